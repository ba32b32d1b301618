"""Checkpoints every n updates, written atomically, also when a signal ends the run."""

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ksm_lightning.files import draft_of
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.private_apis import checkpoint_content

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class UpdateCheckpoint(Checkpoint):
    """Writes ``checkpoints/last.ckpt`` in the run folder: every n updates, before each validation and at the end.

    A checkpoint is written to another file first, which then replaces the old one in one step: if the run is killed,
    one of the two is complete. After SIGTERM or Ctrl-C the current update is finished, a checkpoint is written and the
    run ends; several processes end at the same update. A second Ctrl-C ends the run immediately.

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
        self._saved_at: int | None = None
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}
        self._can_leave = False  # whether a signal may end the run immediately, as nothing would be lost

    # ------------------------------------------------------------------ when to save

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_at = trainer.global_step
        self.last_path = Path(trainer.ckpt_path) if trainer.ckpt_path else None
        self._signal = None
        self._listen(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step % self.every_n_updates == 0:
            self.save(trainer)
        is_stopped = self._signal is not None
        if trainer.world_size > 1:
            is_stopped = trainer.strategy.reduce_boolean_decision(is_stopped, all=False)
        if is_stopped:
            self.save(trainer)
            self._leave(self._signal or signal.SIGTERM)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # An evaluation may take long: a run that is killed during it loses no updates.
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.save(trainer)
            self._can_leave = trainer.world_size == 1

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._can_leave = False

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save(trainer)
        self._stop_listening()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop_listening()

    # ------------------------------------------------------------------ signals

    def _listen(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        run_state = pl_module.run_state if isinstance(pl_module, KernelSimilarityMatching) else None

        def handle(number: int, frame: FrameType | None) -> None:
            if self._can_leave or (self._signal is not None and number == signal.SIGINT):
                self._leave(number)
            self._signal = number
            if run_state is not None and trainer.world_size == 1:
                run_state.should_pause = True  # ends the block of updates; several ranks must end it together

        self._handlers = {number: signal.signal(number, handle) for number in _SIGNALS}

    def _stop_listening(self) -> None:
        self._can_leave = False
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _leave(self, number: int) -> None:
        self._stop_listening()
        if number == signal.SIGTERM:
            raise SIGTERMException
        raise KeyboardInterrupt

    # ------------------------------------------------------------------ saving

    def save(self, trainer: L.Trainer) -> None:
        """Write ``last.ckpt``, unless it already holds this update. Every rank must call it.

        If it cannot be written, an OSError is raised and the old checkpoint is kept.
        """
        folder = trainer.log_dir
        if folder is None or self._saved_at == trainer.global_step:
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
            failure = f"The checkpoint {target} could not be written ({error}); {kept}."
        failure = trainer.strategy.broadcast(failure)
        if failure:
            raise OSError(failure)
        self._saved_at = trainer.global_step
        self.last_path = target

    def _make_durable(self, draft: Path, target: Path, update: int) -> None:
        """Flush the file to the disk before it replaces the old one; link the copy to keep."""
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        if self.keep_all:
            copy = target.with_name(f"update-{update:07d}.ckpt")
            copy.unlink(missing_ok=True)
            os.link(draft, copy)
