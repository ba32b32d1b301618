"""Free memory, and a sentence about data that does not fit into it."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def free_memory() -> float:
    """Bytes of memory available without swapping; infinite if the system does not report it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * float(line.split()[1])
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return float("inf")


def bytes_needed(size: int, dtype: np.dtype[Any]) -> int:
    """Memory for an array, its float32 copy and the tensor made from it, which exist at the same time."""
    return size * (dtype.itemsize + 2 * 4)


def fits_memory(size: int, dtype: np.dtype[Any]) -> bool:
    """Whether an array of ``size`` numbers, and what is made from it, fits into the free memory."""
    return bytes_needed(size, dtype) <= free_memory()


def check_memory(shape: Sequence[int], dtype: np.dtype[Any], source: str, part: str = "an array") -> None:
    """Raise ValueError if an array, which is ``part`` of ``source``, does not fit into the free memory."""
    needed, free = bytes_needed(math.prod(shape), dtype), free_memory()
    if needed > free:
        raise ValueError(
            f"{source} is too large: {part} of shape {tuple(shape)} needs {needed:,} bytes of memory, and "
            f"{free:,.0f} are free; save it as .npy, which is read in parts."
        )
