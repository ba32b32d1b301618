"""KMeans with several starts in parallel, and the accuracy of clusters against labels."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import full_precision


class Clusters(NamedTuple):
    """The best of several runs of KMeans."""

    centres: Tensor  # (clusters, features)
    assignment: Tensor  # cluster of each sample (samples,)
    energy: float  # sum of squared distances to the centres


@torch.no_grad()
def kmeans(
    x: Tensor,
    clusters: int,
    *,
    starts: int = 1,
    max_iterations: int = 100,
    seed: int = 0,
    check: Callable[[], object] = lambda: None,
) -> Clusters:
    """Lloyd's method from ``starts`` random sets of samples in parallel; returns the run with the least energy.

    Args:
        x: Samples (samples, features).
        clusters: Number of clusters, at most the number of samples.
        starts: Number of random starts.
        max_iterations: Maximum number of iterations.
        seed: Seed of a separate random stream.
        check: Called before each iteration; it may raise an exception to give up.
    """
    samples, features = x.shape
    if not 1 <= clusters <= samples:
        raise ValueError(f"KMeans needs between 1 and {samples} clusters for {samples} samples, got {clusters}.")
    generator = torch.Generator().manual_seed(seed)
    first = torch.stack([torch.randperm(samples, generator=generator)[:clusters] for _ in range(starts)])
    with full_precision(x.device):
        offset = x.mean(0)
        x = x - offset
        centres = x[first.to(x.device)]  # (starts, clusters, features)
        assignment = torch.full((samples, starts), -1, device=x.device)
        for _ in range(max_iterations):
            check()
            distance = _distances(x, centres)  # (samples, starts, clusters), without |x|^2
            nearest = distance.argmin(2)
            if bool((nearest == assignment).all()):
                break
            assignment = nearest
            one_hot = torch.zeros_like(distance).scatter_(2, assignment[..., None], 1.0)  # (samples, starts, clusters)
            counts = one_hot.sum(0)[..., None]
            sums = (one_hot.flatten(1).mT @ x).view(starts, clusters, features)
            # A centre without samples does not move.
            centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
        least, assignment = (_distances(x, centres) + x.square().sum(1)[:, None, None]).min(2)
        energy = least.clamp(min=0).sum(0, dtype=torch.float64)  # (starts,)
        best = int(energy.argmin())
    return Clusters(centres[best] + offset, assignment[:, best], float(energy[best]))


def _distances(x: Tensor, centres: Tensor) -> Tensor:
    starts, clusters, features = centres.shape
    flat = centres.view(-1, features)
    return torch.addmm(flat.square().sum(1), x, flat.mT, alpha=-2).view(-1, starts, clusters)


def matched_accuracy(assignment: Tensor, labels: Tensor) -> float:
    """Accuracy under the best one-to-one matching of clusters (samples,) to labels (samples,).

    Example:
        >>> matched_accuracy(torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 1, 0]))
        0.75
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    rows, columns = int(assignment.max()) + 1, int(labels.max()) + 1
    pairs = assignment.cpu() * columns + labels.cpu()
    counts = torch.bincount(pairs, minlength=rows * columns).view(rows, columns).numpy()
    return float(counts[linear_sum_assignment(counts, maximize=True)].sum() / len(labels))
