"""Step sizes for a stream without an end."""

import math
import sys

from ksm_lightning.learning.schedule import AdaptiveSchedule, Rates, TightSchedule


def lifetime(half_life: float | None) -> float:
    """Mean number of samples that something is remembered for, if half of it is forgotten after ``half_life``."""
    return math.inf if half_life is None else half_life / math.log(2)


class _Endless(AdaptiveSchedule):
    """A schedule for a stream: updates are numbered by the samples seen so far, and every one has steps of its own.

    Args:
        half_life: Number of samples after which half of the past is forgotten. Default: nothing is forgotten.
    """

    def __init__(self, half_life: float | None = None) -> None:
        super().__init__(updates=sys.maxsize)
        self._lifetime = lifetime(half_life)

    def _age(self, samples: int, hold: int) -> float:
        """1 at the start; then it grows by 1 every ``hold`` samples, up to the age of the memory."""
        return 1 + min(samples, self._lifetime) / hold

    def relocates_before(self, update: int) -> bool:
        return False  # the stream decides when landmarks move

    def constant_until(self, update: int) -> float:
        return update + 1


class StreamSchedule(_Endless):
    """Natural steps for a stream.

    With ``age = 1 + samples / (4 n)``, W's and q's steps decrease as ``age^-0.75``: slowly enough to reach a solution,
    fast enough for the noise to vanish (Robbins and Monro). L's decrease as ``1 / age``, like those of a running mean.
    A stream that forgets keeps the steps that it has at the age of its memory.
    """

    _HOLD_SAMPLES, _POWER, _POWER_L = 4, 0.75, 1.0

    def rates(self, update: int, num_neurons: int, batch: int) -> Rates:
        rates = super().rates(0, num_neurons, batch)
        age = self._age(update, self._HOLD_SAMPLES * num_neurons)
        return rates.scaled(age**-self._POWER)._replace(L=rates.L * age**-self._POWER_L)


class TightStreamSchedule(_Endless, TightSchedule):
    """Steps of the tight bound for a stream: as in :class:`StreamSchedule`, by the samples seen so far."""

    _HOLD_SAMPLES, _POWER = 8, 0.75

    def rates(self, update: int, num_neurons: int, batch: int) -> Rates:
        rates = super().rates(0, num_neurons, batch)
        age = self._age(update, self._HOLD_SAMPLES * max(num_neurons, batch))
        return Rates(rates.W * age**-self._POWER, rates.q / age, rates.L / age)
