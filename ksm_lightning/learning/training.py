"""Training without Lightning: the whole training of a network on points in memory."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, random_subset
from ksm_lightning.learning.acceleration import Acceleration
from ksm_lightning.learning.exact import balance
from ksm_lightning.learning.learner import Learner
from ksm_lightning.learning.native import is_worth_compiling
from ksm_lightning.learning.samples import Samples, in_blocks
from ksm_lightning.learning.schedule import Schedule, make_schedule
from ksm_lightning.learning.units import (
    candidate_count,
    has_few_samples,
    held_out_count,
    natural_ridge,
    points_to_draw,
)
from ksm_lightning.network import NETWORKS, PAPER_RIDGE, Bound, DataInit, Initialiser, KSMNetwork, check_bound
from ksm_lightning.network.initialisation import kernel_kmeans_plus_plus, lloyd
from ksm_lightning.network.rare_points import with_heaviest, without_heavy_at_end

# Number of batches in a block.
_BLOCK = 50
BATCH_SIZES: dict[Bound, int] = {"paper": 64, "tight": 1024}
"""Default number of points per update: the tight bound needs large batches for W."""
# Number of samples that determine the network if there is a landmark for every different one.
_MOST_OF_FEW = 100_000
_LLOYD_ITERATIONS = 100
_REFINEMENT = 10  # Lloyd iterations of a start at data points with natural steps


def start_at(
    points: Tensor, num_landmarks: int, num_neurons: int, bound: Bound, is_natural: bool, is_final: bool = False
) -> DataInit:
    """The start of W at data points.

    With natural steps landmarks are then moved to means of the points, and those of the tight bound, if there are 2,000
    points or more, partly to rare points, as the last points judge it (see :func:`~.units.held_out_count`).

    Args:
        points: A random sample of the data (samples, m).
        num_landmarks: Number of landmarks p.
        num_neurons: Number of neurons n.
        bound: ``paper`` or ``tight``.
        is_natural: Whether training has natural steps.
        is_final: Whether no update follows, so that the last points may be landmarks, too.
    """
    if not is_natural:
        return DataInit(points)
    count = held_out_count(len(points), num_landmarks) if bound == "tight" else 0
    if count == 0:
        return DataInit(points, _REFINEMENT)
    return DataInit(points[:-count], _REFINEMENT, points[-count:], num_neurons, is_final)


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
    keeps_landmarks: bool = False,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> KSMNetwork:
    """Train a network on points in memory, from start to end.

    Args:
        kernel: The similarity.
        x: The data (samples, m), or :class:`Samples`. The network has its device and dtype.
        num_neurons: Number of neurons n.
        schedule: The schedule. With natural steps it includes the start and moves idle landmarks.
        bound: ``paper``, or ``tight`` for a :class:`~ksm_lightning.network.TightNetwork`. From 2,000 points on, a run
            that follows its landmarks (``tight``, or ``keeps_landmarks``) compares them on up to a tenth of the points,
            which are not learned from.
        num_landmarks: Number of landmarks p. Default: n. Only the tight bound may have more.
        batch_size: Points per batch, drawn independently for each update. Default: 64, or 1,024 with the tight bound.
        ridge: The paper's lambda. Default: 0.001, or :func:`~ksm_lightning.learning.units.natural_ridge` with natural
            steps.
        init: Start of W. Default: at data points, with natural steps at KMeans-like centres and, with the tight bound,
            rare points.
        consolidate_at_end: Whether to end with the best common scale and the exact L for all data. Default: only with
            natural steps.
        keeps_landmarks: Whether the paper's bound, too, follows the best landmarks of the run and ends with them: for
            readouts that use nothing but W.
        seed: Seed of the start, the batches and the samples.
        progress: Called with the number of updates since the last call.
    """
    check_bound(bound)
    generator = torch.Generator().manual_seed(seed)
    batch = batch_size or BATCH_SIZES[bound]
    learner, judges, learned = _started_learner(
        kernel, x, num_neurons, schedule, bound=bound, num_landmarks=num_landmarks, batch=batch,
        ridge=ridge, init=init, keeps_landmarks=keeps_landmarks, generator=generator,
    )  # fmt: skip

    def batches() -> Iterator[Tensor]:
        for _ in range(schedule.total_updates):
            if progress is not None:
                progress(1)
            yield x[learned[torch.randint(len(learned), (batch,), generator=generator)].to(x.device)]

    def sample(update: int, batch: Tensor) -> Tensor:
        if update == 0 and len(judges):
            return judges
        drawn = torch.randperm(len(learned), generator=generator)
        return x[learned[drawn[: points_to_draw(update, learner.network.num_landmarks)]].to(x.device)]

    made = 0
    for block in _in_blocks(batches()):
        made += learner.learn(block, made, sample=sample)
    learner.keep_best()
    if schedule.is_natural if consolidate_at_end is None else consolidate_at_end:
        learner.finish(in_blocks(x))
    return learner.network


class Started(NamedTuple):
    """A learner that has started, and the data that it learns from."""

    learner: Learner
    judges: Tensor  # held-out and very heavy points (judges, m), on which it compares landmarks; none of few points
    learned: Tensor  # indices of the other points


def _started_learner(
    kernel: Kernel,
    x: Tensor | Samples,
    num_neurons: int,
    schedule: Schedule,
    *,
    bound: Bound,
    num_landmarks: int | None,
    batch: int,
    ridge: float | None,
    init: Initialiser | None,
    keeps_landmarks: bool,
    generator: torch.Generator,
    is_final: bool = False,
) -> Started:
    """A learner whose network has its first weights, from a sample of the data.

    Arguments as in :func:`train` and :func:`start_at`.
    """
    count = num_landmarks or num_neurons
    order = torch.randperm(len(x), generator=generator)
    chosen = order[: candidate_count(count, schedule.is_natural, x.shape[1])]
    candidates = x[chosen.to(x.device)]
    follows_landmarks = schedule.is_natural and (bound == "tight" or keeps_landmarks)
    rest = len(chosen) - (held_out_count(len(chosen), count) if follows_landmarks else 0)
    order = without_heavy_at_end(kernel, candidates, len(chosen) - rest)
    candidates, held_out = candidates[order], chosen[order.cpu()[rest:]]
    is_learned = torch.ones(len(x), dtype=torch.bool).index_fill_(0, held_out, False)
    # `start_at` of the tight bound splits the candidates in the same way, because their judges choose the start.
    seen = candidates if bound == "tight" else candidates[:rest]
    init = init or start_at(seen.cpu(), count, num_neurons, bound, schedule.is_natural, is_final)
    first_ridge = PAPER_RIDGE if ridge is None else ridge
    network = NETWORKS[bound](
        kernel, x.shape[1], num_neurons, first_ridge, init, generator=generator, num_landmarks=num_landmarks
    ).to(x[:1])
    acceleration: Acceleration = "auto" if is_worth_compiling(network, batch, schedule.total_updates) else "none"
    learner = Learner(
        network, schedule, chooses_ridge=ridge is None, acceleration=acceleration, keeps_landmarks=keeps_landmarks
    )
    if learner.stage == "unstarted":
        learner.start(candidates)
    judges = with_heaviest(kernel, candidates[rest:], candidates[:rest]) if len(held_out) else candidates[:0]
    return Started(learner, judges, is_learned.nonzero()[:, 0])


def _draw(x: Tensor | Samples, most: int, generator: torch.Generator) -> Tensor:
    """A random sample of the points (samples, m), in random order."""
    return x[torch.randperm(len(x), generator=generator)[:most].to(x.device)]


def train_on_few(
    kernel: Kernel,
    x: Tensor | Samples,
    num_neurons: int,
    updates: int,
    *,
    bound: Bound = "paper",
    num_landmarks: int | None = None,
    batch_size: int | None = None,
    keeps_landmarks: bool = False,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> KSMNetwork:
    """Train with the adaptive schedule, unless there is a landmark for every different sample.

    Then there is nothing to learn: the landmarks are the samples, see :func:`network_at`. Without updates, landmarks
    stay at the start (``init`` of :func:`train`), with the exact L (and Q) for all data. Those of a
    kernel that is not differentiable are samples chosen by kernel k-means++. The arguments are those of :func:`train`.
    """
    p = num_landmarks or num_neurons
    different = torch.unique(x[: 4 * p], dim=0)
    if len(different) <= p < len(x):
        for block in in_blocks(x):
            different = torch.unique(torch.cat([different, block]), dim=0)
            if len(different) > p:
                break
    is_fixed = not kernel.is_differentiable or (updates == 0 and has_few_samples(len(x), num_neurons))
    if len(different) > p and is_fixed:
        different = _fixed_landmarks(kernel, x, p, torch.Generator().manual_seed(seed))
    if len(different) <= p:
        return network_at(kernel, different, x[random_subset(len(x), _MOST_OF_FEW)], num_neurons, bound)
    if updates == 0:
        learner = _started_learner(
            kernel, x, num_neurons, make_schedule(None, 1, bound), bound=bound, num_landmarks=p, batch=1,
            ridge=None, init=None, keeps_landmarks=keeps_landmarks, generator=torch.Generator().manual_seed(seed),
            is_final=True,
        ).learner  # fmt: skip
        learner.finish(in_blocks(x))
        return learner.network
    return train(
        kernel, x, num_neurons, make_schedule(None, updates, bound), bound=bound, num_landmarks=p,
        batch_size=batch_size, keeps_landmarks=keeps_landmarks, seed=seed, progress=progress,
    )  # fmt: skip


def _fixed_landmarks(kernel: Kernel, x: Tensor | Samples, count: int, generator: torch.Generator) -> Tensor:
    """Landmarks (count, m) that do not learn: means of near samples, or samples if the kernel has no derivatives.

    With a radial kernel, Lloyd's method starts at uniformly drawn samples: k-means++ prefers outliers, and a landmark
    at one of few samples represents that sample better than new ones.
    """
    candidates = torch.unique(_draw(x, candidate_count(count, True, x.shape[1]), generator), dim=0)
    if kernel.is_radial and kernel.is_differentiable:
        chosen = torch.randperm(len(candidates), generator=generator)[:count].to(candidates.device)
    else:
        chosen = kernel_kmeans_plus_plus(kernel, candidates, count, generator=generator)
    W = candidates[chosen]
    return lloyd(kernel, candidates, W, _LLOYD_ITERATIONS) if kernel.is_differentiable else torch.unique(W, dim=0)


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
