"""Learning from a stream without an end: one sample or many at a time, in bounded memory."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.learning import train as learning
from ksm_lightning.learning.rules import rates_at
from ksm_lightning.learning.schedule import AdaptiveSchedule, Rates
from ksm_lightning.learning.updater import Updater
from ksm_lightning.network.initialisation import DataInit
from ksm_lightning.network.ksm_network import KSMNetwork

# Steps stay as they are for so many samples a neuron, and fall with a power of the samples seen after that: W and q
# slowly enough to get anywhere, fast enough for the noise to vanish (Robbins and Monro); L as the mean of all samples
# does, so that between two looks after the network it forgets the same small part of what the stream no longer shows.
_HOLD, _POWER, _POWER_L = 4, 0.75, 1.0
# Updates from what is remembered when the network begins anew.
_REHEARSAL = 200
# The network is looked after whenever the stream has grown by this factor: a class that comes late is met in time, and
# one that has gone is not forgotten.
_GROWTH = 1.2
# How much more a landmark must explain elsewhere to be moved. A moved one needs many updates to find its gain, and a
# stream has no second half without moves to give it these.
_ADVANTAGE = 3.0
# A trained network that has seen fewer samples a neuron than this begins anew, too, when their number has doubled.
_FEW = 4


class Reservoir:
    """A uniform sample, without repetition, of all rows it has ever been given.

    Args:
        capacity: Rows that are kept at most.
        seed: Seed of what is kept.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity = capacity
        self.seen = 0
        self.rows: Tensor = torch.empty(0)
        self._random = np.random.RandomState(seed % 2**32)

    def add(self, x: Tensor) -> None:
        """More rows (samples, m); each of all seen so far is kept with the same probability."""
        free = self.capacity - len(self.rows)
        if free > 0:
            self.rows = torch.cat([self.rows.to(x), x[:free]]) if len(self.rows) else x[:free].clone()
            self.seen += len(x[:free])
            x = x[free:]
        places = (self._random.random_sample(len(x)) * (self.seen + 1 + np.arange(len(x)))).astype(np.int64)
        kept = np.flatnonzero(places < self.capacity)
        for row in kept:  # in order: a later row may replace an earlier one
            self.rows[places[row]] = x[row]
        self.seen += len(x)


class Stream:
    """A network that learns from a stream: every batch is one update, and nothing must be known of what will come.

    While all samples are remembered, the network begins anew from them at 1, 2, 4, ... samples: landmarks at data
    points, some updates from the samples known, and the exact L for them. Later, whenever the stream has grown by a
    fifth, landmarks that explain nothing of a uniform sample of all that came are moved to where its residual is
    largest, and the common scale and L are set anew for it: what a stream does not show for a while would else leave
    L, and be answered wildly when it comes back. In between the rules of the adaptive schedule apply, with steps of W
    and q that fall as ``samples^-0.75`` and of L as ``1 / samples``.

    The network that learns has an L that is open to every direction. What it has learned is told by :meth:`settled`:
    the same landmarks with the exact L for what is remembered. That L would be a bad one to go on with: it multiplies
    what little there is in its last directions by a large number, and a step of q that turns them turns the responses.

    Args:
        kernel: The similarity.
        num_neurons: Neurons n.
        batch_size: Samples an update at most.
        seed: Seed of the starts and of the reservoir.
    """

    def __init__(self, kernel: Kernel, num_neurons: int, *, batch_size: int = 64, seed: int = 0) -> None:
        self.kernel = kernel
        self.num_neurons = num_neurons
        self.batch_size = batch_size
        self.seed = seed
        self.seen = 0
        """Samples seen."""
        self.updates = 0
        """Updates made, one a batch of the stream."""
        self.reservoir = Reservoir(learning.sample_size(num_neurons), seed)
        self._begins_until = self.reservoir.capacity  # samples
        self._network: KSMNetwork | None = None
        self._updater: Updater | None = None
        self._tracked: dict[str, Any] = {}

    @classmethod
    def after(cls, network: KSMNetwork, x: Tensor, updates: int, *, batch_size: int = 64, seed: int = 0) -> "Stream":
        """A stream that goes on from a network trained with so many updates on samples ``x`` (samples, m)."""
        stream = cls(network.kernel, network.num_neurons, batch_size=batch_size, seed=seed)
        stream._network = copy.deepcopy(network)
        stream._begins_until = _FEW * network.num_neurons
        stream.seen, stream.updates = len(x), updates
        stream.reservoir.add(x)
        stream._open()
        return stream

    @property
    def network(self) -> KSMNetwork:
        """The network that learns, as it is now.

        Raises:
            ValueError: If nothing was seen yet.
        """
        if self._network is None:
            raise ValueError("Nothing was seen yet: call `learn` with samples first.")
        return self._network

    def settled(self) -> KSMNetwork:
        """A copy of the network as if learning ended here: with the exact L for what is remembered.

        Raises:
            ValueError: If nothing was seen yet.
        """
        network = copy.deepcopy(self.network)
        learning.balance(network, self.reservoir.rows)
        return network

    def learn(self, x: Tensor) -> None:
        """Learn from more samples (samples, m), finite, in their order.

        Raises:
            ValueError: If a sample is too large to be computed with; nothing is learned then.
        """
        learning.check_range(self.kernel, x)
        for batch in torch.split(x, self.batch_size):
            before, self.seen = self.seen, self.seen + len(batch)
            self.reservoir.add(batch)
            is_doubled = before.bit_length() < self.seen.bit_length()
            if self._network is None or (is_doubled and self.seen <= self._begins_until):
                self._begin(x)
                continue
            if _stage(before) < _stage(self.seen):
                self._look_after()
            self._update(batch)

    def _begin(self, like: Tensor) -> None:
        self._network = train_on_few(
            self.kernel, self.reservoir.rows.to(like), self.num_neurons, _REHEARSAL,
            batch_size=self.batch_size, seed=self.seed + self.seen,
        )  # fmt: skip
        self._open()

    def _look_after(self) -> None:
        known = torch.unique(self.reservoir.rows, dim=0).to(self.network.W)
        learning.relocate(self.network, known, advantage=_ADVANTAGE)
        self._open()

    def _open(self) -> None:
        n, rows = self.num_neurons, self.reservoir.rows
        learning.balance(self.network, rows, n / (n + len(rows)))
        self._updater, self._tracked = None, {}  # what was computed of L

    def _update(self, batch: Tensor) -> None:
        if self._updater is None:
            self._updater = Updater(self.network, natural=True)
            self._updater.load_state_dict(self._tracked)
            self._tracked = {}
        with self._updater.block(batch[None]):
            self._updater.update(0, self.rates(len(batch)))
        self.updates += 1

    def rates(self, batch: int) -> Rates:
        """The steps of the next update, from so many samples."""
        rates = rates_at(AdaptiveSchedule(), self.kernel, 0, self.num_neurons, batch)
        age = 1 + self.seen / (_HOLD * self.num_neurons)
        return rates.scaled(age**-_POWER)._replace(L=rates.L * age**-_POWER_L)

    def __getstate__(self) -> dict[str, Any]:
        # Of the updater, the tracked inverse alone is more than working memory.
        tracked = self._tracked if self._updater is None else self._updater.state_dict()
        return {**self.__dict__, "_updater": None, "_tracked": tracked}


def _stage(seen: int) -> int:
    """How often a stream of so many samples has grown by the factor at which landmarks are looked after."""
    return math.floor(math.log(seen) / math.log(_GROWTH))


@torch.no_grad()
def train_on_few(
    kernel: Kernel,
    x: Tensor,
    num_neurons: int,
    updates: int,
    *,
    batch_size: int = 64,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> KSMNetwork:
    """A network trained by :func:`ksm_lightning.learning.train.train` with the adaptive schedule, however few the samples.

    With fewer different samples than neurons, as many neurons learn as there are samples, and the others are silent:
    landmarks that no sample holds in place would answer new points by whatever the rounding says.

    Args:
        kernel: The similarity.
        x: The samples (samples, m).
        num_neurons: Neurons n.
        updates: Updates.
        batch_size: Samples an update.
        seed: Seed of start and batches.
        progress: Called with the number of updates made since the last call.
    """
    different = len(torch.unique(x[: 4 * num_neurons], dim=0))
    if different < num_neurons <= len(x):
        different = len(torch.unique(x, dim=0))
    few = min(num_neurons, different)
    trained = learning.train(
        kernel, x, few, AdaptiveSchedule(updates), batch_size=batch_size, seed=seed, progress=progress
    )
    if few == num_neurons:
        return trained
    network = KSMNetwork(
        kernel, x.shape[1], num_neurons, trained.ridge, DataInit(x), generator=torch.Generator().manual_seed(seed)
    ).to(trained.W)
    # Silent is a landmark of no length, or of no gain where lengths do not count.
    network.W[few:] *= 0 if kernel.is_homogeneous else 1
    network.q.copy_(torch.ones_like(network.q) if kernel.is_homogeneous else torch.zeros_like(network.q))
    network.L.copy_(trained.L.diagonal().median() * torch.eye(num_neurons).to(trained.L))
    network.W[:few], network.q[:few], network.L[:few, :few] = trained.W, trained.q, trained.L
    return network
