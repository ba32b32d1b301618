"""The exact inner solution: L in closed form, the bound J(W, q), and its full-batch minimiser.

For fixed W and q let ``B = <b b^T>`` be the second moment of the drive ``b = q * f(x, W)``. Minimised over the
responses, the energy is ``gain - 1/2 tr((L + ridge I)^-1 B) - 1/4 |L|^2``, which is concave in L. Its maximum has the
eigenvectors of B and eigenvalues l with ``l (l + ridge)^2 = beta``, so the saddle point becomes the minimisation of

``J(W, q) = 1/2 sum_i q_i^2 f(w_i, w_i) - sum (l (l + ridge) / 2 + l^2 / 4)``.

Everything here is float64, because ``1 / (l + ridge)`` amplifies the noise in the small eigenvalues of B.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.learning import exact_tight
from ksm_lightning.learning.moments import SimilarityMoment, similarity_moment
from ksm_lightning.learning.spectrum import Spectrum, leading_spectrum
from ksm_lightning.network import KSMNetwork, TightNetwork, functional
from ksm_lightning.network.landmark_error import MANY_LANDMARKS
from ksm_lightning.network.pivots import pivoted_cholesky


def lateral_eigenvalues(beta: Tensor, ridge: float) -> Tensor:
    """The ``l >= 0`` with ``l (l + ridge)^2 = beta``, for each entry; negative rounding errors count as 0.

    Newton's method from ``beta^(1/3)``, an upper bound. The cubic is convex there, so every step decreases and none
    passes the root.

    Example:
        >>> lateral_eigenvalues(torch.tensor([8.0, 12.0, 0.0], dtype=torch.float64), ridge=0.0)[0]
        tensor(2., dtype=torch.float64)
    """
    beta = beta.double().clamp(min=0)
    root = beta ** (1 / 3)
    for _ in range(50):
        shifted = root + ridge
        slope = shifted * (shifted + 2 * root)
        step = (root * shifted * shifted - beta) / torch.where(slope > 0, slope, 1.0)
        root = (root - step).clamp_(min=0)
    return root


class Inner(NamedTuple):
    """The maximum over L at fixed W and q: L (n, n), float64, and the bound ``J(W, q)``."""

    L: Tensor
    bound: Tensor


def solve_inner(B: Tensor, self_similarity: Tensor, q: Tensor, ridge: float) -> Inner:
    """The exact L and the bound J from ``B = <b b^T>`` (n, n), ``f(w_i, w_i)`` (n,) and the gains q (n,)."""
    beta, vectors = torch.linalg.eigh(B.double())
    l = lateral_eigenvalues(beta, ridge)  # noqa: E741
    gain = 0.5 * (q.double().square() * self_similarity.double()).sum()
    return Inner((vectors * l) @ vectors.mT, gain - (0.5 * l * (l + ridge) + 0.25 * l * l).sum())


def optimal_scale(G: Tensor, self_similarity: Tensor) -> Tensor:
    """The common gain ``c`` that minimises ``J(W, c)`` without a ridge: ``c^(2/3) = tr(G^(2/3)) / sum_i f(w_i, w_i)``.

    ``G = <k k^T>`` (n, n) is measured at gain 1. At other gains it is ``<b b^T>``, ``self_similarity`` (n,) includes
    their squares, and c multiplies them.
    """
    return scale_of(torch.linalg.eigvalsh(G.double()).clamp_(min=0), self_similarity)


def scale_of(eigenvalues: Tensor, self_similarity: Tensor) -> Tensor:
    """:func:`optimal_scale` from the eigenvalues (n,) of G."""
    ratio: Tensor = (eigenvalues ** (2 / 3)).sum() / self_similarity.double().sum()
    return ratio**1.5


@torch.no_grad()
def set_scale(kernel: Kernel, W: Tensor, q: Tensor, c: Tensor) -> None:
    """Multiply every ``q_i phi(w_i)`` by ``c``, in place: W for a homogeneous kernel, q for any other."""
    if kernel.is_homogeneous and kernel.degree is not None:
        W.mul_((c ** (1 / kernel.degree)).to(W))
    else:
        q.mul_(c.to(q))


class Minimum(NamedTuple):
    """A minimum of the bound."""

    W: Tensor
    q: Tensor
    L: Tensor
    bound: float

    def responses(self, kernel: Kernel, x: Tensor, ridge: float) -> Tensor:
        """Responses (samples, n) of this solution, float64."""
        return functional.responses(self.q * kernel(x.double(), self.W), self.L, ridge)


@torch.no_grad()
def minimise_bound(
    kernel: Kernel,
    x: Tensor,
    num_neurons: int,
    ridge: float,
    *,
    starts: int = 4,
    max_iterations: int = 400,
    generator: torch.Generator | None = None,
) -> Minimum:
    """The lowest ``J(W, q)`` that L-BFGS finds from several starts on all data: ground truth for small data.

    By the envelope theorem the gradients of J are those of the energy at the exact L, so the gradients of
    :mod:`ksm_lightning.network.functional` on the full batch are its gradient. J has many minima: more starts find
    lower ones.

    Args:
        kernel: The similarity.
        x: All inputs (samples, m).
        num_neurons: Number of neurons n.
        ridge: The paper's lambda.
        starts: Number of starts at pivots of the data; the lowest bound is returned.
        max_iterations: Largest number of iterations of each.
        generator: Source of randomness, on the CPU. Default: the global one.
    """
    x = x.double()
    chosen = [pivoted_cholesky(kernel, x, num_neurons, generator) for _ in range(starts)]
    return min((_descend(kernel, x, x[W].clone(), ridge, max_iterations) for W in chosen), key=lambda one: one.bound)


def _descend(kernel: Kernel, x: Tensor, W: Tensor, ridge: float, max_iterations: int) -> Minimum:
    """L-BFGS from one start, in float64."""
    q = torch.ones(len(W), dtype=torch.float64, device=W.device)
    set_scale(kernel, W, q, optimal_scale(similarity_moment(kernel, [x], W).of_drive(q), kernel.diag(W)))
    parameters = [W.requires_grad_(), q.requires_grad_()]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=max_iterations, history_size=30, line_search_fn="strong_wolfe",
        tolerance_grad=1e-9, tolerance_change=1e-14,
    )  # fmt: skip

    def inner() -> Inner:
        moment, gains = similarity_moment(kernel, [x], W.detach()), q.detach()
        return solve_inner(moment.of_drive(gains), kernel.diag(W.detach()), gains, ridge)

    def closure() -> Tensor:
        with torch.no_grad(), full_precision(x.device):
            at = inner()
            gradients = functional.hebbian_step(kernel, x, W.detach(), q.detach(), at.L, ridge).gradients
            W.grad = gradients.W
            q.grad = torch.zeros_like(q) if kernel.is_homogeneous else gradients.q
        return at.bound

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    at = inner()
    return Minimum(W.detach(), q.detach(), at.L, float(at.bound))


@torch.no_grad()
def balance(network: KSMNetwork, x: Tensor, shrinkage: float = 0.0) -> None:
    """Set the best common scale of W (or q) and the exact L for a sample; for a tight network the exact Q and L.

    With more than 2,048 neurons, L is exact in the leading 1,024 directions and a multiple of I in the others, because
    an eigen-decomposition of the whole matrix would take longer than the rest of the start.

    Args:
        network: The network, changed in place.
        x: A sample of the data (samples, m).
        shrinkage: How far, from 0 to 1, the sample's second moment is moved towards a multiple of I. Directions that a
            small sample does not show then count as ordinary ones; otherwise the next batch gets ``1 / ridge`` there.
    """
    kernel = network.kernel
    if network.num_neurons > MANY_LANDMARKS and not isinstance(network, TightNetwork):
        _balance_many(network, x, shrinkage)
        return
    moment = similarity_moment(kernel, [x], network.W)
    if isinstance(network, TightNetwork):
        exact_tight.settle(network, moment, shrinkage)
        return
    B = moment.of_drive(network.q)
    mean = B.diagonal().mean()
    if not mean > 0:
        return  # no neuron responds, and any L is as good as another
    B = (1 - shrinkage) * B
    B.diagonal().add_(shrinkage * mean)
    c = optimal_scale(B, network.q.double().square() * kernel.diag(network.W))
    set_scale(kernel, network.W, network.q, c)
    network.L.copy_(solve_inner(c * c * B, kernel.diag(network.W), network.q, network.ridge).L)


def _balance_many(network: KSMNetwork, x: Tensor, shrinkage: float) -> None:
    """:func:`balance` for many neurons: the eigenvalues of B beyond the first 1,024 count as equal."""
    kernel, ridge = network.kernel, network.ridge
    found = leading_spectrum(kernel, x, network.W, network.q).shrunk(shrinkage)
    if not found.values[-1] > 0:
        return
    eigenvalues = torch.cat([found.values, found.rest.expand(found.num_equal)])
    c = scale_of(eigenvalues, network.q.double().square() * kernel.diag(network.W))
    set_scale(kernel, network.W, network.q, c)
    values, rest = (lateral_eigenvalues(c * c * beta, ridge) for beta in (found.values, found.rest))
    network.L.copy_(Spectrum(values, found.vectors, rest).dense())


@torch.no_grad()
def consolidate(network: KSMNetwork, moment: SimilarityMoment) -> float:
    """Set the exact L for the network's W and q (the exact Q and L of a tight network); returns the bound J."""
    if isinstance(network, TightNetwork):
        return exact_tight.settle(network, moment)
    B = moment.of_drive(network.q)
    inner = solve_inner(B, network.kernel.diag(network.W), network.q, network.ridge)
    network.L.copy_(inner.L)
    return float(inner.bound)
