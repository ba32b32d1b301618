"""The kernel error of landmarks on a fixed sample, so that two sets of landmarks can be compared while they learn."""

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, robust_cholesky
from ksm_lightning.kernels.limits import BYTES_AT_ONCE, EXACT_UP_TO, ROUNDING, TILE

MANY_LANDMARKS = EXACT_UP_TO
"""Beyond this number, what takes n^3 operations at the start of a run is replaced by something cheaper."""


class LandmarkError:
    """The Nystroem error ``||F - Y Y^T|| / ||F||`` of landmarks on a fixed sample.

    ``Y Y^T = f(x,W) f(W,W)^-1 f(W,x)`` is the Nystroem approximation.

    F is computed once, so that one more set of landmarks costs ``samples^2 p`` operations. Everything is float64.

    Args:
        kernel: The similarity.
        x: The sample (samples, m).

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> error = LandmarkError(LinearKernel(), torch.eye(3))
        >>> round(error(torch.eye(3)[:1]), 4), error(torch.eye(3))
        (0.8165, 0.0)
    """

    @torch.no_grad()
    def __init__(self, kernel: Kernel, x: Tensor) -> None:
        self.kernel = kernel
        self.x = x[: max(TILE, BYTES_AT_ONCE // (8 * x.shape[1]))].double()
        self._F: Tensor = kernel(self.x, self.x)
        self._total = self._F.square().sum()

    @torch.no_grad()
    def __call__(self, W: Tensor, num_features: int | None = None) -> float:
        """The error of landmarks (p, m). Infinite if they or their similarities are not finite.

        Args:
            W: Landmarks.
            num_features: Number of leading principal components of Y to keep. Default: all.
        """
        W = W.detach().to(self.x)
        K = self.kernel(W, W)
        if not bool(W.isfinite().all() & K.isfinite().all()):
            return torch.inf
        length = K.diagonal().clamp(min=torch.finfo(K.dtype).tiny).rsqrt()  # a landmark's own length does not matter
        K = (K * length).mul_(length[:, None])  # in place: at p = 10,000 it is 0.8 GB
        K.diagonal().add_(ROUNDING)
        factor = robust_cholesky(K)
        k = self.kernel(self.x, W) * length  # (samples, p)
        Y = torch.linalg.solve_triangular(factor, k.mT, upper=False).mT
        if not bool(Y.isfinite().all()):
            return torch.inf
        if num_features is not None and num_features < len(W):
            Y = Y @ torch.linalg.eigh(Y.mT @ Y)[1][:, -num_features:]
        return self.of_features(Y)

    def of_features(self, Y: Tensor) -> float:
        """The error of features (samples, k) of the sample, float64."""
        if Y.shape[1] > max(MANY_LANDMARKS, len(Y)):  # the residual itself is smaller than Y^T Y
            return self._relative((self._F - Y @ Y.mT).square().sum())
        return self._relative(self._total - 2 * (Y * (self._F @ Y)).sum() + (Y.mT @ Y).square().sum())

    def _relative(self, rest: Tensor) -> float:
        error = (rest.clamp(min=0) / self._total.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()
        return float(error.nan_to_num(torch.inf, posinf=torch.inf))
