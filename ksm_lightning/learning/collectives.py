"""What an update needs from the other processes."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Collectives(Protocol):
    """What an update needs from the other processes. All of them must call the same method.

    ``mean``, ``sum`` and ``broadcast`` may overwrite their argument: it can be as large as L.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def is_first(self) -> bool: ...

    def mean(self, value: Tensor) -> Tensor: ...

    def sum(self, value: Tensor) -> Tensor: ...

    def gather(self, rows: Tensor) -> Tensor: ...

    def broadcast(self, value: Tensor, source: int = 0) -> Tensor: ...


class SingleProcess:
    """Collectives of one process: every method returns its argument."""

    size = 1
    rank = 0
    is_first = True

    def mean(self, value: Tensor) -> Tensor:
        return value

    sum = gather = mean

    def broadcast(self, value: Tensor, source: int = 0) -> Tensor:
        return value


@torch.no_grad()
def checksums(parameters: Iterable[Tensor]) -> Tensor:
    """A weighted sum and the length of each parameter (rows, ...), by which processes compare their weights: (2 k,).

    Each row has another weight, so that landmarks in another order have another sum. No host synchronisation.
    """
    values = []
    for parameter in parameters:
        rows = parameter.flatten(1).sum(1, dtype=torch.float64) if parameter.dim() > 1 else parameter.double()
        weights = torch.arange(len(rows), device=rows.device, dtype=torch.float64).cos()
        values += [torch.dot(rows, weights), torch.linalg.vector_norm(parameter, dtype=torch.float64)]
    return torch.stack(values)
