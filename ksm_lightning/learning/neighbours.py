"""Groups of landmarks that are close to each other, each with the points near it."""

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.network.initialisation import ignores_sign

Group = tuple[Tensor, Tensor]
"""Indices of landmarks, and of points."""


@torch.no_grad()
def groups_of_neighbours(kernel: Kernel, W: Tensor, points: Tensor, largest: int) -> list[Group]:
    """Split landmarks (n, m) and points (samples, m) into groups of at most ``largest`` landmarks, by bisection.

    Each cut is at the median landmark along the direction in which the landmarks of a group vary most. Where too few
    points would be left on one side (the landmarks are far from the data), both are cut at their own medians. If the
    length of an input does not matter to the kernel, directions count; if its sign does not matter, x and -x are equal.

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> W, x = torch.tensor([[0.0], [9.0], [1.0], [8.0]]), torch.tensor([[7.0], [0.5], [10.0], [2.0]])
        >>> [(neurons.tolist(), near.tolist()) for neurons, near in groups_of_neighbours(GaussianKernel(), W, x, 2)]
        [([0, 2], [1, 3]), ([1, 3], [0, 2])]
    """
    W, points = W.double(), points.double()
    is_mirrored = kernel.is_homogeneous and ignores_sign(kernel, points[:64], W[:64])
    if kernel.is_homogeneous:
        W, points = torch.nn.functional.normalize(W), torch.nn.functional.normalize(points)
    groups: list[Group] = []
    waiting = [(torch.arange(len(W), device=W.device), torch.arange(len(points), device=W.device))]
    while waiting:
        neurons, near = waiting.pop()
        if len(neurons) <= largest:
            groups.append((neurons, near))
            continue
        values, place = _places(W[neurons], points[near], is_mirrored)
        ranked, order = values.sort()
        half = len(neurons) // 2
        is_left = place < (ranked[half - 1] + ranked[half]) / 2
        if 4 * min(int(is_left.sum()), int((~is_left).sum())) < len(near):
            is_left = torch.zeros_like(is_left).index_fill_(0, place.argsort()[: len(near) // 2], True)
        left, right = neurons[order[:half]].sort().values, neurons[order[half:]].sort().values
        waiting += [(right, near[~is_left]), (left, near[is_left])]
    return groups


def _places(W: Tensor, points: Tensor, is_mirrored: bool) -> tuple[Tensor, Tensor]:
    """Positions (n,) and (samples,) on the principal axis of the landmarks; squared where signs do not matter."""
    if not is_mirrored:
        middle = W - W.mean(0)
        axis = torch.linalg.eigh(middle.mT @ middle)[1][:, -1]
        return W @ axis, points @ axis
    axes = torch.linalg.eigh(W.mT @ W)[1]
    axis = axes[:, (W @ axes).square().var(0).argmax()]
    return (W @ axis).square(), (points @ axis).square()
