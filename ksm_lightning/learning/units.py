"""Sizes that follow from the data and the number of neurons: the default ridge, samples, the range of values."""

import math

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel

# The ridge of the adaptive schedule as a fraction of one neuron's share of the similarity, <f(x, x)> / n.
_RELATIVE_RIDGE = 0.005


@torch.no_grad()
def natural_ridge(kernel: Kernel, x: Tensor, num_neurons: int) -> float:
    """A ridge in the units of the similarity, ``0.005 <f(x, x)> / n``; small compared with a typical eigenvalue of L.

    Raises ValueError if the square of the similarity, the unit of the energy, is out of the dtype's range.
    """
    mean = float(kernel.diag(x.double()).mean())
    limits = torch.finfo(x.dtype)
    if mean != 0 and not math.sqrt(limits.tiny) < abs(mean) < math.sqrt(limits.max / 1e4):
        raise ValueError(
            f"The similarity f(x, x) is {mean:.1e} on average, and its square is out of the range of {x.dtype}: scale "
            "the data (scaling=global or feature; StandardScaler in scikit-learn), or use float64 (precision=64-true)."
        )
    return _RELATIVE_RIDGE * mean / num_neurons if mean > 0 else _RELATIVE_RIDGE


@torch.no_grad()
def check_range(kernel: Kernel, x: Tensor) -> None:
    """Raise ValueError if the square of a sample (samples, m), or of ``f(x, x)``, is out of the dtype's range."""
    limit = torch.finfo(x.dtype).max / 1e4
    size = torch.maximum(x.square().sum(1), kernel.diag(x).square())
    if not bool((size < limit).all()):
        row = int((~(size < limit)).nonzero()[0])
        raise ValueError(
            f"Sample {row} has values of up to {float(x[row].abs().max()):.1e}, whose squares are out of the range of "
            f"{x.dtype}: remove it, or scale the data."
        )


def sample_size(num_neurons: int) -> int:
    """Number of points that the start and the search for idle landmarks use."""
    return max(1000, 2 * num_neurons)


def candidate_count(num_neurons: int) -> int:
    """Number of points that the first landmarks are chosen from. More take time and change nothing."""
    return max(2000, 10 * num_neurons)
