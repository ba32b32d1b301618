"""Initial values of the landmarks W."""

import math
from typing import Protocol

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.kernels.limits import TILE
from ksm_lightning.network.pivots import pivoted_cholesky

PROGRESS = 1e-3
"""Least relative gain of an iteration of Lloyd's method, or of the descent of landmarks, before it ends."""


class Initialiser(Protocol):
    """Callable that returns an initial ``W`` (num_neurons, in_features) for a kernel."""

    def __call__(
        self, kernel: Kernel, num_neurons: int, in_features: int, generator: torch.Generator | None
    ) -> Tensor: ...


class NormalInit:
    """The paper's initialisation: every entry of W is drawn from ``scale * N(0, 1)``.

    Args:
        scale: Standard deviation, positive. Default: 1, as in the paper. 0.5 keeps more neurons near centred data.
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"The scale of a normal initialisation must be positive and finite, got {scale}.")
        self.scale = scale

    def __call__(self, kernel: Kernel, num_neurons: int, in_features: int, generator: torch.Generator | None) -> Tensor:
        return self.scale * torch.randn(num_neurons, in_features, generator=generator)


class DataInit:
    """Initialise W at data points chosen by :func:`~ksm_lightning.network.pivots.pivoted_cholesky`.

    Every neuron is then near the data: dense regions have most of them, and rare points their own.

    Args:
        points: Candidates (samples, m).
        iterations: Largest number of iterations of :func:`lloyd` that then move W to means of nearby candidates, where
            these represent the candidates better. Default: 0, W stays at data points.
    """

    def __init__(self, points: Tensor, iterations: int = 0) -> None:
        if iterations < 0:
            raise ValueError(f"`iterations` must be at least 0, got {iterations}.")
        self.points = points
        self.iterations = iterations

    def __call__(self, kernel: Kernel, num_neurons: int, in_features: int, generator: torch.Generator | None) -> Tensor:
        if self.points.dim() != 2 or self.points.shape[1] != in_features or len(self.points) == 0:
            raise ValueError(
                f"Initialisation at data points needs points of shape (samples, {in_features}), "
                f"got {tuple(self.points.shape)}."
            )
        points = self.points.repeat(-(-num_neurons // len(self.points)), 1)
        W = points[pivoted_cholesky(kernel, points, num_neurons, generator)]
        return _better(kernel, points, W, lloyd(kernel, points, W, self.iterations)) if self.iterations else W


@torch.no_grad()
def _better(kernel: Kernel, points: Tensor, pivots: Tensor, means: Tensor) -> Tensor:
    """Each landmark (n, m) at its mean, or at its pivot if that represents the points next to it better.

    The mean of two rare points can be unlike both.
    """
    tiny, sums = torch.finfo(points.dtype).tiny, points.new_zeros(2, len(pivots))
    for part in torch.split(points, TILE):
        squares = torch.stack([kernel(part, W).square_() / kernel.diag(W).clamp(min=tiny) for W in (pivots, means)])
        nearest = squares.amax(0).argmax(1)
        sums.index_add_(1, nearest, squares[:, torch.arange(len(part), device=part.device), nearest])
    return torch.where((sums[0] > sums[1])[:, None], pivots, means)


@torch.no_grad()
def lloyd(kernel: Kernel, points: Tensor, W: Tensor, iterations: int = 20) -> Tensor:
    """Move landmarks to the means of the points that they are closest to, by Lloyd's method in the kernel's geometry.

    A radial kernel assigns a point to the nearest landmark. A homogeneous kernel assigns it to the landmark that
    explains most of it up to scale, ``f(x,w)^2 / f(w,w)``. If its sign does not matter, the point enters the mean with
    the sign of ``x . w``. Any other kernel assigns it to the nearest landmark in feature space,
    ``f(w,w) - 2 f(x,w)``. A landmark without points stays. So does, unless the kernel is radial, a landmark whose mean
    explains its points less well. The method ends early when an iteration lowers the energy by less than 0.1 %.

    Args:
        kernel: The similarity.
        points: Points (samples, m).
        W: First landmarks (n, m), for example data points.
        iterations: Largest number of iterations. Default: 20.

    Returns:
        The landmarks (n, m).

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> x = torch.tensor([[0.0], [1.0], [10.0], [12.0]])
        >>> lloyd(GaussianKernel(1.0), x, x[1:3])
        tensor([[ 0.5000],
                [11.0000]])
    """
    with full_precision(points.device):
        # The expanded square is most precise around the mean.
        offset = points.mean(0) if kernel.is_radial else torch.zeros_like(points[0])
        x, W = points - offset, W - offset
        squares = x.square().sum(1) if kernel.is_radial else kernel.diag(x)
        is_mirrored = kernel.is_homogeneous and ignores_sign(kernel, x[:64], W[:64])
        total, energy = squares.double().sum(), math.inf
        before, nearest, costs = W, torch.zeros(len(x), dtype=torch.int64, device=x.device), squares
        is_final = torch.zeros(len(W), dtype=torch.bool, device=x.device)
        for iteration in range(iterations + 1):
            old = _sums(costs, nearest, len(W))
            costs, kept, assignment = _assign(kernel, x, W, nearest)
            if iteration and not kernel.is_radial:
                is_worse = _sums(kept, nearest, len(W)) > old
                W = torch.where(is_worse[:, None], before, W)
                is_final |= is_worse
            last, energy = energy, float(total + costs.double().sum())
            if iteration == iterations or not energy < (1 - PROGRESS) * last:
                break
            before, nearest = W, assignment
            signed = x * torch.where((x * W[nearest]).sum(1) < 0, -1.0, 1.0)[:, None] if is_mirrored else x
            counts = _sums(torch.ones_like(squares), nearest, len(W))
            means = _sums(signed, nearest, len(W)) / counts.clamp(min=1)[:, None]
            W = torch.where(((counts > 0) & ~is_final)[:, None], means, W)
        return W + offset


def _assign(kernel: Kernel, x: Tensor, W: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The least cost of each point, its cost at the landmark ``before``, and the landmark with the least cost."""
    own = W.square().sum(1) if kernel.is_radial else kernel.diag(W)
    parts = []
    for block, index in zip(torch.split(x, TILE), torch.split(before, TILE), strict=True):
        if kernel.is_radial:
            costs = torch.addmm(own, block, W.mT, alpha=-2)  # (block, n)
        elif kernel.is_homogeneous:
            costs = kernel(block, W).square_().mul_(-torch.where(own > 0, 1 / own, 0.0))
        else:
            costs = own - 2 * kernel(block, W)
        least, nearest = costs.min(1)
        parts.append((least, costs.gather(1, index[:, None])[:, 0], nearest))
    least, kept, nearest = (torch.cat(part) for part in zip(*parts, strict=True))
    return least, kept, nearest


def _sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums (count, ...) of the values (samples, ...) with the same index."""
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, index, values)


def ignores_sign(kernel: Kernel, x: Tensor, W: Tensor) -> bool:
    """Whether ``f(-x, w)^2 = f(x, w)^2``."""
    return kernel.is_odd or torch.equal(kernel(-x, W), kernel(x, W))
