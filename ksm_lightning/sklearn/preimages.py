"""Samples from features: a ridge regression from the features of training samples to these samples."""

import numpy as np

from ksm_lightning.evaluation.ridge import RIDGES
from ksm_lightning.sklearn.held_out import FOLDS, has_enough


class PreImages:
    """Approximate inverse of a feature map, ``x = y A + b``: the ridge regression of samples on their features.

    It is kernel ridge regression of x on itself with the approximated kernel. The ridge is the one with the lowest
    error on held-out samples.

    Args:
        y: Features (samples, k).
        x: Samples (samples, m).
        seed: Seed of the choice of held-out samples.

    Attributes:
        error: ``||x - x_found|| / ||x - mean||`` of held-out samples, or of all if they are few.
    """

    def __init__(self, y: np.ndarray, x: np.ndarray, seed: int = 0) -> None:
        y, x = y.astype(np.float64), x.astype(np.float64)
        order = np.random.RandomState(seed).permutation(len(x))
        count = len(x) // FOLDS if has_enough(len(x)) else 0
        held, kept = (order[:count], order[count:]) if count else (order, order)
        errors = [_relative_error(x[held], y[held] @ A + b) for A, b in _regressions(y[kept], x[kept])]
        best = int(np.argmin(errors))
        self.error = float(errors[best])
        self.A, self.b = _regressions(y, x)[best]

    def __call__(self, y: np.ndarray) -> np.ndarray:
        """Samples (samples, m) of features (samples, k), in their dtype."""
        found: np.ndarray = (y @ self.A + self.b).astype(y.dtype)
        return found


def _regressions(y: np.ndarray, x: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The matrix A (k, m) and offset b (m,) for each ridge."""
    y_mean, x_mean = y.mean(0), x.mean(0)
    U, s, Vt = np.linalg.svd(y - y_mean, full_matrices=False)
    unit = max(float(np.square(s).mean()), np.finfo(np.float64).tiny)
    projected = U.T @ (x - x_mean)
    found = []
    for ridge in RIDGES:
        A = Vt.T @ ((s / (np.square(s) + ridge * unit))[:, None] * projected)
        found.append((A, x_mean - y_mean @ A))
    return found


def _relative_error(x: np.ndarray, found: np.ndarray) -> float:
    spread = float(np.linalg.norm(x - x.mean(0)))
    missed = float(np.linalg.norm(x - found))
    return missed / spread if spread > 0 else missed
