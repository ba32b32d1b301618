"""Points that a sample lacks: limits on readouts near rare ones, and what long ones count."""

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel

# Number of points near a landmark that halve its weight as a point of their sample; at most this part of the mean.
_ENOUGH, _SHARE = 10.0, 0.05
_BLOCK = 8192
# Points of more than this many times the mean f(x, x) are heavy, up to this number of them.
_HEAVY, _MOST_HEAVY = 10.0, 100
FEATURE_LIMIT = 2.0
"""Largest ``|y|^2 / f(x, x)`` of features that were fitted to a sample which may lack rare points."""


def with_landmarks(kernel: Kernel, W: Tensor, x: Tensor) -> Tensor:
    """The sample x (samples, m) and the landmarks (p, m) as points of its typical length, one after the other."""
    landmarks = W.to(x)
    if kernel.is_homogeneous and kernel.degree is not None:  # the length of a landmark is its gain, not that of a point
        ratio = kernel.diag(x).mean() / kernel.diag(landmarks).clamp(min=torch.finfo(x.dtype).tiny)
        landmarks = landmarks * ratio.clamp(max=1e12)[:, None] ** (0.5 / kernel.degree)
    return torch.cat([x, landmarks])


def heaviest(kernel: Kernel, squares: Tensor) -> Tensor:
    """Indices of points that a sample must not lack, given their ``f(x, x)`` (samples,); none of most data.

    They are up to 100 points with an ``f(x, x)`` of more than 10 times the mean, where that grows with the length of a
    point: one of them can be most of the kernel error.
    """
    if not kernel.is_homogeneous or len(squares) == 0:
        return torch.empty(0, dtype=torch.int64, device=squares.device)
    largest, indices = squares.topk(min(_MOST_HEAVY, len(squares)))
    return indices[largest > _HEAVY * squares.mean()]


def without_heavy_at_end(kernel: Kernel, x: Tensor, count: int) -> Tensor:
    """An order (samples,) of points in random order (samples, m) in which none of the last ``count`` is heavy.

    For points that are held out at the end: a heavy one must be learned. The others keep their places.
    """
    order, start = torch.arange(len(x), device=x.device), len(x) - count
    is_heavy = torch.zeros_like(order, dtype=torch.bool).index_fill_(0, heaviest(kernel, kernel.diag(x)), True)
    late, light = is_heavy[start:].nonzero()[:, 0] + start, (~is_heavy[:start]).nonzero()[:, 0]
    late = late[: len(light)]
    early = light[len(light) - len(late) :]
    order[early], order[late] = late, early
    return order


def add_heavy(kernel: Kernel, sample: Tensor, heavy: Tensor, count: int) -> Tensor:
    """A sample (samples, m) of ``count`` points, and the heavy ones of these, scaled to count as much as in all."""
    if kernel.degree is None or len(heavy) == 0:
        return sample
    return torch.cat([sample, heavy.to(sample) * (len(sample) / count) ** (0.5 / kernel.degree)])


@torch.no_grad()
def with_heaviest(kernel: Kernel, sample: Tensor, others: Tensor) -> Tensor:
    """A sample (samples, m) and the :func:`heaviest` of the other points, scaled to count as much as in all of them.

    The sample should have none itself, see :func:`without_heavy_at_end`.

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> with_heaviest(LinearKernel(), torch.ones(1, 1), torch.tensor([[9.0], *[[1.0]] * 14]))
        tensor([[1.0000],
                [2.2500]])
    """
    return add_heavy(kernel, sample, others[heaviest(kernel, kernel.diag(others))], len(sample) + len(others))


@torch.no_grad()
def points_at(W: Tensor, x: Tensor) -> Tensor:
    """Indices of points (samples, m) that are equal to a landmark (p, m), at most one per landmark.

    Numbers are compared in float32. A point is compared only with landmarks that have a similar projection on a random
    direction.

    Example:
        >>> points_at(torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 2.0]]))
        tensor([1])
    """
    if len(W) == 0 or len(x) == 0:
        return torch.empty(0, dtype=torch.int64)
    W, x = (values.cpu().float().double() for values in (W, x))
    direction = torch.randn(x.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tolerance = 1e-9 * max(1e-300, float((W.abs() @ direction.abs()).max()))
    sums, order = (x @ direction).sort(stable=True)
    of_landmarks = W @ direction
    first = torch.searchsorted(sums, of_landmarks - tolerance)
    last = torch.searchsorted(sums, of_landmarks + tolerance, right=True)
    found = [order[:0]]
    for j in (last > first).nonzero()[:, 0].tolist():
        near = order[first[j] : last[j]]
        found.append(near[(x[near] == W[j]).all(1)][:1])
    indices: Tensor = torch.unique(torch.cat(found))
    return indices


@torch.no_grad()
def weights_of_landmarks(kernel: Kernel, W: Tensor, x: Tensor) -> Tensor:
    """Weights (p,) from 0 to 1 of landmarks as points of a sample x: high for those that the sample has nothing near.

    The weight is ``c / (c + s_j)``, where ``s_j = sum_x cos(x, w_j)^2`` is the number of points near landmark j in
    feature space and c is 10, or less if the kernel is so narrow that all landmarks have few.

    Args:
        kernel: The similarity.
        W: Landmarks (p, m).
        x: The sample (samples, m).

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> weights = weights_of_landmarks(GaussianKernel(1.0), torch.tensor([[0.0], [9.0]]), torch.zeros(1000, 1))
        >>> [round(weight, 2) for weight in weights.tolist()]
        [0.01, 1.0]
    """
    W, near = W.double(), W.new_zeros(len(W), dtype=torch.float64)
    length = kernel.diag(W).clamp(min=torch.finfo(torch.float64).tiny).rsqrt()
    for part in torch.split(x, _BLOCK):
        part = part.double()
        cosines = kernel(part, W) * length
        near += (cosines.square() / kernel.diag(part).clamp(min=torch.finfo(torch.float64).tiny)[:, None]).sum(0)
    enough = (_SHARE * near.mean()).clamp(min=torch.finfo(torch.float64).tiny, max=_ENOUGH)
    weights: Tensor = enough / (enough + near)
    return weights.to(x)


@torch.no_grad()
def limit_readout(kernel: Kernel, W: Tensor, M: Tensor, limit: float = FEATURE_LIMIT) -> Tensor:
    """The M (p, k), in float64, with directions shortened so that ``|y|^2 <= limit f(x, x)`` for every point x.

    ``f(x, W) = K^(1/2) z`` with ``|z|^2 <= f(x, x)``, so the singular values of ``K^(1/2) M`` bound the features. They
    exceed 1 where a readout was fitted to points that barely vary in a direction.

    Args:
        kernel: The similarity.
        W: Landmarks (p, m).
        M: Readout (p, k).
        limit: Largest ``|y|^2 / f(x, x)``.
    """
    W, M = W.double(), M.double()
    values, vectors = torch.linalg.eigh(M.mT @ kernel(W, W) @ M)
    factors = (limit / values.clamp(min=torch.finfo(values.dtype).tiny)).clamp(max=1).sqrt()
    return M if bool((factors == 1).all()) else M @ (vectors * factors) @ vectors.mT
