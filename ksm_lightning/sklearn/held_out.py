"""Samples of a supervised fit in a canonical order, and choices on samples that are held out."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.evaluation.ridge import RIDGES, LinearMaps, fit_ridge
from ksm_lightning.kernels import Kernel, full_precision, random_subset
from ksm_lightning.kernels.limits import FIRST_SAMPLES, ROWS_AT_ONCE
from ksm_lightning.network.readout_matrices import nystroem_matrix

FOLDS = 5
"""Parts of the samples, each of which is held out once."""


class LabelledSamples(NamedTuple):
    """Different samples and their weights."""

    x: Tensor  # (samples, m)
    y: Tensor  # class numbers (samples,), or targets (samples, outputs)
    weights: Tensor  # (samples,), float64, positive

    def take(self, chosen: Tensor) -> "LabelledSamples":
        """The samples with these numbers."""
        return LabelledSamples(self.x[chosen], self.y[chosen], self.weights[chosen])


def canonical_samples(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> LabelledSamples:
    """Equal samples merged to one with the sum of their weights, in an order that depends on the samples only.

    A weight of 2 is then the same as a repeated sample, a weight of 0 the same as a missing one, and no sample is both
    learned and held out.

    Args:
        x: Inputs (samples, m).
        y: Class numbers (samples,), or targets (samples, outputs).
        weights: Weights (samples,), not negative.
    """
    direction = np.random.RandomState(0).standard_normal(x.shape[1])
    # Products and sums of each row alone: in a matrix product, rounding would depend on the row's place.
    parts = (x[start : start + ROWS_AT_ONCE] for start in range(0, len(x), ROWS_AT_ONCE))
    key = np.concatenate([(part * direction).sum(1) for part in parts])
    columns = y.reshape(len(y), -1)
    order = np.lexsort([*columns.T, key])
    order = order[weights[order] > 0]
    is_first = np.ones(len(order), dtype=bool)
    (near,) = np.nonzero(key[order[1:]] == key[order[:-1]])
    one, other = order[near], order[near + 1]
    is_first[near + 1] = (columns[one] != columns[other]).any(1) | (x[one] != x[other]).any(1)
    (first,) = np.nonzero(is_first)
    sums = np.add.reduceat(weights[order], first)
    # Neighbours in that order are similar.
    mixed = np.random.RandomState(0).permutation(len(first))
    kept = order[first[mixed]]
    return LabelledSamples(torch.from_numpy(x[kept]), torch.from_numpy(y[kept]), torch.from_numpy(sums[mixed]))


def has_enough(count: int) -> bool:
    """Whether some of this number of samples can be held out: at least two in each part."""
    return count >= 2 * FOLDS


def held_out_parts(count: int, labels: Tensor | None = None) -> Tensor:
    """Which of ``count`` samples in random order are held out: (parts, samples), bool.

    The five parts cover all samples and have equal shares of each class.
    """
    folds = min(FOLDS, count)
    order = torch.arange(count) if labels is None else labels.cpu().argsort(stable=True)
    part = torch.empty(count, dtype=torch.int64)
    part[order] = torch.arange(count) % folds
    return part == torch.arange(folds)[:, None]


def total_variance(z: Tensor, weights: Tensor) -> float:
    """``<|z - <z>|^2>`` of features (samples, features), weighted."""
    share = (weights / weights.sum()).to(z.dtype)[:, None]
    variance = float(((z - (z * share).sum(0)).square() * share).sum())
    return variance if variance > 0 else 1.0


def held_out_losses(
    z: Tensor,
    weights: Tensor,
    held_out: Tensor,
    fit: Callable[[Tensor, Tensor], LinearMaps],
    loss: Callable[[Tensor], Tensor],
) -> Tensor:
    """Mean loss (penalties,) of held-out samples, over all parts.

    Args:
        z: Features (samples, features).
        weights: Weights (samples,).
        held_out: Samples that are held out (parts, samples).
        fit: Fits linear maps for all penalties to features (parts, samples, features) with weights (parts, samples).
        loss: Loss (parts, samples) of outputs (parts, samples, outputs).
    """
    held_out = held_out.to(z.device)
    parts = z.expand(len(held_out), *z.shape)
    maps = fit(parts, torch.where(held_out, 0.0, weights))
    share, parts = torch.where(held_out, weights, 0.0), parts.to(maps.W.dtype)
    with full_precision(z.device):
        sums = [
            (loss(parts @ maps.W[:, number] + maps.b[:, number, None]) * share).sum()
            for number in range(maps.W.shape[1])
        ]
    return torch.stack(sums) / share.sum()


@torch.no_grad()
def choose_width(
    make: Callable[[float], Kernel], widths: Sequence[float], samples: LabelledSamples, held_out: Tensor, landmarks: int
) -> float:
    """The width with the lowest squared error of ridge regression on held-out samples.

    Each width is judged by Nystroem features of the same random landmarks, at its best penalty.

    Args:
        make: The kernel of a width.
        widths: Widths to choose from.
        samples: Samples with targets (samples, outputs).
        held_out: Samples that are held out (parts, samples).
        landmarks: Number of landmarks, at most 256 of which are used.
    """
    x, y, weights = samples.x.double(), samples.y, samples.weights
    W = x[random_subset(len(x), min(landmarks, FIRST_SAMPLES), seed=1).to(x.device)]

    def lowest_loss(kernel: Kernel) -> float:
        with full_precision(x.device):
            z = kernel(x, W) @ nystroem_matrix(kernel, W)
        unit = total_variance(z, weights) / len(z)

        def fit(parts: Tensor, share: Tensor) -> LinearMaps:
            penalties = [unit * factor for factor in RIDGES]
            return fit_ridge(parts, y.expand(len(parts), *y.shape), penalties, weights=share)

        return float(held_out_losses(z, weights, held_out, fit, lambda outputs: (outputs - y).square().mean(-1)).min())

    return min(widths, key=lambda width: lowest_loss(make(width)))
