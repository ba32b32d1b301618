"""Factorisations of kernel matrices that are robust to rounding."""

import torch
from torch import Tensor

from ksm_lightning.kernels.limits import ROUNDING


def robust_cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor (n, n) of a kernel matrix, with the smallest sufficient jitter on its diagonal.

    Kernels with a square root or an arc cosine near 0 have rounding errors far above the dtype's precision.
    """
    scale = matrix.diagonal().abs().mean()
    for exponent in (None, *range(-15, -2)):
        shifted = matrix
        if exponent is not None:
            shifted = matrix.clone()
            shifted.diagonal().add_(10.0**exponent * scale)
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(shifted)
        if not int(info) and bool(factor.isfinite().all()):
            return factor
    raise ValueError(
        "The kernel matrix cannot be factorised: its values are not finite (scale the data), or the kernel is not "
        "positive semi-definite."
    )


def inverse_root(values: Tensor) -> Tensor:
    """``values^(-1/2)``, and 0 for values that are rounding errors."""
    tiny = torch.finfo(values.dtype).tiny
    return torch.where(values > ROUNDING * values.max().clamp(min=tiny), values.clamp(min=tiny).rsqrt(), 0.0)
