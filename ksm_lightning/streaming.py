"""Learning from a stream without an end: one sample or many at a time, in bounded memory."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksm_lightning import learning
from ksm_lightning.initialisation import DataInit
from ksm_lightning.kernels import Kernel
from ksm_lightning.network import KSMNetwork
from ksm_lightning.rules import rates_at
from ksm_lightning.schedule import AdaptiveSchedule, Rates
from ksm_lightning.updater import Updater

# Steps stay as they are for so many samples a neuron, and fall with this power of the samples seen after that.
_HOLD, _POWER = 10, 0.75


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

    While little is known, at 1, 2, 4, ... samples up to the size of the reservoir, the network begins anew from all
    samples so far; later, at each doubling, landmarks that explain nothing are moved to where the residual is largest.
    In between the rules of the adaptive schedule apply, with steps that fall as ``samples^-0.75``: slowly enough to get
    anywhere, fast enough for the noise to vanish (Robbins and Monro).

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
        """Updates made."""
        self.reservoir = Reservoir(learning.sample_size(num_neurons), seed)
        self._network: KSMNetwork | None = None
        self._updater: Updater | None = None

    @classmethod
    def after(
        cls, network: KSMNetwork, sample: Tensor, updates: int, *, batch_size: int = 64, seed: int = 0
    ) -> "Stream":
        """A stream that goes on from a network trained with so many updates on data like ``sample`` (samples, m)."""
        stream = cls(network.kernel, network.num_neurons, batch_size=batch_size, seed=seed)
        stream._network = network
        stream.seen, stream.updates = updates * batch_size, updates
        stream.reservoir.add(sample)
        stream.reservoir.seen = max(stream.seen, len(sample))
        return stream

    @property
    def network(self) -> KSMNetwork:
        """The network as it is now.

        Raises:
            ValueError: If nothing was seen yet.
        """
        if self._network is None:
            raise ValueError("Nothing was seen yet: call `learn` with samples first.")
        return self._network

    def learn(self, x: Tensor) -> None:
        """Learn from more samples (samples, m), finite, in their order."""
        for batch in torch.split(x, self.batch_size):
            before, self.seen = self.seen, self.seen + len(batch)
            self.reservoir.add(batch)
            is_doubled = before.bit_length() < self.seen.bit_length()
            if self._network is None or (is_doubled and self.seen <= self.reservoir.capacity):
                self._begin(x)
            else:
                if is_doubled:
                    learning.relocate(self.network, torch.unique(self.reservoir.rows, dim=0))
                    self._updater = None
                self._update(batch)

    def _begin(self, like: Tensor) -> None:
        known = torch.unique(self.reservoir.rows, dim=0)
        ridge = learning.natural_ridge(self.kernel, known, self.num_neurons)
        generator = torch.Generator().manual_seed(self.seed + self.seen)
        network = KSMNetwork(
            self.kernel, known.shape[1], self.num_neurons, ridge, DataInit(known), generator=generator
        ).to(like)
        learning.start(network, known)
        self._network, self._updater = network, None

    def _update(self, batch: Tensor) -> None:
        if self._updater is None:
            self._updater = Updater(self.network, natural=True)
        with self._updater.block(batch[None]):
            self._updater.update(0, self.rates(len(batch)))
        self.updates += 1

    def rates(self, batch: int) -> Rates:
        """The steps of the next update, from so many samples."""
        rates = rates_at(AdaptiveSchedule(), self.kernel, 0, self.num_neurons, batch)
        return rates.scaled((1 + self.seen / (_HOLD * self.num_neurons)) ** -_POWER)

    def __getstate__(self) -> dict[str, Any]:
        # The updater holds working memory only.
        return {**self.__dict__, "_updater": None}
