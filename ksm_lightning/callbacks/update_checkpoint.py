"""Checkpoints every n updates, written atomically, also when a signal ends the run."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from ksm_lightning.runs.checkpoint_file import write_checkpoint
from ksm_lightning.runs.run_state import StoppableModule


class UpdateCheckpoint(Checkpoint):
    """Writes ``checkpoints/last.ckpt`` in the run folder: every n updates, before each validation and at the end.

    A checkpoint is written to another file first, which then replaces the old one in one step: if the run is killed,
    one of the two is complete. After SIGTERM or Ctrl-C the current update is finished, a checkpoint is written and the
    run ends; several processes finish their block of updates, and end at the same one. See
    :mod:`ksm_lightning.runs.stop`, and :mod:`ksm_lightning.runs.requeue` for the requeue signal of SLURM.

    Args:
        every_n_updates: Number of updates between two checkpoints.
        keep_all: Whether to keep a copy of each checkpoint, named by its update.
    """

    def __init__(self, every_n_updates: int = 1000, keep_all: bool = False) -> None:
        if every_n_updates < 1:
            raise ValueError(f"`every_n_updates` must be at least 1, got {every_n_updates}.")
        self.every_n_updates = every_n_updates
        self.keep_all = keep_all
        self.last_path: Path | None = None  # the last checkpoint that was written or resumed from, if any
        self._saved: tuple[int, bool] | None = None  # the state in the last checkpoint, see `_state`

    # ------------------------------------------------------------------ when to save

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved = self._state(trainer)
        self.last_path = Path(trainer.ckpt_path) if trainer.ckpt_path else None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        is_stopping = isinstance(pl_module, StoppableModule) and pl_module.is_stopping
        if is_stopping or trainer.global_step % self.every_n_updates == 0:
            self.save(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # An evaluation may take long: a run that is killed during it loses no updates.
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save(trainer)

    # ------------------------------------------------------------------ saving

    def save(self, trainer: L.Trainer) -> None:
        """Write ``last.ckpt``, unless it already holds this update. Every rank must call it.

        If it cannot be written, an OSError is raised and the old checkpoint is kept.
        """
        folder = trainer.log_dir
        if folder is None or self._saved == self._state(trainer):
            return
        target = Path(folder) / "checkpoints" / "last.ckpt"
        copy = target.with_name(f"update-{trainer.global_step:07d}.ckpt") if self.keep_all else None
        kept = f"{self.last_path} is unchanged" if self.last_path else "no earlier checkpoint exists"
        write_checkpoint(trainer, target, copy=copy, kept=kept)
        self._saved = self._state(trainer)
        self.last_path = target

    def _state(self, trainer: L.Trainer) -> tuple[int, bool]:
        """The update, and whether the end of the schedule is still to come after the last one."""
        module = trainer.lightning_module
        return trainer.global_step, isinstance(module, StoppableModule) and module.run_state.needs_finish
