"""Training without Lightning: the whole training of a network on points in memory."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.learning.learner import Learner
from ksm_lightning.learning.schedule import AdaptiveSchedule, Schedule
from ksm_lightning.learning.units import candidate_count, sample_size
from ksm_lightning.network import PAPER_RIDGE, DataInit, Initialiser, KSMNetwork

# Number of batches in a block.
_BLOCK = 50


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
    """Train a network on points in memory, from start to end.

    Args:
        kernel: The similarity.
        x: The data (samples, m). The network has its device and dtype.
        num_neurons: Number of neurons n.
        schedule: The schedule. With natural steps it includes the start and moves idle landmarks.
        batch_size: Points per batch, drawn independently for each update.
        ridge: The paper's lambda. Default: 0.001, or :func:`~ksm_lightning.learning.units.natural_ridge` with natural
            steps.
        init: Start of W. Default: at data points.
        consolidate_at_end: Whether to end with the exact L for all data. Default: only with natural steps.
        seed: Seed of the start, the batches and the samples.
        progress: Called with the number of updates since the last call.
    """
    generator = torch.Generator().manual_seed(seed)

    def sample(most: int) -> Tensor:
        return x[torch.randperm(len(x), generator=generator)[:most].to(x.device)]

    def batches() -> Iterator[Tensor]:
        for _ in range(schedule.total_updates):
            if progress is not None:
                progress(1)
            yield x[torch.randint(len(x), (batch_size,), generator=generator).to(x.device)]

    candidates = sample(candidate_count(num_neurons))
    init = DataInit(candidates.cpu()) if init is None else init
    first_ridge = PAPER_RIDGE if ridge is None else ridge
    network = KSMNetwork(kernel, x.shape[1], num_neurons, first_ridge, init, generator=generator).to(x)
    learner = Learner(network, schedule, chooses_ridge=ridge is None)
    if learner.stage == "unstarted":
        learner.start(candidates)
    made = 0
    for block in _in_blocks(batches()):
        made += learner.learn(block, made, sample=lambda update, batch: sample(sample_size(num_neurons)))
    if schedule.is_natural if consolidate_at_end is None else consolidate_at_end:
        learner.finish(torch.split(x, 8192))
    return network


@torch.no_grad()
def train_on_few(
    kernel: Kernel,
    x: Tensor,
    num_neurons: int,
    updates: int,
    *,
    batch_size: int = 64,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> KSMNetwork:
    """Train with the adaptive schedule, also on fewer different samples than neurons.

    In that case as many neurons learn as there are different samples, and the others are silent. Landmarks that no
    sample determines would respond to new points by rounding errors. The arguments are those of :func:`train`.
    """
    different = len(torch.unique(x[: 4 * num_neurons], dim=0))
    if different < num_neurons <= len(x):
        different = len(torch.unique(x, dim=0))
    few = min(num_neurons, different)
    trained = train(kernel, x, few, AdaptiveSchedule(updates), batch_size=batch_size, seed=seed, progress=progress)
    if few == num_neurons:
        return trained
    network = KSMNetwork(
        kernel, x.shape[1], num_neurons, trained.ridge, DataInit(x), generator=torch.Generator().manual_seed(seed)
    ).to(trained.W)
    # A silent neuron has a landmark of length 0, or a gain of 0 where lengths do not matter.
    network.W[few:] *= 0 if kernel.is_homogeneous else 1
    network.q.copy_(torch.ones_like(network.q) if kernel.is_homogeneous else torch.zeros_like(network.q))
    network.L.copy_(trained.L.diagonal().median() * torch.eye(num_neurons).to(trained.L))
    network.W[:few], network.q[:few], network.L[:few, :few] = trained.W, trained.q, trained.L
    return network


def _in_blocks(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Batches (batch, m) as blocks (updates, batch, m)."""
    waiting: list[Tensor] = []
    for batch in batches:
        if len(waiting) == _BLOCK:
            yield torch.stack(waiting)
            waiting = []
        waiting.append(batch)
    if waiting:
        yield torch.stack(waiting)
