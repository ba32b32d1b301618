"""The rules of one update in plain words: what an update is, in the paper's or in natural units.

:class:`ksm_lightning.learning.updater.Updater` makes the same updates with less work; the tests hold the two together.
"""

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.learning.schedule import Rates, Schedule
from ksm_lightning.network import functional
from ksm_lightning.network.functional import Gradients, Step
from ksm_lightning.network.ksm_network import KSMNetwork

# A step moves phi(w) by at most this part of a typical length; gains below this part of the mean count as that.
TRUST, GAIN_FLOOR = 0.5, 0.01
# Responses are at most so many times as long as they should be.
RESPONSE_LIMIT = 2.0


def compute_step(network: KSMNetwork, x: Tensor, natural: bool) -> Step:
    """Responses and gradients of a batch (batch, m); with natural steps responses are limited in length.

    The limit, ``2 sqrt(f(x, x))``, makes everything bounded: C has a trace of at most ``4 <f(x, x)>``, L is an average
    of such C, q and W are drawn to averages of products with y. So L stays positive semi-definite and of bounded size,
    and ``L + ridge I`` can always be factorised. Near a solution no response is that long.
    """
    limit = RESPONSE_LIMIT if natural else None
    return functional.hebbian_step(network.kernel, x, network.W, network.q, network.L, network.ridge, limit=limit)


def rates_at(schedule: Schedule, kernel: Kernel, update: int, num_neurons: int, batch: int) -> Rates:
    """The schedule's rates; a homogeneous kernel keeps q at 1."""
    rates = schedule.rates(update, num_neurons, batch)
    return rates._replace(q=0.0) if kernel.is_homogeneous else rates


@torch.no_grad()
def descent(
    network: KSMNetwork, gradients: Gradients, self_similarity: Tensor, rates: Rates, natural: bool
) -> Gradients:
    """Directions that the rates multiply: W and q go against theirs, L along its own.

    The paper's are the gradients, W's divided by q^2. In natural units each parameter is drawn to the place where its
    own gradient would vanish: L's direction is ``C - L``, q's is divided by ``f(w, w)``, and W's by ``q^2`` times
    the kernel's curvature (for a Gaussian kernel a mean shift, for a power-cosine kernel ``w - <y df/dw>``). Two limits
    keep a neuron far from all data from being thrown about: q^2 is taken as at least a hundredth of the mean gain, and
    no step moves ``phi(w)`` by more than half the typical length of one.

    Args:
        network: The network, as it was when the gradients were computed.
        gradients: The energy's, averaged over all processes.
        self_similarity: ``f(w_i, w_i)`` (n,).
        rates: What the directions will be multiplied with.
        natural: Whether the rates are natural steps.
    """
    q2 = network.q.square()
    if not natural:
        return gradients._replace(W=gradients.W / q2[:, None])
    tiny = torch.finfo(q2.dtype).tiny
    norm2 = self_similarity.clamp(min=tiny)
    gain = q2 * norm2
    curvature = network.kernel.curvature(network.W)
    scale = torch.maximum(gain, GAIN_FLOOR * gain.mean()).div_(norm2).mul_(curvature).clamp_(min=tiny)
    W = gradients.W / scale[:, None]
    moved = torch.linalg.vector_norm(W, dim=1).mul_(curvature.sqrt()).mul_(rates.W)
    allowed = torch.maximum(norm2, norm2.mean()).sqrt_().mul_(TRUST)
    W.mul_((allowed / moved.clamp_(min=tiny)).clamp_(max=1)[:, None])
    return Gradients(W, gradients.q / norm2, gradients.L * 2)


@torch.no_grad()
def apply(network: KSMNetwork, directions: Gradients, rates: Rates) -> None:
    """Take the step."""
    network.W.sub_(directions.W, alpha=rates.W)
    network.q.sub_(directions.q, alpha=rates.q)
    network.L.add_(directions.L, alpha=rates.L)


def update(network: KSMNetwork, schedule: Schedule, number: int, x: Tensor) -> Step:
    """One update of W, q and L from one batch (batch, m), all from the same state."""
    rates = rates_at(schedule, network.kernel, number, network.num_neurons, len(x))
    step = compute_step(network, x, schedule.is_natural)
    apply(network, descent(network, step.gradients, step.self_similarity, rates, schedule.is_natural), rates)
    return step
