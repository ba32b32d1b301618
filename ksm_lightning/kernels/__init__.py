"""What a similarity is: Gram block, diagonal, pullback, diagonal gradient; and kernels by name."""

from ksm_lightning.kernels.angular import ArcCosineKernel, LinearKernel, PolynomialKernel, PowerCosineKernel
from ksm_lightning.kernels.base import Kernel, Prepared, Pullback, Pulled, SelfTerms
from ksm_lightning.kernels.precision import full_precision
from ksm_lightning.kernels.radial import CauchyKernel, GaussianKernel, LaplacianKernel, RadialKernel
from ksm_lightning.kernels.registry import kernel_name, kernel_names, make_kernel, register_kernel

__all__ = [
    "ArcCosineKernel",
    "CauchyKernel",
    "GaussianKernel",
    "Kernel",
    "LaplacianKernel",
    "LinearKernel",
    "PolynomialKernel",
    "PowerCosineKernel",
    "Prepared",
    "Pullback",
    "Pulled",
    "RadialKernel",
    "SelfTerms",
    "full_precision",
    "kernel_name",
    "kernel_names",
    "make_kernel",
    "register_kernel",
]
