"""Measurements of a trained network on points, and of its kernel on the data."""

from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels.limits import NOTICEABLE
from ksm_lightning.learning.relocation import find_moves
from ksm_lightning.network.ksm_network import KSMNetwork


class Health(NamedTuple):
    """The state of a trained network on points."""

    is_finite: bool  # parameters and responses; if False, the other values have no meaning
    silent: int = 0  # neurons whose mean squared response is below 1 % of the mean over neurons; tight: below the ridge
    idle: int = 0  # landmarks that would reduce the error more at another position; at most a quarter is counted
    smallest: float = 1.0  # smallest eigenvalue of L
    largest: float = 1.0  # largest eigenvalue of L
    precision: float = torch.finfo(torch.float32).eps  # machine epsilon of the dtype of the responses


@torch.no_grad()
def examine(network: KSMNetwork, x: Tensor, y: Tensor) -> Health:
    """Measure the state of a network.

    Args:
        network: The trained network.
        x: A sample of the data (samples, m), ideally several times more than neurons.
        y: The network's responses (samples, n) to it.
    """
    if not all(bool(value.isfinite().all()) for value in (*network.parameters(), y)):
        return Health(is_finite=False)
    activity = y.double().square().mean(0)  # (n,)
    # Responses of a tight network are principal components, whose activity falls by orders of magnitude.
    smallest = NOTICEABLE * activity.mean() if network.bound == "paper" else network.ridge
    eigenvalues = torch.linalg.eigvalsh(network.L.double())
    moves = find_moves(network.kernel, torch.unique(x, dim=0), network.W, max(1, network.num_landmarks // 4))
    return Health(
        is_finite=True,
        silent=int((activity <= smallest).sum()),
        idle=len({move.neuron for move in moves}),
        smallest=float(eigenvalues[0]),
        largest=float(eigenvalues[-1]),
        precision=torch.finfo(network.W.dtype).eps,
    )
