"""Loaders: random batches for training, as a function of (seed, rank, update), and all points in order."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ksm_lightning.data.points import Points
from ksm_lightning.kernels.limits import NUMBERS_AT_ONCE, UPDATES_AT_ONCE

# Constants of SplitMix64 (Steele, Lea and Flood, 2014) in two's complement: PyTorch has no uint64 arithmetic.
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
MAX_SLOTS = 2**24  # positions in a global batch


def draw_indices(seed: int, updates: Tensor, slots: Tensor, count: int) -> Tensor:
    """Uniform indices (u, b) below ``count``, drawn with replacement; a function of (seed, update, slot) only.

    The generator is counter-based: it has no state to save, gives the same numbers on every device, and can draw any
    batch again. This makes a resumed run exact.

    Args:
        seed: Any integer.
        updates: Update numbers (u,), int64.
        slots: Positions in the global batch (b,), int64, below ``MAX_SLOTS``. Each rank has its own range.
        count: Number of points, at least 1.
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


def next_milestone(update: int) -> int:
    """The first milestone after an update: 1, 2, 4, 8 and so on.

    What is measured there shows the start of a run, where most is learned, as finely as its end.
    """
    return 1 << update.bit_length()


class UpdateBlock(NamedTuple):
    """The batches of several consecutive updates."""

    x: Tensor  # (updates, batch, m)


class UpdateLoader:
    """Random batches for training: an iterable of :class:`UpdateBlock` on the device of the points.

    One iteration is one epoch: the updates between two validations. The method itself has no epochs, because its
    batches are drawn independently. A block holds several batches because Lightning's loop costs more per step than a
    small update.

    Rank r uses the positions ``r * batch_size`` to ``(r + 1) * batch_size`` of a global batch, so that two ranks with
    batches of 32 draw the same points as one rank with batches of 64.

    Args:
        points: Points to draw from.
        batch_size: Number of points per batch and rank, at least 1.
        updates_per_epoch: Epochs end at multiples of this number.
        seed: Seed of the draws.
        rank: Rank of this process.
        next_update: Returns the number of the next update; called when an iteration starts. A resumed run starts in
            the middle of an epoch.
        last_update: Number of updates in the run; no block goes beyond it. Default: unlimited.
        stops: Blocks end at the multiples of each of these numbers, so that callbacks can act there.
        ends_at_milestones: Whether blocks also end at milestones, see :func:`next_milestone`.
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
        ends_at_milestones: bool = False,
    ) -> None:
        if not 1 <= (rank + 1) * batch_size <= MAX_SLOTS:
            raise ValueError(
                f"`batch_size` must be at least 1, and at most {MAX_SLOTS} summed over all ranks, got {batch_size}."
            )
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
        self.ends_at_milestones = ends_at_milestones
        self.stops = (block, updates_per_epoch, *stops)

    def indices(self, first_update: int, updates: int) -> Tensor:
        """Point indices (updates, batch_size) of consecutive batches."""
        device = self.points.device
        update_numbers = torch.arange(first_update, first_update + updates, device=device)
        slots = torch.arange(self.rank * self.batch_size, (self.rank + 1) * self.batch_size, device=device)
        return draw_indices(self.seed, update_numbers, slots, len(self.points))

    def blocks(self, first_update: int) -> Iterator[tuple[int, int]]:
        """First update and number of updates of each block, from ``first_update`` to the end of its epoch."""
        end = (first_update // self.updates_per_epoch + 1) * self.updates_per_epoch
        if self.last_update is not None:
            end = min(end, self.last_update)
        while first_update < end:
            stop = min(end, *((first_update // every + 1) * every for every in self.stops))
            if self.ends_at_milestones:
                stop = min(stop, next_milestone(first_update))
            yield first_update, stop - first_update
            first_update = stop

    def __iter__(self) -> Iterator[UpdateBlock]:
        for first_update, updates in self.blocks(self.next_update()):
            x = self.points.take(self.indices(first_update, updates).flatten())
            yield UpdateBlock(x.view(updates, self.batch_size, -1))


class PointLoader:
    """All points of this rank once, in order: batches ``(x, labels)``, or ``x`` without labels.

    Args:
        points: The points.
        labels: Their labels (samples,), or None.
        batch_size: Number of points per batch.
        rank: Rank of this process.
        world_size: Number of processes that share the points; each has a contiguous range.
    """

    def __init__(
        self, points: Points, labels: Tensor | None, batch_size: int, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.points = points
        self.labels = labels
        self.batch_size = batch_size
        self.start = len(points) * rank // world_size
        self.stop = len(points) * (rank + 1) // world_size

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.batch_size)

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        for start in range(self.start, self.stop, self.batch_size):
            stop = min(start + self.batch_size, self.stop)
            x = self.points.slice(start, stop)
            yield x if self.labels is None else (x, self.labels[start:stop].to(x.device))


class FirstBatches:
    """Points of the first batches of any loader, for a run without a datamodule of this package.

    Points that are not finite are left out: the divergence guard names the update that meets them.

    The global random state stays as it was, so that a loader that shuffles with it begins with the same batches.

    Args:
        loader: The loader, an iterable of batches.
        count_for: Returns the number of points to read, given the number of features. A shorter loader is read whole.
    """

    def __init__(self, loader: Any, count_for: Callable[[int], int]) -> None:
        parts: list[Tensor] = []
        with torch.random.fork_rng(devices=[]):
            for batch in loader:
                x = inputs_of(batch).cpu()
                if x.dim() != 2:
                    raise ValueError(f"A batch must have the shape (batch, features), got {tuple(x.shape)}.")
                x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
                parts.append(x[x.isfinite().all(1)])
                if sum(map(len, parts)) >= count_for(x.shape[1]):
                    break
        if not any(map(len, parts)):
            raise ValueError("The training loader has no batches of finite points, so there is nothing to learn from.")
        self.points = torch.cat(parts)  # (samples, m)

    @property
    def in_features(self) -> int:
        """Number of features of a point."""
        return self.points.shape[1]

    def random_points(self, count: int, generator: torch.Generator) -> Tensor:
        """Up to ``count`` of the points (samples, m); ``generator`` is on the CPU."""
        return self.points[torch.randperm(len(self.points), generator=generator)[:count]]


def batches_of(batch: Any) -> Tensor:
    """Batches (updates, batch, m) of one training step: an :class:`UpdateBlock`, or one batch of another loader."""
    return batch.x if isinstance(batch, UpdateBlock) else inputs_of(batch)[None]


def inputs_of(batch: Any) -> Tensor:
    """Inputs (batch, m) of a batch, which is a tensor or a sequence that starts with one; images are flattened."""
    x = batch[0] if isinstance(batch, Sequence) and len(batch) else batch
    if not isinstance(x, Tensor):
        raise TypeError(f"A batch must be a tensor or a tuple that starts with one, got {type(batch).__name__}.")
    return x.flatten(1) if x.dim() > 2 else x


def has_length(loader: Any) -> bool:
    """Whether a loader has an end that is known."""
    try:
        len(loader)
    except TypeError:
        return False
    return True
