"""A portrait of a network at some points: the arrays that its figures show."""

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels.limits import TILE
from ksm_lightning.network import functional
from ksm_lightning.network.ksm_network import KSMNetwork


def portrait_arrays(network: KSMNetwork, x: Tensor, pairs: int = 500) -> dict[str, np.ndarray]:
    """:func:`portrait` as NumPy arrays."""
    return {name: value.cpu().numpy() for name, value in portrait(network, x, pairs).items()}


@torch.no_grad()
def portrait(network: KSMNetwork, x: Tensor, pairs: int = 500) -> dict[str, Tensor]:
    """Compute what the figures show, on the network's device.

    Where signs are free, they are aligned so that mean responses are positive.

    Args:
        network: The trained network.
        x: Points (samples, m).
        pairs: Similarities are computed between about this number of points.

    Returns:
        The points ``x``, the landmarks ``W``, the ``centres`` of the neurons (their landmarks, or in a tight network
        the mean of the points weighted with y^2), the responses ``y``, input similarities ``f`` and output similarities
        ``output`` of pairs of points, the filters ``linearised``, the kernel error ``nrmse``, and the eigenvalues
        ``input_spectrum`` and ``output_spectrum`` of both similarity matrices.
    """
    kernel = network.kernel
    W, y = network.align_signs(network(x))
    few = slice(None, None, max(len(x) // pairs, 1))
    spectrum = slice(None, None, max(len(x) // TILE, 1))
    return {
        "x": x,
        "W": W,
        "centres": W if network.bound == "paper" else (y * y).mT @ x / (y * y).sum(0)[:, None].clamp(min=1e-30),
        "y": y,
        "f": kernel(x[few], x[few]),
        "output": y[few] @ y[few].mT,
        "linearised": functional.linearised_responses(x, y),
        "nrmse": kernel_nrmse(kernel, x, y)[0],
        "input_spectrum": torch.linalg.eigvalsh(kernel(x[spectrum], x[spectrum]).double()).flip(0),
        "output_spectrum": torch.linalg.svdvals(y[spectrum].double()).square(),
    }
