"""Kernel similarity matching with Hebbian neural networks, in PyTorch Lightning."""

from ksm_lightning.data import ArrayDataModule, DigitsDataModule, HalfMoonsDataModule
from ksm_lightning.evaluation.kernel_error import KernelNRMSE, kernel_nrmse
from ksm_lightning.extractor import FeatureExtractor
from ksm_lightning.kernels import (
    ArcCosineKernel,
    CauchyKernel,
    GaussianKernel,
    Kernel,
    LaplacianKernel,
    LinearKernel,
    PolynomialKernel,
    PowerCosineKernel,
    make_kernel,
    register_kernel,
)
from ksm_lightning.learning.schedule import AdaptiveSchedule, Phase, PhaseSchedule
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.initialisation import DataInit, NormalInit
from ksm_lightning.network.ksm_network import KSMNetwork

__all__ = [
    "AdaptiveSchedule",
    "ArcCosineKernel",
    "ArrayDataModule",
    "CauchyKernel",
    "DataInit",
    "DigitsDataModule",
    "FeatureExtractor",
    "GaussianKernel",
    "HalfMoonsDataModule",
    "KSMNetwork",
    "Kernel",
    "KernelNRMSE",
    "KernelSimilarityMatching",
    "LaplacianKernel",
    "LinearKernel",
    "NormalInit",
    "Phase",
    "PhaseSchedule",
    "PolynomialKernel",
    "PowerCosineKernel",
    "kernel_nrmse",
    "make_kernel",
    "register_kernel",
]
