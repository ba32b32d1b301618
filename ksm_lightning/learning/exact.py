"""The exact inner solution: the common scale and L in closed form, the bound J(W, q), and its full-batch minimiser.

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
from ksm_lightning.learning.spectrum import Spectrum, leading_spectrum, moment_eigenvalues
from ksm_lightning.network import KSMNetwork, TightNetwork, functional
from ksm_lightning.network.landmark_error import MANY_LANDMARKS
from ksm_lightning.network.pivots import pivoted_cholesky


def lateral_eigenvalues(beta: Tensor, ridge: float) -> Tensor:
    """The ``l >= 0`` with ``l (l + ridge)^2 = beta``, for each entry; negative rounding errors count as 0.

    Newton's method from ``beta^(1/3)``, an upper bound. The cubic is convex there, so every step decreases and none
    passes the root; eight of them reach it to the last digit for any beta and ridge.

    Example:
        >>> lateral_eigenvalues(torch.tensor([8.0, 12.0, 0.0], dtype=torch.float64), ridge=0.0)[0]
        tensor(2., dtype=torch.float64)
    """
    beta = beta.double().clamp(min=0)
    root = beta ** (1 / 3)
    for _ in range(8):
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
    return Inner((vectors * l) @ vectors.mT, bound_from(gain, l, ridge))


def bound_from(gain: Tensor, l: Tensor, ridge: float) -> Tensor:  # noqa: E741
    """J from ``1/2 sum_i q_i^2 f(w_i, w_i)`` and the eigenvalues of the exact L (n,)."""
    return gain - (0.5 * l * (l + ridge) + 0.25 * l * l).sum()


def optimal_scale(eigenvalues: Tensor, self_similarity: Tensor, ridge: float) -> Tensor:
    """The common gain ``c`` that minimises ``J(W, c q)``, from the eigenvalues beta of B and all ``q_i^2 f(w_i, w_i)``.

    With the exact L for every c, the minimum is where ``c^2 sum_i q_i^2 f(w_i, w_i) = sum l (l + ridge)``, with
    ``l (l + ridge)^2 = c^2 beta``. J is convex in ``c^2``, so there is one. Without a ridge it is
    ``c^(2/3) = sum beta^(2/3) / sum_i q_i^2 f(w_i, w_i)``; Newton's method for log c goes down from there. Where no
    response at all is best, c is 1.
    """
    beta, own = eigenvalues.double().clamp(min=0), self_similarity.double().sum()
    c = ((beta ** (2 / 3)).sum() / own) ** 1.5
    for _ in range(12):
        l = lateral_eigenvalues(c * c * beta, ridge)  # noqa: E741
        total = l * (l + ridge)
        slope = (total * 2 * l / (3 * l + ridge)).sum() / total.sum()  # minus that of log(total.sum() / c^2) in log c
        c = c * (total.sum() / (c * c * own)) ** (1 / slope)
    return torch.where(beta.sum() > ridge * own, c, 1.0)


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
    beta = torch.linalg.eigvalsh(similarity_moment(kernel, [x], W).of_drive(q))
    set_scale(kernel, W, q, optimal_scale(beta, kernel.diag(W), ridge))
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
def consolidate(network: KSMNetwork, moment: SimilarityMoment, shrinkage: float = 0.0) -> float:
    """Set the best common scale of W (or q) and the exact L for some inputs; returns the bound J.

    For a tight network it sets the exact Q and L.

    Args:
        network: The network, changed in place.
        moment: The second moment of the inputs' similarities to the network's landmarks.
        shrinkage: How far, from 0 to 1, the moment is moved towards a multiple of I. Directions that a small sample
            does not show then count as ordinary ones; otherwise the next batch gets ``1 / ridge`` there.
    """
    if isinstance(network, TightNetwork):
        return exact_tight.settle(network, moment, shrinkage)
    return _settle(network, Spectrum.of(moment.of_drive(network.q)).shrunk(shrinkage))


@torch.no_grad()
def bound_on(network: KSMNetwork, x: Tensor) -> Tensor:
    """The bound J of a network's W and q for a sample (samples, m): its energy with the exact L (and Q)."""
    k = network.kernel(x, network.W).double()
    if isinstance(network, TightNetwork):
        return exact_tight.bound_of(network, k)
    gain = 0.5 * (network.q.double().square() * network.kernel.diag(network.W)).sum()
    return bound_from(gain, lateral_eigenvalues(moment_eigenvalues(network.q * k), network.ridge), network.ridge)


@torch.no_grad()
def balance(network: KSMNetwork, x: Tensor, shrinkage: float = 0.0) -> None:
    """:func:`consolidate` for a sample (samples, m).

    With more than 2,048 neurons, L is exact in the leading 1,024 directions and a multiple of I in the others, because
    an eigen-decomposition of the whole matrix would take longer than the rest of the start.
    """
    if network.num_neurons > MANY_LANDMARKS and not isinstance(network, TightNetwork):
        _settle(network, leading_spectrum(network.kernel, x, network.W, network.q).shrunk(shrinkage))
    else:
        consolidate(network, similarity_moment(network.kernel, [x], network.W), shrinkage)


def _settle(network: KSMNetwork, B: Spectrum) -> float:
    """Set the best common scale and the exact L for ``B = <b b^T>``; returns the bound J."""
    kernel, ridge = network.kernel, network.ridge
    own = network.q.double().square() * kernel.diag(network.W)
    if not B.values[-1] > 0:
        return 0.5 * float(own.sum())  # no neuron responds, and any L is as good as another
    c = optimal_scale(B.eigenvalues, own, ridge)
    set_scale(kernel, network.W, network.q, c)
    L = B.map(lambda beta: lateral_eigenvalues(c * c * beta, ridge))
    network.L.copy_(L.dense())
    return float(bound_from(0.5 * c * c * own.sum(), L.eigenvalues, ridge))
