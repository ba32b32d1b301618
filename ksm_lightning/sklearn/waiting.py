"""Single samples of a stream that are learned together."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from ksm_lightning.kernels.limits import TILE


class Waiting:
    """Single samples of a stream that wait to be learned together, which takes a fraction of the time.

    Nothing that can be observed depends on it: they are learned, one update each, before anything else is done.

    Args:
        params: The parameters with which the last samples were learned.
        x: These samples (samples, m). Only samples with no larger values wait: the others are checked first.
    """

    def __init__(self, params: dict[str, Any], x: Tensor) -> None:
        # A dictionary may be changed in place.
        self.params = tuple(dict(value) if isinstance(value, dict) else value for value in params.values())
        self.names = tuple(params)
        self.shape, self.largest = (1, x.shape[1]), float(x.abs().max()) if len(x) else 0.0
        self.dtype = x.numpy().dtype
        self.rows: list[np.ndarray] = []

    @property
    def is_full(self) -> bool:
        """Whether it is time to learn."""
        return len(self.rows) >= TILE

    def take(self, X: Any, params: Mapping[str, Any]) -> bool:
        """Let a sample wait; False if it has to be checked, or the parameters may have changed."""
        if type(X) is not np.ndarray or X.shape != self.shape or X.dtype != self.dtype:
            return False
        if not np.abs(X).max() <= self.largest:  # or NaN
            return False
        if tuple(map(params.__getitem__, self.names)) != self.params:
            return False
        self.rows.append(X.copy())
        return True

    def give(self) -> list[np.ndarray]:
        """The samples that wait; none do afterwards."""
        rows, self.rows = self.rows, []
        return rows
