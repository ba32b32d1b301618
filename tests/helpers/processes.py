"""Waiting for other processes, with deadlines that a slow machine meets too."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Seconds until a test gives up on a process: ten times what a busy machine needs for the slowest of them.
PATIENCE = 600.0


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Poll ``condition`` until it is true; fail if ``process`` ends first, or after ``PATIENCE`` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, f"the process ended with exit code {process.returncode}"
        assert time.monotonic() < deadline, f"nothing happened for {PATIENCE:g} seconds"
        time.sleep(0.02)


def written_again(path: Path) -> Callable[[], bool]:
    """A condition: ``path``, which exists, has been replaced since this call."""
    before = path.stat().st_mtime_ns
    return lambda: path.stat().st_mtime_ns != before


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process in the background, killed at the end of the ``with`` block if it still runs."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
