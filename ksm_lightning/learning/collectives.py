"""What an update needs from the other processes."""

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """What an update needs from the other processes. All of them must call the same method."""

    @property
    def size(self) -> int: ...

    def mean(self, value: Tensor) -> Tensor: ...

    def sum(self, value: Tensor) -> Tensor: ...

    def gather(self, rows: Tensor) -> Tensor: ...


class SingleProcess:
    """Collectives of one process: every method returns its argument."""

    size = 1

    def mean(self, value: Tensor) -> Tensor:
        return value

    sum = gather = mean
