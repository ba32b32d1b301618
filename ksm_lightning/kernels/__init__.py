"""Kernels and their derivatives, a registry of names, tiles of kernel matrices and robust factorisations."""

from ksm_lightning.kernels.angular import ArcCosineKernel, LinearKernel, PolynomialKernel, PowerCosineKernel
from ksm_lightning.kernels.base import Evaluated, Kernel, Prepared, Pullback, PullbackParts, SelfTerms
from ksm_lightning.kernels.factorisation import inverse_root, robust_cholesky
from ksm_lightning.kernels.pairs import Tile, random_subset, symmetric_tiles
from ksm_lightning.kernels.precision import full_precision
from ksm_lightning.kernels.radial import CauchyKernel, GaussianKernel, LaplacianKernel, RadialKernel
from ksm_lightning.kernels.registry import kernel_name, kernel_names, make_kernel, register_kernel

__all__ = [
    "ArcCosineKernel", "CauchyKernel", "Evaluated", "GaussianKernel", "Kernel", "LaplacianKernel", "LinearKernel",
    "PolynomialKernel", "PowerCosineKernel", "Prepared", "Pullback", "PullbackParts", "RadialKernel", "SelfTerms",
    "Tile", "full_precision", "inverse_root", "kernel_name", "kernel_names", "make_kernel", "random_subset",
    "register_kernel", "robust_cholesky", "symmetric_tiles",
]  # fmt: skip
