"""Signals that end a run: the handler only sets a flag, and the run ends at the next point where nothing is half done.

Python runs a signal handler between any two instructions of the main thread: while a lock is held, or in a finaliser,
where exceptions are ignored. An exception raised by the handler can therefore be lost, or leave a lock taken for ever.
Here the exception is raised by the code that reads the flag: after a block of updates, a batch or an evaluation.
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from ksm_lightning.learning.collectives import Collectives
from ksm_lightning.private_apis import after_signal_registration, requeue_signal

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedEarly(Exception):
    """Work was left unfinished because a signal asks the run to end. The code that started the work ends the run."""


@dataclass
class StopFlag:
    """Whether a signal asks a run to end. Only the handler sets it; code reads it where it can leave."""

    number: int | None = None  # the signal that this process has received
    agreed: int | None = None  # the signal that ends the run, the same on all processes, see `agree`
    is_owned: bool = False  # somebody reads the flag after the run, too
    wants_requeue: bool = False  # this process has received SLURM's requeue signal
    requeues: bool = False  # a process has received it, the same on all processes, see `agree`
    requeued_from: Path | None = None  # what the job continues from, after it was put back in the queue

    @property
    def is_set(self) -> bool:
        """Whether this process has received a signal."""
        return self.number is not None

    def agree(self, collectives: Collectives, device: torch.device) -> bool:
        """Whether any process has received a signal. Every process must call it."""
        self.agreed, self.requeues = self.number, self.wants_requeue
        if collectives.size > 1:
            own = [*(self.number == number for number in SIGNALS), self.wants_requeue]
            *counts, requeues = collectives.sum(torch.tensor(own, dtype=torch.int64, device=device)).tolist()
            self.agreed = next((number for number, count in zip(SIGNALS, counts, strict=True) if count), None)
            self.requeues = requeues > 0
        return self.is_agreed

    @property
    def is_agreed(self) -> bool:
        """Whether :meth:`agree` has found a signal."""
        return self.agreed is not None or self.requeues

    def leave_if_agreed(self) -> None:
        """End the run on this process, if :meth:`agree` has found a signal."""
        if self.agreed is not None:
            self._leave(self.agreed)

    def leave_work(self) -> None:
        """Raise StoppedEarly if this process has received a signal."""
        if self.is_set:
            raise StoppedEarly

    def until_set(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """The blocks, with :meth:`leave_work` before each of them."""
        for block in blocks:
            self.leave_work()
            yield block

    def _leave(self, number: int) -> NoReturn:
        if number == signal.SIGTERM:
            raise SIGTERMException
        raise KeyboardInterrupt


def handle_by(flag: StopFlag, requeue_by: int | None = None) -> dict[int, Any]:
    """Let SIGINT and SIGTERM set the flag; returns the handlers before. Nothing happens outside of the main thread.

    A second Ctrl-C restores the default action of SIGINT, so that a third one ends the process at once, whatever it
    waits for. ``requeue_by`` is SLURM's requeue signal; it does not end a block of updates early.
    """
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a worker of a DataLoader: the run reads from it until it ends itself
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        elif number == requeue_by:
            flag.wants_requeue = True
        elif flag.number is None:
            flag.number = number
        elif number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = SIGNALS if requeue_by is None else (*SIGNALS, requeue_by)
    return {number: signal.signal(number, handle) for number in numbers}


@contextmanager
def stopping_by(flag: StopFlag, trainer: L.Trainer | None = None) -> Iterator[None]:
    """Within the block, signals set the flag, also the requeue signal of a trainer. The caller reads it afterwards."""
    flag.is_owned, before = True, handle_by(flag, None if trainer is None else requeue_signal(trainer))
    try:
        yield
    finally:
        flag.is_owned = False
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class SignalStop(Callback):
    """Lets signals set the flag while a Trainer runs; the module has it and reads the flag.

    Lightning registers handlers of its own. That of SIGTERM writes to the log and, with several processes, waits for a
    broadcast; that of SLURM's requeue signal saves a checkpoint. They are replaced immediately. After the run Lightning
    restores the handlers from before. A handler of the user for the requeue signal is left alone.

    Args:
        flag: The flag of the run.
    """

    def __init__(self, flag: StopFlag) -> None:
        self.flag = flag

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.flag.agreed, self.flag.requeues, self.flag.requeued_from = None, False, None
        requeue_by = requeue_signal(trainer)
        if not self.flag.is_owned:
            self.flag.number, self.flag.wants_requeue = None, False
            if requeue_by is not None and signal.getsignal(requeue_by) not in (None, signal.SIG_DFL):
                requeue_by = None
        after_signal_registration(trainer, lambda: handle_by(self.flag, requeue_by))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        after_signal_registration(trainer, None)  # the trainer may run another module next
        # A signal that came after the last point at which the flag was read.
        if not self.flag.is_owned and trainer.world_size == 1:
            self.flag.agreed = self.flag.number
            self.flag.leave_if_agreed()
