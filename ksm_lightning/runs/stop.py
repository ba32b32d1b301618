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
from types import FrameType
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from ksm_lightning.learning.collectives import Collectives
from ksm_lightning.private_apis import after_signal_registration

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedEarly(Exception):
    """Work was left unfinished because a signal asks the run to end. The code that started the work ends the run."""


@dataclass
class StopFlag:
    """Whether a signal asks a run to end. Only the handler sets it; code reads it where it can leave."""

    number: int | None = None  # the signal that this process has received
    agreed: int | None = None  # the signal that ends the run, the same on all processes, see `agree`
    is_owned: bool = False  # somebody reads the flag after the run, too

    @property
    def is_set(self) -> bool:
        """Whether this process has received a signal."""
        return self.number is not None

    def agree(self, collectives: Collectives, device: torch.device) -> bool:
        """Whether any process has received a signal. Every process must call it."""
        self.agreed = self.number
        if collectives.size > 1:
            received = torch.tensor([self.number == number for number in SIGNALS], dtype=torch.int64, device=device)
            counts = dict(zip(SIGNALS, collectives.sum(received).tolist(), strict=True))
            self.agreed = next((number for number, count in counts.items() if count), None)
        return self.agreed is not None

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


def handle_by(flag: StopFlag) -> dict[int, Any]:
    """Let SIGINT and SIGTERM set the flag; returns the handlers before. Nothing happens outside of the main thread.

    A second Ctrl-C restores the default action of SIGINT, so that a third one ends the process at once, whatever it
    waits for.
    """
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a worker of a DataLoader: the run reads from it until it ends itself
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        elif flag.number is None:
            flag.number = number
        elif number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handle) for number in SIGNALS}


@contextmanager
def stopping_by(flag: StopFlag) -> Iterator[None]:
    """Within the block, signals set the flag. The caller reads it afterwards."""
    flag.is_owned, before = True, handle_by(flag)
    try:
        yield
    finally:
        flag.is_owned = False
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class SignalStop(Callback):
    """Lets SIGINT and SIGTERM set the flag while a Trainer runs; the module has it and reads the flag.

    Lightning registers a handler of its own that writes to the log and, with several processes, waits for a broadcast.
    It is replaced immediately. After the run Lightning restores the handlers from before.

    Args:
        flag: The flag of the run.
    """

    def __init__(self, flag: StopFlag) -> None:
        self.flag = flag

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.flag.agreed = None
        if not self.flag.is_owned:
            self.flag.number = None
        after_signal_registration(trainer, lambda: handle_by(self.flag))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # A signal that came after the last point at which the flag was read.
        if not self.flag.is_owned and trainer.world_size == 1:
            self.flag.agreed = self.flag.number
            self.flag.leave_if_agreed()
