"""Rows of an array in a file that several processes write, each its own."""

import errno
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ksm_lightning.files import naming_errors


def create_array(path: Path, dtype: Any, shape: tuple[int, ...], target: Path) -> None:
    """Create a ``.npy`` file of zeros and reserve its space; errors name the ``target``."""
    with naming_errors(target):
        np.lib.format.open_memmap(path, "w+", dtype, shape)
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except AttributeError:
                pass  # not on this system
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # not on this file system
                    raise


class RowFile:
    """Writes rows of a ``.npy`` file that exists; a call changes the bytes of its rows and no others.

    Memory-mapped files are written in whole pages. Where two machines write rows of the same page through a network
    file system, the second one would restore the old bytes of the first.

    Args:
        path: The file, as :func:`create_array` makes it.
        target: The file that errors name.
    """

    def __init__(self, path: Path, target: Path) -> None:
        array = np.lib.format.open_memmap(path, "r")
        self.target, self.dtype, self.row_shape = target, array.dtype, array.shape[1:]
        self._start, self._row_bytes = array.offset, array.nbytes // max(1, len(array))
        self._file = path.open("r+b", buffering=0)

    def write(self, rows: slice | Sequence[int], values: np.ndarray) -> None:
        """Write values (len(rows), ...) to a contiguous slice of rows, or to rows with these indices."""
        values = np.ascontiguousarray(values, self.dtype)
        with naming_errors(self.target):
            if isinstance(rows, slice):
                self._write_at(rows.start, values)
                return
            index = np.asarray(rows)
            ends = [0, *(np.flatnonzero(np.diff(index) != 1) + 1), len(index)]
            for first, last in pairwise(ends):
                self._write_at(int(index[first]), values[first:last])

    def _write_at(self, row: int, values: np.ndarray) -> None:
        self._file.seek(self._start + row * self._row_bytes)
        left = values.reshape(-1).view(np.uint8).data
        while left:
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Write everything to the disk, where other machines see it."""
        if not self._file.closed:
            with naming_errors(self.target):
                os.fsync(self._file.fileno())
                self._file.close()
