"""Commands ``ksm`` in forked processes: they start at once, because this process has imported everything."""

import functools
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sklearn.datasets
import torch
import torch.utils.tensorboard

import ksm_lightning.cli.compare
import ksm_lightning.cli.export
import ksm_lightning.cli.lightning_cli
import ksm_lightning.cli.report
import ksm_lightning.figures
import ksm_lightning.sklearn  # noqa: F401
from ksm_lightning.cli import main

PATIENCE = 300.0  # seconds until a process is said to hang
_CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.move"}


@dataclass
class Process:
    """One or several ranks of a command, each a forked process."""

    ranks: list[int]
    log: Path
    codes: dict[int, int] = field(default_factory=dict)

    def poll(self) -> bool:
        """Whether all ranks have ended."""
        for pid in self.ranks:
            if pid not in self.codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.ranks)

    def kill(self) -> bool:
        """Send SIGKILL to all ranks; whether it met one of them."""
        is_running = not self.poll()
        for pid in self.ranks:
            if pid not in self.codes:
                os.kill(pid, signal.SIGKILL)
        self.wait()
        return is_running

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for all ranks; returns the exit code of the first one. Ranks that hang are killed: an error."""
        deadline = time.monotonic() + seconds
        while not self.poll():
            if -signal.SIGKILL in self.codes.values():  # what kills one rank kills all
                for pid in set(self.ranks) - set(self.codes):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"No end after {seconds:g} s: {self.output()[-2000:]}")
            time.sleep(0.005)
        return self.codes[self.ranks[0]]

    def output(self) -> str:
        """What the first rank has printed."""
        return self.log.read_text(errors="replace")

    def error(self) -> str:
        """The last line of what it has printed."""
        return (self.output().strip().splitlines() or [""])[-1]


def run(arguments: Sequence[str] | Callable[[], object], log: Path, ranks: int = 1, **hooks: Any) -> Process:
    """Start a command ``ksm``, or a function, in forked processes; the arguments ``hooks`` are those of :class:`Hooks`.

    Args:
        arguments: The arguments of ``ksm``, or a function to call.
        log: File for the output of the first rank.
        ranks: Number of processes that train or predict together.
        hooks: What to observe or to kill, in the first rank.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            if ranks > 1:
                os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            _child(arguments, log if rank == 0 else Path(os.devnull), Hooks(**hooks) if rank == 0 else Hooks())
        pids.append(pid)
    return Process(pids, log)


def _child(arguments: Sequence[str] | Callable[[], object], log: Path, hooks: "Hooks") -> None:
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(output, stream)
        torch.set_num_threads(1)
        hooks.install()
        if callable(arguments):
            arguments()
        else:
            main(list(arguments))
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        hooks.finish()
        os._exit(code)


@dataclass
class Hooks:
    """What a process observes of itself.

    Args:
        phase: A function, as ``module:name``. When it is called, ``started`` is created.
        started: That file. When the function returns, the file holds its duration in seconds.
        folder: Changes of files in this folder are counted.
        kill_at_change: The process kills itself before this change. Default: never.
    """

    phase: str = ""
    started: Path | None = None
    folder: Path | None = None
    kill_at_change: int | None = None
    changes: int = 0

    def install(self) -> None:
        """Start to observe."""
        if self.phase:
            module, _, name = self.phase.partition(":")
            *owners, last = name.split(".")
            owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
            setattr(owner, last, self._marked(getattr(owner, last)))
        if self.folder is not None:
            sys.addaudithook(self._on_event)

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            assert self.started is not None
            self.started.touch()
            begin = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.started.write_text(json.dumps(time.monotonic() - begin))

        return call

    def _on_event(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "open":
            path, mode, flags = args
            is_change = any(letter in (mode or "") for letter in "wax+") or bool(
                mode is None and flags & (os.O_WRONLY | os.O_RDWR)
            )
            paths = [path]
        else:
            is_change, paths = name in _CHANGES, list(args[:2])
        if not is_change or not any(isinstance(path, str | Path) and self._is_inside(path) for path in paths):
            return
        if self.changes == self.kill_at_change:
            os.kill(os.getpid(), signal.SIGKILL)
        self.changes += 1

    def _is_inside(self, path: str | Path) -> bool:
        return os.path.abspath(path).startswith(f"{os.path.abspath(str(self.folder))}/")

    def finish(self) -> None:
        """Store the number of changes."""
        if self.folder is not None and self.started is not None:
            self.started.with_suffix(".changes").write_text(str(self.changes))


def half_moons(path: Path, count: int = 2000) -> None:
    """Write half moons with labels: ``path`` and ``NAME_labels.npy``."""
    import numpy as np

    x, labels = sklearn.datasets.make_moons(count, noise=0.1, random_state=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, x.astype(np.float32))
    np.save(path.with_name(f"{path.stem}_labels.npy"), labels)
