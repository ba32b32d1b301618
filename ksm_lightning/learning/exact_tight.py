"""The exact inner solution of the tight bound: Q and L in closed form, and the bound J(W).

For fixed W let ``z = K^(-1/2) k`` be the Nystroem features, with ``K = f(W, W)``, and mu the eigenvalues of
``<z z^T>``. The saddle point keeps the n largest mu, with eigenvectors U:

``y = sqrt(1 - ridge / mu) U^T z``, ``L = diag(mu - ridge)``, ``Q = <y k^T> K^-1``, ``J(W) = -1/4 sum (mu - ridge)^2``,

where ``mu <= ridge`` gives a silent neuron. So minimising J maximises the norm of the Nystroem approximation itself,
and the error of the responses has no floor. Everything here is float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import robust_cholesky
from ksm_lightning.learning.moments import SimilarityMoment
from ksm_lightning.learning.spectrum import moment_eigenvalues
from ksm_lightning.network import TightNetwork

# Added to the diagonal of K, relative to f(w, w): landmarks closer than this are not told apart. Responses amplify
# rounding errors of k by up to its inverse root.
JITTER = {torch.float32: 1e-6, torch.float64: 1e-10}


def add_jitter(K: Tensor, dtype: torch.dtype) -> Tensor:
    """``K`` (p, p), float64, with a jitter on its diagonal, in place, that suits weights of ``dtype``."""
    own = K.diagonal()
    own.add_(JITTER[dtype] * (own + 1e-6 * own.mean()) + torch.finfo(dtype).tiny)  # also where all similarities are 0
    return K


class TightInner(NamedTuple):
    """The saddle point at fixed W: Q (n, p), L (n, n) and the bound ``J(W)``, float64."""

    Q: Tensor
    L: Tensor
    bound: Tensor


def leading_directions(G: Tensor, K: Tensor, num_neurons: int, shrinkage: float = 0.0) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues mu (n,) of ``<z z^T>``, descending, and ``V = R^-T U`` (p, n): ``z U = k V``.

    They solve ``G v = mu K v`` with ``v^T K v = 1``. Arguments as for :func:`solve_inner`.
    """
    factor = robust_cholesky(K)  # K = R R^T; z = R^-1 k differs from K^(-1/2) k by a rotation, which U undoes
    half = torch.linalg.solve_triangular(factor, G, upper=False)
    S = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    S = (S + S.mT) / 2
    mean = S.diagonal().mean()
    S = (1 - shrinkage) * S
    S.diagonal().add_(shrinkage * mean)
    mu, U = torch.linalg.eigh(S)
    mu, U = mu[-num_neurons:].flip(0), U[:, -num_neurons:].flip(1)
    return mu, torch.linalg.solve_triangular(factor.mT, U, upper=True)


def solve_inner(G: Tensor, K: Tensor, num_neurons: int, ridge: float, shrinkage: float = 0.0) -> TightInner:
    """The exact Q and L and the bound from ``G = <k k^T>`` (p, p) and ``K = f(W, W)`` (p, p), positive definite.

    ``shrinkage``, from 0 to 1, moves ``<z z^T>`` towards a multiple of I, for a sample that does not show all
    directions.
    """
    mu, V = leading_directions(G, K, num_neurons, shrinkage)
    excess = (mu - ridge).clamp(min=0)
    # y = a U^T z with a = sqrt(1 - ridge / mu), and Q = <y k^T> K^-1 = a mu V^T
    Q = (V * (excess * mu.clamp(min=0)).sqrt()).mT
    return TightInner(Q, torch.diag(excess), -0.25 * excess.square().sum())


@torch.no_grad()
def settle(network: TightNetwork, moment: SimilarityMoment, shrinkage: float = 0.0) -> float:
    """Set the exact Q and L of a network for its W and the data behind ``moment``; returns the bound J."""
    W = network.W.detach().double()
    K = add_jitter(network.kernel(W, W), network.W.dtype)
    inner = solve_inner(moment.total / moment.samples, K, network.num_neurons, network.ridge, shrinkage)
    network.Q.copy_(inner.Q)
    network.L.copy_(inner.L)
    return float(inner.bound)


@torch.no_grad()
def bound_of(network: TightNetwork, k: Tensor) -> Tensor:
    """The bound J(W) for the similarities (samples, p), float64, of a sample to a network's landmarks."""
    W = network.W.detach().double()
    factor = robust_cholesky(add_jitter(network.kernel(W, W), network.W.dtype))
    mu = moment_eigenvalues(torch.linalg.solve_triangular(factor, k.mT, upper=False).mT)[-network.num_neurons :]
    return -0.25 * (mu - network.ridge).clamp(min=0).square().sum()
