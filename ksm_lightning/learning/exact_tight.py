"""The exact inner solution of the tight bound: Q and L in closed form, the bound J(W), and its full-batch minimiser.

For fixed W let ``z = K^(-1/2) k`` be the Nystroem features, with ``K = f(W, W)``, and mu the eigenvalues of
``<z z^T>``. The saddle point keeps the n largest mu, with eigenvectors U:

``y = sqrt(1 - ridge / mu) U^T z``, ``L = diag(mu - ridge)``, ``Q = <y k^T> K^-1``, ``J(W) = -1/4 sum (mu - ridge)^2``,

where ``mu <= ridge`` gives a silent neuron. So minimising J maximises the norm of the Nystroem approximation itself,
and the error of the responses has no floor. Everything here is float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision, robust_cholesky
from ksm_lightning.learning.moments import SimilarityMoment, similarity_moment
from ksm_lightning.learning.spectrum import moment_eigenvalues
from ksm_lightning.network import TightNetwork, functional, tight
from ksm_lightning.network.initialisation import kernel_kmeans_plus_plus

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


def solve_inner(G: Tensor, K: Tensor, num_neurons: int, ridge: float, shrinkage: float = 0.0) -> TightInner:
    """The exact Q and L and the bound from ``G = <k k^T>`` (p, p) and ``K = f(W, W)`` (p, p), positive definite.

    ``shrinkage``, from 0 to 1, moves ``<z z^T>`` towards a multiple of I, for a sample that does not show all
    directions.
    """
    factor = robust_cholesky(K)  # K = R R^T; z = R^-1 k differs from K^(-1/2) k by a rotation, which U undoes
    half = torch.linalg.solve_triangular(factor, G, upper=False)
    S = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    S = (S + S.mT) / 2
    mean = S.diagonal().mean()
    S = (1 - shrinkage) * S
    S.diagonal().add_(shrinkage * mean)
    mu, U = torch.linalg.eigh(S)
    mu, U = mu[-num_neurons:].flip(0), U[:, -num_neurons:].flip(1)  # the n largest, in descending order
    excess = (mu - ridge).clamp(min=0)
    # y = a U^T z with a = sqrt(1 - ridge / mu), and Q = <y k^T> K^-1 = a mu U^T R^-1
    scaled = U * (excess * mu.clamp(min=0)).sqrt()
    Q = torch.linalg.solve_triangular(factor.mT, scaled, upper=True).mT
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


class TightMinimum(NamedTuple):
    """A minimum of the tight bound."""

    W: Tensor
    Q: Tensor
    L: Tensor
    bound: float

    def responses(self, kernel: Kernel, x: Tensor, ridge: float) -> Tensor:
        """Responses (samples, n) of this solution, float64."""
        return functional.responses(kernel(x.double(), self.W) @ self.Q.mT, self.L, ridge)


@torch.no_grad()
def minimise_tight_bound(
    kernel: Kernel,
    x: Tensor,
    num_neurons: int,
    ridge: float,
    *,
    num_landmarks: int | None = None,
    W: Tensor | None = None,
    starts: int = 4,
    max_iterations: int = 400,
    generator: torch.Generator | None = None,
) -> TightMinimum:
    """The lowest ``J(W)`` that L-BFGS finds from several starts on all data: ground truth for small data.

    By the envelope theorem the gradient of J is that of the energy at the exact Q and L.

    Args:
        kernel: The similarity.
        x: All inputs (samples, m).
        num_neurons: Number of neurons n.
        ridge: The paper's lambda.
        num_landmarks: Number of landmarks p. Default: n.
        W: A single start (p, m). Default: ``starts`` starts at data points chosen by kernel k-means++.
        starts: Number of starts; the lowest bound is returned.
        max_iterations: Largest number of iterations of each.
        generator: Source of randomness, on the CPU. Default: the global one.
    """
    x, p = x.double(), num_landmarks or num_neurons
    chosen = [W.double()] if W is not None else [
        x[kernel_kmeans_plus_plus(kernel, x, p, generator=generator)] for _ in range(starts)
    ]  # fmt: skip
    found = (_descend(kernel, x, start.clone(), num_neurons, ridge, max_iterations) for start in chosen)
    return min(found, key=lambda one: one.bound)


def _descend(kernel: Kernel, x: Tensor, W: Tensor, num_neurons: int, ridge: float, max_iterations: int) -> TightMinimum:
    """L-BFGS from one start, in float64."""
    W.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [W], max_iter=max_iterations, history_size=30, line_search_fn="strong_wolfe",
        tolerance_grad=1e-10, tolerance_change=1e-15,
    )  # fmt: skip

    def inner() -> TightInner:
        at = W.detach()
        moment = similarity_moment(kernel, [x], at)
        return solve_inner(moment.total / moment.samples, add_jitter(kernel(at, at), torch.float64), num_neurons, ridge)

    def closure() -> Tensor:
        with torch.no_grad(), full_precision(x.device):
            at = inner()
            W.grad = tight.hebbian_step(kernel, x, W.detach(), at.Q, at.L, ridge)[1].W
        return at.bound

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    at = inner()
    return TightMinimum(W.detach(), at.Q, at.L, float(at.bound))
