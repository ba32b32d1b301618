"""The learning rules applied to a network: steps in the paper's or in natural units, the start, moved landmarks.

Nothing here knows Lightning: :func:`learn` is the whole training of a network in a loop.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ksm_lightning import functional
from ksm_lightning.exact import optimal_scale, set_scale, similarity_moment, solve_inner
from ksm_lightning.functional import Gradients, Step
from ksm_lightning.kernels import Kernel
from ksm_lightning.network import KSMNetwork
from ksm_lightning.relocation import find_moves
from ksm_lightning.schedule import LearningSchedule, Rates

# The ridge of the adaptive schedule in units of a neuron's share of the similarity, <f(x, x)> / n.
_RELATIVE_RIDGE = 0.005
# A step moves phi(w) by at most this part of a typical length; gains below this part of the mean count as that.
_TRUST, _GAIN_FLOOR = 0.5, 0.01
# Responses are at most so many times as long as they should be.
_RESPONSE_LIMIT = 2.0


def compute_step(network: KSMNetwork, x: Tensor, natural: bool) -> Step:
    """Responses and gradients of a batch (batch, m); with natural steps responses are limited in length.

    The limit, ``2 sqrt(f(x, x))``, makes everything bounded: C has a trace of at most ``4 <f(x, x)>``, L is an average
    of such C, q and W are drawn to averages of products with y. So L stays positive semi-definite and of bounded size,
    and ``L + ridge I`` can always be factorised. Near a solution no response is that long.
    """
    limit = _RESPONSE_LIMIT if natural else None
    return functional.hebbian_step(network.kernel, x, network.W, network.q, network.L, network.ridge, limit=limit)


def sample_size(num_neurons: int) -> int:
    """How many points the start and the search for idle landmarks look at."""
    return max(1000, 2 * num_neurons)


def rates_at(schedule: LearningSchedule, kernel: Kernel, update: int, num_neurons: int, batch: int) -> Rates:
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
    scale = torch.maximum(gain, _GAIN_FLOOR * gain.mean()).div_(norm2).mul_(curvature).clamp_(min=tiny)
    W = gradients.W / scale[:, None]
    moved = torch.linalg.vector_norm(W, dim=1).mul_(curvature.sqrt()).mul_(rates.W)
    allowed = torch.maximum(norm2, norm2.mean()).sqrt_().mul_(_TRUST)
    W.mul_((allowed / moved.clamp_(min=tiny)).clamp_(max=1)[:, None])
    return Gradients(W, gradients.q / norm2, gradients.L * 2)


@torch.no_grad()
def apply(network: KSMNetwork, directions: Gradients, rates: Rates) -> None:
    """Take the step."""
    network.W.sub_(directions.W, alpha=rates.W)
    network.q.sub_(directions.q, alpha=rates.q)
    network.L.add_(directions.L, alpha=rates.L)


def update(network: KSMNetwork, schedule: LearningSchedule, number: int, x: Tensor) -> Step:
    """One update of W, q and L from one batch (batch, m), all from the same state."""
    rates = rates_at(schedule, network.kernel, number, network.num_neurons, len(x))
    step = compute_step(network, x, schedule.is_natural)
    apply(network, descent(network, step.gradients, step.self_similarity, rates, schedule.is_natural), rates)
    return step


@torch.no_grad()
def natural_ridge(kernel: Kernel, x: Tensor, num_neurons: int) -> float:
    """A ridge in the similarity's own units, ``0.005 <f(x, x)> / n``; small against the typical eigenvalue of L.

    Raises:
        ValueError: If the square of the similarity, the unit of the energy, is out of the dtype's range.
    """
    mean = float(kernel.diag(x.double()).mean())
    limits = torch.finfo(x.dtype)
    if mean != 0 and not limits.tiny < mean**2 < limits.max / 1e4:
        raise ValueError(
            f"The similarity f(x, x) is {mean:.1e} on average, whose square is out of the range of {x.dtype}: scale "
            "the data (scaling=global or feature), or use precision=64-true."
        )
    return _RELATIVE_RIDGE * mean / num_neurons if mean > 0 else _RELATIVE_RIDGE


@torch.no_grad()
def start(network: KSMNetwork, x: Tensor) -> None:
    """Begin well: idle landmarks moved, W (or q) at the optimal common scale, L at its exact value for a sample.

    The sample's second moment is drawn a little to a multiple of I, by ``n / (n + samples)``: directions that a small
    sample has not seen are then taken for ordinary ones, instead of answering the next batch with ``1 / ridge``.

    Args:
        network: The network, changed in place.
        x: A sample of the data (samples, m), without repetitions.
    """
    relocate(network, x[: sample_size(network.num_neurons)], most=network.num_neurons)
    kernel, n = network.kernel, network.num_neurons
    total, count = similarity_moment(kernel, [x], network.W)
    q = network.q.double()  # 1, but for neurons that were moved
    B = q[:, None] * total * q / count
    mean = B.diagonal().mean()
    if not mean > 0:
        return  # nothing answers to anything; L = I is as good as any
    share = n / (n + count)
    B = (1 - share) * B
    B.diagonal().add_(share * mean)
    c = optimal_scale(B, q.square() * kernel.diag(network.W))
    set_scale(kernel, network.W, network.q, c)
    network.L.copy_(solve_inner(c * c * B, kernel.diag(network.W), network.q, network.ridge).L)


@torch.no_grad()
def relocate(network: KSMNetwork, x: Tensor, most: int | None = None) -> int:
    """Move landmarks that explain nothing to where the residual is largest; returns how many moved.

    A moved neuron gets the mean gain of all, no lateral connections, and the median self-inhibition.

    Args:
        network: The network, changed in place.
        x: A sample of the data (samples, m), without repetitions.
        most: Landmarks to move at most; a quarter of them unless given.
    """
    kernel, n = network.kernel, network.num_neurons
    moves = dict(find_moves(kernel, x, network.W, max(1, n // 4) if most is None else most))  # the last of each neuron
    if not moves:
        return 0
    gain = (network.q.square() * kernel.diag(network.W)).double().mean()
    inhibition = network.L.diagonal().median()
    neurons = torch.tensor(list(moves), device=x.device)
    places = x[torch.tensor(list(moves.values()), device=x.device)].to(network.W)
    ratio = gain / kernel.diag(places).double().clamp(min=torch.finfo(torch.float32).tiny)
    if kernel.is_homogeneous and kernel.degree is not None:
        places = places * (ratio ** (0.5 / kernel.degree)).to(places)[:, None]
    else:
        network.q[neurons] = ratio.sqrt().to(network.q)
    network.W[neurons] = places
    network.L[neurons] = 0
    network.L[:, neurons] = 0
    network.L[neurons, neurons] = inhibition
    return len(moves)


@torch.no_grad()
def consolidate(network: KSMNetwork, blocks: Iterable[Tensor], sum_over_ranks: Callable[[Tensor], Tensor]) -> float:
    """Give the network the exact L for its W and q; returns the bound J.

    One pass over the data and one eigen-decomposition, both float64.

    Args:
        network: The network, changed in place.
        blocks: All inputs, or this process's share of them, (samples, m) at a time.
        sum_over_ranks: Adds a tensor over all processes.

    Raises:
        ValueError: If there is no input.
    """
    total, count = similarity_moment(network.kernel, blocks, network.W)
    summed = sum_over_ranks(torch.cat([total.flatten(), total.new_tensor([float(count)])]))
    if not summed[-1] > 0:
        raise ValueError("Consolidation needs data, and there was none.")
    q = network.q.double()
    B = q[:, None] * (summed[:-1] / summed[-1]).view_as(total) * q
    inner = solve_inner(B, network.kernel.diag(network.W), q, network.ridge)
    network.L.copy_(inner.L)
    return float(inner.bound)


def learn(
    network: KSMNetwork,
    schedule: LearningSchedule,
    batches: Iterable[Tensor],
    *,
    first_update: int = 0,
    sample: Callable[[int], Tensor] | None = None,
) -> None:
    """Train a network on one batch after the other, without Lightning.

    Args:
        network: The network, changed in place.
        schedule: The rates; its changes of kernel parameters are a trainer's business.
        batches: One batch (batch, m) an update.
        first_update: Number of the first one.
        sample: Gives, for an update's number, points among which idle landmarks find a new place; none move unless
            given.
    """
    for number, x in enumerate(batches, start=first_update):
        if sample is not None and schedule.relocates_before(number):
            relocate(network, sample(number))
        update(network, schedule, number, x)
