"""Landmarks of the tight bound on data in memory: L-BFGS on J(W), whose inner problem is solved exactly.

On a fixed sample, the bound ``J(W) = -1/4 sum (mu - ridge)^2`` (:mod:`ksm_lightning.learning.exact_tight`) is a
deterministic function of W. By the envelope theorem, with ``V = R^-T U`` for the leading eigenvectors U and
``K = R R^T``, its derivatives are ``-V E V^T k / samples`` in ``k = f(x, W)`` and ``1/2 V E M V^T`` in K, where E and M
are the diagonal matrices of ``(mu - ridge)_+`` and mu.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.learning.exact_tight import add_jitter, leading_directions
from ksm_lightning.network.initialisation import PROGRESS


@torch.no_grad()
def minimise_bound(
    kernel: Kernel,
    x: Tensor,
    W: Tensor,
    num_neurons: int,
    ridge: float,
    iterations: int,
    progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Landmarks (p, m) with a lower tight bound on a sample than W, by L-BFGS with a line search.

    W moves in units of the kernel, one length ``|dw|`` of a unit step in its feature space, so that neither the units
    of x nor those of f matter. The result is the best W that was tried, and never worse than the first one.

    Args:
        kernel: A differentiable similarity.
        x: The sample (samples, m).
        W: First landmarks (p, m).
        num_neurons: Number of neurons n.
        ridge: The paper's lambda.
        iterations: Largest number of iterations.
        progress: Called with the number of iterations since the last call.
    """
    terms = kernel.self_terms(W)
    value = torch.ones_like(W[:, 0]) if terms.value is None else terms.value
    unit = float((value / terms.curvature).mean().sqrt())
    first, gradient = bound_and_gradient(kernel, x, W, num_neurons, ridge)
    best, lowest, scale = W, first, float(gradient.norm()) * unit
    if not 0 < scale < math.inf:
        return W

    def evaluate(position: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best, lowest
        now = torch.from_numpy(position * unit).view(W.shape).to(W)
        bound, gradient = bound_and_gradient(kernel, x, now, num_neurons, ridge)
        if bound < lowest:
            best, lowest = now, bound
        return bound / scale, gradient.flatten().cpu().numpy() * (unit / scale)

    last = first

    def after_iteration(_: np.ndarray) -> None:
        nonlocal last
        before, last = last, lowest
        if progress is not None:
            progress(1)
        if not before - last > PROGRESS * (first - last):
            raise StopIteration

    start = W.double().flatten().cpu().numpy() / unit
    options = {"maxiter": iterations, "ftol": 0.0, "gtol": 0.0}
    minimize(evaluate, start, jac=True, method="L-BFGS-B", callback=after_iteration, options=options)
    return best


@torch.no_grad()
def bound_and_gradient(kernel: Kernel, x: Tensor, W: Tensor, num_neurons: int, ridge: float) -> tuple[float, Tensor]:
    """The bound J, infinite where it is not finite, and its gradient (p, m) in W, float64.

    Similarities are computed in the dtype of x, and everything of size (p, p) in float64.
    """
    wide = W.double()
    k, pullback = kernel.value_and_pullback(x, W)  # (samples, p)
    K, pullback_K = kernel.value_and_pullback(wide, wide)
    K = add_jitter((K + K.mT) / 2, x.dtype)  # a copy: autograd needs the original
    with full_precision(x.device):
        G = (k.mT @ k).double() / len(x)
    if not bool(K.isfinite().all() & G.isfinite().all()):
        return math.inf, torch.zeros_like(wide)
    mu, V = leading_directions(G, K, num_neurons)
    excess = (mu - ridge).clamp(min=0)
    weighted = V * excess
    with full_precision(x.device):
        of_k = (k @ (weighted @ V.mT).to(k.dtype)).div_(-len(x))
    # w_i is in row i and in column i of K.
    gradient = pullback(of_k).double() + pullback_K((weighted * mu) @ V.mT)
    return -0.25 * float(excess.square().sum()), gradient
