"""Initial values of the landmarks W."""

import math
from typing import Protocol

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel


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
    """Initialise W at data points chosen by :func:`kernel_kmeans_plus_plus`, so that every neuron is near the data.

    Args:
        points: Candidates (samples, m).
    """

    def __init__(self, points: Tensor) -> None:
        self.points = points

    def __call__(self, kernel: Kernel, num_neurons: int, in_features: int, generator: torch.Generator | None) -> Tensor:
        if self.points.dim() != 2 or self.points.shape[1] != in_features or len(self.points) == 0:
            raise ValueError(
                f"Initialisation at data points needs points of shape (samples, {in_features}), "
                f"got {tuple(self.points.shape)}."
            )
        return self.points[kernel_kmeans_plus_plus(kernel, self.points, num_neurons, generator=generator)]


def kernel_kmeans_plus_plus(
    kernel: Kernel, points: Tensor, count: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw indices (count,) of points (samples, m) that are spread out in the kernel's feature space.

    Each point is drawn with probability proportional to its squared distance to the nearest point already drawn,
    ``|phi(x) - phi(c)|^2 = f(x,x) + f(c,c) - 2 f(x,c)``. When all distances are 0 (fewer distinct points than
    ``count``), the remaining points are drawn uniformly. The generator must be on the CPU.
    """
    self_similarity = kernel.diag(points).double()  # (samples,)
    draws = torch.rand(count, dtype=torch.float64, generator=generator).to(points.device)
    weights = uniform = torch.ones_like(self_similarity)
    nearest = torch.full_like(self_similarity, torch.inf)
    chosen: list[Tensor] = []
    for draw in torch.split(draws, 1):
        cumulative = weights.cumsum(0)
        # Keep the index as a vector of length 1: a Python scalar would need a host sync in every iteration.
        index = torch.searchsorted(cumulative, draw * cumulative[-1], right=True).clamp_(max=len(points) - 1)  # (1,)
        chosen.append(index)
        similarity = kernel(points, points[index])[:, 0].double()
        distance = (self_similarity + self_similarity[index] - 2 * similarity).clamp_(min=0)
        nearest = torch.minimum(nearest, distance).index_fill(0, index, 0.0)
        # Equal points have a computed distance of about eps f, which must not count as a distance.
        resolved = nearest > 1e-6 * self_similarity.max()
        weights = torch.where(resolved.any(), torch.where(resolved, nearest, 0.0), uniform)
    return torch.cat(chosen)
