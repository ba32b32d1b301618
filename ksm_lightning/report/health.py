"""What can be measured of a trained network at work, and of its kernel on the data."""

from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.learning.relocation import find_moves
from ksm_lightning.network.ksm_network import KSMNetwork

SILENT = 0.01
"""A neuron below this part of the mean activity does nothing; the adaptive schedule draws the same line for what a
landmark explains before it moves it."""


class Health(NamedTuple):
    """A network at work on points."""

    is_finite: bool
    """Whether parameters and responses are; the other numbers mean nothing where they are not."""
    silent: int = 0
    """Neurons whose mean squared response is below a hundredth of the mean over neurons."""
    idle: int = 0
    """Landmarks that would explain more at another place; counted up to a quarter of them."""
    smallest: float = 1.0
    """Smallest eigenvalue of L."""
    largest: float = 1.0
    """Largest eigenvalue of L."""
    precision: float = torch.finfo(torch.float32).eps
    """Rounding of the dtype that responses are computed in."""


@torch.no_grad()
def examine(network: KSMNetwork, x: Tensor, y: Tensor) -> Health:
    """Measure a network at work.

    Args:
        network: The trained network.
        x: A sample of the data (samples, m), ideally several times as many as neurons.
        y: The network's responses to it (samples, n).
    """
    if not all(bool(value.isfinite().all()) for value in (*network.parameters(), y)):
        return Health(is_finite=False)
    activity = y.double().square().mean(0)  # (n,)
    eigenvalues = torch.linalg.eigvalsh(network.L.double())
    moves = find_moves(network.kernel, torch.unique(x, dim=0), network.W, max(1, network.num_neurons // 4))
    return Health(
        is_finite=True,
        silent=int((activity <= SILENT * activity.mean()).sum()),
        idle=len({move.neuron for move in moves}),
        smallest=float(eigenvalues[0]),
        largest=float(eigenvalues[-1]),
        precision=torch.finfo(network.W.dtype).eps,
    )


class Similarity(NamedTuple):
    """How alike two different points are, with ``f(x, x)`` as 1."""

    mean: float
    mean_square: float
    distance: float
    """Median distance of two points."""


@torch.no_grad()
def compare_points(kernel: Kernel, x: Tensor) -> Similarity:
    """Measure the kernel on pairs of different points out of ``x`` (samples, m), at least two."""
    x = x.double()
    length = kernel.diag(x).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    above = torch.triu_indices(len(x), len(x), offset=1, device=x.device)
    alike = (kernel(x, x) / length / length[:, None])[above[0], above[1]]
    return Similarity(float(alike.mean()), float(alike.square().mean()), float(torch.nn.functional.pdist(x).median()))
