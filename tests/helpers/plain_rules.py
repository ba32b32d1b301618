"""The learning rules as plain formulas, one batch at a time: the reference for the Learner."""

import torch
from torch import Tensor

from helpers import references
from ksm_lightning.learning import Learner, Rates, Schedule
from ksm_lightning.network import KSMNetwork, functional
from ksm_lightning.network.functional import Gradients, Step

GAIN_FLOOR, RESPONSE_LIMIT = 0.01, 2.0


class FixedRates(Schedule):
    """A schedule with the same rates at every update."""

    total_updates = 10**9

    def __init__(self, rates: Rates, natural: bool, settling: int = 0) -> None:
        self.is_natural = natural
        self.fixed = rates
        self.settling = settling

    def rates(self, update: int, num_neurons: int, batch: int) -> Rates:
        return self.fixed

    def is_settling(self, update: int) -> bool:
        return update < self.settling


def learner_of(network: KSMNetwork, rates: Rates, natural: bool, **options) -> Learner:
    settling = options.pop("settling", 0)
    options.setdefault("acceleration", "none")
    return Learner(network, FixedRates(rates, natural, settling), stage="learning", **options)


@torch.no_grad()
def compute_step(network: KSMNetwork, x: Tensor, natural: bool) -> Step:
    """Responses and gradients of a batch (batch, m). With natural steps the length of responses is limited."""
    state = (network.kernel, x, network.W, network.q, network.L, network.ridge)
    return references.limited_step(*state, limit=RESPONSE_LIMIT) if natural else functional.hebbian_step(*state)


@torch.no_grad()
def descent(network: KSMNetwork, gradients: Gradients, self_similarity: Tensor, natural: bool) -> Gradients:
    """Directions that are multiplied by the rates: subtracted from W and q, added to L."""
    q2 = network.q.square()
    if not natural:
        return gradients._replace(W=gradients.W / q2[:, None])
    tiny = torch.finfo(q2.dtype).tiny
    norm2 = self_similarity.clamp(min=tiny)
    gain = q2 * norm2
    scale = torch.maximum(gain, GAIN_FLOOR * gain.mean()) / norm2 * network.kernel.curvature(network.W)
    return Gradients(gradients.W / scale[:, None], gradients.q / norm2, gradients.L * 2)


@torch.no_grad()
def update(network: KSMNetwork, x: Tensor, rates: Rates, natural: bool) -> Step:
    """One update of W, q and L from one batch (batch, m), all from the same weights."""
    step = compute_step(network, x, natural)
    directions = descent(network, step.gradients, step.self_similarity, natural)
    network.W.sub_(directions.W, alpha=rates.W)
    network.q.sub_(directions.q, alpha=rates.q)
    network.L.add_(directions.L, alpha=rates.L)
    return step


def largest_difference(ours: KSMNetwork, theirs: KSMNetwork) -> float:
    """Largest relative difference of W, q and L."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)
