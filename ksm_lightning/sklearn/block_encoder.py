"""Features of NumPy arrays in blocks that stay in the processor's cache."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.kernels.limits import FLOAT32_ROUNDING, TILE
from ksm_lightning.network.readout import LandmarkFeatures


class BlockEncoder:
    """Features ``f(x, W) M`` (samples, k) of NumPy arrays (samples, m).

    Products are NumPy's, which on some processors are faster than torch's, and so is the default kernel.

    Args:
        features: The features.
        dtype: Dtype in which they are computed, float32 or float64.
    """

    def __init__(self, features: LandmarkFeatures, dtype: np.dtype[Any]) -> None:
        self.dtype, self.kernel = dtype, features.kernel
        self.W: Tensor = features.W.to(torch.float32 if dtype == np.float32 else torch.float64)
        self.M = np.ascontiguousarray(features.M.numpy(), dtype=dtype)
        self.rows = TILE * torch.get_num_threads()
        # A subclass may have another formula.
        self.scale = -0.5 / self.kernel.sigma**2 if type(self.kernel) is GaussianKernel else None
        if self.scale is not None:
            self.offset = features.W.double().mean(0).numpy().astype(dtype)
            centred = self.W.numpy() - self.offset
            self.factors = np.ascontiguousarray((-2 * self.scale * centred).T, dtype=dtype)
            self.squares = (self.scale * np.square(centred, dtype=np.float64).sum(1)).astype(dtype)

    def __call__(self, X: Any) -> np.ndarray:
        """Features of an array or a CSR matrix, whose rows become dense one block at a time."""
        out = np.empty((X.shape[0], self.M.shape[1]), dtype=self.dtype)
        for start in range(0, X.shape[0], self.rows):
            part = X[start : start + self.rows]
            part = part if isinstance(part, np.ndarray) else part.toarray()
            np.dot(self.similarities(part), self.M, out=out[start : start + self.rows])
        return out

    def similarities(self, x: np.ndarray) -> np.ndarray:
        """``f(x, W)`` (samples, p) of a block (samples, m)."""
        if self.scale is None:
            found: np.ndarray = self.kernel(torch.from_numpy(x.astype(self.dtype, order="C")), self.W).numpy()
            return found
        # As RadialKernel.gram, with NumPy's exponential, and what depends on the landmarks alone computed once.
        centred = np.subtract(x, self.offset, dtype=self.dtype, order="C")
        t: np.ndarray = np.dot(centred, self.factors)
        t += self.scale * np.einsum("ij,ij->i", centred, centred)[:, None]
        t += self.squares
        np.minimum(t, 0, out=t)
        np.exp(t, out=t)
        return t


def is_precise(features: LandmarkFeatures, sample: Tensor) -> bool:
    """Whether float32 is enough to compute the features of a sample (samples, m).

    A readout amplifies rounding errors where the kernel barely varies between landmarks.
    """
    x = sample.numpy()
    wide = BlockEncoder(features, np.dtype(np.float64))(x.astype(np.float64))
    with np.errstate(over="ignore"):
        narrow = BlockEncoder(features, np.dtype(np.float32))(x.astype(np.float32))
    longest = np.sqrt(np.square(wide).sum(1).max(initial=0.0))
    return bool(np.abs(narrow - wide).max(initial=0.0) <= FLOAT32_ROUNDING * longest)
