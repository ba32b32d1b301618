"""Conversion of raw input (arrays, tensors, data frames, loaders) to batches of finite tensors."""

import math
from collections.abc import Iterable
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor


def input_batches(data: Any, batch_size: int) -> tuple[Iterable[Any], int | None]:
    """Batches of raw input and their number, if known. Memory-mapped arrays are read one batch at a time.

    Args:
        data: An array, a tensor or a data frame with one point per row; or a loader whose batches are tensors, or
            tuples that start with a tensor.
        batch_size: Number of points per batch. Ignored for a loader.
    """
    if isinstance(data, Tensor) or hasattr(data, "__array__"):
        rows = data if isinstance(data, Tensor | np.ndarray) else np.asarray(data)
        if rows.ndim == 0:
            raise ValueError("Input must have one row per point, got a single number.")
        count = max(1, math.ceil(len(rows) / batch_size))  # one empty batch, so that its shape is checked
        return (rows[index * batch_size : (index + 1) * batch_size] for index in range(count)), count
    if not isinstance(data, Iterable):
        raise ValueError(f"Input must be an array, a tensor, a data frame or a loader, got a {type(data).__name__}.")
    batches = (batch[0] if isinstance(batch, tuple | list) and len(batch) else batch for batch in data)
    return batches, length_hint(data) or None


def as_tensor(data: Any) -> Tensor:
    """Convert an array or a data frame of real numbers to a tensor. A tensor is returned unchanged."""
    if isinstance(data, Tensor):
        if data.is_complex():
            raise ValueError(f"Input must be real numbers, got {data.dtype}.")
        return data
    array = np.asarray(data)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"Input must be numbers, got {array.dtype} in a {type(data).__name__}.")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # torch has no long double
        array = array.astype(np.float64)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides) or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(array)


def check_finite(x: Tensor, name: str) -> Tensor:
    """Return the tensor if all values are finite, or raise a ValueError about ``name``."""
    if not is_finite(x):
        raise ValueError(f"{name} contains NaN or infinity: remove or replace these values first.")
    return x


def is_finite(x: Tensor) -> bool:
    """Whether all values are finite. Checks the sum first, which is much faster than checking every value."""
    return not x.is_floating_point() or bool(x.sum().isfinite()) or bool(x.isfinite().all())
