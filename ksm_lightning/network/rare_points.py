"""Readouts that were fitted to a sample, kept in bounds near points that the sample lacks."""

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel

FEATURE_LIMIT = 2.0
"""Largest ``|y|^2 / f(x, x)`` of features that were fitted to a sample which may lack rare points."""


def with_landmarks(kernel: Kernel, W: Tensor, x: Tensor) -> Tensor:
    """The sample x (samples, m) and the landmarks (p, m) as points of its typical length, one after the other."""
    landmarks = W.to(x)
    if kernel.is_homogeneous and kernel.degree is not None:  # the length of a landmark is its gain, not that of a point
        ratio = kernel.diag(x).mean() / kernel.diag(landmarks).clamp(min=torch.finfo(x.dtype).tiny)
        landmarks = landmarks * ratio.clamp(max=1e12)[:, None] ** (0.5 / kernel.degree)
    return torch.cat([x, landmarks])


@torch.no_grad()
def limit_readout(kernel: Kernel, W: Tensor, M: Tensor, limit: float = FEATURE_LIMIT) -> Tensor:
    """The M (p, k), in float64, with directions shortened so that ``|y|^2 <= limit f(x, x)`` for every point x.

    ``f(x, W) = K^(1/2) z`` with ``|z|^2 <= f(x, x)``, so the singular values of ``K^(1/2) M`` bound the features. They
    exceed 1 where a readout was fitted to points that barely vary in a direction.

    Args:
        kernel: The similarity.
        W: Landmarks (p, m).
        M: Readout (p, k).
        limit: Largest ``|y|^2 / f(x, x)``.
    """
    W, M = W.double(), M.double()
    values, vectors = torch.linalg.eigh(M.mT @ kernel(W, W) @ M)
    factors = (limit / values.clamp(min=torch.finfo(values.dtype).tiny)).clamp(max=1).sqrt()
    return M if bool((factors == 1).all()) else M @ (vectors * factors) @ vectors.mT
