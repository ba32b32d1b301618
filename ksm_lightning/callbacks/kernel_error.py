"""The kernel's NRMSE over the evaluated points, on the device."""

from typing import Any

import lightning as L
from lightning.pytorch import Callback
from torch import Tensor

from ksm_lightning.metrics import KernelNRMSE
from ksm_lightning.module import KernelSimilarityMatching, inputs_of


class KernelError(Callback):
    """Logs ``val/kernel_nrmse`` (and ``test/kernel_nrmse``): ``||F - Y Y^T||_F / ||F||_F`` over all pairs of points.

    How often is said by the data's ``updates_per_epoch``.

    Args:
        max_points: Points to compare at most, evenly over the data; the cost grows with their square.

    Raises:
        ValueError: If ``max_points`` is below 1.
    """

    def __init__(self, max_points: int = 10_000) -> None:
        if max_points < 1:
            raise ValueError(f"`max_points` must be at least 1, got {max_points}.")
        self.max_points = max_points
        self._metric: KernelNRMSE | None = None

    def _start(self, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, KernelSimilarityMatching)
        self._metric = KernelNRMSE(pl_module.network.kernel, self.max_points).to(pl_module.device)

    def _add(self, y: Any, batch: Any) -> None:
        if self._metric is not None and isinstance(y, Tensor):
            self._metric.update(inputs_of(batch).to(y.dtype), y)

    def _finish(self, pl_module: L.LightningModule, name: str) -> None:
        if self._metric is not None:
            # The metric has gathered all ranks already, so every rank logs the same number.
            pl_module.log(name, self._metric.compute(), prog_bar=True, rank_zero_only=False)
        self._metric = None

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start(pl_module)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._add(outputs, batch)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(pl_module, "val/kernel_nrmse")

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start(pl_module)

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._add(outputs, batch)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(pl_module, "test/kernel_nrmse")
