"""The processes that train together: what they compute in common, and what they must agree on."""

from collections.abc import Callable
from typing import TypeVar

import lightning as L
import torch
from torch import Tensor

from ksm_lightning.private_apis import attached_trainer

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds to wait for another program or thread that should have answered long ago."""


def on_first_process(trainer: L.Trainer, compute: Callable[[], T]) -> T:
    """What ``compute`` returns on the first process, on all processes. Every process must call it.

    An error there is raised on every process: otherwise the others would wait for the first one until their timeout.
    """
    if trainer.world_size == 1:
        return compute()
    result: list[T] = []
    error: Exception | None = None
    if trainer.is_global_zero:
        try:
            result = [compute()]
        except Exception as caught:
            error = caught
    sent = error
    if error is not None and type(error).__module__ != "builtins":  # others may not survive pickling
        sent = RuntimeError(f"The first process has failed with {type(error).__name__}: {error}")
    result, sent = trainer.strategy.broadcast((result, sent))
    if error is not None or sent is not None:
        raise error or sent  # type: ignore[misc]
    return result[0]


class TrainerCollectives:
    """Collectives over the processes of a module's trainer; a single process without a trainer.

    They call :mod:`torch.distributed` on the group of all processes. ``strategy.reduce`` would wait at a barrier before
    each reduction, which on GPUs also makes the host wait for the device.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module

    @property
    def size(self) -> int:
        """Number of processes."""
        trainer = attached_trainer(self.module)
        return 1 if trainer is None else trainer.world_size

    @property
    def rank(self) -> int:
        """Rank of this process."""
        trainer = attached_trainer(self.module)
        return 0 if trainer is None else trainer.global_rank

    @property
    def is_first(self) -> bool:
        """Whether this is the process that decides for all, see :meth:`broadcast`."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """Mean over all processes. The value may be overwritten."""
        size = self.size
        return value if size == 1 else self.sum(value).div_(size)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over all processes. The value may be overwritten."""
        if self.size > 1:
            value = value.contiguous()
            torch.distributed.all_reduce(value)
        return value

    def gather(self, rows: Tensor) -> Tensor:
        """The rows (samples, m) of all processes, which must have the same number of them."""
        size = self.size
        if size == 1:
            return rows
        gathered = rows.new_empty(size * rows.shape[0], *rows.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered

    def broadcast(self, value: Tensor, source: int = 0) -> Tensor:
        """The value of a process. It may be on the CPU, although the training device is another one."""
        if self.size == 1:
            return value
        sent = value.to(self.module.trainer.strategy.root_device).contiguous()
        torch.distributed.broadcast(sent, source)
        return sent.to(value.device)
