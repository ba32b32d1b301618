"""Randomly pivoted Cholesky: points drawn by how much of them the points before leave unexplained."""

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, robust_cholesky
from ksm_lightning.kernels.limits import ROUNDING, ROWS_AT_ONCE
from ksm_lightning.network.landmark_error import MANY_LANDMARKS


@torch.no_grad()
def pivoted_cholesky(kernel: Kernel, x: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw indices (count,) of points, each with probability proportional to its residual under those before.

    Randomly pivoted Cholesky (Chen, Epperly, Tropp and Webber, 2023): the residual of a point is
    ``f(x,x) - |g(x)|^2``, where g is its row of the partial Cholesky factor, and each pivot adds a column. A group of
    similar points is drawn in proportion to its size until one of them explains the others; a rare point keeps its
    residual. Candidates are drawn in blocks, and each is accepted with probability (residual now) / (residual when
    drawn), which gives the same distribution with matrix products (Epperly, Tropp and Webber, 2024). Beyond 2,000
    pivots the rest are drawn at once. When all residuals vanish, the other points are drawn uniformly.

    Args:
        kernel: The similarity.
        x: Points (samples, m), at least ``count``.
        count: Number of pivots.
        generator: Source of randomness, on the CPU. Default: the global one.

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> x = torch.tensor([[0.0]] * 98 + [[9.0], [-9.0]])
        >>> pivots = pivoted_cholesky(GaussianKernel(1.0), x, 3, torch.Generator().manual_seed(0))
        >>> x[pivots].sort(0).values[:, 0]
        tensor([-9.,  0.,  9.])
    """
    x = x.double()
    residual = kernel.diag(x)
    smallest = ROUNDING * residual.max()
    columns = min(count, MANY_LANDMARKS)
    factor = x.new_zeros(len(x), columns)
    together = max(8, min(64, columns // 8))
    chosen = torch.empty(0, dtype=torch.int64, device=x.device)
    while len(chosen) < columns:
        done = len(chosen)
        weights = torch.where(residual > smallest, residual, 0.0)
        if not bool(weights.sum() > 0):
            break
        draws = torch.rand(2, together, dtype=torch.float64, generator=generator).to(x.device)
        cumulative = weights.cumsum(0)
        drawn = torch.searchsorted(cumulative, draws[0] * cumulative[-1], right=True).clamp_(max=len(x) - 1)
        rows = factor[drawn, :done]
        H = kernel(x[drawn], x[drawn]) - rows @ rows.mT
        accepted = drawn[_accepted(H.cpu(), draws[1].cpu(), float(smallest)).to(x.device)][: columns - done]
        if len(accepted) == 0:
            residual[drawn] = 0.0  # only rounding errors are left
            continue
        new = kernel(x, x[accepted]) - factor[:, :done] @ factor[accepted, :done].mT
        new = torch.linalg.solve_triangular(robust_cholesky(new[accepted]), new.mT, upper=False).mT
        factor[:, done : done + len(accepted)] = new
        residual = (residual - new.square().sum(1)).clamp_(min=0).index_fill_(0, accepted, 0.0)
        chosen = torch.cat([chosen, accepted])
    if len(chosen) < count:
        others = torch.ones(len(x), dtype=torch.bool, device=x.device).index_fill_(0, chosen, False).nonzero()[:, 0]
        weights = torch.where(residual > smallest, residual, 0.0)[others]
        chosen = torch.cat([chosen, others[weighted_draw(weights, count - len(chosen), generator)]])
    return chosen


def _accepted(H: Tensor, draws: Tensor, smallest: float) -> Tensor:
    """Indices of the candidates that are accepted in sequence, given their residual matrix ``H`` (b, b)."""
    first = H.diagonal().clone()
    kept = []
    for index in range(len(H)):
        own = float(H[index, index])
        if own > smallest and own > float(draws[index] * first[index]):
            kept.append(index)
            column = H[:, index].clone()
            H = H - torch.outer(column, column / own)
    return torch.tensor(kept, dtype=torch.int64)


def weighted_draw(weights: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Indices (count,) drawn without replacement in proportion to the weights; weights of 0 come last, uniformly.

    Takes the largest ``log(u) / w`` with u uniform (Efraimidis and Spirakis, 2006).
    """
    uniform = torch.rand(len(weights), dtype=torch.float64, generator=generator).clamp_(min=1e-300).to(weights.device)
    # A floor far below the other weights replaces 0.
    relative = weights.double() / weights.max().clamp(min=1e-300)
    return (uniform.log() / relative.clamp(min=1e-12)).topk(count).indices


@torch.no_grad()
def residuals(kernel: Kernel, x: Tensor, W: Tensor) -> Tensor:
    """``f(x,x) - k(x) K^-1 k(x)^T`` (samples,), float64: how much of each point the landmarks W (p, m) do not explain.

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> residuals(LinearKernel(), torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([[1.0, 0.0]])).round()
        tensor([0., 9.], dtype=torch.float64)
    """
    W = W.double()
    K = kernel(W, W)
    K.diagonal().add_(ROUNDING * K.diagonal().mean())
    lower, parts = robust_cholesky(K), []
    for part in torch.split(x.double(), ROWS_AT_ONCE):
        explained = torch.linalg.solve_triangular(lower, kernel(W, part), upper=False).square().sum(0)
        parts.append((kernel.diag(part) - explained).clamp_(min=0))
    return torch.cat(parts)


@torch.no_grad()
def nearest_points(kernel: Kernel, x: Tensor, W: Tensor) -> Tensor:
    """Indices (p,) of the points that are most similar to each landmark, by ``f(x,w)^2 / f(x,x)``.

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> nearest_points(GaussianKernel(1.0), torch.tensor([[0.0], [3.0], [9.0]]), torch.tensor([[8.0], [0.5]]))
        tensor([2, 0])
    """
    best, index = W.new_full((len(W),), -1.0), torch.zeros(len(W), dtype=torch.int64, device=W.device)
    for start in range(0, len(x), ROWS_AT_ONCE):
        part = x[start : start + ROWS_AT_ONCE].to(W)
        length = kernel.diag(part).clamp(min=torch.finfo(W.dtype).tiny)
        value, nearest = (kernel(part, W).square_() / length[:, None]).max(0)
        index = torch.where(value > best, start + nearest, index)
        best = torch.maximum(best, value)
    return index
