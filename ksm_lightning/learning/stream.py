"""Learning from a stream without an end: one or many samples at a time, in bounded memory."""

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.learning.exact import balance
from ksm_lightning.learning.learner import Learner
from ksm_lightning.learning.schedule import StreamSchedule, TightStreamSchedule
from ksm_lightning.learning.training import train_on_few
from ksm_lightning.learning.units import check_range, sample_size
from ksm_lightning.network import Bound, KSMNetwork

# Number of updates on the remembered samples when the network is restarted.
_REHEARSAL, _TIGHT_REHEARSAL = 200, 30
# Fewest samples of an update with the tight bound.
_COLLECTED = 256
# Landmarks, scale and L are revised whenever the stream has grown by this factor. This is often enough to learn classes
# that appear late, and to keep those that have disappeared.
_GROWTH = 1.2
# How many times more a landmark must explain elsewhere to be moved. A moved landmark needs many updates to find its
# gain, and in a stream the moves never stop.
_ADVANTAGE = 3.0
# A network from `fit` is restarted, too, when its samples have doubled, up to this number of samples per neuron.
_FEW = 4


class Reservoir:
    """A uniform sample without repetition, of at most ``capacity`` rows, of all rows that were added."""

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity = capacity
        self.seen = 0
        self.rows: Tensor = torch.empty(0)
        self._random = np.random.RandomState(seed % 2**32)

    def add(self, x: Tensor) -> None:
        """Add rows (samples, m). Every row seen so far is kept with the same probability."""
        free = self.capacity - len(self.rows)
        if free > 0:
            self.rows = torch.cat([self.rows.to(x), x[:free]]) if len(self.rows) else x[:free].clone()
            self.seen += len(x[:free])
            x = x[free:]
        slots = (self._random.random_sample(len(x)) * (self.seen + 1 + np.arange(len(x)))).astype(np.int64)
        kept = np.flatnonzero(slots < self.capacity)
        for row in kept:  # in order: a later row may replace an earlier one
            self.rows[slots[row]] = x[row]
        self.seen += len(x)


class Stream:
    """A network that learns from a stream. Every batch is one update, and nothing is known about future samples.

    While all samples are remembered, the network is restarted from them at 1, 2, 4, ... samples: landmarks at data
    points, 200 updates on the known samples, and the exact L for them. Later, whenever the stream has grown by a fifth,
    landmarks that explain nothing of a uniform sample of the past are moved to where its residual is largest, and the
    common scale and L are recomputed for that sample. Otherwise L forgets what the stream has not shown for a while,
    and over-responds when it returns. In between, natural steps apply, with the sizes of
    :class:`~ksm_lightning.learning.schedule.StreamSchedule`.

    The L of the network that learns is shrunk towards a multiple of I. :meth:`settled` returns the same landmarks with
    the exact L for the remembered samples. Learning cannot continue with that L: it amplifies its smallest directions,
    so a step of q that rotates them would change the responses strongly.

    With the tight bound, W needs many samples for a step. Samples are then collected, and an update is made of
    ``max(256, p)`` of them; features are always those of the current W with the exact Q and L for the remembered ones.

    Args:
        kernel: The similarity.
        num_neurons: Number of neurons n.
        bound: ``paper`` or ``tight``.
        num_landmarks: Number of landmarks p. Default: n.
        batch_size: Largest number of samples per update.
        seed: Seed of the starts and of the reservoir.
    """

    def __init__(
        self,
        kernel: Kernel,
        num_neurons: int,
        *,
        bound: Bound = "paper",
        num_landmarks: int | None = None,
        batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        self.kernel = kernel
        self.num_neurons = num_neurons
        self.bound = bound
        self.num_landmarks = num_landmarks or num_neurons
        self.batch_size = batch_size
        self.seed = seed
        self.seen = self.updates = 0
        """Number of samples seen, and of updates, one per batch of the stream."""
        self.reservoir = Reservoir(sample_size(self.num_landmarks), seed)
        self._collected: list[Tensor] = []
        self._restarts_until = self.reservoir.capacity  # samples
        self._learner: Learner | None = None

    @classmethod
    def after(cls, network: KSMNetwork, x: Tensor, updates: int, *, batch_size: int = 64, seed: int = 0) -> "Stream":
        """A stream that continues from a network trained on samples ``x`` (samples, m)."""
        stream = cls(
            network.kernel, network.num_neurons, bound=network.bound, num_landmarks=network.num_landmarks,
            batch_size=batch_size, seed=seed,
        )  # fmt: skip
        stream._restarts_until = _FEW * network.num_landmarks
        stream.seen, stream.updates = len(x), updates
        stream.reservoir.add(x)
        stream._continue_with(copy.deepcopy(network))
        return stream

    @property
    def network(self) -> KSMNetwork:
        """The network that learns, in its current state. Raises ValueError if no sample was seen yet."""
        if self._learner is None:
            raise ValueError("No sample was seen yet: call `learn` with samples first.")
        return self._learner.network

    def settled(self) -> KSMNetwork:
        """A copy of the network with the exact L for the remembered samples, as if learning ended here."""
        network = copy.deepcopy(self.network)
        balance(network, self.reservoir.rows)
        return network

    def learn(self, x: Tensor) -> None:
        """Learn from more samples (samples, m), finite, in their order. Too large ones raise ValueError first."""
        check_range(self.kernel, x)
        for batch in torch.split(x, self.batch_size):
            before, self.seen = self.seen, self.seen + len(batch)
            self.reservoir.add(batch)
            is_doubled = before.bit_length() < self.seen.bit_length()
            if self._learner is None or (is_doubled and self.seen <= self._restarts_until):
                self._restart(x)
                continue
            if _stage(before) < _stage(self.seen):
                self._revise(self._learner)
            self._collected.append(batch.clone())  # a view would keep the whole call's samples in memory
            if self.bound == "paper" or sum(map(len, self._collected)) >= max(_COLLECTED, self.num_landmarks):
                self._learner.learn(torch.cat(self._collected)[None], self.seen)
                self._collected = []
                self.updates += 1

    def _restart(self, like: Tensor) -> None:
        rows, seed, batch_size = self.reservoir.rows.to(like), self.seed + self.seen, self.batch_size
        updates = _REHEARSAL if self.bound == "paper" else _TIGHT_REHEARSAL
        self._collected = []
        self._continue_with(
            train_on_few(
                self.kernel, rows, self.num_neurons, updates, bound=self.bound, num_landmarks=self.num_landmarks,
                batch_size=batch_size if self.bound == "paper" else len(rows), seed=seed,
            )
        )  # fmt: skip

    def _revise(self, learner: Learner) -> None:
        known = torch.unique(self.reservoir.rows, dim=0).to(learner.network.W)
        learner.move_idle_landmarks(known, advantage=_ADVANTAGE)
        self._rebalance(learner)

    def _continue_with(self, network: KSMNetwork) -> None:
        self._learner = self._make_learner(network)
        self._rebalance(self._learner)

    def _make_learner(self, network: KSMNetwork) -> Learner:
        schedule = StreamSchedule() if self.bound == "paper" else TightStreamSchedule()
        return Learner(network, schedule, stage="learning")

    def _rebalance(self, learner: Learner) -> None:
        """Recompute scale and L for the remembered samples, with shrinkage for directions that they do not show."""
        p, rows = self.num_landmarks, self.reservoir.rows
        learner.balance(rows, p / (p + len(rows)))

    def __getstate__(self) -> dict[str, Any]:
        # The rest of a learner is working memory.
        learner = self._learner
        return {**self.__dict__, "_learner": None if learner is None else (learner.network, learner.state_dict())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_learner")
        self.__dict__.update(state, _learner=None)
        if saved is not None:
            network, learned = saved
            self._learner = self._make_learner(network)
            self._learner.load_state_dict(learned)


def _stage(seen: int) -> int:
    """How often a stream of this number of samples has grown by the factor at which it is revised."""
    return math.floor(math.log(seen) / math.log(_GROWTH))
