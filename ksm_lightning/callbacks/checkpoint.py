"""Checkpoints counted in updates, replaced as a whole or not at all."""

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint


class UpdateCheckpoint(Checkpoint):
    """Keeps ``checkpoints/last.ckpt`` in the run folder: every so many updates and at the end.

    A checkpoint is written beside the old one and then takes its place in one step, so that a run that is killed
    leaves either of them whole.

    Args:
        every_n_updates: Updates between two checkpoints.
        keep_all: Whether to keep a copy of each, named by its update.

    Raises:
        ValueError: If ``every_n_updates`` is below 1.
    """

    def __init__(self, every_n_updates: int = 1000, keep_all: bool = False) -> None:
        if every_n_updates < 1:
            raise ValueError(f"`every_n_updates` must be at least 1, got {every_n_updates}.")
        self.every_n_updates = every_n_updates
        self.keep_all = keep_all
        self._saved_at: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_at = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step % self.every_n_updates == 0:
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Write ``last.ckpt`` now, unless it has this update already; every rank must call it."""
        folder = trainer.log_dir
        if folder is None or self._saved_at == trainer.global_step:
            return
        self._saved_at = trainer.global_step
        target = Path(folder) / "checkpoints" / "last.ckpt"
        draft = target.with_suffix(".draft")
        trainer.save_checkpoint(draft, weights_only=False)
        if trainer.is_global_zero:
            _flush(draft)
            if self.keep_all:
                copy = target.with_name(f"update-{trainer.global_step:07d}.ckpt")
                copy.unlink(missing_ok=True)
                os.link(draft, copy)
            os.replace(draft, target)
        trainer.strategy.barrier("ksm_checkpoint")


def _flush(path: Path) -> None:
    """Have the file on the disk before it takes the old one's name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
