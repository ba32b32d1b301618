"""The progress bar of training: updates, energy and kernel error."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from ksm_lightning.module import KernelSimilarityMatching


class UpdateProgressBar(TQDMProgressBar):
    """Lightning's progress bar for a run without epochs: updates done and to do, speed, energy and kernel error.

    Args:
        refresh_rate: Number of updates between two refreshes.
    """

    def __init__(self, refresh_rate: int = 50) -> None:
        super().__init__(refresh_rate=refresh_rate)

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.unit = " updates"
        return bar

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        bar = self.train_progress_bar
        if bar.total is None:  # the first epoch; all epochs share one bar
            bar.reset(total=updates_to_do(trainer))
            bar.initial = bar.n = trainer.global_step
            bar.set_description("Training")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        bar, done = self.train_progress_bar, trainer.global_step
        if not bar.disable and (done - bar.n >= self.refresh_rate or done == bar.total):
            bar.n = done
            bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
            bar.refresh()

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, int | str | float | Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {name.removeprefix("train/").removeprefix("val/"): value for name, value in metrics.items()}


def updates_to_do(trainer: L.Trainer) -> int | None:
    """Number of the update at which the run ends, or None if it is not known."""
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if isinstance(trainer.lightning_module, KernelSimilarityMatching):
        limits.append(trainer.lightning_module.schedule.total_updates)
    return min(limits) if limits else None
