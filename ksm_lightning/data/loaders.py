"""Batches drawn independently each update, as a pure function of (seed, rank, update), where the data lives."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.data.points import Points

# A block holds at most so many updates, and so many numbers (16 MB of float32).
UPDATES_AT_ONCE, NUMBERS_AT_ONCE = 200, 2**22
# SplitMix64 (Steele, Lea and Flood, 2014) in two's complement, as int64 tensors have no unsigned arithmetic.
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
MAX_SLOTS = 2**24


def draw_indices(seed: int, updates: Tensor, slots: Tensor, count: int) -> Tensor:
    """Uniform indices below ``count``, with replacement, that depend on (seed, update, slot) and nothing else.

    A counter-based generator: it has no state to save, gives the same numbers on every device, and a batch can be
    drawn again in any order, which is what makes a resumed run exact.

    Args:
        seed: Any integer.
        updates: Update numbers (u,), int64.
        slots: Places in the global batch (b,), int64, below 2^24; rank r of R has its own range of places.
        count: Number of points, at least 1.

    Returns:
        Indices (u, b), int64.
    """
    counter = updates[:, None] * MAX_SLOTS + slots  # (u, b)
    state = _mix(torch.tensor(seed, device=updates.device) + _GOLDEN) + counter * _GOLDEN
    return (_mix(state) & (2**63 - 1)) % count


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _logical_shift(z, 30)) * _MIX_1
    z = (z ^ _logical_shift(z, 27)) * _MIX_2
    return z ^ _logical_shift(z, 31)


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


class UpdateBlock(NamedTuple):
    """The batches of several consecutive updates, drawn together."""

    x: Tensor
    """Inputs (updates, batch, m)."""


class UpdateLoader:
    """An iterable of :class:`UpdateBlock`, on the device of its points; one iteration is one epoch.

    An epoch has no meaning to the method, whose batches are drawn independently: here it is the stretch of updates
    between two validations. Lightning's loop costs more than a small update, so it is handed several batches at once.

    Rank r of R takes the places ``r * batch_size`` to ``(r + 1) * batch_size`` of a global batch, so that two ranks
    of 32 see what one rank of 64 sees.

    Args:
        points: Where batches are drawn from.
        batch_size: Points a batch and rank, at least 1.
        updates_per_epoch: An epoch ends at the multiples of this number.
        seed: Seed of the draw.
        rank: This process's number.
        next_update: Says, when an epoch starts, which update comes next; a resumed run starts in the middle.
        last_update: The run ends with this update, if that is known; no block goes beyond it.
        stops: No block goes beyond a multiple of any of these numbers, so that things can be done at their updates.

    Raises:
        ValueError: If ``batch_size`` or ``updates_per_epoch`` is impossible.
    """

    def __init__(
        self,
        points: Points,
        batch_size: int,
        updates_per_epoch: int = 1000,
        *,
        seed: int = 0,
        rank: int = 0,
        next_update: Callable[[], int] = lambda: 0,
        last_update: int | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        if not 1 <= (rank + 1) * batch_size <= MAX_SLOTS:
            raise ValueError(f"`batch_size` must be at least 1 and below {MAX_SLOTS}, got {batch_size}.")
        if updates_per_epoch < 1:
            raise ValueError(f"`updates_per_epoch` must be at least 1, got {updates_per_epoch}.")
        self.points = points
        self.batch_size = batch_size
        self.updates_per_epoch = updates_per_epoch
        self.seed = seed
        self.rank = rank
        self.next_update = next_update
        self.last_update = last_update
        block = max(1, min(UPDATES_AT_ONCE, NUMBERS_AT_ONCE // (batch_size * points.num_features)))
        self.stops = (block, updates_per_epoch, *stops)

    def indices(self, first_update: int, updates: int) -> Tensor:
        """Indices (updates, batch_size) of consecutive batches."""
        device = self.points.device
        numbers = torch.arange(first_update, first_update + updates, device=device)
        slots = torch.arange(self.rank * self.batch_size, (self.rank + 1) * self.batch_size, device=device)
        return draw_indices(self.seed, numbers, slots, len(self.points))

    def blocks(self, first_update: int) -> Iterator[tuple[int, int]]:
        """First update and length of each block, from an update to the end of its epoch."""
        end = (first_update // self.updates_per_epoch + 1) * self.updates_per_epoch
        if self.last_update is not None:
            end = min(end, self.last_update)
        while first_update < end:
            stop = min(end, *((first_update // every + 1) * every for every in self.stops))
            yield first_update, stop - first_update
            first_update = stop

    def __iter__(self) -> Iterator[UpdateBlock]:
        for first_update, updates in self.blocks(self.next_update()):
            indices = self.indices(first_update, updates)
            x = self.points.take(indices.flatten())
            yield UpdateBlock(x.view(updates, self.batch_size, -1))


class PointLoader:
    """All points of a rank's share once, in order, as ``(x, labels)`` blocks; without labels, as ``x``.

    Args:
        points: The points.
        labels: Their labels (samples,), if there are any.
        block_size: Points a block.
        rank: This process's number.
        world_size: Number of processes that share the points; rank r has a contiguous run of them.
    """

    def __init__(
        self, points: Points, labels: Tensor | None, block_size: int, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.points = points
        self.labels = labels
        self.block_size = block_size
        self.start = len(points) * rank // world_size
        self.stop = len(points) * (rank + 1) // world_size

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.block_size)

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        for start in range(self.start, self.stop, self.block_size):
            stop = min(start + self.block_size, self.stop)
            x = self.points.slice(start, stop)
            yield x if self.labels is None else (x, self.labels[start:stop].to(x.device))
