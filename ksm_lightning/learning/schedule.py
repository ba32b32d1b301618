"""Step sizes and kernel parameters as a function of the update count: adaptive, or phases of constant rates."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from ksm_lightning.network import Bound

# Number of updates that L needs to follow a change of the kernel; responses can be a thousand times too large before.
_SETTLING = 50

PaperPhases = Literal["paper_half_moons", "paper_mnist", "released_mnist"]


class Rates(NamedTuple):
    """The step sizes of W, q and L in one update. The learner scales them after a rollback, the rule limits them."""

    W: float
    q: float
    L: float

    def scaled(self, factor: float) -> "Rates":
        """All three multiplied by ``factor``."""
        return Rates(*(factor * rate for rate in self))


class Schedule(ABC):
    """What a :class:`~ksm_lightning.learning.learner.Learner` needs to know about an update.

    Every method is a function of the update's number alone, so a resumed run continues exactly. A subclass defines the
    two abstract ones; the defaults of the others assume a fixed kernel and no relocation.
    """

    is_natural: bool = False
    """Whether rates are natural steps (:class:`~ksm_lightning.learning.rules.NaturalRule`) or the paper's rates."""
    phase_ends: tuple[int, ...] = ()
    """Updates at which the next phase starts."""

    @property
    @abstractmethod
    def total_updates(self) -> int:
        """Number of updates of the run."""

    @abstractmethod
    def rates(self, update: int, num_neurons: int, batch: int) -> Rates:
        """Step sizes for a batch of this size, counted over all processes."""

    def table(self, updates: range, num_neurons: int, batch: int) -> np.ndarray:
        """The step sizes of several updates (updates, 3)."""
        rows: list[Rates] = []
        while len(rows) < len(updates):
            update = updates[len(rows)]
            count = min(len(updates) - len(rows), max(1.0, (self.constant_until(update) - update) // updates.step))
            rows += [self.rates(update, num_neurons, batch)] * int(count)
        return np.array(rows, np.float64).reshape(-1, 3)

    def kernel_params(self, update: int) -> dict[str, float]:
        """Kernel parameters that differ from the model's. They change at phase ends only."""
        return {}

    def relocates_before(self, update: int) -> bool:
        """Whether idle landmarks are moved before the update with this number."""
        return False

    def is_settling(self, update: int) -> bool:
        """Whether the kernel has changed within the last 50 updates, so that L has not followed yet."""
        return False

    def constant_until(self, update: int) -> float:
        """The next update at which rates or kernel parameters may change."""
        return update + 1


@dataclass(frozen=True)
class Phase:
    """A number of updates with constant rates.

    Args:
        updates: Number of updates, at least 1.
        eta_w: Rate of the descent in W. The gradient is divided by q^2.
        eta_q: Rate of the descent in q. Ignored for a homogeneous kernel, where q stays 1.
        eta_l: Rate of the ascent in L. Keep it well above the other two.
        kernel_params: Kernel parameters that differ from the model's during this phase, such as ``{alpha: 1}`` in a
            warm-up.

    Raises:
        ValueError: If the phase is empty, or a rate is negative or not finite.
    """

    updates: int
    eta_w: float = 0.01
    eta_q: float = 0.01
    eta_l: float = 0.1
    kernel_params: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise ValueError(f"A phase must have at least 1 update, got `updates`={self.updates}.")
        for name in ("eta_w", "eta_q", "eta_l"):
            rate = getattr(self, name)
            if not (math.isfinite(rate) and rate >= 0):
                raise ValueError(f"The rate `{name}` must be finite and not negative, got {rate}.")

    def rates(self) -> Rates:
        return Rates(self.eta_w, self.eta_q, self.eta_l)


class PhaseSchedule(Schedule):
    """Phases of constant rates, one after the other. The last phase has no end.

    Args:
        phases: The phases in order, as :class:`Phase` or as mappings of its fields.

    Raises:
        ValueError: If the list is empty, or an entry is not a phase.

    Example:
        >>> schedule = PhaseSchedule([Phase(10, eta_w=0.1), {"updates": 5, "eta_w": 0.01}])
        >>> schedule.at(9).eta_w, schedule.at(10).eta_w, schedule.total_updates
        (0.1, 0.01, 15)
    """

    def __init__(self, phases: Sequence[Phase | Mapping[str, Any]]) -> None:
        if not phases:
            raise ValueError("A schedule needs at least one phase; give `phases` a list with one entry or more.")
        self.phases = tuple(_as_phase(phase) for phase in phases)
        ends: list[int] = []
        for phase in self.phases:
            ends.append(phase.updates + (ends[-1] if ends else 0))
        self._ends, self.phase_ends = tuple(ends), tuple(ends[:-1])
        # Updates at which the kernel changes.
        self._changes = tuple(
            end for end, (old, new) in zip(ends, pairwise(self.phases), strict=False)
            if old.kernel_params != new.kernel_params
        )  # fmt: skip

    @property
    def total_updates(self) -> int:
        return self._ends[-1]

    def at(self, update: int) -> Phase:
        """The phase of the update with this number, counted from 0."""
        for phase, end in zip(self.phases, self._ends, strict=True):
            if update < end:
                return phase
        return self.phases[-1]

    def rates(self, update: int, num_neurons: int, batch: int) -> Rates:
        return self.at(update).rates()

    def kernel_params(self, update: int) -> dict[str, float]:
        return self.at(update).kernel_params

    def is_settling(self, update: int) -> bool:
        return any(start <= update < start + _SETTLING for start in self._changes)

    def constant_until(self, update: int) -> float:
        return next((end for end in self.phase_ends if update < end), math.inf)

    def as_primitives(self) -> list[dict[str, Any]]:
        """The phases as plain dictionaries, for checkpoints."""
        return [asdict(phase) for phase in self.phases]


def _as_phase(phase: Phase | Mapping[str, Any]) -> Phase:
    if isinstance(phase, Phase):
        return phase
    try:
        return Phase(**phase)
    except TypeError as error:
        raise ValueError(f"Not a phase of the schedule: {phase!r} ({error}).") from error


class AdaptiveSchedule(Schedule):
    """Natural steps that need no tuning. The default.

    For every parameter there is a value at which its own gradient vanishes while the others are fixed. A natural step
    is the fraction of the way to that value: ``L -> C``, ``q_i -> <y_i k_i> / f(w_i, w_i)``, ``w_i`` to its mean shift.
    A fraction has no units, so nothing depends on the units of x, the width of the kernel or the scale of f.

    The step of L is ``min(0.1, 0.25 batch / n)``. C of one batch has rank ``batch``, so L must average over
    ``n / batch`` batches to see every direction. The limit of 0.1 is needed for small n: a step between two
    eigenvectors of L is stable below ``2 / (1 + l_i / l_j + l_j / l_i)`` only, and with 0.25 wide kernels oscillate,
    responses grow, and landmarks leave the data. W and q use a third of L's step, which keeps L close to its maximum
    while they move. Steps are constant for the first 30 % of the run and then decrease linearly to 0.

    Three times in a run, in the middle of each third, landmarks that explain nothing are moved to where the residual is
    largest (:mod:`ksm_lightning.learning.relocation`).

    Proven: minimised over y, the energy is concave in L and has a closed-form maximum
    (:mod:`ksm_lightning.learning.exact`), so L has no local maxima and a run can end exactly. Natural steps vanish
    where the paper's gradients vanish, so both have the same solutions. Responses are limited in length
    (:class:`~ksm_lightning.learning.rules.NaturalRule`), so L is an average of bounded positive semi-definite matrices
    and ``L + ridge I`` can always be factorised. Empirical: the numbers above, and how close to the best solution a run
    ends (scripts/stress/RESULTS.md). The bound has many local minima in W.

    Args:
        updates: Number of updates of the run, at least 1.

    Raises:
        ValueError: If ``updates`` is below 1.

    Example:
        >>> schedule = AdaptiveSchedule(updates=1000)
        >>> schedule.rates(0, num_neurons=16, batch=64)
        Rates(W=0.03333333333333333, q=0.03333333333333333, L=0.1)
        >>> round(schedule.rates(0, num_neurons=640, batch=64).L, 4)
        0.025
    """

    is_natural = True
    _LARGEST, _STEP_L = 0.1, 0.25  # L's step: min(0.1, 0.25 batch / n)
    _RATIO, _HOLD = 1 / 3, 0.3  # W's and q's part of it; steps are constant for 30 % of the run
    _SEARCHES = 3  # number of searches for idle landmarks

    def __init__(self, updates: int = 5000) -> None:
        if updates < 1:
            raise ValueError(f"A run needs at least 1 update, got `updates`={updates}.")
        self.updates = updates
        middles = (round(updates * (index + 0.5) / self._SEARCHES) for index in range(self._SEARCHES))
        self._relocations = frozenset(middles) - {0}

    @property
    def total_updates(self) -> int:
        return self.updates

    def rates(self, update: int, num_neurons: int, batch: int) -> Rates:
        return Rates(*self.table(range(update, update + 1), num_neurons, batch)[0].tolist())

    def table(self, updates: range, num_neurons: int, batch: int) -> np.ndarray:
        left = np.clip((1 - np.array(updates, np.float64) / self.updates) / (1 - self._HOLD), 0, 1)[:, None]
        return np.asarray(np.array(self._first(num_neurons, batch)) * left)

    def _first(self, num_neurons: int, batch: int) -> Rates:
        """The step sizes at the start of the run."""
        step = min(self._LARGEST, self._STEP_L * batch / num_neurons)
        return Rates(self._RATIO * step, self._RATIO * step, step)

    def relocates_before(self, update: int) -> bool:
        return update in self._relocations

    def constant_until(self, update: int) -> float:
        return max(update + 1, math.floor(self._HOLD * self.updates))


class TightSchedule(AdaptiveSchedule):
    """The adaptive schedule of the tight bound, see :class:`~ksm_lightning.learning.tight_rule.TightRule`.

    Q and L make natural steps of ``min(0.1, 0.25 batch / n)``. W's step is 0.25 in units of the kernel. It is
    normalised, so it does not shrink near a solution: the decay of the schedule makes it converge.

    Args:
        updates: Number of updates of the run. Default: 1000. With batches of 1,024 points, 100 to 400 are enough.

    Raises:
        ValueError: If ``updates`` is below 1.
    """

    _STEP_W = 0.25

    def __init__(self, updates: int = 1000) -> None:
        super().__init__(updates)

    def _first(self, num_neurons: int, batch: int) -> Rates:
        step = super()._first(num_neurons, batch).L
        return Rates(self._STEP_W, step, step)


_WARM_UP = Phase(1_000, 0.01, 0.0, 0.1, kernel_params={"alpha": 1})
NAMED_PHASES: dict[str, tuple[Phase, ...]] = {
    "paper_half_moons": (Phase(10_000, 0.01, 0.01, 0.1), Phase(10_000, 0.001, 0.001, 0.01)),
    "paper_mnist": (_WARM_UP, Phase(10_000, 0.001, 0.0, 0.01), Phase(5_000, 0.0001, 0.0, 0.001)),
    "released_mnist": (_WARM_UP, Phase(5_000, 0.001, 0.0, 0.01), Phase(5_000, 0.0001, 0.0, 0.001)),
}
"""The paper's phases by name: as printed in the paper, and as in the notebook that made the released MNIST weights."""


def make_schedule(
    phases: Sequence[Phase | Mapping[str, Any]] | str | None, updates: int | None, bound: Bound = "paper"
) -> PhaseSchedule | AdaptiveSchedule:
    """The schedule that the options ``phases``, ``updates`` and ``bound`` describe. Default: the bound's adaptive one.

    Raises:
        ValueError: If both ``phases`` and ``updates`` are given, the name is unknown, or the tight bound has phases.
    """
    if phases is None:
        adaptive = TightSchedule if bound == "tight" else AdaptiveSchedule
        return adaptive() if updates is None else adaptive(updates)
    if bound == "tight":
        raise ValueError("`phases` are rates of the paper's rules: leave them out with bound=tight.")
    if updates is not None:
        raise ValueError("`updates` is the length of the adaptive schedule and `phases` have their own: give only one.")
    if isinstance(phases, str):
        if phases not in NAMED_PHASES:
            raise ValueError(f"No phases are called {phases!r}: give a list, or one of {', '.join(NAMED_PHASES)}.")
        return PhaseSchedule(NAMED_PHASES[phases])
    return PhaseSchedule(phases)
