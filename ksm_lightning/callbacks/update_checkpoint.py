"""Checkpoints counted in updates, replaced as a whole or not at all; also when a signal ends the run."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class UpdateCheckpoint(Checkpoint):
    """Keeps ``checkpoints/last.ckpt`` in the run folder: every so many updates, before a validation and at the end.

    A checkpoint is written beside the old one and then takes its place in one step, so that a run that is killed
    leaves either of them whole. SIGTERM and Ctrl-C let the update at hand come to its end, save, and leave; with
    several processes all of them leave at the same update. A second Ctrl-C leaves at once.

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
        self.last_path: Path | None = None
        """The checkpoint written last, if there is one."""
        self._saved_at: int | None = None
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}
        self._can_leave = False

    # ------------------------------------------------------------------ when to save

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_at = trainer.global_step
        self.last_path = Path(trainer.ckpt_path) if trainer.ckpt_path else None
        self._signal = None
        self._listen(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step % self.every_n_updates == 0:
            self.save(trainer)
        is_told = self._signal is not None
        if trainer.world_size > 1:
            is_told = trainer.strategy.reduce_boolean_decision(is_told, all=False)
        if is_told:
            self.save(trainer)
            self._leave(self._signal or signal.SIGTERM)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # What is saved before an evaluation, which may take long, cannot be lost in it.
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

        def handle(number: int, frame: FrameType | None) -> None:
            if self._can_leave or (self._signal is not None and number == signal.SIGINT):
                self._leave(number)
            self._signal = number
            if trainer.world_size == 1:
                pl_module.should_pause = True  # type: ignore[assignment]

        pl_module.should_pause = False  # type: ignore[assignment]
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
        """Write ``last.ckpt`` now, unless it has this update already; every rank must call it.

        Raises:
            OSError: If it cannot be written; the old one is still there then.
        """
        folder = trainer.log_dir
        if folder is None or self._saved_at == trainer.global_step:
            return
        target = Path(folder) / "checkpoints" / "last.ckpt"
        draft = target.with_suffix(".draft")
        # Trainer.save_checkpoint without its barrier, at which the others would wait for a rank that cannot write.
        content = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        failure = ""
        try:
            trainer.strategy.save_checkpoint(content, draft)
            if trainer.is_global_zero:
                self._put_in_place(draft, target, trainer.global_step)
        except OSError as error:
            draft.unlink(missing_ok=True)
            kept = f"{self.last_path} is as it was" if self.last_path else "there is none yet"
            failure = f"The checkpoint {target} could not be written ({error}); {kept}."
        failure = trainer.strategy.broadcast(failure)
        if failure:
            raise OSError(failure)
        self._saved_at = trainer.global_step
        self.last_path = target

    def _put_in_place(self, draft: Path, target: Path, update: int) -> None:
        """Have the file on the disk before it takes the old one's name."""
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        if self.keep_all:
            copy = target.with_name(f"update-{update:07d}.ckpt")
            copy.unlink(missing_ok=True)
            os.link(draft, copy)
        os.replace(draft, target)
