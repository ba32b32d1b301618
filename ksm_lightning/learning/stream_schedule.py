"""Step sizes for a stream without an end."""

import math
import sys

import numpy as np

from ksm_lightning.learning.schedule import AdaptiveSchedule, TightSchedule


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

    def _ages(self, samples: range, hold: int) -> np.ndarray:
        """1 at the start; then they grow by 1 every ``hold`` samples, up to the age of the memory: (updates,)."""
        return 1 + np.minimum(np.array(samples, np.float64), self._lifetime) / hold

    def relocates_before(self, update: int) -> bool:
        return False  # the stream decides when landmarks move

    def constant_until(self, update: int) -> float:
        return update + 1


class StreamSchedule(_Endless):
    """Natural steps for a stream.

    With ``age = 1 + samples / (4 n)``, steps decrease as ``age^-0.75``: slowly enough to reach a solution, fast enough
    for the noise to vanish (Robbins and Monro). A stream that forgets keeps the steps that it has at the age of its
    memory.
    """

    _HOLD_SAMPLES, _POWER = 4, 0.75

    def table(self, updates: range, num_neurons: int, batch: int) -> np.ndarray:
        ages = self._ages(updates, self._HOLD_SAMPLES * max(num_neurons, batch))[:, None]
        return np.asarray(np.array(self._first(num_neurons, batch)) * ages**-self._POWER)


class TightStreamSchedule(StreamSchedule, TightSchedule):
    """Steps of the tight bound for a stream: as in :class:`StreamSchedule`, by the samples seen so far."""
