"""Kernels and their derivatives, a registry of names, tiles of kernel matrices and robust factorisations."""

from ksm_lightning.kernels.angular import (
    ArcCosineKernel,
    LinearKernel,
    OffsetPolynomialKernel,
    PolynomialKernel,
    PowerCosineKernel,
)
from ksm_lightning.kernels.base import Evaluated, Kernel, Prepared, Pullback, PullbackParts, SelfTerms
from ksm_lightning.kernels.factorisation import inverse_root, robust_cholesky
from ksm_lightning.kernels.pairs import Tile, kernel_sample, random_subset, symmetric_tiles
from ksm_lightning.kernels.precision import full_precision
from ksm_lightning.kernels.radial import CauchyKernel, GaussianKernel, LaplacianKernel, RadialKernel
from ksm_lightning.kernels.registry import kernel_name, kernel_names, kernel_parameters, make_kernel, register_kernel
from ksm_lightning.kernels.width import AUTO, Auto, auto_width, chooses_width, with_width

__all__ = [
    "AUTO",
    "ArcCosineKernel",
    "Auto",
    "CauchyKernel",
    "Evaluated",
    "GaussianKernel",
    "Kernel",
    "LaplacianKernel",
    "LinearKernel",
    "OffsetPolynomialKernel",
    "PolynomialKernel",
    "PowerCosineKernel",
    "Prepared",
    "Pullback",
    "PullbackParts",
    "RadialKernel",
    "SelfTerms",
    "Tile",
    "auto_width",
    "chooses_width",
    "full_precision",
    "inverse_root",
    "kernel_name",
    "kernel_names",
    "kernel_parameters",
    "kernel_sample",
    "make_kernel",
    "random_subset",
    "register_kernel",
    "robust_cholesky",
    "symmetric_tiles",
    "with_width",
]  # fmt: skip
