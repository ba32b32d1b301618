"""Sizes that follow from the data and the number of neurons: the default ridge, samples, the range of values."""

import math
import warnings

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, RadialKernel
from ksm_lightning.kernels.limits import BYTES_AT_ONCE
from ksm_lightning.network import Bound

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


def sample_size(num_landmarks: int) -> int:
    """Number of points that idle landmarks are searched on during a run, and that a stream remembers."""
    return max(1000, 2 * num_landmarks)


CANDIDATES = 20_000  # or as many as fill 0.5 GB in float32


def candidate_count(num_landmarks: int, in_features: int = 1) -> int:
    """Number of points that a start uses: landmarks are chosen from them, and scale, gains and L fitted to them."""
    return max(4 * num_landmarks, min(CANDIDATES, BYTES_AT_ONCE // (4 * in_features)))


def tight_batch(num_landmarks: int) -> int:
    """Points per update of the tight bound: W's direction needs several times as many as landmarks."""
    return max(256, min(1024, 8 * num_landmarks))


def shrinkage_for(num_landmarks: int, samples: int) -> float:
    """How far the second moment of a sample is moved towards a multiple of I, see :func:`~.exact.balance`."""
    return num_landmarks / (num_landmarks + samples)
