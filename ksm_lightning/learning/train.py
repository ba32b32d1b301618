"""The training of a network: the start, moved landmarks, the exact end, and all of it in a loop.

Nothing here knows Lightning: :func:`learn` is the whole training of a network.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.learning.exact import optimal_scale, set_scale, similarity_moment, solve_inner
from ksm_lightning.learning.relocation import find_moves
from ksm_lightning.learning.rules import rates_at
from ksm_lightning.learning.schedule import Schedule
from ksm_lightning.learning.updater import Updater
from ksm_lightning.network.initialisation import DataInit, Initialiser
from ksm_lightning.network.ksm_network import KSMNetwork

PAPER_RIDGE = 1e-3
"""The paper's lambda."""
# The ridge of the adaptive schedule in units of a neuron's share of the similarity, <f(x, x)> / n.
_RELATIVE_RIDGE = 0.005
# Batches that are prepared together.
_AT_ONCE = 50


def sample_size(num_neurons: int) -> int:
    """How many points the start and the search for idle landmarks look at."""
    return max(1000, 2 * num_neurons)


def candidate_count(num_neurons: int) -> int:
    """How many points landmarks are first drawn from: more cost time and change nothing."""
    return max(2000, 10 * num_neurons)


@torch.no_grad()
def natural_ridge(kernel: Kernel, x: Tensor, num_neurons: int) -> float:
    """A ridge in the similarity's own units, ``0.005 <f(x, x)> / n``; small against the typical eigenvalue of L.

    Raises:
        ValueError: If the square of the similarity, the unit of the energy, is out of the dtype's range.
    """
    mean = float(kernel.diag(x.double()).mean())
    limits = torch.finfo(x.dtype)
    if mean != 0 and not math.sqrt(limits.tiny) < abs(mean) < math.sqrt(limits.max / 1e4):
        raise ValueError(
            f"The similarity f(x, x) is {mean:.1e} on average, whose square is out of the range of {x.dtype}: scale "
            "the data (scaling=global or feature; StandardScaler in scikit-learn), or use float64 (precision=64-true)."
        )
    return _RELATIVE_RIDGE * mean / num_neurons if mean > 0 else _RELATIVE_RIDGE


@torch.no_grad()
def check_range(kernel: Kernel, x: Tensor) -> None:
    """Refuse samples (samples, m) that are too large to be computed with.

    Raises:
        ValueError: If squares of a sample, or of its similarity to itself, are out of the dtype's range.
    """
    limit = torch.finfo(x.dtype).max / 1e4
    size = torch.maximum(x.square().sum(1), kernel.diag(x).square())
    if not bool((size < limit).all()):
        row = int((~(size < limit)).nonzero()[0])
        raise ValueError(
            f"Sample {row} has values of up to {float(x[row].abs().max()):.1e}, whose squares are out of the range of "
            f"{x.dtype}: remove it, or scale the data."
        )


@torch.no_grad()
def start(network: KSMNetwork, x: Tensor) -> None:
    """Begin well: idle landmarks moved, W (or q) at the optimal common scale, L at its exact value for a sample.

    The sample's second moment is drawn a little to a multiple of I, by ``n / (n + samples)``: directions that a small
    sample has not seen are then taken for ordinary ones, instead of answering the next batch with ``1 / ridge``.

    Args:
        network: The network, changed in place.
        x: A sample of the data (samples, m), without repetitions.
    """
    n = network.num_neurons
    relocate(network, x[: sample_size(n)], most=n)
    balance(network, x, n / (n + len(x)))


@torch.no_grad()
def balance(network: KSMNetwork, x: Tensor, shrinkage: float = 0.0) -> None:
    """Give the network the best common scale of W (or q) and the exact L for a sample.

    Args:
        network: The network, changed in place.
        x: A sample of the data (samples, m).
        shrinkage: How far, from 0 to 1, the sample's second moment is drawn to a multiple of I.
    """
    kernel = network.kernel
    total, count = similarity_moment(kernel, [x], network.W)
    q = network.q.double()
    B = q[:, None] * total * q / count
    mean = B.diagonal().mean()
    if not mean > 0:
        return  # nothing answers to anything; L is as good as any
    B = (1 - shrinkage) * B
    B.diagonal().add_(shrinkage * mean)
    c = optimal_scale(B, q.square() * kernel.diag(network.W))
    set_scale(kernel, network.W, network.q, c)
    network.L.copy_(solve_inner(c * c * B, kernel.diag(network.W), network.q, network.ridge).L)


@torch.no_grad()
def relocate(network: KSMNetwork, x: Tensor, most: int | None = None, **options: float) -> int:
    """Move landmarks that explain nothing to where the residual is largest; returns how many moved.

    A moved neuron gets the mean gain of all, no lateral connections, and the median self-inhibition.

    Args:
        network: The network, changed in place.
        x: A sample of the data (samples, m), without repetitions.
        most: Landmarks to move at most; a quarter of them unless given.
        options: Further ones of :func:`ksm_lightning.learning.relocation.find_moves`.
    """
    kernel, n = network.kernel, network.num_neurons
    most = max(1, n // 4) if most is None else most
    moves = dict(find_moves(kernel, x, network.W, most, **options))  # the last of each neuron
    if not moves:
        return 0
    gain = (network.q.square() * kernel.diag(network.W)).double().mean()
    inhibition = network.L.diagonal().median()
    neurons = torch.tensor(list(moves), device=x.device)
    places = x[torch.tensor(list(moves.values()), device=x.device)].to(network.W)
    ratio = gain / kernel.diag(places).double().clamp(min=torch.finfo(torch.float32).tiny)
    if not gain > 0:  # all neurons are silent, and the first ones that are not have their own length
        ratio = torch.ones_like(ratio)
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
    schedule: Schedule,
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
    updater = Updater(network, schedule.is_natural)
    number = first_update
    for block in _blocks(batches):
        with updater.block(block):
            for place in range(len(block)):
                if sample is not None and schedule.relocates_before(number):
                    relocate(network, sample(number))
                    updater.forget()
                rates = rates_at(schedule, network.kernel, number, network.num_neurons, block.shape[1])
                updater.update(place, rates, factorise=schedule.is_settling(number))
                number += 1


def train(
    kernel: Kernel,
    x: Tensor,
    num_neurons: int,
    schedule: Schedule,
    *,
    batch_size: int = 64,
    ridge: float | None = None,
    init: Initialiser | None = None,
    consolidate_at_end: bool | None = None,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> KSMNetwork:
    """A network trained on points in memory from start to end, without Lightning.

    Args:
        kernel: The similarity.
        x: The data (samples, m); the network lives on its device, in its dtype.
        num_neurons: Neurons n.
        schedule: The schedule; an adaptive one has its start and moves idle landmarks.
        batch_size: Points a batch, drawn independently each update.
        ridge: The paper's lambda; unless given, :func:`natural_ridge` with an adaptive schedule and 0.001 with phases.
        init: Where W starts; at data points unless given.
        consolidate_at_end: Whether to end with the exact L for all data; an adaptive schedule does unless told.
        seed: Seed of the start, the batches and the samples.
        progress: Called with the number of updates made since the last call.
    """
    generator = torch.Generator().manual_seed(seed)

    def sample(most: int) -> Tensor:
        return x[torch.randperm(len(x), generator=generator)[:most].to(x.device)]

    def batches(updates: int) -> Iterator[Tensor]:
        for _ in range(updates):
            if progress is not None:
                progress(1)
            yield x[torch.randint(len(x), (batch_size,), generator=generator).to(x.device)]

    candidates = sample(candidate_count(num_neurons))
    if ridge is None:
        ridge = natural_ridge(kernel, candidates, num_neurons) if schedule.is_natural else PAPER_RIDGE
    init = DataInit(candidates.cpu()) if init is None else init
    network = KSMNetwork(kernel, x.shape[1], num_neurons, ridge, init, generator=generator).to(x)
    if schedule.is_natural:
        start(network, candidates)
    for first, end in pairwise([0, *schedule.phase_ends, schedule.total_updates]):
        network.kernel = kernel.with_params(**schedule.kernel_params(first))
        learn(
            network, schedule, batches(end - first), first_update=first,
            sample=lambda update: sample(sample_size(num_neurons)),
        )  # fmt: skip
    if schedule.is_natural if consolidate_at_end is None else consolidate_at_end:
        consolidate(network, torch.split(x, 8192), lambda total: total)
    return network


def _blocks(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Batches (batch, m) together, as (updates, batch, m)."""
    waiting: list[Tensor] = []
    for batch in batches:
        if waiting and (len(waiting) == _AT_ONCE or batch.shape != waiting[0].shape):
            yield torch.stack(waiting)
            waiting = []
        waiting.append(batch)
    if waiting:
        yield torch.stack(waiting)
