"""Phases of rates and kernel parameters as a function of the update count."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


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

    def rates(self) -> dict[str, float]:
        """The three rates by the name of the parameter that they drive."""
        return {"W": self.eta_w, "q": self.eta_q, "L": self.eta_l}


class Schedule:
    """Which phase is on at an update; the last one goes on for ever.

    Args:
        phases: The phases in order, as :class:`Phase` or as mappings of its fields.

    Raises:
        ValueError: If there is none, or one of them is not a phase.

    Example:
        >>> schedule = Schedule([Phase(10, eta_w=0.1), {"updates": 5, "eta_w": 0.01}])
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
        self._ends = tuple(ends)

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


def half_moons_phases() -> list[Phase]:
    """The paper's schedule for half moons: 10,000 updates, then 10,000 at a tenth of the rates."""
    return [Phase(10_000, 0.01, 0.01, 0.1), Phase(10_000, 0.001, 0.001, 0.01)]
