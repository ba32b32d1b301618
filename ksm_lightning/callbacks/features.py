"""What ``ksm predict`` leaves behind: the features of all points as one array."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor


class FeatureWriter(BasePredictionWriter):
    """Writes the features of the predicted points, in their order, as a ``.npy`` array (samples, neurons).

    Args:
        path: The file to write; it must not exist yet.
    """

    def __init__(self, path: str = "features.npy") -> None:
        super().__init__(write_interval="epoch")
        self.path = Path(path)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        if self.path.suffix != ".npy":
            raise ValueError(f"Features are written as .npy, got {self.path}.")
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists already: name another file with --features.path.")
        if trainer.world_size > 1:
            raise ValueError("Predict with one device: --trainer.devices=1.")

    def write_on_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any] | None,
    ) -> None:
        features = np.concatenate([y.cpu().numpy() for y in predictions if isinstance(y, Tensor)])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft.npy")
        np.save(draft, features)
        os.replace(draft, self.path)
        print(f"Features of {features.shape[0]:,} points in {features.shape[1]} dimensions: {self.path}")
