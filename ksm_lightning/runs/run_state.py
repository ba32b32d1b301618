"""A run while it lasts: what the module and its callbacks share, and the processes that train together."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning as L
from torch import Tensor

from ksm_lightning.private_apis import attached_trainer
from ksm_lightning.runs.stop import SignalStop, StopFlag
from ksm_lightning.runs.update_log import UpdateLog


@dataclass
class RunState:
    """What the module and its callbacks share during a run. The module owns it."""

    is_guarded: bool = False  # a DivergenceGuard checks the run; otherwise the module does
    stop: StopFlag = field(default_factory=StopFlag)  # whether a signal asks the run to end
    log: UpdateLog = field(default_factory=UpdateLog)
    needs_finish: bool = False  # all updates are made, but a signal came before L was consolidated
    has_updated: bool = False  # this run has made an update
    updates_per_second: float = 0.0  # up to the last update or validation, with everything in between
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
        self.updates_per_second = 0.0
        self._started_at, self._first_update = time.perf_counter(), update

    def measure(self, update: int) -> None:
        """Note that updates were made, and measure the throughput up to this one."""
        self.has_updated = self.has_updated or update > self._first_update
        self.updates_per_second = (update - self._first_update) / (time.perf_counter() - self._started_at)


class TrainerCollectives:
    """Collectives over the processes of a module's trainer; a single process without a trainer."""

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module

    @property
    def size(self) -> int:
        """Number of processes."""
        trainer = attached_trainer(self.module)
        return 1 if trainer is None else trainer.world_size

    def mean(self, value: Tensor) -> Tensor:
        """Mean over all processes."""
        return self._reduce(value, "mean")

    def sum(self, value: Tensor) -> Tensor:
        """Sum over all processes."""
        return self._reduce(value, "sum")

    def gather(self, rows: Tensor) -> Tensor:
        """The rows (samples, m) of all processes."""
        if self.size == 1:
            return rows
        gathered = self.module.all_gather(rows)
        assert isinstance(gathered, Tensor)
        return gathered.flatten(0, 1)

    def _reduce(self, value: Tensor, operation: Literal["mean", "sum"]) -> Tensor:
        if self.size == 1:
            return value
        reduced = self.module.trainer.strategy.reduce(value, reduce_op=operation)
        assert isinstance(reduced, Tensor)
        return reduced


class StoppableModule(L.LightningModule):
    """A LightningModule whose runs a signal can end, at the points where the module or a callback reads the flag.

    Several processes end together, where all of them meet: until then, a process that has received a signal skips its
    share of the work. ``training_step`` must end with :meth:`agree_to_stop`, so that callbacks can save a checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run_state = RunState()

    def configure_callbacks(self) -> list[L.Callback]:
        """The callback that lets SIGINT and SIGTERM set the flag."""
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
        return self.run_state.stop.agreed is not None

    def leave_if_stopped(self) -> None:
        """End the run if a process has received a signal. Every process must call it, between two pieces of work."""
        self.agree_to_stop()
        self.run_state.stop.leave_if_agreed()

    def skips_work(self) -> bool:
        """Whether one of several processes skips its work because of a signal; a single process ends the run."""
        if self.is_alone:
            self.leave_if_stopped()
            return False
        return self.run_state.stop.is_set

    def on_train_batch_end(self, *args: Any) -> None:
        """Leave after the callbacks, which have saved a checkpoint."""
        if self.is_stopping:
            self.run_state.stop.leave_if_agreed()

    def on_validation_epoch_end(self) -> None:
        self.leave_if_stopped()

    def on_test_epoch_end(self) -> None:
        self.leave_if_stopped()

    def end_run(self) -> None:
        """End a completed run by a signal that came late, unless somebody reads the flag after the run."""
        if not self.run_state.stop.is_owned:
            self.leave_if_stopped()
