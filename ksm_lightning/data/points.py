"""Points with their centring and scaling: a tensor on the device, or a file too large for memory."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Scaling = Literal["none", "global", "feature"]
_ROWS_AT_ONCE = 65_536


@dataclass(frozen=True)
class Standardisation:
    """``x -> (x - mean) / scale`` with ``mean`` (m,) and ``scale`` (m,), float64, as measured on training data."""

    mean: np.ndarray
    scale: np.ndarray

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Rows (samples, m) of any dtype, standardised in float64 and then cast to float32."""
        result = np.empty(rows.shape, dtype=np.float32)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            result[part] = (np.asarray(rows[part], dtype=np.float64) - self.mean) / self.scale
        return result

    @classmethod
    def measure(cls, array: np.ndarray, *, centre: bool, scaling: Scaling) -> "Standardisation":
        """Mean and scale of ``array`` (samples, m), streamed and summed in float64; a constant feature keeps scale 1.

        Args:
            array: The data, possibly memory-mapped.
            centre: Whether to remove the mean of each feature.
            scaling: Divide by nothing, by the standard deviation of all entries, or of each feature.
        """
        features = array.shape[1]
        total, square = np.zeros(features), np.zeros(features)
        # Sums about a first guess of the mean keep the variance exact for data far from the origin.
        guess = np.asarray(array[:_ROWS_AT_ONCE], dtype=np.float64).mean(0)
        for start in range(0, len(array), _ROWS_AT_ONCE):
            rows = np.asarray(array[start : start + _ROWS_AT_ONCE], dtype=np.float64) - guess
            total += rows.sum(0)
            square += (rows * rows).sum(0)
        offset = total / len(array)
        mean, variance = guess + offset, square / len(array) - offset**2
        if scaling == "global":
            variance = np.full(features, variance.mean() + ((mean - mean.mean()) ** 2).mean())
        # A variance at rounding level is that of a constant feature, which no scale can bring to 1.
        has_spread = variance > (8 * np.finfo(np.float64).eps * np.abs(mean)) ** 2
        scale = np.where(has_spread & (scaling != "none"), np.sqrt(np.maximum(variance, 0)), 1.0)
        return cls(mean if centre else np.zeros(features), scale)


class Points:
    """Rows to draw from, standardised, answered on one device.

    In-memory data is standardised once and moved to the device; memory-mapped data stays in its file, and each batch
    is read, standardised and sent.

    Args:
        data: A tensor (samples, m), already standardised, or a memory-mapped array.
        standardisation: What to apply to rows of a memory-mapped array.
        device: Where batches are wanted.
    """

    def __init__(
        self,
        data: Tensor | np.ndarray,
        standardisation: Standardisation | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.standardisation = standardisation
        self.data = data.to(self.device) if isinstance(data, Tensor) else data
        self._moved: Points | None = None

    def __len__(self) -> int:
        return len(self.data)

    @property
    def num_features(self) -> int:
        """Features m."""
        return int(self.data.shape[1])

    def to(self, device: torch.device | str) -> "Points":
        """The same points answered on another device; the copy is made once, however often it is asked for."""
        if torch.device(device) == self.device:
            return self
        if self._moved is None or self._moved.device != torch.device(device):
            self._moved = Points(self.data, self.standardisation, device)
        return self._moved

    def take(self, indices: Tensor) -> Tensor:
        """Rows by index: (b,) gives (b, m)."""
        if isinstance(self.data, Tensor):
            return self.data[indices]
        return self._read(self.data[indices.cpu().numpy()])

    def slice(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop``."""
        if isinstance(self.data, Tensor):
            return self.data[start:stop]
        return self._read(self.data[start:stop])

    def _read(self, rows: np.ndarray) -> Tensor:
        x = self.standardisation(rows) if self.standardisation is not None else np.asarray(rows, dtype=np.float32)
        return torch.tensor(x).to(self.device)


def check_points(array: np.ndarray, name: str) -> None:
    """Refuse what cannot be trained on, in one sentence.

    Raises:
        ValueError: If the array is empty, not two-dimensional, not numeric, or holds a NaN or an infinity.
    """
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name} holds {array.dtype}, not numbers.")
    if array.ndim != 2:
        raise ValueError(f"{name} must have two dimensions (samples, features), got shape {array.shape}.")
    if array.shape[0] == 0 or array.shape[1] == 0:
        raise ValueError(f"{name} is empty: its shape is {array.shape}.")
    for start in range(0, len(array), _ROWS_AT_ONCE):
        # float32 is what the network sees: a float64 beyond its range is an infinity there.
        with np.errstate(over="ignore"):
            rows = np.asarray(array[start : start + _ROWS_AT_ONCE], dtype=np.float32)
        bad = np.argwhere(~np.isfinite(rows))
        if len(bad):
            row, column = bad[0]
            raise ValueError(
                f"{name} holds {rows[row, column]} at row {start + row}, column {column} (counted from 0); "
                "remove or fill such values first."
            )
