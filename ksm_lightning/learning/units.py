"""Sizes that follow from the data and the number of neurons: the default ridge, samples, the range of values."""

import math
import warnings

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, RadialKernel, random_subset
from ksm_lightning.network import Bound
from ksm_lightning.network.landmark_error import MANY_LANDMARKS

# The ridge of the adaptive schedule as a fraction of one neuron's share of the similarity, <f(x, x)> / n. The error of
# the tight bound has no other floor than the ridge.
_RELATIVE_RIDGE: dict[Bound, float] = {"paper": 0.005, "tight": 1e-4}
# Warn if the rounding error of a squared distance, in units of sigma, exceeds this.
_IMPRECISE = 0.1


@torch.no_grad()
def natural_ridge(kernel: Kernel, x: Tensor, num_neurons: int, bound: Bound = "paper") -> float:
    """A ridge in the units of the similarity, ``0.005 <f(x, x)> / n``, or ``0.0001 <f(x, x)> / n`` for the tight bound.

    It is small compared with a typical eigenvalue of L.

    Raises ValueError if the square of the similarity, the unit of the energy, is out of the dtype's range.
    """
    _check_kernel(kernel, x)
    mean = float(kernel.diag(x.double()).mean())
    smallest, largest = _similarity_range(x.dtype)
    if mean != 0 and not smallest < abs(mean) < largest:
        raise ValueError(
            f"The similarity f(x, x) is {mean:.1e} on average, and its powers are out of the range of {x.dtype}: scale "
            "the data (scaling=global or feature; StandardScaler in scikit-learn), or use float64 (precision=64-true)."
        )
    relative = _RELATIVE_RIDGE[bound]
    return relative * mean / num_neurons if mean > 0 else relative


def _similarity_range(dtype: torch.dtype) -> tuple[float, float]:
    """Smallest and largest similarity: weights hold its square in ``dtype``, and its fourth power occurs in float64."""
    own, wide = torch.finfo(dtype), torch.finfo(torch.float64)
    return max(math.sqrt(own.tiny), wide.tiny**0.25), min(math.sqrt(own.max / 1e4), (wide.max / 1e8) ** 0.25)


@torch.no_grad()
def check_range(kernel: Kernel, x: Tensor) -> None:
    """Raise ValueError if powers of a sample (samples, m), or of ``f(x, x)``, are out of the dtype's range.

    Warns if the samples are so far apart, in units of a radial kernel's width, that their distances are rounding
    errors.
    """
    _check_kernel(kernel, x)
    is_large = (x.square().sum(1) >= torch.finfo(x.dtype).max / 1e4) | (kernel.diag(x) >= _similarity_range(x.dtype)[1])
    if bool(is_large.any()):
        row = int(is_large.nonzero()[0])
        raise ValueError(
            f"Sample {row} has values of up to {float(x[row].abs().max()):.1e}, whose powers are out of the range of "
            f"{x.dtype}: remove it, or scale the data."
        )
    if isinstance(kernel, RadialKernel):
        _check_spread(kernel, x)


def _check_spread(kernel: RadialKernel, x: Tensor) -> None:
    """Raise ValueError, or warn, if the largest squared distance in units of sigma is too large for x's dtype."""
    limits, unit = torch.finfo(x.dtype), 1 / kernel.sigma**2
    centred = x - x.mean(0, dtype=torch.float64).to(x)
    spread = float(torch.linalg.vector_norm(centred, dim=1, dtype=torch.float64).max()) ** 2 * unit
    # Gradients contain R / sigma^2, and steps their squares.
    if not max(spread * spread, spread * unit) < limits.max / 1e4:
        raise ValueError(
            f"The samples are {math.sqrt(spread):.0e} widths of {kernel} apart, which is out of the range of "
            f"{x.dtype}: choose a larger width."
        )
    if limits.eps * spread > _IMPRECISE:
        warnings.warn(
            f"The samples are up to {math.sqrt(spread):.0e} widths of {kernel} apart, and {x.dtype} cannot tell equal "
            "samples from neighbours: choose a larger width, or remove outliers.",
            stacklevel=4,
        )


def _check_kernel(kernel: Kernel, x: Tensor) -> None:
    """Raise ValueError if a parameter of the kernel, such as ``1 / sigma^2``, is out of the range of x's dtype."""
    try:
        kernel(x[:1], x[:1])
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ValueError(
            f"{kernel} is out of the range of {x.dtype}: change its parameters and scale the data alike, or use "
            "float64 (precision=64-true)."
        ) from error


def points_to_draw(update: int, num_landmarks: int) -> int:
    """Number of points of the sample of an update: update 0 stands for the fixed one that judges landmarks."""
    return sample_size(num_landmarks) if update else judge_count(num_landmarks)


def choose_points(points: Tensor, update: int, num_landmarks: int) -> Tensor:
    """The sample of an update from the points (samples, m) of a batch; empty if they are too few to judge landmarks."""
    if update == 0 and len(points) < _FEWEST_JUDGES:
        return points[:0]
    return points[random_subset(len(points), points_to_draw(update, num_landmarks)).to(points.device)]


def sample_size(num_landmarks: int) -> int:
    """Number of points that the start and the search for idle landmarks use."""
    return max(1000, 2 * num_landmarks)


# Fewer points of a batch than this do not decide whether landmarks have become better.
_FEWEST_JUDGES = 500
_MOST_NUMBERS = 2**27  # in the points that landmarks are chosen from, 0.5 GB of float32
# From 2,048 landmarks on, the start takes fewer points per landmark: its cost grows with their product.
_MANY_CANDIDATES, _MANY_STARTS = 40 * MANY_LANDMARKS, 8 * MANY_LANDMARKS


def candidate_count(num_landmarks: int, is_refined: bool = False, in_features: int = 1) -> int:
    """Number of points that the first landmarks are chosen from; more if these are refined by Lloyd iterations."""
    fewest = max(2000, min(10 * num_landmarks, max(_MANY_CANDIDATES, 4 * num_landmarks)))
    wanted = min(max(20_000, 40 * num_landmarks), _MANY_CANDIDATES, _MOST_NUMBERS // in_features)
    return max(fewest, wanted) if is_refined else fewest


def tight_updates(num_landmarks: int) -> int:
    """Number of updates with batches of 1,024 points after which features of the tight bound gain little more."""
    return max(25, min(200, 20_000 // num_landmarks))


# Below this number of samples per feature, landmarks that move fit the samples instead of new points. Above this number
# of landmarks, the updates that a fit has time for do not improve the start (scripts/benchmark/BOARD.md).
_SAMPLES_PER_FEATURE, _MOST_MOVED = 12, 512


def has_few_samples(samples: int, num_features: int) -> bool:
    """Whether there are too few samples to learn from: the error on new points would grow with the updates."""
    return samples < _SAMPLES_PER_FEATURE * num_features


def worthwhile_updates(samples: int, num_features: int, num_landmarks: int) -> int:
    """:func:`tight_updates`, or 0 if features of landmarks at the start are as good on new points."""
    is_start_enough = has_few_samples(samples, num_features) or num_landmarks > _MOST_MOVED
    return 0 if is_start_enough else tight_updates(num_landmarks)


def tight_batch(num_landmarks: int) -> int:
    """Points per update of the tight bound: W's direction needs several times as many as landmarks."""
    return max(256, min(1024, 8 * num_landmarks))


def judge_count(num_landmarks: int) -> int:
    """Number of points that decide whether landmarks have become better or worse. Fewer do not show rare points."""
    return min(4096, max(1000, min(2000, 40 * num_landmarks), 2 * num_landmarks))


# Part of the data that judges landmarks without being learned from, unless that would be fewer points than this.
_HELD_OUT, _FEWEST_HELD_OUT = 0.1, 200


def held_out_count(samples: int, num_landmarks: int) -> int:
    """Number of these samples that judge landmarks and are not learned from; 0 if there are too few samples.

    Copies of a sample that judges are not held out with it.
    """
    count = min(judge_count(num_landmarks), int(_HELD_OUT * samples))
    return count if count >= _FEWEST_HELD_OUT and samples - count > num_landmarks else 0


def start_count(num_landmarks: int) -> int:
    """Number of points that the first scale, gains and L are computed from."""
    return max(4000, min(8 * num_landmarks, max(_MANY_STARTS, 2 * num_landmarks)))


def shrinkage_for(num_landmarks: int, samples: int) -> float:
    """How far the second moment of a sample is moved towards a multiple of I, see :func:`~.exact.balance`."""
    return num_landmarks / (num_landmarks + samples)
