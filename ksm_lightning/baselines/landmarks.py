"""Landmark selectors of the Nystroem approximation.

To add a selector, write a function that maps (kernel, points (samples, m), count, generator) to landmarks (count, m)
and add one entry with a label, color and marker to :data:`LANDMARK_SELECTORS`. The generator is on the CPU. The entry
is read by :class:`ksm_lightning.baselines.Nystroem`, the method registry, ``ksm compare`` and the figures.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.evaluation.clustering import kmeans
from ksm_lightning.kernels import Kernel
from ksm_lightning.kernels.factorisation import robust_cholesky
from ksm_lightning.kernels.limits import EXACT_UP_TO, POINTS_PER_LANDMARK, ROUNDING, ROWS_AT_ONCE
from ksm_lightning.network.pivots import pivoted_cholesky, weighted_draw


def uniform(kernel: Kernel, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Points drawn uniformly without replacement."""
    return x[torch.randperm(len(x), generator=generator)[:count].to(x.device)]


def kmeans_centres(kernel: Kernel, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """KMeans centres of the points: random data points, then at most 100 iterations of Lloyd's method."""
    seed = int(torch.randint(2**31, (1,), generator=generator))
    return kmeans(x, count, starts=1, max_iterations=100, seed=seed).centres


def cholesky_pivots(kernel: Kernel, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Points drawn by :func:`~ksm_lightning.network.pivots.pivoted_cholesky`."""
    return x[pivoted_cholesky(kernel, x, count, generator)]


def leverage_scores(kernel: Kernel, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Points drawn by ridge leverage scores, estimated recursively (Musco and Musco, 2017).

    The score of point t is ``(F (F + r I)^-1)_tt``. The ridge r is the part of the trace outside the leading
    ``k = count / (4 log count)`` eigenvectors, divided by k. The points are halved recursively: the sample picked at
    one level estimates the scores at the next level, which has twice as many points.
    """
    oversampling = max(1.0, math.log(count))
    rank = max(1, math.ceil(count / (4 * oversampling)))
    order = torch.randperm(len(x), generator=generator)
    sizes = [len(x)]
    while sizes[-1] > max(count, 2):
        sizes.append(math.ceil(sizes[-1] / 2))
    picked = order[: sizes[-1]]  # the innermost level keeps all its points
    weights = torch.ones(len(picked), dtype=torch.float64)
    for size in reversed(sizes[:-1]):
        members = order[:size]
        scores = _ridge_leverage(kernel, x, members, picked, weights, rank)  # (size,), on the CPU
        if size == len(x):
            return x[members[weighted_draw(scores, count, generator)].to(x.device)]
        probability = (oversampling * scores).clamp_(max=1)
        is_picked = torch.rand(size, dtype=torch.float64, generator=generator) < probability
        if not bool(is_picked.any()):
            is_picked[:count] = True
            probability = torch.full_like(probability, count / size)
        picked, weights = members[is_picked], probability[is_picked].rsqrt()
    return x[picked[:count].to(x.device)]  # every point is a landmark


def _ridge_leverage(
    kernel: Kernel, x: Tensor, members: Tensor, picked: Tensor, weights: Tensor, rank: int
) -> Tensor:  # fmt: skip
    """Ridge leverage scores of the points ``members``, estimated from the weighted sample ``picked``; at most 1."""
    landmarks = x[picked.to(x.device)].double()
    weight = weights.to(x.device)
    S = weight[:, None] * kernel(landmarks, landmarks) * weight  # (picked, picked)
    eigenvalues = torch.linalg.eigvalsh(S).clamp_(min=0)
    tail = eigenvalues[: max(0, len(eigenvalues) - rank)].sum() / rank
    ridge = tail.clamp(min=ROUNDING * eigenvalues[-1].clamp(min=torch.finfo(torch.float64).tiny))
    S.diagonal().add_(ridge)
    factor = robust_cholesky(S)
    scores = []
    for part in torch.split(members, ROWS_AT_ONCE):
        points = x[part.to(x.device)].double()
        K = kernel(points, landmarks) * weight  # (part, picked)
        explained = torch.linalg.solve_triangular(factor, K.mT, upper=False).square().sum(0)
        scores.append(((kernel.diag(points) - explained).clamp_(min=0) / ridge).clamp_(max=1))
    return torch.cat(scores).cpu()


def gradient_optimised(kernel: Kernel, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Landmarks that minimise the residual ``tr(F - f(x,W) f(W,W)^-1 f(W,x))`` by at most 50 iterations of L-BFGS.

    The residual is the sum of squared distances of the points from the span of the landmarks in the kernel's feature
    space, an objective similar to that of Fu (2014). The gradient needs ``V = f(W,W)^-1 f(W,x)`` and the kernel's
    pullback. The start is :func:`cholesky_pivots` on a sample of the data.
    """
    sample = uniform(kernel, x, max(EXACT_UP_TO, POINTS_PER_LANDMARK * count), generator).double()
    W = cholesky_pivots(kernel, sample, count, generator)
    total = kernel.diag(sample).sum()
    if not bool(total > 0):
        return W.to(x.dtype)  # all similarities are 0
    W = W.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [W], max_iter=50, history_size=20, line_search_fn="strong_wolfe",
        tolerance_grad=1e-12, tolerance_change=1e-12,
    )  # fmt: skip

    def closure() -> Tensor:
        with torch.no_grad():
            residual, W.grad = _residual(kernel, sample, W.detach())
        # Scaled by the trace of F, because the first step of L-BFGS depends on the scale.
        W.grad.div_(total)
        return residual / total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return W.detach().to(x.dtype)


def _residual(kernel: Kernel, x: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """``tr(F - f(x,W) f(W,W)^-1 f(W,x))`` and its gradient in W (n, m)."""
    A, pull = kernel.value_and_pullback(x, W)  # (samples, n)
    B, pull_own = kernel.value_and_pullback(W, W)
    jitter = 1e-9 * B.diagonal().mean()
    B.diagonal().add_(jitter)
    V = torch.cholesky_solve(A.mT, robust_cholesky(B))  # (n, samples)
    explained = (A.mT * V).sum()
    # d tr(A B^-1 A^T) = 2 tr(V dA) - tr(V V^T dB); w_i appears in row i and in column i of B.
    gradient = -2 * pull(V.mT) + 2 * pull_own(V @ V.mT)
    return kernel.diag(x).sum() - explained, gradient


class LandmarkSelector(NamedTuple):
    """One way to select landmarks, and how comparisons show it."""

    select: Callable[[Kernel, Tensor, int, torch.Generator], Tensor]  # see the docstring of this module
    label: str
    color: str
    marker: str


LANDMARK_SELECTORS: dict[str, LandmarkSelector] = {
    "uniform": LandmarkSelector(uniform, "uniform", "#8c8c8c", "s"),
    "kmeans": LandmarkSelector(kmeans_centres, "KMeans", "#2a9d4a", "^"),
    "leverage": LandmarkSelector(leverage_scores, "leverage scores", "#8a5cc0", "v"),
    "cholesky": LandmarkSelector(cholesky_pivots, "pivoted Cholesky", "#1f77b4", "D"),
    "gradient": LandmarkSelector(gradient_optimised, "gradient", "#17becf", "P"),
}
