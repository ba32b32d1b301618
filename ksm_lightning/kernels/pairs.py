"""Tiles of a symmetric matrix, and random subsets of points."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ksm_lightning.kernels.base import Kernel
from ksm_lightning.kernels.limits import ROWS_AT_ONCE, TILE

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


@torch.no_grad()
def kernel_sample(kernel: Kernel, x: Any, most: int, seed: int = 0) -> Tensor:
    """About ``most`` points (samples, m) that stand for all of x, in sums over ``f(x_s, x_t)`` and over pairs of them.

    They are a random subset, except for a homogeneous kernel, where a few long points can be most of the kernel. Points
    are then drawn with a probability in proportion to ``f(x, x)``, at most 1, and divided by its root to the degree:
    ``f(a u, b v) = (a b)^d f(u, v)``, so that the sums stay what they are on average.

    Args:
        kernel: The similarity.
        x: A tensor (samples, m), or another sequence of rows whose items are tensors.
        most: Number of points.
        seed: Seed of the choice.

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> x = torch.cat([torch.ones(10_000, 1), torch.tensor([[1000.0]])])
        >>> sample = kernel_sample(LinearKernel(), x, 1000)
        >>> bool(sample.max() == 1000), round(float(sample.square().sum() / x.square().sum()), 2)
        (True, 1.0)
    """
    if len(x) <= most or kernel.degree is None or not kernel.is_homogeneous:
        subset: Tensor = x[random_subset(len(x), most, seed).to(x.device)]
        return subset
    squares = torch.cat([kernel.diag(x[start : start + ROWS_AT_ONCE]) for start in range(0, len(x), ROWS_AT_ONCE)])
    squares = squares.double().clamp(min=0)
    chance = (most * squares / squares.sum().clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1).cpu()
    uniform = torch.rand(len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    chosen = (uniform < chance).nonzero()[:, 0]
    points: Tensor = x[chosen.to(x.device)]
    return points / chance[chosen].to(points)[:, None] ** (0.5 / kernel.degree)
