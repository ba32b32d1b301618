"""Learning from a stream without an end: one or many samples at a time, in bounded memory."""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.kernels.limits import FIRST_SAMPLES, POINTS_PER_LANDMARK
from ksm_lightning.learning.exact import balance
from ksm_lightning.learning.learner import Learner
from ksm_lightning.learning.reservoir import Reservoir
from ksm_lightning.learning.stream_schedule import StreamSchedule, TightStreamSchedule, lifetime
from ksm_lightning.learning.training import DESCENT_ITERATIONS, fit_network, network_at
from ksm_lightning.learning.units import check_range, sample_size, shrinkage_for
from ksm_lightning.network import Bound, KSMNetwork
from ksm_lightning.network.readout import LandmarkFeatures, readout_matrix
from ksm_lightning.network.readout_matrices import limit_readout, robust_least_squares

# Number of updates of the paper's bound on the remembered samples when the network is restarted.
_REHEARSAL = 200
# Landmarks, scale and L are revised whenever the stream has grown by this factor. This is often enough to learn classes
# that appear late, and to keep those that have disappeared.
_GROWTH = 1.2


def check_half_life(half_life: float | None, num_landmarks: int) -> None:
    """Raise ValueError if so few samples cannot determine the landmarks, or nothing would be forgotten."""
    if half_life is not None and not num_landmarks <= half_life < math.inf:
        raise ValueError(
            f"`half_life` must be a finite number, at least the number of landmarks, {num_landmarks}, which fewer "
            f"samples cannot determine, got {half_life}; None forgets nothing."
        )


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
        stream._restarts_until = POINTS_PER_LANDMARK * stream.num_landmarks
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
        """A copy of the network with the exact L for the remembered samples, as if learning ended here."""
        network = copy.deepcopy(self.network)
        balance(network, self.reservoir.rows)
        return network

    def features(self, readout: str, network: KSMNetwork | None = None) -> LandmarkFeatures:
        """The features of :meth:`settled` by a readout, as :meth:`~.LandmarkFeatures.of`, with ``|y|^2 <= 4 f(x, x)``.

        The limit holds for every point, also one unlike the remembered samples.

        Args:
            readout: One of :data:`~ksm_lightning.network.readout.READOUTS`.
            network: The result of :meth:`settled`, if it is known already.
        """
        network = self.settled() if network is None else network
        W = network.W.detach()
        rows = self.reservoir.rows
        if readout == "least_squares":
            M = robust_least_squares(self.kernel, W, rows, network.num_neurons, is_part=self.seen > len(rows))
        else:
            M = limit_readout(self.kernel, W, readout_matrix(network, readout, rows))
        return LandmarkFeatures(self.kernel, W.double(), M)

    def learn(self, x: Tensor, batch_size: int | None = None) -> None:
        """Learn from more samples (samples, m), finite, in their order. Too large ones raise ValueError first.

        Args:
            x: The samples.
            batch_size: Number of samples per update. Default: at most :attr:`batch_size`.
        """
        check_range(self.kernel, x)
        self._continue_trained()
        size = min(batch_size or self.batch_size, max(1, len(x)))
        while len(x):
            calm = self._calm_batches(len(x) // size, size)
            if calm:
                self._learn_calmly(x[: calm * size].view(calm, size, -1))
            else:
                self._learn_batch(x[:size])
            x = x[max(1, calm) * size :]

    def _learn_batch(self, batch: Tensor) -> None:
        """Learn from one batch (samples, m), and revise or restart the network if it is time."""
        before, self.seen = self.seen, self.seen + len(batch)
        self.reservoir.add(batch)
        if self._learner is None and self._place(batch):
            return
        if self._learner is None or self._restarts(before, self.seen):
            self._restart(batch)
            return
        if self._stage(before) < self._stage(self.seen):
            self._revise(self._learner)
        self._update(self._learner, batch[None], self.seen)

    def _calm_batches(self, most: int, size: int) -> int:
        """Number of batches, at most ``most``, that are nothing but updates: no restart, no revision."""
        if self._learner is None:
            return 0
        seen, stage, calm = self.seen, self._stage(self.seen), 0
        while calm < most and not self._restarts(seen, seen + size) and self._stage(seen + size) == stage:
            seen, calm = seen + size, calm + 1
        return calm

    def _learn_calmly(self, batches: Tensor) -> None:
        """One update per batch (batches, samples, m)."""
        assert self._learner is not None
        size = batches.shape[1]
        self.reservoir.add(batches.flatten(0, 1))
        first, self.seen = self.seen + size, self.seen + batches[..., 0].numel()
        self._update(self._learner, batches, first)

    def _update(self, learner: Learner, batches: Tensor, first: int) -> None:
        """One update per batch (batches, samples, m); with the tight bound when enough samples are collected.

        Args:
            learner: The learner.
            batches: The batches.
            first: Number of samples seen up to the end of the first batch.
        """
        size = batches.shape[1]
        if self.bound == "paper":
            learner.learn(batches, first, every=size)
            self.updates += len(batches)
            return
        need = max(FIRST_SAMPLES, self.num_landmarks)
        while len(batches):
            waiting = sum(map(len, self._collected))
            count = min(len(batches), -(-(need - waiting) // size))
            self._collected.append(batches[:count].flatten(0, 1).clone())  # a view would keep all samples in memory
            if waiting + count * size >= need:
                learner.learn(torch.cat(self._collected)[None], first + (count - 1) * size)
                self._collected = []
                self.updates += 1
            batches, first = batches[count:], first + count * size

    def _restarts(self, before: int, seen: int) -> bool:
        """Whether the samples have doubled, as long as they are few."""
        return before.bit_length() < seen.bit_length() and seen <= self._restarts_until

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
        updates = _REHEARSAL if self.bound == "paper" else DESCENT_ITERATIONS
        self._collected = []
        self._continue_with(
            fit_network(
                self.kernel, rows, self.num_neurons, updates, bound=self.bound, num_landmarks=self.num_landmarks,
                batch_size=batch_size, seed=seed,
            )
        )  # fmt: skip

    def _revise(self, learner: Learner) -> None:
        known = torch.unique(self.reservoir.rows, dim=0).to(learner.network.W)
        learner.move_idle_landmarks(known)
        self._rebalance(learner)

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
