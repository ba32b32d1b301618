"""Training without Lightning: the whole training of a network on points in memory."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, kernel_sample, random_subset
from ksm_lightning.kernels.limits import NUMBERS_AT_ONCE, POINTS_PER_LANDMARK, UPDATES_AT_ONCE
from ksm_lightning.learning.acceleration import Acceleration
from ksm_lightning.learning.descent import minimise_bound
from ksm_lightning.learning.exact import balance
from ksm_lightning.learning.learner import Learner
from ksm_lightning.learning.native import is_worth_compiling
from ksm_lightning.learning.samples import Samples, in_blocks
from ksm_lightning.learning.schedule import Schedule, make_schedule
from ksm_lightning.learning.units import candidate_count, natural_ridge, sample_size
from ksm_lightning.network import NETWORKS, PAPER_RIDGE, Bound, DataInit, Initialiser, KSMNetwork, check_bound
from ksm_lightning.network.initialisation import lloyd
from ksm_lightning.network.readout_matrices import READOUT_SAMPLE

BATCH_SIZES: dict[Bound, int] = {"paper": 64, "tight": 1024}
"""Default number of points per update: the tight bound needs large batches for W."""
# Lloyd iterations of a start at data points with natural steps.
_REFINEMENT = 10
DESCENT_ITERATIONS = 25
"""Default number of iterations of this minimisation, after which features gain little."""


def start_at(points: Tensor, kernel: Kernel, is_natural: bool) -> DataInit:
    """The start of W at data points (samples, m), which natural steps then move to means of near points."""
    return DataInit(points, _REFINEMENT if is_natural and kernel.is_differentiable else 0)


def train(
    kernel: Kernel,
    x: Tensor | Samples,
    num_neurons: int,
    schedule: Schedule,
    *,
    bound: Bound = "paper",
    num_landmarks: int | None = None,
    batch_size: int | None = None,
    ridge: float | None = None,
    init: Initialiser | None = None,
    consolidate_at_end: bool | None = None,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> KSMNetwork:
    """Train a network online on points in memory, from start to end.

    Args:
        kernel: The similarity.
        x: The data (samples, m), or :class:`Samples`. The network has its device and dtype.
        num_neurons: Number of neurons n.
        schedule: The schedule. With natural steps it includes the start and moves idle landmarks.
        bound: ``paper``, or ``tight`` for a :class:`~ksm_lightning.network.TightNetwork`.
        num_landmarks: Number of landmarks p. Default: n. Only the tight bound may have more.
        batch_size: Points per batch, drawn independently for each update. Default: 64, or 1,024 with the tight bound.
        ridge: The paper's lambda. Default: 0.001, or :func:`~ksm_lightning.learning.units.natural_ridge` with natural
            steps.
        init: Start of W. Default: at data points, see :class:`~ksm_lightning.network.DataInit`.
        consolidate_at_end: Whether to end with the best common scale and the exact L for all data. Default: only with
            natural steps.
        seed: Seed of the start, the batches and the samples.
        progress: Called with the number of updates since the last call.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = batch_size or BATCH_SIZES[check_bound(bound)]
    candidates = _candidates(x, num_landmarks or num_neurons, generator)
    network = _new_network(
        kernel, candidates, num_neurons, num_landmarks, bound, schedule.is_natural, ridge, init, generator
    )
    acceleration: Acceleration = "auto" if is_worth_compiling(network, batch, schedule.total_updates) else "none"
    learner = Learner(network, schedule, chooses_ridge=ridge is None, acceleration=acceleration)
    if learner.stage == "unstarted":
        learner.start(candidates)

    def batches() -> Iterator[Tensor]:
        for _ in range(schedule.total_updates):
            if progress is not None:
                progress(1)
            yield x[torch.randint(len(x), (batch,), generator=generator).to(x.device)]

    made, most = 0, max(1, min(UPDATES_AT_ONCE, NUMBERS_AT_ONCE // (batch * x.shape[1])))
    for block in _in_blocks(batches(), most):
        made += learner.learn(block, made, sample=lambda *_: _draw(x, sample_size(network.num_landmarks), generator))
    if schedule.is_natural if consolidate_at_end is None else consolidate_at_end:
        learner.finish(in_blocks(x))
    return network


def fit_network(
    kernel: Kernel,
    x: Tensor | Samples,
    num_neurons: int,
    updates: int,
    *,
    bound: Bound = "paper",
    num_landmarks: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> KSMNetwork:
    """Fit a network to points in memory, for an estimator that need not learn online.

    If there is a landmark for every different sample, nothing is learned, see :func:`network_at`. The tight bound is
    minimised on a sample of 5,000 points, by up to ``updates`` iterations of
    :func:`~ksm_lightning.learning.descent.minimise_bound` after the start that every run has, if that is at least 10
    points per neuron. With fewer samples than that, landmarks are KMeans centres. Those of a kernel that is not
    differentiable stay at samples. The paper's bound learns by :func:`train` with the adaptive schedule.

    Other arguments as in :func:`train`.
    """
    generator, p = torch.Generator().manual_seed(seed), num_landmarks or num_neurons
    different = _few_different(x, p)
    if different is not None:
        return network_at(kernel, different, x[random_subset(len(x), candidate_count(p))], num_neurons, bound)
    if bound == "paper" and kernel.is_differentiable:
        return train(
            kernel, x, num_neurons, make_schedule(None, updates), batch_size=batch_size, seed=seed, progress=progress
        )
    candidates, is_few = _candidates(x, p, generator), len(x) < POINTS_PER_LANDMARK * num_neurons
    init: Initialiser | None = None
    if is_few and kernel.is_differentiable:  # KMeans from random samples: pivots prefer samples unlike any new one
        init = lambda *_: lloyd(kernel, candidates, candidates[:p], iterations=100)  # noqa: E731
    network = _new_network(kernel, candidates, num_neurons, num_landmarks, bound, True, None, init, generator)
    learner = Learner(network, make_schedule(None, 1, bound), chooses_ridge=True, acceleration="none")
    learner.start(candidates)
    if kernel.is_differentiable and min(len(x), READOUT_SAMPLE) >= POINTS_PER_LANDMARK * num_neurons:
        W = minimise_bound(
            kernel,
            kernel_sample(kernel, candidates, READOUT_SAMPLE),
            network.W.detach(),
            num_neurons,
            network.ridge,
            updates,
            progress,
        )
        network.W.data.copy_(W)
    learner.finish(in_blocks(x))
    return network


def _candidates(x: Tensor | Samples, num_landmarks: int, generator: torch.Generator) -> Tensor:
    """The random sample (samples, m) that a start uses."""
    return _draw(x, candidate_count(num_landmarks, x.shape[1]), generator)


def _draw(x: Tensor | Samples, most: int, generator: torch.Generator) -> Tensor:
    """A random sample of the points (samples, m), in random order."""
    return x[torch.randperm(len(x), generator=generator)[:most].to(x.device)]


def _new_network(
    kernel: Kernel, candidates: Tensor, num_neurons: int, num_landmarks: int | None, bound: Bound, is_natural: bool,
    ridge: float | None, init: Initialiser | None, generator: torch.Generator,
) -> KSMNetwork:  # fmt: skip
    """A network like the candidates (samples, m), with its first landmarks."""
    m, count = candidates.shape[1], num_landmarks or num_neurons
    W = (init or start_at(candidates.cpu(), kernel, is_natural))(kernel, count, m, generator)
    ridge = PAPER_RIDGE if ridge is None else ridge
    network = NETWORKS[bound](kernel, m, num_neurons, ridge, lambda *_: W, num_landmarks=num_landmarks)
    network.to(candidates[:1]).W.data.copy_(W)  # the constructor makes float32 of them
    return network


def _few_different(x: Tensor | Samples, most: int) -> Tensor | None:
    """The different samples, if there are at most this many."""
    different = torch.unique(x[: 4 * most], dim=0)
    if len(x) > 4 * most >= len(different):
        for block in in_blocks(x):
            if len(different) > most:
                break
            different = torch.unique(torch.cat([different, block]), dim=0)
    return different if len(different) <= most else None


@torch.no_grad()
def network_at(kernel: Kernel, points: Tensor, x: Tensor, num_neurons: int, bound: Bound) -> KSMNetwork:
    """A network with a landmark at each of few points, and the exact L (and Q) for the data.

    It has no more neurons than landmarks: those that no sample determines would respond to new points by rounding
    errors.

    Args:
        kernel: The similarity.
        points: Different points (p, m).
        x: The data (samples, m).
        num_neurons: Largest number of neurons.
        bound: ``paper``, which has as many neurons as landmarks, or ``tight``.
    """
    neurons = len(points) if bound == "paper" else min(num_neurons, len(points))
    ridge = natural_ridge(kernel, x, neurons, bound)
    count, features = points.shape
    network = NETWORKS[bound](kernel, features, neurons, ridge, lambda *_: points, num_landmarks=count).to(points)
    network.W.copy_(points)  # the constructor makes float32 of them
    balance(network, x)
    return network


def _in_blocks(batches: Iterable[Tensor], updates: int) -> Iterator[Tensor]:
    """Batches (batch, m) as blocks (updates, batch, m) of up to this number of updates."""
    waiting: list[Tensor] = []
    for batch in batches:
        if len(waiting) == updates:
            yield torch.stack(waiting)
            waiting = []
        waiting.append(batch)
    if waiting:
        yield torch.stack(waiting)
