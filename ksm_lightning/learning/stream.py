"""Learning from a stream without an end: one or many samples at a time, in bounded memory."""

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.learning.best import Snapshot
from ksm_lightning.learning.exact import balance, limit_responses
from ksm_lightning.learning.learner import Learner
from ksm_lightning.learning.stream_schedule import StreamSchedule, TightStreamSchedule, lifetime
from ksm_lightning.learning.training import network_at, train_on_few
from ksm_lightning.learning.units import check_range, sample_size, shrinkage_for
from ksm_lightning.network import Bound, KSMNetwork
from ksm_lightning.network.landmark_error import LandmarkError
from ksm_lightning.network.readout import LandmarkFeatures, limit_readout, readout_matrix, with_landmarks

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


def check_half_life(half_life: float | None, num_landmarks: int) -> None:
    """Raise ValueError if so few samples cannot determine the landmarks, or nothing would be forgotten."""
    if half_life is not None and not num_landmarks <= half_life < math.inf:
        raise ValueError(
            f"`half_life` must be a finite number, at least the number of landmarks, {num_landmarks}, which fewer "
            f"samples cannot determine, got {half_life}; None forgets nothing."
        )


class Reservoir:
    """A sample without repetition of the rows that were added: uniform, or with more of the recent ones.

    Args:
        capacity: Largest number of rows.
        seed: Seed of the choice.
        half_life: Number of rows after which half of the sample has been replaced. A row is then kept with a
            probability that halves every ``half_life`` rows. Default: every row is kept with the same probability.
    """

    def __init__(self, capacity: int, seed: int = 0, half_life: float | None = None) -> None:
        self._lifetime = lifetime(half_life)
        self.capacity = int(min(capacity, max(1, self._lifetime)))
        self.seen = 0
        self.rows: Tensor = torch.empty(0)
        self._random = np.random.RandomState(seed % 2**32)

    def add(self, x: Tensor) -> None:
        """Add rows (samples, m)."""
        free = self.capacity - len(self.rows)
        if free > 0:
            self.rows = torch.cat([self.rows.to(x), x[:free]]) if len(self.rows) else x[:free].clone()
            self.seen += len(x[:free])
            x = x[free:]
        # The number of rows that are as likely as this one to be in the sample.
        among = np.minimum(self.seen + 1 + np.arange(len(x)), self._lifetime)
        slots = (self._random.random_sample(len(x)) * among).astype(np.int64)
        kept = np.flatnonzero(slots < self.capacity)
        for row in kept:  # in order: a later row may replace an earlier one
            self.rows[slots[row]] = x[row]
        self.seen += len(x)


class Stream:
    """A network that learns from a stream. Every batch is one update, and nothing is known about future samples.

    Up to p different samples, each has a landmark of its own, and nothing is learned. Then the network is restarted
    from all samples at p + 1 of them and whenever they have doubled, as long as all are remembered: landmarks at data
    points, 200 updates on the known samples, and the exact L for them. Later, whenever the stream has grown by a fifth,
    landmarks that explain nothing of a uniform sample of the past are moved to where its residual is largest, and the
    common scale and L are recomputed for that sample. Otherwise L forgets what the stream has not shown for a while,
    and over-responds when it returns. In between, natural steps apply, with the sizes of
    :class:`~ksm_lightning.learning.stream_schedule.StreamSchedule`.

    With a ``half_life`` the stream follows data that change: the remembered sample consists of recent samples, steps do
    not decrease further than to those of a stream of that age, and landmarks are revised for as long as it goes on.

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
        half_life: Number of samples after which half of the past is forgotten, at least p. Default: nothing is.
        seed: Seed of the starts and of the reservoir.

    Raises:
        ValueError: If the half-life is too short for the number of landmarks.
    """

    def __init__(
        self,
        kernel: Kernel,
        num_neurons: int,
        *,
        bound: Bound = "paper",
        num_landmarks: int | None = None,
        batch_size: int = 64,
        half_life: float | None = None,
        seed: int = 0,
    ) -> None:
        self.kernel = kernel
        self.num_neurons = num_neurons
        self.bound = bound
        self.num_landmarks = num_landmarks or num_neurons
        check_half_life(half_life, self.num_landmarks)
        self.batch_size = batch_size
        self.half_life = half_life
        self.seed = seed
        self.seen = self.updates = 0
        """Number of samples seen, and of updates, one per batch of the stream."""
        self.reservoir = Reservoir(sample_size(self.num_landmarks), seed, half_life)
        self._collected: list[Tensor] = []
        self._restarts_until = self.reservoir.capacity  # samples
        self._placed: dict[bytes, Tensor] = {}  # different samples, while there are no more than landmarks
        self._trained: KSMNetwork | None = None  # a network that learning will continue with
        self._known: Snapshot | None = None  # weights of the last revision, with the tight bound
        self._learner: Learner | None = None

    @classmethod
    def after(cls, network: KSMNetwork, x: Tensor, updates: int, **options: Any) -> "Stream":
        """A stream that continues from a network trained on samples ``x`` (samples, m).

        Args:
            network: The network.
            x: The samples.
            updates: Number of updates that it was trained for.
            options: Arguments of :class:`Stream` that the network does not determine. ``num_neurons`` and
                ``num_landmarks`` may be larger than the network's, if it was trained on few samples.
        """
        sizes = {"num_neurons": network.num_neurons, "num_landmarks": network.num_landmarks}
        stream = cls(network.kernel, bound=network.bound, **(sizes | options))
        stream._restarts_until = _FEW * stream.num_landmarks
        stream.seen, stream.updates = len(x), updates
        stream.reservoir.add(x)
        if network.num_landmarks == stream.num_landmarks:
            stream._trained = network
        else:
            stream._place(x)
        return stream

    @property
    def network(self) -> KSMNetwork:
        """The network that learns, in its current state.

        Up to p different samples it has only as many landmarks as there are. Raises ValueError without a sample.
        """
        self._continue_trained()
        if self._learner is not None:
            return self._learner.network
        if not self._placed:
            raise ValueError("No sample was seen yet: call `learn` with samples first.")
        points = torch.stack(list(self._placed.values()))
        return network_at(self.kernel, points, self.reservoir.rows, self.num_neurons, self.bound)

    def settled(self) -> KSMNetwork:
        """A copy of the network with the exact L for the remembered samples, as if learning ended here.

        No response exceeds ``|y|^2 = 2 f(x, x)``, also to a point that the remembered samples do not show.
        """
        network = copy.deepcopy(self.network)
        if (better := self._better_than(network.W)) is not None:
            better.restore(network)
        balance(network, self.reservoir.rows)
        limit_responses(network)
        return network

    def features(self, readout: str, network: KSMNetwork | None = None) -> LandmarkFeatures:
        """The features of :meth:`settled` by a readout, as :meth:`~.LandmarkFeatures.of`, with ``|y|^2 <= 2 f(x, x)``.

        The sample that a readout is fitted to contains the landmarks: a rare value that one of them lies on may have
        left the remembered samples.

        Args:
            readout: One of :data:`~ksm_lightning.network.readout.READOUTS`.
            network: The result of :meth:`settled`, if it is known already.
        """
        network = self.settled() if network is None else network
        W = network.W.detach()
        sample = with_landmarks(self.kernel, W, self.reservoir.rows)
        M = limit_readout(self.kernel, W, readout_matrix(network, readout, sample))
        return LandmarkFeatures(self.kernel, W.double(), M)

    def learn(self, x: Tensor) -> None:
        """Learn from more samples (samples, m), finite, in their order. Too large ones raise ValueError first."""
        check_range(self.kernel, x)
        self._continue_trained()
        for batch in torch.split(x, self.batch_size):
            before, self.seen = self.seen, self.seen + len(batch)
            self.reservoir.add(batch)
            if self._learner is None and self._place(batch):
                continue
            is_doubled = before.bit_length() < self.seen.bit_length()
            if self._learner is None or (is_doubled and self.seen <= self._restarts_until):
                self._restart(x)
                continue
            if self._stage(before) < self._stage(self.seen):
                self._revise(self._learner)
            self._collected.append(batch.clone())  # a view would keep the whole call's samples in memory
            if self.bound == "paper" or sum(map(len, self._collected)) >= max(_COLLECTED, self.num_landmarks):
                self._learner.learn(torch.cat(self._collected)[None], self.seen)
                self._collected = []
                self.updates += 1

    def _place(self, x: Tensor) -> bool:
        """Give each new sample (samples, m) a landmark of its own; False if there are not enough."""
        for row in x:
            key = (row.cpu() + 0.0).numpy().tobytes()  # -0 becomes 0
            if key not in self._placed:
                self._placed[key] = row.clone()
                if len(self._placed) > self.num_landmarks:
                    return False
        return True

    def _restart(self, like: Tensor) -> None:
        rows, seed, batch_size = self.reservoir.rows.to(like), self.seed + self.seen, self.batch_size
        if self._placed and self.seen > self.reservoir.capacity:  # it may have lost rare ones
            rows = torch.cat([rows, torch.stack(list(self._placed.values())).to(like)])
        self._placed = {}
        updates = _REHEARSAL if self.bound == "paper" else _TIGHT_REHEARSAL
        self._collected = []
        self._continue_with(
            train_on_few(
                self.kernel, rows, self.num_neurons, updates, bound=self.bound, num_landmarks=self.num_landmarks,
                batch_size=batch_size if self.bound == "paper" else len(rows), seed=seed,
            )
        )  # fmt: skip

    def _revise(self, learner: Learner) -> None:
        if (better := self._better_than(learner.network.W)) is not None:
            learner.restore(better)
        known = torch.unique(self.reservoir.rows, dim=0).to(learner.network.W)
        learner.move_idle_landmarks(known, advantage=_ADVANTAGE)
        self._rebalance(learner)

    def _better_than(self, W: Tensor) -> Snapshot | None:
        """The weights of the last revision, if their landmarks have a lower error on the remembered samples than W.

        Steps of the tight bound have a length of their own, which does not shrink where there is nothing to improve.
        """
        known = self._known
        if known is None or torch.equal(W, known.W):
            return None
        error = LandmarkError(self.kernel, self.reservoir.rows)
        return known if error(W, self.num_neurons) > error(known.W, self.num_neurons) else None

    def _continue_trained(self) -> None:
        """Continue with the network of :meth:`after`, which is copied when it is needed: its L takes long."""
        if self._trained is not None:
            self._continue_with(copy.deepcopy(self._trained))

    def _continue_with(self, network: KSMNetwork) -> None:
        self._trained, self._learner = None, self._make_learner(network)
        self._rebalance(self._learner)

    def _make_learner(self, network: KSMNetwork) -> Learner:
        schedule = StreamSchedule if self.bound == "paper" else TightStreamSchedule
        return Learner(network, schedule(self.half_life), stage="learning")

    def _rebalance(self, learner: Learner) -> None:
        """Recompute scale and L for the remembered samples, with shrinkage for directions that they do not show."""
        rows = self.reservoir.rows
        learner.balance(rows, shrinkage_for(self.num_landmarks, len(rows)))
        self._known = learner.snapshot() if self.bound == "tight" else None

    def _stage(self, seen: int) -> int:
        """How often a stream of this number of samples has grown by the factor at which it is revised.

        A stream that forgets grows to its lifetime, and is then revised each time that part of it is replaced.
        """
        known = min(seen, lifetime(self.half_life))
        return math.floor(math.log(known) / math.log(_GROWTH) + (seen - known) / ((_GROWTH - 1) * known))

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
