"""The smallest number of components whose kernel error is below a limit."""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, random_subset
from ksm_lightning.kernels.limits import FEW, TILE
from ksm_lightning.learning import fit_network
from ksm_lightning.learning.samples import Samples
from ksm_lightning.learning.units import CANDIDATES
from ksm_lightning.network import KSMNetwork
from ksm_lightning.network.landmark_error import LandmarkError
from ksm_lightning.network.readout import LandmarkFeatures
from ksm_lightning.sklearn.settings import Sizes

# The result is exact to this fraction: repeated fits differ by as much.
_EXACT = 0.03


class Split(NamedTuple):
    """Samples to learn from and samples that judge the result."""

    learned: Tensor  # (samples, m)
    judges: Tensor


def split_samples(x: Tensor | Samples, seed: int) -> Split:
    """Held-out samples, and up to 20,000 others. Each counts once, so that no sample is both learned and held out."""
    chosen = torch.unique(x[random_subset(len(x), CANDIDATES + TILE, seed)], dim=0)
    count = min(TILE, len(chosen) // 5)
    if count < FEW:
        return Split(chosen, chosen)
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
    return Split(chosen[order[count:]], chosen[order[:count]])


@torch.no_grad()
def smallest_errors(kernel: Kernel, x: Tensor) -> Tensor:
    """Kernel errors (samples + 1,) of the best 0, 1, 2, ... features of a sample of x: those of kernel PCA."""
    x = x[random_subset(len(x), TILE)].double()
    squares = torch.linalg.eigvalsh(kernel(x, x)).flip(0).square()
    rest = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
    errors: Tensor = (rest / squares.sum().clamp(min=torch.finfo(rest.dtype).tiny)).sqrt()
    return errors


def find_components(error_of: Callable[[int], float], predicted: Tensor, limit: float, most: int) -> tuple[int, float]:
    """The smallest number n of components with ``error_of(n) <= limit``, to within 3 %, and its error.

    The predicted errors, scaled to the last measured one, say what to try next, between a number that is too small and
    one that is large enough. The result is ``most``, with an error above the limit, if that is not enough.

    Args:
        error_of: Measures the error of n components.
        predicted: Predicted errors of 0, 1, 2, ... components, which decrease.
        limit: The error to be reached.
        most: Largest number.

    Example:
        >>> find_components(lambda n: 1.2 / n, 1.0 / torch.arange(1, 500), 0.0125, most=400)[0]
        96
    """
    low, high, ratio, errors = 0, most, 1.0, dict[int, float]()
    for _ in range(FEW):
        if high - low <= max(1, math.floor(_EXACT * high)) and high in errors:
            break
        enough = (predicted * ratio <= limit).nonzero()
        n = int(enough[0]) if len(enough) else most
        smallest, largest = low + 1, (high - 1 if high in errors else most)
        n = n if smallest <= n <= largest else (smallest + largest) // 2 if n < smallest else largest
        errors[n] = error_of(n)
        if errors[n] <= limit:
            high = n
        elif n == most:
            break
        else:
            low = n
        if n < len(predicted) and float(predicted[n]) > 0:
            ratio = errors[n] / float(predicted[n])
    if high not in errors:
        errors[high] = error_of(high)
    return high, errors[high]


def choose_components(
    kernel: Kernel,
    x: Tensor | Samples,
    sizes_for: Callable[[int], Sizes],
    readout: str,
    limit: float,
    most: int,
    seed: int,
) -> int:
    """The smallest number of components whose kernel error on held-out samples is at most ``limit``.

    Networks learn from up to 20,000 samples, and up to 1,000 others judge them. Warns if ``most`` are not enough.

    Args:
        kernel: The similarity.
        x: The data (samples, m).
        sizes_for: The sizes of a network of n components.
        readout: The readout of the features.
        limit: The error to be reached.
        most: Largest number of components.
        seed: Seed of the choice of samples and of the networks.
    """
    learned, judges = split_samples(x, seed)
    error = LandmarkError(kernel, judges)

    def error_of(n: int) -> float:
        features = LandmarkFeatures.of(train_with(kernel, learned, sizes_for(n), seed), readout, learned)
        return error.of_features(features(judges).double())

    n, reached = find_components(error_of, smallest_errors(kernel, learned), limit, min(most, len(learned)))
    if reached > limit:
        warnings.warn(
            f"{n} components have a kernel error of {reached:.2g}, above `n_components` = {limit:g}: raise "
            f"`max_components`, {most}, or choose a wider kernel than {kernel}.",
            stacklevel=3,
        )
    return n


def train_with(
    kernel: Kernel, x: Tensor | Samples, sizes: Sizes, seed: int, progress: Callable[[int], object] | None = None
) -> KSMNetwork:
    """A network of these sizes, see :func:`ksm_lightning.learning.fit_network`."""
    return fit_network(
        kernel, x, sizes.components, sizes.updates, bound=sizes.bound, num_landmarks=sizes.landmarks,
        batch_size=sizes.batch_size, seed=seed, progress=progress,
    )  # fmt: skip
