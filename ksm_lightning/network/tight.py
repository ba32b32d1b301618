"""The mathematics of the tight bound as pure functions of tensors.

The paper's bound expands ``|<y_i phi(x)> - u_i|^2 >= 0`` with ``u_i = q_i phi(w_i)``, one landmark per neuron. The
proof holds for any ``u_i``. Here ``u_i = sum_j Q_ij phi(w_j)``, with a matrix Q (n, p) from p landmarks to n neurons:

``e = -sum_i <y_i (Q k)_i> + 1/2 tr(Q K Q^T) + 1/2 sum_ij (L_ij C_ij - 1/2 L_ij^2) + ridge/2 sum_i <y_i^2>``

with ``k = f(W, x)`` and ``K = f(W, W)``. A diagonal Q is the paper's network. The other symbols are those of
:mod:`ksm_lightning.network.functional`, with shapes x (batch, m), W (p, m), k (batch, p), y (batch, n), L (n, n).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, Pullback, full_precision
from ksm_lightning.network import functional
from ksm_lightning.network.functional import EnergyTerms


def energy_terms(
    k: Tensor, y: Tensor, K: Tensor, Q: Tensor, L: Tensor, ridge: float, *, C: Tensor | None = None
) -> EnergyTerms:
    """Energy of a batch by terms, summed in float64. ``K = f(W, W)`` (p, p); C is computed if it is not given."""
    C, f64 = functional.correlation(y) if C is None else C, torch.float64
    return EnergyTerms(
        feedforward=-((k @ Q.mT) * y).sum(dtype=f64) / y.shape[0],
        gain=0.5 * ((Q @ K) * Q).sum(dtype=f64),
        lateral=0.5 * (L * C).sum(dtype=f64),
        lateral_cost=-0.25 * (L * L).sum(dtype=f64),
        ridge=0.5 * ridge * C.diagonal().sum(dtype=f64),
    )


def gradient_W(Q: Tensor, y: Tensor, pullback: Pullback, pullback_K: Pullback) -> Tensor:
    """``de/dw_j = -<(Q^T y)_j df(w_j,x)/dw_j> + sum_l (Q^T Q)_jl df(w_j,w_l)/dw_j`` (p, m).

    Args:
        Q: Gains (n, p).
        y: Responses (batch, n).
        pullback: Pullback of ``f(x, W)``.
        pullback_K: Pullback of ``f(W, W)`` in its second argument.
    """
    return pullback((y @ Q).div_(-y.shape[0])) + pullback_K(Q.mT @ Q)


def gradient_Q(Q: Tensor, k: Tensor, y: Tensor, K: Tensor) -> Tensor:
    """``de/dQ = Q K - <y k^T>`` (n, p). Local: neuron i and landmark j are what ``Q_ij`` connects."""
    return torch.addmm(Q @ K, y.mT, k, alpha=-1 / y.shape[0])


class Gradients(NamedTuple):
    """Derivatives of the batch energy in W, Q and L."""

    W: Tensor
    Q: Tensor
    L: Tensor


@torch.no_grad()
def hebbian_step(
    kernel: Kernel, x: Tensor, W: Tensor, Q: Tensor, L: Tensor, ridge: float
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """Responses y (batch, n) to a batch x (batch, m) and the gradients of its energy in W, Q and L.

    The responses minimise the energy, so the gradients need no derivative of the responses.
    """
    with full_precision(x.device):
        k, pullback = kernel.value_and_pullback(x, W)  # (batch, p)
        K, pullback_K = kernel.value_and_pullback(W, W)  # (p, p)
        y = functional.responses(k @ Q.mT, L, ridge)  # (batch, n)
        return y, Gradients(
            W=gradient_W(Q, y, pullback, pullback_K),
            Q=gradient_Q(Q, k, y, K),
            L=functional.gradient_L(functional.correlation(y), L),
        )
