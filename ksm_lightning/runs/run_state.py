"""A run while it lasts: what the module and its callbacks share, and the processes that train together."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import lightning as L
from torch import Tensor

from ksm_lightning.private_apis import attached_trainer


@dataclass
class RunState:
    """What the module and its callbacks share during a run. The module owns it."""

    is_guarded: bool = False  # a DivergenceGuard checks the run; otherwise the module does
    should_pause: bool = False  # set by a callback to leave a block of updates early
    has_updated: bool = False  # this run has made an update
    updates_per_second: float = 0.0  # up to the last update or validation, with everything in between
    encoder: Callable[[Tensor], Tensor] | None = None  # what `predict` computes; None: the network's responses
    _started_at: float = 0.0
    _first_update: int = 0

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
