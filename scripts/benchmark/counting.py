"""Counted work of a process: operations of matrix products, numbers in collectives, bytes in memory."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::bmm": 0, "aten::mv": 0, "aten::addmv": 1}
# Operations in units of n^3.
_FACTORISATIONS = {"aten::linalg_cholesky_ex": 1 / 3, "aten::cholesky_inverse": 2 / 3}


class CountedWork(TorchDispatchMode):
    """Counts within its block: operations, numbers of the largest tensor, and bytes at the peak.

    Products of matrices and factorisations (with inverses and triangular systems) are counted apart. Memory of tensors
    that existed before counts from the first operation that uses them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.factorised, self.largest, self.peak = 0, 0, 0, 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        first = _PRODUCTS.get(name)
        if name in _FACTORISATIONS:
            self.factorised += round(_FACTORISATIONS[name] * args[0].shape[-1] ** 3)
        elif name == "aten::linalg_solve_triangular":
            self.factorised += args[0].shape[-1] * args[1].numel()
        if first is not None:
            left, right = args[first], args[first + 1]
            self.operations += 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
        if reference.cdata not in self._storages:
            self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
            self._storages[reference.cdata] = (reference, storage.nbytes())
            self.peak = max(self.peak, sum(size for _, size in self._storages.values()))


class CountedRanks:
    """Collectives that count the numbers in their results, by method."""

    def __init__(self, ranks: Any) -> None:
        self.ranks, self.size, self.rank, self.is_first = ranks, ranks.size, ranks.rank, ranks.is_first
        self.calls: dict[str, list[int]] = {}

    def _counted(self, method: str, *args: Any) -> torch.Tensor:
        result: torch.Tensor = getattr(self.ranks, method)(*args)
        self.calls.setdefault(method, []).append(result.numel())
        return result

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return self._counted("sum", value)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return self._counted("mean", value)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return self._counted("gather", rows)

    def broadcast(self, value: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._counted("broadcast", value, source)


class ShapesOnly:
    """The collectives of one rank of many, for tensors without data: results have the right shapes."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank, self.is_first = size, rank, rank == 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return value

    mean = sum

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_empty(self.size * len(rows), *rows.shape[1:])

    def broadcast(self, value: torch.Tensor, source: int = 0) -> torch.Tensor:
        return value
