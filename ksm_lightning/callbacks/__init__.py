"""Kernel error, probes, figures, the divergence guard, checkpoints, progress and feature files."""

from ksm_lightning.callbacks.checkpoint import UpdateCheckpoint
from ksm_lightning.callbacks.features import FeatureWriter
from ksm_lightning.callbacks.figures import Figures
from ksm_lightning.callbacks.guard import DivergenceGuard
from ksm_lightning.callbacks.kernel_error import KernelError
from ksm_lightning.callbacks.probes import KMeansProbe, LinearProbe
from ksm_lightning.callbacks.progress import UpdateProgressBar

__all__ = [
    "DivergenceGuard",
    "FeatureWriter",
    "Figures",
    "KMeansProbe",
    "KernelError",
    "LinearProbe",
    "UpdateCheckpoint",
    "UpdateProgressBar",
]
