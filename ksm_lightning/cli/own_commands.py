"""The commands without a Trainer: the arguments of a function are the options of its command."""

import importlib
from collections.abc import Sequence
from typing import NamedTuple

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
    function(**options)
