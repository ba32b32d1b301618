"""Checkpoints every n updates, written atomically, also when a signal ends the run."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from ksm_lightning.files import draft_of
from ksm_lightning.private_apis import checkpoint_content
from ksm_lightning.runs.run_state import StoppableModule


class UpdateCheckpoint(Checkpoint):
    """Writes ``checkpoints/last.ckpt`` in the run folder: every n updates, before each validation and at the end.

    A checkpoint is written to another file first, which then replaces the old one in one step: if the run is killed,
    one of the two is complete. After SIGTERM or Ctrl-C the current update is finished, a checkpoint is written and the
    run ends; several processes finish their block of updates, and end at the same one. See
    :mod:`ksm_lightning.runs.stop`.

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
        content = checkpoint_content(trainer)
        failure = ""
        try:
            with draft_of(target) if trainer.is_global_zero else nullcontext(target) as draft:
                trainer.strategy.save_checkpoint(content, draft)  # some strategies write on the first rank only
                if trainer.is_global_zero:
                    self._make_durable(draft, target, trainer.global_step)
        except OSError as error:
            kept = f"{self.last_path} is unchanged" if self.last_path else "no earlier checkpoint exists"
            failure = f"The checkpoint {target} could not be written ({error.__cause__ or error}); {kept}."
        failure = trainer.strategy.broadcast(failure)
        if failure:
            raise OSError(failure)
        self._saved = self._state(trainer)
        self.last_path = target

    def _state(self, trainer: L.Trainer) -> tuple[int, bool]:
        """The update, and whether the end of the schedule is still to come after the last one."""
        module = trainer.lightning_module
        return trainer.global_step, isinstance(module, StoppableModule) and module.run_state.needs_finish

    def _make_durable(self, draft: Path, target: Path, update: int) -> None:
        """Flush the file to the disk before it replaces the old one; link the copy to keep."""
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        if self.keep_all:
            copy = target.with_name(f"update-{update:07d}.ckpt")
            copy.unlink(missing_ok=True)
            os.link(draft, copy)
