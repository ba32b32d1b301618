"""The commands without a Trainer: the arguments of a function are the options of its command."""

import importlib
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple, NoReturn

from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]

from ksm_lightning.cli.parser import KSMArgumentParser


class OwnCommand(NamedTuple):
    """A function that is a command, in the module ``ksm_lightning.cli.NAME``."""

    description: str  # its line in `ksm --help`
    is_positional: bool = False  # whether arguments without a default are given without the name of an option


OWN_COMMANDS = {
    "export": OwnCommand("Write the feature extractor for other programs: ksm export --ckpt_path=... --format=onnx"),
    "compare": OwnCommand(
        "Kernel errors of all methods: ksm compare --data=HalfMoonsDataModule --kernel_params.sigma=0.3"
    ),
    "report": OwnCommand(
        "One page about a run, with advice: ksm report runs/half_moons/version_0", is_positional=True
    ),
}  # fmt: skip


def run_own_command(name: str, args: Sequence[str]) -> None:
    """Parse the options of a command and call its function."""
    function = getattr(importlib.import_module(f"ksm_lightning.cli.{name}"), name)
    description = (function.__doc__ or "").partition("Args:")[0].strip()
    parser = KSMArgumentParser(prog=f"ksm {name}", description=description)
    parser.add_argument("--config", action=ActionConfigFile, help="A YAML file with options.")
    parser.add_function_arguments(function, fail_untyped=True, as_positional=OWN_COMMANDS[name].is_positional)
    options = parser.instantiate_classes(parser.parse_args(list(args)))
    options.pop("config", None)
    with _sigterm_like_ctrl_c():
        function(**options)


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Within the block, SIGTERM raises an exception, so that files that are half written are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End the command as Ctrl-C does.

    Unlike a run, these commands share no lock with another thread that an exception could leave taken. Should the
    exception be lost in a finaliser, the next signal ends the process.
    """
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)
