"""The mathematics of the network as pure functions of tensors, with the symbols of the paper.

Shapes: inputs ``x`` (batch, m), landmarks ``W`` (n, m), gains ``q`` (n,), lateral weights ``L`` (n, n), similarities
``k = f(x, W)`` (batch, n), responses ``y`` (batch, n), correlations ``C = y^T y / batch`` (n, n). Angle brackets
denote averages over the batch.
"""

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, Pullback, full_precision


def factorise(L: Tensor, ridge: float) -> Tensor:
    """Lower Cholesky factor of ``L + ridge I``. A failed factorisation is returned as NaN, to avoid a host sync."""
    shifted = L.clone()
    shifted.diagonal().add_(ridge)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(shifted)
    return factor.masked_fill_(info != 0, torch.nan)


def responses(drive: Tensor, L: Tensor, ridge: float) -> Tensor:
    """Steady state of the network: solves ``(L + ridge I) y = b`` for every row b of ``drive`` (batch, n).

    Example:
        >>> responses(torch.tensor([[2.0, 3.0]]), torch.eye(2), ridge=1.0)
        tensor([[1.0000, 1.5000]])
    """
    return solve(drive, factorise(L, ridge))


def solve(drive: Tensor, factor: Tensor) -> Tensor:
    """:func:`responses` from the Cholesky factor that :func:`factorise` returns."""
    return torch.cholesky_solve(drive.mT, factor).mT


class SteadyState(NamedTuple):
    """Result of :func:`run_dynamics`."""

    y: Tensor  # responses (batch, n)
    steps: int
    error: float  # upper bound of |y - y*| / |y|, from the residual
    has_converged: bool  # whether the error is within the tolerance


def run_dynamics(
    drive: Tensor, L: Tensor, ridge: float, *, tolerance: float = 1e-8, max_steps: int = 100_000
) -> SteadyState:
    """Integrate the recurrent dynamics ``dy/dt = b - L y - ridge y`` from ``y = 0`` to the steady state.

    This is gradient descent with the optimal constant step ``2 / (lambda_max + lambda_min + 2 ridge)``. It stops when
    the residual ``r = b - (L + ridge I) y`` guarantees ``|y - y*| <= |r| / (lambda_min + ridge) <= tolerance |y|`` over
    the whole batch. Steps are computed in float64: float32 stalls at an error of its eps times the condition number of
    ``L + ridge I``.

    Args:
        drive: Feedforward drive ``b = q * k`` (batch, n).
        L: Lateral weights (n, n), symmetric, with ``L + ridge I`` positive definite; otherwise a ValueError is raised.
        ridge: The paper's lambda.
        tolerance: Relative error at which to stop.
        max_steps: Maximum number of steps. Reaching it gives a warning.
    """
    dtype, drive, L = drive.dtype, drive.double(), L.double()
    eigenvalues = torch.linalg.eigvalsh(L)
    slowest, fastest = float(eigenvalues[0]) + ridge, float(eigenvalues[-1]) + ridge
    if not slowest > 0:
        raise ValueError(
            f"L + ridge I must be positive definite, but its smallest eigenvalue is {slowest:.3g}: raise `ridge` or "
            "train with smaller steps."
        )
    step = 2 / (slowest + fastest)
    y, steps = torch.zeros_like(drive), 0
    while True:
        residual = drive - ridge * y - y @ L
        scale = float(torch.linalg.vector_norm(y))
        bound = float(torch.linalg.vector_norm(residual)) / slowest
        error = bound / scale if scale > 0 else (0.0 if bound == 0 else math.inf)
        if error <= tolerance or steps >= max_steps:
            break
        # Checking the residual synchronises with the device, so check every 20 steps.
        for _ in range(min(20, max_steps - steps)):
            y.add_(residual, alpha=step)
            residual = torch.addmm(drive - ridge * y, y, L, alpha=-1)
            steps += 1
    if error > tolerance:
        warnings.warn(
            f"The recurrent dynamics did not converge in {max_steps} steps: the relative error is up to {error:.1e} "
            f"(tolerance {tolerance:.1e}). Raise `max_steps` or use the closed form.",
            stacklevel=2,
        )
    return SteadyState(y.to(dtype), steps, error, error <= tolerance)


def correlation(y: Tensor, rows: Tensor | None = None) -> Tensor:
    """``C = y^T y / batch`` (n, n) for ``y`` (batch, n); only its rows (n_r, n) for responses ``rows`` (batch, n_r)."""
    return ((y if rows is None else rows).mT @ y).div_(y.shape[0])


class EnergyTerms(NamedTuple):
    """Terms of the energy, each averaged over the batch. Their sum is :attr:`total`."""

    feedforward: Tensor  # -sum_i q_i <y_i k_i>
    gain: Tensor  # 1/2 sum_i q_i^2 f(w_i, w_i)
    lateral: Tensor  # 1/2 sum_ij L_ij C_ij
    lateral_cost: Tensor  # -1/4 sum_ij L_ij^2
    ridge: Tensor  # ridge/2 sum_i <y_i^2>

    @property
    def total(self) -> Tensor:
        """The paper's energy per sample, averaged over the batch."""
        return self.feedforward + self.gain + self.lateral + self.lateral_cost + self.ridge


def energy_terms(
    k: Tensor, y: Tensor, self_similarity: Tensor, q: Tensor, L: Tensor, ridge: float, *, C: Tensor | None = None
) -> EnergyTerms:
    """Energy of a batch by terms, summed in float64.

    ``e = -sum_i q_i <y_i k_i> + 1/2 sum_i q_i^2 f(w_i,w_i) + 1/2 sum_ij (L_ij C_ij - 1/2 L_ij^2)
    + ridge/2 sum_i <y_i^2>``

    Symbols are as at the top of this file; ``self_similarity`` is ``f(w_i, w_i)`` (n,), ``ridge`` the paper's lambda.
    C is computed if it is not given.
    """
    C, f64 = correlation(y) if C is None else C, torch.float64
    return EnergyTerms(
        feedforward=-(q * k * y).sum(dtype=f64) / y.shape[0],
        gain=0.5 * (q * q * self_similarity).sum(dtype=f64),
        lateral=0.5 * (L * C).sum(dtype=f64),
        lateral_cost=-0.25 * (L * L).sum(dtype=f64),
        ridge=0.5 * ridge * C.diagonal().sum(dtype=f64),
    )


def gradient_W(q: Tensor, y: Tensor, pullback: Pullback, diag_gradient: Tensor) -> Tensor:
    """``de/dw_i = -q_i <y_i df(w_i,x)/dw_i> + 1/2 q_i^2 df(w_i,w_i)/dw_i`` (n, m)."""
    from_inputs = pullback(y * (q / -y.shape[0]))
    return torch.addcmul(from_inputs, (q * q)[:, None], diag_gradient, value=0.5)


def gradient_q(q: Tensor, k: Tensor, y: Tensor, self_similarity: Tensor) -> Tensor:
    """``de/dq_i = q_i f(w_i,w_i) - <y_i k_i>`` (n,)."""
    return torch.addcmul(-(y * k).mean(0), q, self_similarity)


def gradient_L(C: Tensor, L: Tensor) -> Tensor:
    """``de/dL = (C - L) / 2`` (n, n). L ascends."""
    return (C - L).mul_(0.5)


class Gradients(NamedTuple):
    """Derivatives of the batch energy in W, q and L."""

    W: Tensor
    q: Tensor
    L: Tensor


class Step(NamedTuple):
    """Quantities that one update computes from a batch."""

    gradients: Gradients
    k: Tensor
    y: Tensor
    C: Tensor
    self_similarity: Tensor
    factor: Tensor


@torch.no_grad()
def hebbian_step(kernel: Kernel, x: Tensor, W: Tensor, q: Tensor, L: Tensor, ridge: float) -> Step:
    """Responses to a batch x (batch, m) and the gradients of its energy in W, q and L.

    The responses minimise the energy, so the gradients need no derivative of the responses.
    """
    with full_precision(x.device):
        k, pullback = kernel.value_and_pullback(x, W)  # (batch, n)
        factor = factorise(L, ridge)
        y = solve(q * k, factor)  # (batch, n)
        C = correlation(y)  # (n, n)
        self_similarity = kernel.diag(W)  # (n,)
        gradients = Gradients(
            W=gradient_W(q, y, pullback, kernel.diag_gradient(W)),
            q=gradient_q(q, k, y, self_similarity),
            L=gradient_L(C, L),
        )
    return Step(gradients, k, y, C, self_similarity, factor)


def align_signs(W: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Flip ``w_i`` and ``y_i`` where the mean of ``y_i`` is negative, for histograms and figures.

    Only for odd kernels, ``f(-w, x) = -f(w, x)``, where the sign of a neuron is arbitrary.

    Example:
        >>> align_signs(torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0, -3.0]]))
        (tensor([[ 1.],
                [-1.]]), tensor([[2., 3.]]))
    """
    sign = torch.where(y.mean(0) < 0, -1.0, 1.0).to(y.dtype)
    return W * sign[:, None].to(W.dtype), y * sign


def linearised_responses(x: Tensor, y: Tensor, ridge: float = 0.1) -> Tensor:
    """Linear filters (n, m) that best predict each neuron: ``s_i = (ridge I + <x x^T>)^-1 <y_i x>``.

    Args:
        x: Inputs (samples, m).
        y: Responses (samples, n).
        ridge: Ridge of the regression. Default: 0.1, as in the paper.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> linearised_responses(x, x @ torch.tensor([[2.0], [1.0]]), ridge=1e-6)
        tensor([[2.0000, 1.0000]])
    """
    with full_precision(x.device):
        second = (x.mT @ x / len(x)).double()
        second.diagonal().add_(ridge)
        filters: Tensor = torch.linalg.solve(second, (x.mT @ y / len(x)).double())
    return filters.mT.to(y.dtype)
