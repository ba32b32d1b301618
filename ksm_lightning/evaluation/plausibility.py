"""Warnings about kernels that are too narrow or too wide, and features that are worse than random landmarks."""

import math
import warnings
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, random_subset
from ksm_lightning.kernels.limits import NOTICEABLE, TILE
from ksm_lightning.kernels.width import Rows, typical_width
from ksm_lightning.network.landmark_error import LandmarkError
from ksm_lightning.network.readout import LandmarkFeatures

# Independent directions per feature from which on a kernel is too narrow.
_SPREAD = 10.0
FAR_ABOVE = 2.0
"""An error is far above another one if it exceeds this multiple of it."""


class Similarity(NamedTuple):
    """Similarity of two different points, normalised so that ``f(x, x)`` is 1."""

    mean: float
    mean_square: float
    distance: float  # median distance between two points


@torch.no_grad()
def compare_points(kernel: Kernel, x: Tensor) -> Similarity:
    """Measure the kernel on all pairs of different points of ``x`` (samples, m), at least two points."""
    x = x.double()
    length = kernel.diag(x).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    above = torch.triu_indices(len(x), len(x), offset=1, device=x.device)
    pairs = (kernel(x, x) / length / length[:, None])[above[0], above[1]]
    return Similarity(float(pairs.mean()), float(pairs.square().mean()), float(torch.nn.functional.pdist(x).median()))


def width_problem(similarity: Similarity, count: int) -> Literal["narrow", "wide"] | None:
    """Whether a kernel is too narrow or too wide to be approximated by this number of features."""
    if not similarity.distance > 0:
        return None  # all points are equal, so no width is better than another
    if similarity.mean_square * _SPREAD * count < 1:
        return "narrow"
    return "wide" if similarity.mean > 1 - NOTICEABLE else None


def width_advice(kernel: Kernel, x: Rows, count: int) -> str | None:
    """A sentence if a kernel with a width is too narrow or too wide for ``count`` features of data x (samples, m).

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> width_advice(GaussianKernel(1.0), torch.arange(9.0)[:, None], 4) is None
        True
        >>> print(width_advice(GaussianKernel(1e-3), torch.arange(9.0)[:, None], 4))
        GaussianKernel(sigma=0.001) is too narrow for 4 features: two different points have a root-mean-square \
similarity of 0. Try sigma=2.1, which sigma='auto' chooses.
    """
    is_few = len(x) <= count  # each of them can have a feature of its own
    sample = x[random_subset(len(x), TILE)]
    if len(sample) < 2 or "sigma" not in kernel.params():
        return None
    similarity = compare_points(kernel, sample)
    problem, width = width_problem(similarity, count), typical_width(x)
    if problem is None or width is None or (problem == "narrow" and is_few):
        return None
    measured = f"too wide: two different points have a mean similarity of {similarity.mean:.4g}, and equal points 1"
    if problem == "narrow":
        measured = (
            f"too narrow for {count} features: two different points have a root-mean-square similarity of "
            f"{math.sqrt(similarity.mean_square):.2g}"
        )
    return f"{kernel} is {measured}. Try sigma={width:g}, which sigma='auto' chooses."


@torch.no_grad()
def warn_if_worse_than_uniform(features: LandmarkFeatures, x: Tensor) -> None:
    """Warn if the kernel error of features on samples (samples, m) is far above that of random samples as landmarks.

    The responses of the paper's network have an error that no number of landmarks or updates lowers, where the kernel
    is narrow or the data are simple.
    """
    x = x[random_subset(len(x), TILE)]
    error = LandmarkError(features.kernel, x)
    ours = error.of_features(features(error.x).double())
    count = features.M.shape[1]
    uniform = min(error(x[random_subset(len(x), count, seed=seed)]) for seed in range(5))
    if ours > max(FAR_ABOVE * uniform, NOTICEABLE):
        warnings.warn(
            f"The kernel error of these features is {ours:.2g}, and that of {count} random samples as landmarks "
            f"{uniform:.2g}: use readout='nystroem' or 'least_squares', or bound='tight'.",
            stacklevel=2,
        )
