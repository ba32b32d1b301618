"""Callbacks: evaluations, figures, the divergence guard, checkpoints, the progress bar and feature files."""

from ksm_lightning.callbacks.evaluations import Evaluation, KMeansProbe, LinearProbe
from ksm_lightning.callbacks.feature_writer import FeatureWriter
from ksm_lightning.callbacks.guard import DivergenceGuard
from ksm_lightning.callbacks.kernel_error_evaluation import KernelErrorEvaluation
from ksm_lightning.callbacks.progress_bar import UpdateProgressBar
from ksm_lightning.callbacks.run_figures import Figures
from ksm_lightning.callbacks.update_checkpoint import UpdateCheckpoint

__all__ = [
    "DivergenceGuard", "Evaluation", "FeatureWriter", "Figures", "KMeansProbe", "KernelErrorEvaluation", "LinearProbe",
    "UpdateCheckpoint", "UpdateProgressBar",
]  # fmt: skip
