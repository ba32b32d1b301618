"""Points that landmarks represent worst, as further landmarks."""

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, robust_cholesky

# Residuals below this fraction of the largest f(x, x) are rounding errors; the jitter of f(W, W) is far below it.
_ROUNDING, _JITTER = 1e-8, 1e-10
# Pivots are chosen among this many points per pivot, and at least this many: those with the largest residuals. The
# residual of any other point would have to become the largest, although residuals only decrease.
_POOL_PER_PIVOT, _POOL_AT_LEAST = 10, 1000
_BLOCK = 2048


@torch.no_grad()
def residual_pivots(kernel: Kernel, points: Tensor, W: Tensor, count: int) -> Tensor:
    """Indices of the points with the largest residual under the landmarks and all pivots before, one by one.

    The residual of a point is ``f(x,x) - |g(x)|^2``, its squared distance in feature space from the span of the
    landmarks, where g are its Nystroem features. Each pivot adds a feature: this is a pivoted Cholesky factorisation
    that starts at given landmarks. KMeans-like centres represent the bulk of the data, and pivots its rare points.

    Args:
        kernel: The similarity.
        points: Candidates (samples, m).
        W: Landmarks (p, m); may be empty.
        count: Largest number of pivots.

    Returns:
        Indices (count,), or fewer if all residuals are then 0 up to rounding.

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> x = torch.tensor([[0.0], [0.5], [1.5], [3.0]])
        >>> residual_pivots(GaussianKernel(1.0), x, x[:1], count=2)
        tensor([3, 2])
    """
    landmarks = W.double()
    K = kernel(landmarks, landmarks)
    K.diagonal().add_(_JITTER * K.diagonal().sum() / max(1, len(K)))
    lower = robust_cholesky(K) if len(K) else K
    parts = [part.double() for part in torch.split(points, _BLOCK)]
    own = torch.cat([kernel.diag(part) for part in parts])
    residual = own - torch.cat([_nystroem(kernel, lower, landmarks, part).square().sum(1) for part in parts])
    residual, pool = residual.topk(min(len(points), max(_POOL_AT_LEAST, _POOL_PER_PIVOT * count)))
    x = points[pool].double()
    features = torch.nn.functional.pad(_nystroem(kernel, lower, landmarks, x), (0, count))  # (pool, p + count)
    smallest, chosen = _ROUNDING * own.max(), []
    for done in range(len(W), len(W) + count):
        largest, pivot = residual.max(0)
        if not bool(largest > smallest):
            break
        chosen.append(pivot)
        column = kernel(x, x[pivot][None])[:, 0] - features[:, :done] @ features[pivot, :done]
        column = column / column[pivot].clamp(min=float(smallest)).sqrt()
        features[:, done] = column
        residual = (residual - column.square()).index_fill_(0, pivot, 0.0)
    return pool[torch.stack(chosen)] if chosen else pool[:0]


def _nystroem(kernel: Kernel, lower: Tensor, landmarks: Tensor, x: Tensor) -> Tensor:
    """Nystroem features (samples, p) of points, from the Cholesky factor of ``f(W, W)``."""
    features: Tensor = torch.linalg.solve_triangular(lower, kernel(landmarks, x), upper=False).mT
    return features
