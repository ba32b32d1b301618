"""The mathematics of the network as pure functions on tensors; symbols as in the paper.

Shapes: inputs ``x`` (batch, m), landmarks ``W`` (n, m), gains ``q`` (n,), lateral weights ``L`` (n, n), similarities
``k = f(x, W)`` (batch, n), responses ``y`` (batch, n), correlations ``C = y^T y / batch`` (n, n). Angle brackets
are averages over the batch.
"""

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, Pullback, full_precision


def factorise(L: Tensor, ridge: float) -> Tensor:
    """Lower Cholesky factor of ``L + ridge I``; all NaN where there is none.

    The failure is told in the values because asking the device whether it succeeded would make the host wait.
    """
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
    """:func:`responses` from the Cholesky factor that :func:`factorise` gave."""
    return torch.cholesky_solve(drive.mT, factor).mT


class Settled(NamedTuple):
    """Where the recurrent dynamics came to rest."""

    y: Tensor
    """Responses (batch, n)."""
    steps: int
    """Steps taken."""
    error: float
    """Bound on ``|y - y*| / |y|``, from the residual of the equilibrium."""
    has_converged: bool
    """Whether ``error`` is within the tolerance."""


def settle(drive: Tensor, L: Tensor, ridge: float, *, tolerance: float = 1e-8, max_steps: int = 100_000) -> Settled:
    """The slow neural mode: integrates ``dy/dt = b - L y - ridge y`` from rest until it stands still.

    Plain gradient descent, which converges for steps below ``2 / (lambda_max + ridge)``; the step taken is
    ``2 / (lambda_max + lambda_min + 2 ridge)``, the fastest one. It stops when the residual ``r = b - (L + ridge I) y``
    proves ``|y - y*| <= |r| / (lambda_min + ridge) <= tolerance |y|`` over the whole batch. Steps are taken in float64,
    whatever the inputs' dtype: float32 stalls at an error of its eps times the condition number of ``L + ridge I``.

    Args:
        drive: Feedforward drive ``b = q * k`` (batch, n).
        L: Lateral weights (n, n), symmetric, with ``L + ridge I`` positive definite.
        ridge: The paper's lambda.
        tolerance: Relative error to stop at.
        max_steps: Steps after which to give up, with a warning.

    Raises:
        ValueError: If ``L + ridge I`` is not positive definite: the dynamics would run away.
    """
    dtype, drive, L = drive.dtype, drive.double(), L.double()
    eigenvalues = torch.linalg.eigvalsh(L)
    slowest, fastest = float(eigenvalues[0]) + ridge, float(eigenvalues[-1]) + ridge
    if not slowest > 0:
        raise ValueError(
            f"The dynamics need L + ridge I positive definite, but its smallest eigenvalue is {slowest:.3g}: "
            "raise `ridge` or train with smaller steps."
        )
    step = 2 / (slowest + fastest)
    y = torch.zeros_like(drive)
    taken = 0
    while True:
        residual = drive - ridge * y - y @ L
        scale = float(torch.linalg.vector_norm(y))
        bound = float(torch.linalg.vector_norm(residual)) / slowest
        error = bound / scale if scale > 0 else (0.0 if bound == 0 else math.inf)
        if error <= tolerance or taken >= max_steps:
            break
        # Asking for the residual waits for the device, so it is asked rarely.
        for _ in range(min(20, max_steps - taken)):
            y.add_(residual, alpha=step)
            residual = torch.addmm(drive - ridge * y, y, L, alpha=-1)
            taken += 1
    if error > tolerance:
        warnings.warn(
            f"The recurrent dynamics stopped at their limit of {max_steps} steps with a relative error of up to "
            f"{error:.1e} (wanted {tolerance:.1e}); raise `max_steps` or use the closed form.",
            stacklevel=2,
        )
    return Settled(y.to(dtype), taken, error, error <= tolerance)


def correlation(y: Tensor) -> Tensor:
    """``C = y^T y / batch``: ``y`` (batch, n) gives (n, n)."""
    return (y.mT @ y).div_(y.shape[0])


class EnergyTerms(NamedTuple):
    """The parts of the energy, each averaged over the batch; they add up to :attr:`total`."""

    feedforward: Tensor
    """``-sum_i q_i <y_i k_i>``"""
    gain: Tensor
    """``1/2 sum_i q_i^2 f(w_i, w_i)``"""
    lateral: Tensor
    """``1/2 sum_ij L_ij C_ij``"""
    lateral_cost: Tensor
    """``-1/4 sum_ij L_ij^2``"""
    ridge: Tensor
    """``ridge/2 sum_i <y_i^2>``"""

    @property
    def total(self) -> Tensor:
        """The paper's per-sample energy, averaged over the batch."""
        return self.feedforward + self.gain + self.lateral + self.lateral_cost + self.ridge


def energy_terms(
    k: Tensor, y: Tensor, self_similarity: Tensor, q: Tensor, L: Tensor, ridge: float, *, C: Tensor | None = None
) -> EnergyTerms:
    """The energy of a batch, by its named terms; sums are taken in float64.

    ``e = -sum_i q_i <y_i k_i> + 1/2 sum_i q_i^2 f(w_i,w_i) + 1/2 sum_ij (L_ij C_ij - 1/2 L_ij^2)
    + ridge/2 sum_i <y_i^2>``

    Args:
        k: Similarities ``f(x, W)`` (batch, n).
        y: Responses (batch, n).
        self_similarity: ``f(w_i, w_i)`` (n,).
        q: Gains (n,).
        L: Lateral weights (n, n).
        ridge: The paper's lambda.
        C: ``correlation(y)``, if it is known already.
    """
    C = correlation(y) if C is None else C
    batch = y.shape[0]
    f64 = torch.float64
    return EnergyTerms(
        feedforward=-(q * k * y).sum(dtype=f64) / batch,
        gain=0.5 * (q * q * self_similarity).sum(dtype=f64),
        lateral=0.5 * (L * C).sum(dtype=f64),
        lateral_cost=-0.25 * (L * L).sum(dtype=f64),
        ridge=0.5 * ridge * C.diagonal().sum(dtype=f64),
    )


def gradient_W(q: Tensor, y: Tensor, pullback: Pullback, diag_gradient: Tensor) -> Tensor:
    """``de/dw_i = -q_i <y_i df(w_i,x)/dw_i> + 1/2 q_i^2 df(w_i,w_i)/dw_i`` (n, m), the second a total derivative."""
    from_inputs = pullback(y * (q / -y.shape[0]))
    return torch.addcmul(from_inputs, (q * q)[:, None], diag_gradient, value=0.5)


def gradient_q(q: Tensor, k: Tensor, y: Tensor, self_similarity: Tensor) -> Tensor:
    """``de/dq_i = q_i f(w_i,w_i) - <y_i k_i>`` (n,)."""
    return torch.addcmul(-(y * k).mean(0), q, self_similarity)


def gradient_L(C: Tensor, L: Tensor) -> Tensor:
    """``de/dL = (C - L) / 2`` (n, n), to be climbed."""
    return (C - L).mul_(0.5)


class Gradients(NamedTuple):
    """Derivatives of the batch energy in the three parameters."""

    W: Tensor
    q: Tensor
    L: Tensor


class Step(NamedTuple):
    """Everything that one update computes from a batch."""

    gradients: Gradients
    k: Tensor
    y: Tensor
    C: Tensor
    self_similarity: Tensor
    factor: Tensor


@torch.no_grad()
def hebbian_step(
    kernel: Kernel, x: Tensor, W: Tensor, q: Tensor, L: Tensor, ridge: float, *, limit: float | None = None
) -> Step:
    """Responses to a batch and the gradients of its energy, all from the same state.

    The responses minimise the energy, so nothing is differentiated through them.

    Args:
        kernel: The similarity.
        x: Inputs (batch, m).
        W: Landmarks (n, m).
        q: Gains (n,).
        L: Lateral weights (n, n).
        ridge: The paper's lambda.
        limit: Responses longer than ``limit sqrt(f(x, x))`` are shortened to that; none are unless given. At a solution
            ``|y|^2`` is about ``f(x, x)``, so what is longer says that L does not know its direction yet.
    """
    with full_precision(x.device):
        k, pullback = kernel.value_and_pullback(x, W)  # (batch, n)
        factor = factorise(L, ridge)
        y = solve(q * k, factor)  # (batch, n)
        if limit is not None:
            length = torch.linalg.vector_norm(y, dim=1, keepdim=True)
            allowed = kernel.diag(x).clamp(min=0).sqrt_().mul_(limit)[:, None]
            y = y * (allowed / length.clamp(min=torch.finfo(y.dtype).tiny)).clamp_(max=1)
        C = correlation(y)  # (n, n)
        self_similarity = kernel.diag(W)  # (n,)
        gradients = Gradients(
            W=gradient_W(q, y, pullback, kernel.diag_gradient(W)),
            q=gradient_q(q, k, y, self_similarity),
            L=gradient_L(C, L),
        )
    return Step(gradients, k, y, C, self_similarity, factor)


def align_signs(W: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Flip ``w_i`` and ``y_i`` by the sign of the mean of ``y_i``: what an odd kernel leaves free.

    Use it before a histogram or figure, for odd kernels only: ``f(-w, x) = -f(w, x)``.

    Args:
        W: Landmarks (n, m).
        y: Responses (samples, n).

    Returns:
        Both, flipped; a neuron whose mean is exactly 0 stays as it is.

    Example:
        >>> align_signs(torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0, -3.0]]))
        (tensor([[ 1.],
                [-1.]]), tensor([[2., 3.]]))
    """
    sign = torch.where(y.mean(0) < 0, -1.0, 1.0).to(y.dtype)
    return W * sign[:, None].to(W.dtype), y * sign


def linearised_responses(x: Tensor, y: Tensor, ridge: float = 0.1) -> Tensor:
    """The linear filter that comes closest to each neuron: ``s_i = (ridge I + <x x^T>)^-1 <y_i x>``.

    Args:
        x: Inputs (samples, m).
        y: Responses (samples, n).
        ridge: The paper's 0.1.

    Returns:
        Filters (n, m).

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
