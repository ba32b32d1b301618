"""Which points, or places, serve as landmarks of a Nystroem approximation.

Each choice is a function of (kernel, points (samples, m), count, generator) that gives landmarks (count, m).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ksm_lightning.evaluation.clustering import kmeans
from ksm_lightning.kernels import Kernel
from ksm_lightning.kernels.factorisation import robust_cholesky

Choice = Callable[[Kernel, Tensor, int, torch.Generator], Tensor]

# Relative to the largest similarity of a point with itself, a residual below this is rounding.
_ROUNDING = 1e-10
# Gradients are followed on so many points a landmark, and on so many at least.
_POINTS_PER_LANDMARK, _POINTS_AT_LEAST = 10, 2000


def uniform(kernel: Kernel, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Points drawn without replacement, all alike."""
    return x[torch.randperm(len(x), generator=generator)[:count].to(x.device)]


def kmeans_centres(kernel: Kernel, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Centres of KMeans on the points, started from data points, at most 100 iterations of Lloyd's method."""
    seed = int(torch.randint(2**31, (1,), generator=generator))
    return kmeans(x, count, starts=1, max_iterations=100, seed=seed).centres


def pivoted_cholesky(kernel: Kernel, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Points drawn one by one with probability proportional to what those before leave unexplained of them.

    Randomly pivoted Cholesky (Chen, Epperly, Tropp and Webber, 2023): the residual of a point is
    ``f(x,x) - |g(x)|^2`` with g its row of the partial Cholesky factor, which grows by a column with each landmark.
    Candidates are drawn together, and each is accepted with the share that its residual has kept since then: that is
    the same distribution (Epperly, Tropp and Webber, 2024), in products of matrices. Where the landmarks explain all
    points, the rest is drawn uniformly among the others.
    """
    points = x.double()
    residual = kernel.diag(points)
    smallest = _ROUNDING * residual.max()
    factor = points.new_zeros(len(points), count)  # (samples, count)
    together = max(8, min(64, count // 8))
    chosen = torch.empty(0, dtype=torch.int64, device=x.device)
    while len(chosen) < count:
        done = len(chosen)
        weights = torch.where(residual > smallest, residual, 0.0)
        if not bool(weights.sum() > 0):
            others = torch.ones(len(x), dtype=torch.bool).index_fill_(0, chosen.cpu(), False).nonzero()[:, 0]
            rest = others[torch.randperm(len(others), generator=generator)[: count - done]]
            chosen = torch.cat([chosen, rest.to(x.device)])
            break
        draws = torch.rand(2, together, dtype=torch.float64, generator=generator).to(x.device)
        cumulative = weights.cumsum(0)
        candidates = torch.searchsorted(cumulative, draws[0] * cumulative[-1], right=True).clamp_(max=len(x) - 1)
        rows = factor[candidates, :done]
        H = kernel(points[candidates], points[candidates]) - rows @ rows.mT
        accepted = candidates[_accepted(H.cpu(), draws[1].cpu(), float(smallest)).to(x.device)][: count - done]
        if len(accepted) == 0:
            residual[candidates] = 0.0  # rounding only
            continue
        columns = kernel(points, points[accepted]) - factor[:, :done] @ factor[accepted, :done].mT
        lower = robust_cholesky(columns[accepted])
        columns = torch.linalg.solve_triangular(lower, columns.mT, upper=False).mT
        factor[:, done : done + len(accepted)] = columns
        residual = (residual - columns.square().sum(1)).clamp_(min=0).index_fill_(0, accepted, 0.0)
        chosen = torch.cat([chosen, accepted])
    return x[chosen]


def _accepted(H: Tensor, draws: Tensor, smallest: float) -> Tensor:
    """Places of the candidates that are accepted one after the other, given their residual matrix ``H`` (b, b)."""
    first = H.diagonal().clone()
    kept = []
    for place in range(len(H)):
        own = float(H[place, place])
        if own > smallest and own > float(draws[place] * first[place]):
            kept.append(place)
            column = H[:, place].clone()
            H = H - torch.outer(column, column / own)
    return torch.tensor(kept, dtype=torch.int64)


def leverage_scores(kernel: Kernel, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Points drawn by their ridge leverage scores, estimated recursively (Musco and Musco, 2017).

    The score of a point is how much it alone is needed to explain all others, ``(F (F + r I)^-1)_tt``, with the ridge r
    the part of the trace that ``count / (4 log count)`` directions leave, divided by their number. A sample of half the
    points, halved again and again, stands in for F at each level: the points that it picks estimate the scores of twice
    as many.
    """
    samples = len(x)
    oversampling = max(1.0, math.log(count))
    rank = max(1, math.ceil(count / (4 * oversampling)))
    order = torch.randperm(samples, generator=generator)
    sizes = [samples]
    while sizes[-1] > max(count, 2):
        sizes.append(math.ceil(sizes[-1] / 2))
    picked = order[: sizes[-1]]  # of the innermost level, all
    weights = torch.ones(len(picked), dtype=torch.float64)
    for size in reversed(sizes[:-1]):
        members = order[:size]
        is_last = size == samples
        scores = _ridge_leverage(kernel, x, members, picked, weights, rank)  # (size,), on the CPU
        if is_last:
            return x[members[_weighted_draw(scores, count, generator)].to(x.device)]
        probability = (oversampling * scores).clamp_(max=1)
        is_picked = torch.rand(size, dtype=torch.float64, generator=generator) < probability
        if not bool(is_picked.any()):
            is_picked[:count] = True
            probability = torch.full_like(probability, count / size)
        picked, weights = members[is_picked], probability[is_picked].rsqrt()
    return x[picked[:count].to(x.device)]  # as many landmarks as points


def _ridge_leverage(
    kernel: Kernel, x: Tensor, members: Tensor, picked: Tensor, weights: Tensor, rank: int
) -> Tensor:  # fmt: skip
    """Estimates of the ridge leverage scores of some points from a weighted sample of them, at most 1."""
    landmarks = x[picked.to(x.device)].double()
    weight = weights.to(x.device)
    S = weight[:, None] * kernel(landmarks, landmarks) * weight  # (picked, picked)
    eigenvalues = torch.linalg.eigvalsh(S).clamp_(min=0)
    tail = eigenvalues[: max(0, len(eigenvalues) - rank)].sum() / rank
    ridge = tail.clamp(min=_ROUNDING * eigenvalues[-1].clamp(min=torch.finfo(torch.float64).tiny))
    S.diagonal().add_(ridge)
    factor = robust_cholesky(S)
    scores = []
    for part in torch.split(members, 8192):
        points = x[part.to(x.device)].double()
        K = kernel(points, landmarks) * weight  # (part, picked)
        explained = torch.linalg.solve_triangular(factor, K.mT, upper=False).square().sum(0)
        scores.append(((kernel.diag(points) - explained).clamp_(min=0) / ridge).clamp_(max=1))
    return torch.cat(scores).cpu()


def _weighted_draw(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices (count,) drawn one after the other in proportion to weights; those of weight 0 come last, uniformly.

    The largest of ``log(u) / w`` are such a draw (Efraimidis and Spirakis, 2006).
    """
    uniform = torch.rand(len(weights), dtype=torch.float64, generator=generator).clamp_(min=1e-300)
    # Weights of 0 count as far below the smallest other.
    floor = 1e-12 * weights.max().clamp(min=1e-300)
    return (uniform.log() / weights.clamp(min=float(floor))).topk(count).indices


def gradient_optimised(
    kernel: Kernel, x: Tensor, count: int, generator: torch.Generator, max_iterations: int = 50
) -> Tensor:
    """Landmarks moved downhill in what they leave unexplained, ``tr(F - f(x,W) f(W,W)^-1 f(W,x))``, by L-BFGS.

    In the spirit of Fu (2014), who poses the choice of landmarks as an optimisation in the kernel's feature space: this
    is the sum of squared distances of the points from the span of the landmarks there. The gradient needs
    ``V = f(W,W)^-1 f(W,x)`` and the kernel's pullback. It starts from pivoted Cholesky's points, on a sample of the
    data.

    Args:
        kernel: The similarity.
        x: Points (samples, m).
        count: Landmarks.
        generator: Source of randomness, on the CPU.
        max_iterations: Iterations of L-BFGS.
    """
    sample = uniform(kernel, x, max(_POINTS_AT_LEAST, _POINTS_PER_LANDMARK * count), generator).double()
    W = pivoted_cholesky(kernel, sample, count, generator)
    total = kernel.diag(sample).sum()
    if not bool(total > 0):
        return W.to(x.dtype)  # there is nothing to explain
    W = W.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [W], max_iter=max_iterations, history_size=20, line_search_fn="strong_wolfe",
        tolerance_grad=1e-12, tolerance_change=1e-12,
    )  # fmt: skip

    def closure() -> Tensor:
        with torch.no_grad():
            unexplained, W.grad = _unexplained(kernel, sample, W.detach())
        # In units of all there is to explain, and of a landmark: L-BFGS has a first step of its own.
        W.grad.div_(total)
        return unexplained / total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return W.detach().to(x.dtype)


def _unexplained(kernel: Kernel, x: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """``tr(F - f(x,W) f(W,W)^-1 f(W,x))`` and its gradient in W (n, m)."""
    A, pull = kernel.value_and_pullback(x, W)  # (samples, n)
    B, pull_own = kernel.value_and_pullback(W, W)
    jitter = 1e-9 * B.diagonal().mean()
    B.diagonal().add_(jitter)
    V = torch.cholesky_solve(A.mT, robust_cholesky(B))  # (n, samples)
    explained = (A.mT * V).sum()
    # d tr(A B^-1 A^T) = 2 tr(V dA) - tr(V V^T dB), and dB has a w_i in its row and in its column.
    gradient = -2 * pull(V.mT) + 2 * pull_own(V @ V.mT)
    return kernel.diag(x).sum() - explained, gradient


LANDMARK_SELECTORS: dict[str, Choice] = {
    "uniform": uniform,
    "kmeans": kmeans_centres,
    "leverage": leverage_scores,
    "cholesky": pivoted_cholesky,
    "gradient": gradient_optimised,
}
