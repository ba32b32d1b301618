"""Warnings about features that are worse than they could easily be."""

import warnings

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, random_subset
from ksm_lightning.network.landmark_error import LandmarkError
from ksm_lightning.network.readout import LandmarkFeatures

# Number of points that are looked at.
_POINTS = 500
# Warn if the mean similarity of different samples is below this fraction of the self-similarity. On half moons it is
# 0.1 for the best width and 0.002 for a width that is ten times too small.
_TOO_NARROW = 3e-4
# Warn if an error exceeds this multiple of that of uniform landmarks. Below the other number it does not matter.
_WORSE, _SMALL = 1.7, 2e-2


def warn_if_too_narrow(kernel: Kernel, x: Tensor) -> None:
    """Warn if a radial kernel is almost 0 between different samples (samples, m)."""
    x = x[random_subset(len(x), _POINTS)]
    if len(x) < 2 or not kernel.is_radial:
        return
    F = kernel(x, x)
    others = (F.abs().sum() - F.diagonal().abs().sum()) / (len(x) - 1)
    if others < _TOO_NARROW * F.diagonal().abs().sum():
        warnings.warn(
            f"{kernel} is almost 0 between different samples: its width is too small for this data. Set "
            "`kernel_params={'sigma': ...}` to about the distance between neighbours, or scale the data.",
            stacklevel=3,
        )


@torch.no_grad()
def warn_if_worse_than_uniform(features: LandmarkFeatures, x: Tensor) -> None:
    """Warn if the kernel error of features on samples (samples, m) is far above that of random samples as landmarks.

    The responses of the paper's network have an error that no number of landmarks or updates lowers, where the kernel
    is narrow or the data are simple.
    """
    x = x[random_subset(len(x), _POINTS)]
    error = LandmarkError(features.kernel, x)
    ours = error.of_features(features(error.x).double())
    count = features.M.shape[1]
    uniform = min(error(x[random_subset(len(x), count, seed=seed)]) for seed in range(5))
    if ours > max(_WORSE * uniform, _SMALL):
        warnings.warn(
            f"The kernel error of these features is {ours:.2g}, and that of {count} random samples as landmarks "
            f"{uniform:.2g}: use readout='nystroem' or 'least_squares', or bound='tight'.",
            stacklevel=2,
        )
