"""Samples of a training set that are sparse, or count several times: rows become dense when they are drawn."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels.limits import FEW, ROWS_AT_ONCE

# Weights that are not whole numbers become counts that add up to at least this number. Whole ones are counts up to it.
_COUNTS = 100_000


class Samples:
    """Rows of an array or a CSR matrix in an order of their own, which may repeat or leave out rows.

    It has the length, the shape and the indexing of a tensor (samples, m), but an index makes a dense copy of the rows
    that it names and of no others.

    Args:
        rows: Array or CSR matrix (rows, m), float32 or float64.
        index: The row of each sample (samples,).

    Example:
        >>> samples = Samples(np.array([[1.0], [2.0], [3.0]]), np.array([2, 2, 0]))
        >>> samples[1:], samples.shape
        (tensor([[3.],
                [1.]], dtype=torch.float64), torch.Size([3, 1]))
    """

    device = torch.device("cpu")

    def __init__(self, rows: Any, index: np.ndarray) -> None:
        self._rows, self._index = rows, index
        self.shape = torch.Size([len(index), rows.shape[1]])
        self.dtype = torch.float32 if rows.dtype == np.float32 else torch.float64

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, chosen: slice | Tensor) -> Tensor:
        rows = self._rows[self._index[chosen.numpy() if isinstance(chosen, Tensor) else chosen]]
        return torch.from_numpy(rows if isinstance(rows, np.ndarray) else rows.toarray())


def in_blocks(x: Tensor | Samples, size: int = ROWS_AT_ONCE) -> Iterator[Tensor]:
    """Blocks (samples, m) of all samples in order, one at a time."""
    for start in range(0, len(x), size):
        yield x[start : start + size]


def counts_of(weights: np.ndarray) -> np.ndarray:
    """How often each sample counts, in proportion to its weight: whole numbers (samples,).

    Equal weights do not matter. Other whole weights are counts, so that a weight of 2 equals a repeated sample. Other
    weights are rounded so that the counts add up to 100,000, or to the number of samples if that is larger; a sample of
    weight 0 never counts.

    Example:
        >>> counts_of(np.array([2.0, 0.0, 1.0])), counts_of(np.array([0.5, 0.0, 1.5]))
        (array([2, 0, 1]), array([25000,     0, 75000]))
    """
    total, largest = weights.sum(), weights.max()
    if ((weights == 0) | (weights == largest)).all():
        return (weights > 0).astype(np.int64)
    if (weights == np.rint(weights)).all() and total <= max(_COUNTS, FEW * len(weights)):
        return weights.astype(np.int64)
    steps = max(len(weights), _COUNTS)
    ends = np.rint(np.cumsum(weights) / total * steps).astype(np.int64)
    return np.diff(ends, prepend=0)


def canonical_order(rows: Any) -> np.ndarray:
    """An order (rows,) of an array or CSR matrix that depends on the values of its rows only, with equal ones together.

    It is that of a hash of their bytes, so it is also as good as random.
    """
    multipliers = np.random.RandomState(0).randint(2**62, size=rows.shape[1], dtype=np.int64).astype(np.uint64)
    multipliers = 2 * multipliers + np.uint64(1)
    hashes = np.empty(rows.shape[0], dtype=np.uint64)
    for start in range(0, rows.shape[0], ROWS_AT_ONCE):
        block = rows[start : start + ROWS_AT_ONCE]
        block = np.ascontiguousarray(block if isinstance(block, np.ndarray) else block.toarray())
        bits = (block + 0.0).view(np.uint64 if block.itemsize == 8 else np.uint32).astype(np.uint64)  # -0 becomes 0
        mixed = (bits ^ (bits >> np.uint64(29))) * multipliers
        hashes[start : start + ROWS_AT_ONCE] = (mixed ^ (mixed >> np.uint64(32))).sum(1, dtype=np.uint64)
    return np.argsort(hashes, kind="stable")
