"""The commands without a Trainer: the arguments of a function are the options of its command."""

import importlib
import inspect
import re
import signal
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ksm_lightning.cli.front import examples_of
from ksm_lightning.cli.parser import KSMArgumentParser, add_config_option
from ksm_lightning.cli.user_error import UserError

OWN_COMMANDS = ("export", "compare", "report")
_POSITIONAL = ("report",)  # arguments without a default are given without the name of an option


def run_own_command(name: str, args: Sequence[str]) -> None:
    """Parse the options of a command and call its function."""
    function = getattr(importlib.import_module(f"ksm_lightning.cli.{name}"), name)
    about = inspect.cleandoc(function.__doc__ or "").partition("Args:")[0].strip()
    wrapped = (textwrap.fill(part, width=100) for part in about.split("\n\n"))
    description = "\n\n".join([*wrapped, examples_of(name)])
    is_positional = name in _POSITIONAL
    parser = KSMArgumentParser(prog=f"ksm {name}", description=description, is_positional=is_positional)
    add_config_option(parser)
    parser.add_function_arguments(function, fail_untyped=True, as_positional=is_positional)
    try:
        options = parser.instantiate_classes(parser.parse_args(list(args)))
    except UserError as error:
        # The parser of a class within the options knows neither its command nor its option, which is always the data.
        hint = rf"--data.\1 ksm {name} --help."
        raise UserError(re.sub(r"^--(\w+ is required; see) (?!ksm ).*", hint, str(error))) from error
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
