"""The remembered sample of a stream."""

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.learning.stream_schedule import lifetime


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
