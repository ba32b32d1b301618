"""A run while it lasts: what the module and its callbacks share."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from torch import Tensor

from ksm_lightning.private_apis import attached_trainer
from ksm_lightning.runs.other_callbacks import prepare_for_callbacks
from ksm_lightning.runs.processes import TrainerCollectives
from ksm_lightning.runs.requeue import requeue
from ksm_lightning.runs.stop import SignalStop, StopFlag
from ksm_lightning.runs.strategy import prepare_strategy
from ksm_lightning.runs.update_log import UpdateLog


@dataclass
class RunState:
    """What the module and its callbacks share during a run. The module owns it."""

    is_guarded: bool = False  # a DivergenceGuard checks the run; otherwise the module does
    stop: StopFlag = field(default_factory=StopFlag)  # whether a signal asks the run to end
    log: UpdateLog = field(default_factory=UpdateLog)
    needs_finish: bool = False  # all updates are made, but a signal came before L was consolidated
    has_updated: bool = False  # this run has made an update
    is_milestone: bool = (
        False  # the last block has reached a milestone, see `next_milestone`, before the end of the run
    )
    is_silent: bool = False  # this run has warned that no neuron responds to the data
    updates_per_second: float = 0.0  # up to the last update or validation, with everything in between
    batch_choice: str = ""  # what `batch_size: auto` has chosen, in a sentence
    encoder: Callable[[Tensor], Tensor] | None = None  # what `predict` computes; None: the network's responses
    _started_at: float = 0.0
    _first_update: int = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs of it."""
        return {"needs_finish": self.needs_finish, "epoch_energy": self.log.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.needs_finish = bool(state.get("needs_finish", False))
        self.log.load_state(state.get("epoch_energy", [0.0, 0.0]))

    def start(self, update: int) -> None:
        """Start to measure the throughput of a run that starts at this update."""
        self.updates_per_second, self.has_updated, self.is_silent = 0.0, False, False
        self._started_at, self._first_update = time.perf_counter(), update

    def measure(self, update: int) -> None:
        """Note that updates were made, and measure the throughput up to this one."""
        self.has_updated = self.has_updated or update > self._first_update
        self.updates_per_second = (update - self._first_update) / (time.perf_counter() - self._started_at)


class StoppableModule(L.LightningModule):
    """A LightningModule whose runs a signal can end, at the points where the module or a callback reads the flag.

    Several processes end together, where all of them meet: until then, a process that has received a signal skips its
    share of the work. ``training_step`` must end with :meth:`agree_to_stop`, so that callbacks can save a checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run_state = RunState()

    def configure_callbacks(self) -> list[L.Callback]:
        """The callback that lets signals set the flag. Strategies and callbacks that cannot work are refused here."""
        trainer = attached_trainer(self)
        if trainer is not None:
            prepare_strategy(trainer)
            prepare_for_callbacks(trainer)
        return [SignalStop(self.run_state.stop)]

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process, which may leave anywhere."""
        return TrainerCollectives(self).size == 1

    def agree_to_stop(self) -> bool:
        """Whether a process has received a signal. Every process must call it."""
        return self.run_state.stop.agree(TrainerCollectives(self), self.device)

    @property
    def is_stopping(self) -> bool:
        """Whether all processes leave at the end of this block of updates. A single one looks at the flag again."""
        if self.is_alone:
            self.agree_to_stop()
        return self.run_state.stop.is_agreed

    def leave_if_stopped(self) -> None:
        """End the run if a process has received a signal. Every process must call it, between two pieces of work."""
        self.agree_to_stop()
        self._leave_if_agreed()

    def _leave_if_agreed(self) -> None:
        """End the run, and before put its job back in the queue if SLURM asks for it and work is left."""
        trainer, stop = self.trainer, self.run_state.stop
        if stop.requeues:
            stop.requeues = stop.wants_requeue = False
            has_ended = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
            if trainer.state.fn != "fit" or not has_ended:
                stop.requeued_from = requeue(trainer)
            if stop.requeued_from is not None and stop.agreed is None:
                stop.agreed = signal.SIGTERM
        stop.leave_if_agreed()

    def skips_work(self) -> bool:
        """Whether one of several processes skips its work because of a signal; a single process ends the run."""
        if self.is_alone:
            self.leave_if_stopped()
            return False
        return self.run_state.stop.is_set

    def on_train_batch_end(self, *args: Any) -> None:
        """Leave after the callbacks, which have saved a checkpoint."""
        if self.is_stopping:
            self._leave_if_agreed()

    def on_validation_epoch_end(self) -> None:
        self.leave_if_stopped()

    def on_test_epoch_end(self) -> None:
        self.leave_if_stopped()

    def end_run(self) -> None:
        """End a completed run by a signal that came late, unless somebody reads the flag after the run."""
        self.run_state.stop.wants_requeue = False  # nothing is left to do
        if not self.run_state.stop.is_owned:
            self.leave_if_stopped()
