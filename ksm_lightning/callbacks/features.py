"""What ``ksm predict`` leaves behind: the features of all points as one array."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from ksm_lightning.data import KSMDataModule
from ksm_lightning.files import write_array
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.readout import Readout, check_readout


class FeatureWriter(BasePredictionWriter):
    """Writes the features of the predicted points, in their order, as a ``.npy`` array (samples, neurons).

    Args:
        path: The file to write; it must not exist yet.
        readout: The features: ``neural`` is the network's response, ``nystroem`` and ``least_squares`` have a lower
            kernel error with the same landmarks.
    """

    def __init__(self, path: str = "features.npy", readout: Readout = "neural") -> None:
        super().__init__(write_interval="epoch")
        self.path = Path(path)
        self.readout = check_readout(readout)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        if self.path.suffix != ".npy":
            raise ValueError(f"Features are written as .npy, got {self.path}.")
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists already: name another file with --features.path.")
        if trainer.world_size > 1:
            raise ValueError("Predict with one device: --trainer.devices=1.")

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        if isinstance(pl_module, KernelSimilarityMatching):
            pl_module.set_readout(
                self.readout, data.readout_sample(self.readout) if isinstance(data, KSMDataModule) else None
            )

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(pl_module, KernelSimilarityMatching):
            pl_module.set_readout("neural")

    def write_on_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any] | None,
    ) -> None:
        features = np.concatenate([y.cpu().numpy() for y in predictions if isinstance(y, Tensor)])
        write_array(self.path, features)
        print(f"Features of {features.shape[0]:,} points in {features.shape[1]} dimensions: {self.path}")
