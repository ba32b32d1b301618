"""Ridge regression for a grid of penalties and several data sets at once, by one eigendecomposition per data set."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import full_precision

RIDGES = tuple(10.0**power for power in range(-9, 4))
"""Penalties of a ridge regression to choose from, as multiples of a variance of the features."""


class LinearMaps(NamedTuple):
    """Linear maps ``x W + b``, one per data set and penalty."""

    W: Tensor  # (seeds, penalties, features, outputs)
    b: Tensor  # (seeds, penalties, outputs)


@torch.no_grad()
def fit_ridge(x: Tensor, y: Tensor, penalties: Sequence[float], *, weights: Tensor | None = None) -> LinearMaps:
    """Minimise ``<|y - x W - b|^2> + penalty |W|^2`` for every data set and penalty at once.

    With ``<x x^T> = V diag(e) V^T`` for centred x and y, ``W = V diag(1 / (e + penalty)) V^T <x y^T>``: all penalties
    share one eigendecomposition. The bias is not penalised.

    Args:
        x: Features (seeds, samples, features), one data set per seed.
        y: Targets (seeds, samples, outputs).
        penalties: Weight penalties, positive.
        weights: Weights of the samples in the mean (seeds, samples), with a positive sum. Default: 1.

    Example:
        >>> x = torch.tensor([[[-1.0], [1.0]]])
        >>> found = fit_ridge(x, 2 * x + 5, [1e-6, 1.0])
        >>> found.W.flatten(), found.b.flatten()
        (tensor([2.0000, 1.0000]), tensor([5., 5.]))
    """
    seeds, samples, _ = x.shape
    share = x.new_full((seeds, samples), 1 / samples) if weights is None else weights / weights.sum(1, keepdim=True)
    share = share.to(x.dtype)[:, :, None]
    with full_precision(x.device):
        x_mean, y_mean = (x * share).sum(1, keepdim=True), (y * share).sum(1, keepdim=True)
        weighted = (x - x_mean) * share.sqrt()  # (seeds, samples, features)
        values, vectors = torch.linalg.eigh(weighted.mT @ weighted)  # (seeds, features)
        along = vectors.mT @ (weighted.mT @ ((y - y_mean) * share.sqrt()))  # (seeds, features, outputs)
        penalty = torch.tensor(penalties, dtype=x.dtype, device=x.device)[:, None]
        inverse = 1 / (values.clamp(min=0)[:, None] + penalty)  # (seeds, penalties, features)
        W = vectors[:, None] @ (inverse[..., None] * along[:, None])  # (seeds, penalties, features, outputs)
        return LinearMaps(W, (y_mean[:, None] - x_mean[:, None] @ W)[:, :, 0])
