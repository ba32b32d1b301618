"""A small model, its data and a short training run."""

import lightning
import torch
from lightning.pytorch.loggers import Logger

from ksm_lightning.callbacks import UpdateProgressBar
from ksm_lightning.data import HalfMoonsDataModule
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.module import KernelSimilarityMatching

SHORT = [Phase(10, 0.01, 0.02, 0.1)]


def moons(**options) -> HalfMoonsDataModule:
    return HalfMoonsDataModule(**{"num_points": 200, "batch_size": 16, "seed": 3, **options})


def model(**options) -> KernelSimilarityMatching:
    torch.manual_seed(0)
    defaults = {"num_neurons": 6, "in_features": 2, "kernel_params": {"sigma": 0.3}, "init": "normal", "phases": SHORT}
    return KernelSimilarityMatching(**{**defaults, **options})


def trainer(callbacks=(), logger=False, **options) -> lightning.Trainer:
    """A quiet trainer on the CPU, with a progress bar only if it is among the callbacks."""
    defaults = {
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": any(isinstance(callback, UpdateProgressBar) for callback in callbacks),
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 5,
    }
    return lightning.Trainer(callbacks=list(callbacks), logger=logger, **{**defaults, **options})


def fit(module, data=None, logger=False, **options) -> lightning.Trainer:
    """Train ``module`` and return the trainer. Default of ``data``: 200 half moons."""
    run = trainer(logger=logger, **{"log_every_n_steps": 50, **options})
    run.fit(module, datamodule=data or moons())
    return run


class Recorder(Logger):
    """A logger that keeps the metrics of each step."""

    def __init__(self):
        super().__init__()
        self.metrics: dict[int, dict[str, float]] = {}

    name, version = "recorder", 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.metrics.setdefault(step, {}).update(metrics)
