"""Kernel similarity matching with Hebbian neural networks, in PyTorch Lightning.

Names are imported when they are first used, so that the mathematics can be imported without Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ksm_lightning.data import (
        ArrayDataModule,
        CroppedMNISTDataModule,
        DatasetDataModule,
        DigitsDataModule,
        HalfMoonsDataModule,
    )
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
    )  # fmt: skip
    from ksm_lightning.learning import AdaptiveSchedule, Learner, Phase, PhaseSchedule, train
    from ksm_lightning.module import KernelSimilarityMatching
    from ksm_lightning.network import DataInit, KSMNetwork, NormalInit
    from ksm_lightning.sklearn import KSMClassifier, KSMRegressor, KSMTransformer

    __version__: str

__all__ = [
    "AdaptiveSchedule", "ArcCosineKernel", "ArrayDataModule", "CauchyKernel", "CroppedMNISTDataModule", "DataInit",
    "DatasetDataModule", "DigitsDataModule", "FeatureExtractor", "GaussianKernel", "HalfMoonsDataModule",
    "KSMClassifier", "KSMNetwork", "KSMRegressor", "KSMTransformer", "Kernel", "KernelNRMSE",
    "KernelSimilarityMatching", "LaplacianKernel", "Learner", "LinearKernel", "NormalInit", "Phase", "PhaseSchedule",
    "PolynomialKernel", "PowerCosineKernel", "kernel_nrmse", "make_kernel", "register_kernel", "train",
]  # fmt: skip
# Where names come from that are not in `kernels`.
_HOMES = {
    "data": (
        "ArrayDataModule", "CroppedMNISTDataModule", "DatasetDataModule", "DigitsDataModule", "HalfMoonsDataModule"
    ),
    "evaluation.kernel_error": ("KernelNRMSE", "kernel_nrmse"),
    "extractor": ("FeatureExtractor",),
    "learning": ("AdaptiveSchedule", "Learner", "Phase", "PhaseSchedule", "train"),
    "module": ("KernelSimilarityMatching",),
    "network": ("DataInit", "KSMNetwork", "NormalInit"),
    "sklearn": ("KSMClassifier", "KSMRegressor", "KSMTransformer"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module(f"{__name__}.cli.front").version()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "kernels")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
