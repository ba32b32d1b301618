"""Rates and kernel parameters as a function of the update count: adaptive, or phases such as the paper's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

# Updates that L takes to follow a change of the kernel, when responses can be thousands of times too large.
_SETTLING = 50

PaperPhases = Literal["paper_half_moons", "paper_mnist"]


class Rates(NamedTuple):
    """How far one update goes in each parameter."""

    W: float
    q: float
    L: float

    def scaled(self, factor: float) -> "Rates":
        """All three multiplied."""
        return Rates(*(factor * rate for rate in self))


class Schedule(Protocol):
    """What the learning rules ask of a schedule; all of it is a function of the update, so that a run can resume."""

    is_natural: bool
    """Whether rates are in natural units (see :func:`ksm_lightning.learning.rules.descent`) or multiply the gradients."""

    @property
    def total_updates(self) -> int: ...

    @property
    def phase_ends(self) -> tuple[int, ...]: ...

    def rates(self, update: int, num_neurons: int, batch: int) -> Rates: ...

    def kernel_params(self, update: int) -> dict[str, float]: ...

    def relocates_before(self, update: int) -> bool: ...

    def is_settling(self, update: int) -> bool: ...

    def constant_until(self, update: int) -> float: ...


@dataclass(frozen=True)
class Phase:
    """A stretch of training with constant rates.

    Args:
        updates: How many updates the phase lasts, at least 1.
        eta_w: Rate of W's descent (its gradient is divided by q^2).
        eta_q: Rate of q's descent; a homogeneous kernel keeps q at 1 whatever is said here.
        eta_l: Rate of L's ascent; keep it well above the other two.
        kernel_params: Kernel parameters during the phase, where they differ from the model's; a warm-up has
            ``{alpha: 1}``.

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
            raise ValueError(f"A phase must last at least 1 update, got `updates`={self.updates}.")
        for name in ("eta_w", "eta_q", "eta_l"):
            rate = getattr(self, name)
            if not (math.isfinite(rate) and rate >= 0):
                raise ValueError(f"The rate `{name}` must be finite and not negative, got {rate}.")

    def rates(self) -> Rates:
        """The three rates."""
        return Rates(self.eta_w, self.eta_q, self.eta_l)


class PhaseSchedule:
    """Which phase is on at an update; the last one goes on for ever.

    Args:
        phases: The phases in order, as :class:`Phase` or as mappings of its fields.

    Raises:
        ValueError: If there is none, or one of them is not a phase.

    Example:
        >>> schedule = PhaseSchedule([Phase(10, eta_w=0.1), {"updates": 5, "eta_w": 0.01}])
        >>> schedule.at(9).eta_w, schedule.at(10).eta_w, schedule.total_updates
        (0.1, 0.01, 15)
    """

    is_natural = False

    def __init__(self, phases: Sequence[Phase | Mapping[str, Any]]) -> None:
        if not phases:
            raise ValueError("A schedule needs at least one phase; give `phases` a list with one entry or more.")
        self.phases = tuple(_as_phase(phase) for phase in phases)
        ends: list[int] = []
        for phase in self.phases:
            ends.append(phase.updates + (ends[-1] if ends else 0))
        self._ends = tuple(ends)
        # Updates at which the kernel changes.
        self._changes = tuple(
            end for end, (old, new) in zip(ends, pairwise(self.phases), strict=False)
            if old.kernel_params != new.kernel_params
        )  # fmt: skip

    @property
    def total_updates(self) -> int:
        """Updates in all phases together."""
        return self._ends[-1]

    def at(self, update: int) -> Phase:
        """The phase of the update with this number, counted from 0."""
        for phase, end in zip(self.phases, self._ends, strict=True):
            if update < end:
                return phase
        return self.phases[-1]

    def rates(self, update: int, num_neurons: int, batch: int) -> Rates:
        """The rates of the phase, whatever the sizes."""
        return self.at(update).rates()

    def kernel_params(self, update: int) -> dict[str, float]:
        """Kernel parameters of the phase, where they differ from the model's."""
        return self.at(update).kernel_params

    def relocates_before(self, update: int) -> bool:
        """Never: the phases are the paper's rules and nothing else."""
        return False

    def is_settling(self, update: int) -> bool:
        """Whether the kernel has changed a moment ago, so that L is not yet what it should be."""
        return any(start <= update < start + _SETTLING for start in self._changes)

    def constant_until(self, update: int) -> float:
        """The first later update at which rates or kernel parameters may differ: the end of the phase."""
        return next((end for end in self._ends[:-1] if update < end), math.inf)

    @property
    def phase_ends(self) -> tuple[int, ...]:
        """Updates at which a phase gives way to the next."""
        return self._ends[:-1]

    def as_primitives(self) -> list[dict[str, Any]]:
        """The phases as plain dictionaries, which is what a checkpoint holds."""
        return [asdict(phase) for phase in self.phases]


def _as_phase(phase: Phase | Mapping[str, Any]) -> Phase:
    if isinstance(phase, Phase):
        return phase
    try:
        return Phase(**phase)
    except TypeError as error:
        raise ValueError(f"Not a phase of the schedule: {phase!r} ({error}).") from error


class AdaptiveSchedule:
    """Steps in natural units that need no tuning; the default.

    Every parameter has a place where its own gradient would vanish if the others stood still, and a step is the part of
    the way to it: ``L -> C``, ``q_i -> <y_i k_i> / f(w_i, w_i)``, ``w_i`` to its mean shift. A part is a pure number,
    so nothing depends on the units of x, on the kernel's width or on the similarity's scale.

    The step of L is ``min(0.1, 0.25 batch / (n + batch / 3))``. C of one batch has rank ``batch``, and L must average
    over ``n / batch`` of them before it knows every direction; without the third, networks with as many neurons as
    samples in a batch lost most of them on kernels with very unequal eigenvalues. However few the neurons, a step
    between two eigenvectors of L is stable below ``2 / (1 + l_i / l_j + l_j / l_i)`` alone: with 0.25 instead of 0.1,
    networks with wide kernels swing, their responses become long, and landmarks are thrown out of the data. W and q
    take a third of L's step, which keeps L near its maximum while they move. All steps stay constant for three tenths
    of the run and then fall linearly to a fiftieth.

    Before some updates of the first half (2, 5, 10, 20, 30, 40 and 50 % of the run) landmarks that explain nothing are
    moved to where the residual is largest (:mod:`ksm_lightning.learning.relocation`).

    What is provable: after y is minimised out the energy is concave in L, with a closed-form maximum
    (:mod:`ksm_lightning.learning.exact`), so L cannot be caught in a wrong place and the end of a run can be exact; the natural
    steps vanish where the paper's do, so both have the same solutions; and as responses are limited in length
    (:func:`ksm_lightning.learning.rules.compute_step`), L is an average of bounded positive semi-definite matrices and can
    always be factorised. What is empirical: the numbers above, and how near to the best solution a run ends
    (scripts/stress/RESULTS.md). The bound itself has many minima in W.

    Args:
        updates: Updates of the whole run, at least 1.

    Raises:
        ValueError: If ``updates`` is below 1.

    Example:
        >>> schedule = AdaptiveSchedule(updates=1000)
        >>> schedule.rates(0, num_neurons=16, batch=64)
        Rates(W=0.03333333333333333, q=0.03333333333333333, L=0.1)
        >>> round(schedule.rates(0, num_neurons=640, batch=64).L, 4)
        0.0242
    """

    is_natural = True
    _LARGEST, _STEP_L, _RATIO, _HOLD, _FINAL, _MARGIN = 0.1, 0.25, 1 / 3, 0.3, 0.02, 1 / 3
    _RELOCATIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)

    def __init__(self, updates: int = 5000) -> None:
        if updates < 1:
            raise ValueError(f"A run needs at least 1 update, got `updates`={updates}.")
        self.updates = updates
        self._relocations = frozenset(round(part * updates) for part in self._RELOCATIONS) - {0}

    @property
    def total_updates(self) -> int:
        """Updates of the whole run."""
        return self.updates

    def rates(self, update: int, num_neurons: int, batch: int) -> Rates:
        """Steps in natural units for a batch over all processes."""
        left = max(0.0, 1 - update / self.updates) / (1 - self._HOLD)
        largest = min(self._LARGEST, self._STEP_L * batch / (num_neurons + self._MARGIN * batch))
        step = largest * (self._FINAL + (1 - self._FINAL) * min(1.0, left))
        return Rates(self._RATIO * step, self._RATIO * step, step)

    @property
    def phase_ends(self) -> tuple[int, ...]:
        """None: the steps change smoothly."""
        return ()

    def kernel_params(self, update: int) -> dict[str, float]:
        """The model's own, always."""
        return {}

    def relocates_before(self, update: int) -> bool:
        """Whether landmarks that explain nothing are moved before the update with this number."""
        return update in self._relocations

    def is_settling(self, update: int) -> bool:
        """Never: the kernel stays."""
        return False

    def constant_until(self, update: int) -> float:
        """The first later update at which the steps may differ."""
        return max(update + 1, math.floor(self._HOLD * self.updates))


_PAPER: dict[str, tuple[Phase, ...]] = {
    "paper_half_moons": (Phase(10_000, 0.01, 0.01, 0.1), Phase(10_000, 0.001, 0.001, 0.01)),
    "paper_mnist": (
        Phase(1_000, 0.01, 0.0, 0.1, kernel_params={"alpha": 1}),
        Phase(10_000, 0.001, 0.0, 0.01),
        Phase(5_000, 0.0001, 0.0, 0.001),
    ),
}


def make_schedule(
    phases: Sequence[Phase | Mapping[str, Any]] | str | None, updates: int | None
) -> PhaseSchedule | AdaptiveSchedule:
    """The schedule that a model's options name: phases, one of the paper's by name, or else the adaptive one.

    Raises:
        ValueError: If both are given, or the name is none of the paper's.
    """
    if phases is None:
        return AdaptiveSchedule() if updates is None else AdaptiveSchedule(updates)
    if updates is not None:
        raise ValueError("`updates` is the length of the adaptive schedule; `phases` have their own: give one of both.")
    if isinstance(phases, str):
        if phases not in _PAPER:
            raise ValueError(f"There is no schedule {phases!r}: `phases` is a list, or one of {', '.join(_PAPER)}.")
        return PhaseSchedule(_PAPER[phases])
    return PhaseSchedule(phases)
