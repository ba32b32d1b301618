"""Random Fourier features (Rahimi and Recht, 2007) of shift-invariant kernels."""

import math

import torch
from torch import Tensor

from ksm_lightning.baselines.feature_map import FeatureMap


class RandomFourier(FeatureMap):
    """Features ``sqrt(2/n) cos(w_i . x + b_i)`` with w from the kernel's spectral density and b uniform.

    Their inner products are unbiased with errors of order ``n^(-1/2)``. They do not depend on the data.

    Args:
        kernel: A kernel that implements :meth:`Kernel.frequencies`: Gaussian, Laplacian, Cauchy, or your own.
        n_components: Number of features n.
        seed: Seed of the frequencies.
    """

    def _fit(self, x: Tensor, generator: torch.Generator) -> None:
        self.frequencies_ = self.kernel.frequencies(self.n_components, x.shape[1], generator=generator).to(x)
        self.phases_ = (2 * math.pi * torch.rand(self.n_components, generator=generator)).to(x)

    def _features(self, x: Tensor) -> Tensor:
        angles = torch.addmm(self.phases_, x.to(self.frequencies_), self.frequencies_.mT)  # (samples, n)
        return angles.cos_().mul_(math.sqrt(2 / self.n_components))
