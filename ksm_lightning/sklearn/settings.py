"""The parameters of an estimator, checked and with defaults filled in, and its samples in order."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.learning.samples import Samples, canonical_order, counts_of
from ksm_lightning.learning.stream import check_half_life
from ksm_lightning.learning.training import BATCH_SIZES, DESCENT_ITERATIONS
from ksm_lightning.network import Bound, check_bound
from ksm_lightning.network.readout import check_readout
from ksm_lightning.sklearn.precomputed import is_precomputed

# Landmarks per component with the tight bound. Twice as many have an error that is lower by another few percent, but
# `transform` takes longer.
_LANDMARKS_PER_COMPONENT = 1.5
# With a precomputed kernel, whose landmarks are not learned and whose similarities are known anyway. On four data sets
# the held-out error was then that of 1.5 learned ones or lower, and 6 to 31 % below that of 1.5 chosen ones.
_CHOSEN_PER_COMPONENT = 4


class Sizes(NamedTuple):
    """Numbers that follow from the number of components."""

    bound: Bound
    components: int
    landmarks: int
    batch_size: int
    updates: int


def is_error(n_components: Any) -> bool:
    """Whether this is a kernel error to be reached, a number between 0 and 1, instead of a number of components."""
    return isinstance(n_components, float | np.floating) and bool(0 < n_components < 1)


def check_parameters(estimator: Any) -> None:
    """Raise ValueError if a parameter of a :class:`~ksm_lightning.sklearn.KSMTransformer` is not allowed."""
    for name in ("n_components", "max_components", "n_landmarks", "batch_size", "updates"):
        value = getattr(estimator, name)
        if value is None and name not in ("n_components", "max_components"):
            continue
        if name == "n_components" and is_error(value):
            continue
        if not isinstance(value, int | np.integer) or value < 1:
            or_error = ", or a kernel error between 0 and 1" if name == "n_components" else ""
            raise ValueError(f"`{name}` must be a whole number of at least 1{or_error}, got {value!r}.")
    half_life: Any = estimator.half_life
    if half_life is not None and not isinstance(half_life, int | float | np.number):
        raise ValueError(f"`half_life` must be a number of samples, or None to forget nothing, got {half_life!r}.")
    check_readout(estimator.readout)
    check_bound(estimator.bound)
    if not is_error(estimator.n_components):
        half_life = None if half_life is None else float(half_life)
        check_half_life(half_life, sizes_for(estimator, int(estimator.n_components)).landmarks)
    elif estimator.n_landmarks is not None:
        raise ValueError("`n_landmarks` follows from `n_components` if that is a kernel error: leave it out.")


def check_updates(estimator: Any, kernel: Kernel) -> None:
    """Raise ValueError if a parameter is about updates, but landmarks stay at samples with this kernel."""
    for name in ("updates", "batch_size", "half_life"):
        value = getattr(estimator, name)
        if value is not None and not kernel.is_differentiable:
            raise ValueError(
                f"`{name}` is {value}, but landmarks stay at samples, as torch cannot compute derivatives of this "
                "kernel: leave it out."
            )


def sizes_for(estimator: Any, n: int) -> Sizes:
    """The sizes of an estimator with n components."""
    bound, landmarks = check_bound(estimator.bound), estimator.n_landmarks
    if landmarks is None:
        ratio = _CHOSEN_PER_COMPONENT if is_precomputed(estimator.kernel) else _LANDMARKS_PER_COMPONENT
        landmarks = math.ceil(ratio * n) if bound == "tight" else n
    elif landmarks < n or (bound == "paper" and landmarks != n):
        raise ValueError(
            f"`n_landmarks` must be at least `n_components`, {n}, and equal to it with bound='paper', got {landmarks} "
            f"with bound={bound!r}."
        )
    updates = DESCENT_ITERATIONS if bound == "tight" else max(2000, 5 * n)
    batch = estimator.batch_size or BATCH_SIZES[bound]
    return Sizes(bound, n, landmarks, batch, estimator.updates or updates)


def check_weights(sample_weight: Any, count: int) -> np.ndarray:
    """Weights (samples,) in float64. Default: 1.

    Raises:
        ValueError: If they do not match the samples, or are negative, not finite or all 0.
    """
    if sample_weight is None:
        return np.ones(count)
    weights = np.asarray(sample_weight, dtype=np.float64)
    weights = np.full(count, float(weights)) if weights.ndim == 0 else weights
    if weights.shape != (count,):
        raise ValueError(
            f"`sample_weight` must be a 1D array of {count} weights, one per sample, got shape {weights.shape}."
        )
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise ValueError("`sample_weight` must be finite and not negative, and not all of its weights may be zero.")
    return weights


def training_samples(X: Any, sample_weight: ArrayLike | None) -> Tensor | Samples:
    """Samples (samples, m) in an order that depends on their values only, so that weights equal repetitions exactly.

    Args:
        X: An array or a CSR matrix.
        sample_weight: Weights (samples,), or None.

    Raises:
        ValueError: See :func:`check_weights`.
    """
    order = canonical_order(X)
    if sample_weight is None:
        return torch.from_numpy(X[order]) if isinstance(X, np.ndarray) else Samples(X, order)
    weights = check_weights(sample_weight, X.shape[0])
    return Samples(X, np.repeat(order, counts_of(weights[order])))
