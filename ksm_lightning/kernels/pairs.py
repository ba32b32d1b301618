"""Tiles of a symmetric matrix, and random subsets of points."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ksm_lightning.kernels.limits import TILE

Tile = tuple[slice, slice, int]


def symmetric_tiles(samples: int, tile: int = TILE) -> Iterator[Tile]:
    """Rows and columns of the tiles on and above the diagonal, and the weight (1 or 2) of each in a full sum."""
    for top in range(0, samples, tile):
        for left in range(top, samples, tile):
            yield slice(top, top + tile), slice(left, left + tile), 1 if left == top else 2


def random_subset(count: int, most: int | None, seed: int = 0) -> Tensor:
    """Sorted indices of at most ``most`` of ``count`` samples, drawn without touching the global random state."""
    if most is None or count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most].sort().values
