"""Which neurons a process owns, and how it gets what belongs to the others."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.learning.collectives import Collectives


class Panel(NamedTuple):
    """Consecutive rows of a matrix that one process owns."""

    owner: int  # rank
    rows: slice  # among all rows
    own: slice  # among the rows of the owner


@dataclass(frozen=True)
class Shard:
    """The neurons of one process: consecutive ones, ``ceil(n / ranks)`` on each rank but the last.

    Args:
        num_neurons: Number of neurons n of all processes.
        ranks: The processes.

    Raises:
        ValueError: If a process would have no neurons.

    Example:
        >>> from ksm_lightning.learning import SingleProcess
        >>> Shard(10, SingleProcess()).rows
        slice(0, 10, None)
    """

    num_neurons: int
    ranks: Collectives

    def __post_init__(self) -> None:
        n, size = self.num_neurons, self.ranks.size
        if (size - 1) * self.width >= n:
            raise ValueError(
                f"{n} neurons in equal parts of {self.width} leave some of {size} processes without any: use at most "
                f"{-(-n // self.width)} processes, or more neurons."
            )

    @property
    def width(self) -> int:
        """Number of rows of every rank but the last, which may have fewer."""
        return -(-self.num_neurons // self.ranks.size)

    @property
    def rows(self) -> slice:
        """The neurons of this process."""
        return self.rows_of(self.ranks.rank)

    @property
    def count(self) -> int:
        """Number of neurons of this process."""
        return len(range(self.num_neurons)[self.rows])

    def rows_of(self, rank: int) -> slice:
        """The neurons of a rank."""
        return slice(rank * self.width, min((rank + 1) * self.width, self.num_neurons))

    def diagonal(self, rows: Tensor) -> Tensor:
        """The diagonal elements (n_r,) in the rows (n_r, n) that this process owns of a matrix: a view."""
        return rows.diagonal(self.rows.start)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows (n, ...) of all processes, from those of this process (n_r, ...), on every process."""
        missing = self.width - len(rows)
        if missing:  # collectives need equal sizes
            rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
        return self.ranks.gather(rows)[: self.num_neurons]

    def gathered_mT(self, columns: Tensor) -> Tensor:
        """The columns (batch, n) of all neurons, from those of this process (batch, n_r)."""
        return self.gather(columns.mT).mT

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a value over all processes."""
        return self.ranks.sum(value)

    def panels(self, largest: int) -> Iterator[Panel]:
        """All rows in panels of at most ``largest`` rows, each of one process."""
        for owner in range(self.ranks.size):
            rows = self.rows_of(owner)
            for start in range(rows.start, rows.stop, largest):
                stop = min(start + largest, rows.stop)
                yield Panel(owner, slice(start, stop), slice(start - rows.start, stop - rows.start))

    def broadcast(self, panel: Panel, rows: Tensor) -> Tensor:
        """The rows (panel, n) of a panel, on every process, from the rows (n_r, n) that each of them owns."""
        if panel.owner == self.ranks.rank:
            sent = rows[panel.own].clone(memory_format=torch.contiguous_format)
        else:
            sent = rows.new_empty(panel.rows.stop - panel.rows.start, *rows.shape[1:])
        return self.ranks.broadcast(sent, panel.owner)
