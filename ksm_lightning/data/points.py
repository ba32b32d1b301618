"""Preprocessed points: a tensor on the device, or a memory-mapped file that is too large for memory."""

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels.limits import ROWS_AT_ONCE
from ksm_lightning.network.preprocessing import Preprocessing


class Points:
    """Preprocessed rows that are read by index or by slice, as tensors on one device.

    In-memory data is preprocessed once and moved to the device. Memory-mapped data stays in its file; each batch is
    read, preprocessed and moved.

    Args:
        data: A tensor (samples, m) that is already preprocessed, or a memory-mapped array of raw rows.
        preprocessing: Applied to the rows of a memory-mapped array. Default: only a cast to float32.
        device: Device of the returned tensors.
    """

    def __init__(
        self, data: Tensor | np.ndarray, preprocessing: Preprocessing | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.preprocessing = preprocessing
        self.data = data.to(self.device) if isinstance(data, Tensor) else data
        self._moved: Points | None = None

    def __len__(self) -> int:
        return len(self.data)

    @property
    def num_features(self) -> int:
        """Number of features m of a point."""
        return int(self.data.shape[1])

    def to(self, device: torch.device | str) -> "Points":
        """The same points on another device; the last copy is kept, so that repeated calls do not copy again.

        Raises ValueError if they are larger than the free memory of a GPU.
        """
        if torch.device(device) == self.device:
            return self
        if self._moved is None or self._moved.device != torch.device(device):
            self._check_room(torch.device(device))
            self._moved = Points(self.data, self.preprocessing, device)
        return self._moved

    def _check_room(self, device: torch.device) -> None:
        if device.type != "cuda" or not isinstance(self.data, Tensor):
            return
        needed, (free, _) = self.data.numel() * self.data.element_size(), torch.cuda.mem_get_info(device)
        if needed > free:
            raise ValueError(
                f"The data needs {needed / 1e9:.3g} GB on {device}, which has {free / 1e9:.3g} GB free: save it as a "
                ".npy file and read it with ArrayDataModule and memory_map=always, or use fewer points."
            )

    def take(self, indices: Tensor) -> Tensor:
        """Rows (b, m) at ``indices`` (b,)."""
        if isinstance(self.data, Tensor):
            return self.data[indices]
        return self._read(self.data[indices.cpu().numpy()])

    def slice(self, start: int, stop: int) -> Tensor:
        """Rows from ``start`` up to, but not including, ``stop``."""
        rows = self.data[start:stop]
        return rows if isinstance(rows, Tensor) else self._read(rows)

    def _read(self, rows: np.ndarray) -> Tensor:
        x = np.asarray(rows, dtype=np.float32) if self.preprocessing is None else self.preprocessing.transform(rows)
        return torch.tensor(x).to(self.device)


def check_points(array: np.ndarray, name: str) -> None:
    """Raise a ValueError about ``name`` if an array is empty, not numeric, not two-dimensional or not finite."""
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name} must hold numbers, but its dtype is {array.dtype}.")
    if array.ndim != 2:
        raise ValueError(f"{name} must have two dimensions (samples, features), got shape {array.shape}.")
    if array.shape[0] == 0 or array.shape[1] == 0:
        raise ValueError(f"{name} is empty: its shape is {array.shape}.")
    for start in range(0, len(array), ROWS_AT_ONCE):
        # The network computes in float32, where a float64 beyond its range is an infinity.
        with np.errstate(over="ignore"):
            rows = np.asarray(array[start : start + ROWS_AT_ONCE], dtype=np.float32)
        bad = np.argwhere(~np.isfinite(rows))
        if len(bad):
            row, column = bad[0]
            raise ValueError(
                f"{name} holds {rows[row, column]} at row {start + row}, column {column} (counted from 0); "
                "remove or fill such values first."
            )
