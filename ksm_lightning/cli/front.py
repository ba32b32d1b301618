"""What ``ksm`` answers before anything slow is imported: its main help, its version, and misspelt commands."""

import importlib.metadata
from typing import NamedTuple

from ksm_lightning.cli.user_error import UserError, did_you_mean


class Command(NamedTuple):
    """A command in the main help."""

    summary: str
    examples: tuple[str, ...]  # the first is shown in the main help, all of them in the help of the command


COMMANDS = {
    "fit": Command(
        "Train a network and write a run folder.",
        (
            "ksm fit --config half_moons",
            "ksm fit --config half_moons --model.num_neurons=32 --seed_everything=1",
            "ksm fit --config half_moons --config half_moons_paper",
            "ksm fit --data=ArrayDataModule --data.path=mine.npy --model.kernel_params.sigma=3",
            "ksm fit --config half_moons --ckpt_path=runs/half_moons/version_0 --model.updates=4000",
        ),
    ),
    "validate": Command(
        "Energy, kernel error and probes of a run on its training points.",
        (
            "ksm validate --ckpt_path=runs/half_moons/version_0",
            "ksm validate --ckpt_path=runs/half_moons/version_0 --kernel_error.readouts=[neural,least_squares]",
            "ksm validate --config half_moons --ckpt_path=elsewhere/last.ckpt",
        ),
    ),
    "test": Command(
        "The same on its test points.",
        (
            "ksm test --ckpt_path=runs/half_moons/version_0",
            "ksm test --config half_moons --ckpt_path=elsewhere/last.ckpt",
        ),
    ),
    "predict": Command(
        "Write the features of the test points to a file.",
        (
            "ksm predict --ckpt_path=runs/half_moons/version_0 --features.path=y.npz",
            "ksm predict --ckpt_path=runs/half_moons/version_0 --features.path=y.npz --features.readout=nystroem",
        ),
    ),
    "export": Command(
        "Write the feature extractor for other programs.",
        (
            "ksm export --ckpt_path=runs/half_moons/version_0 --format=onnx",
            "ksm export --ckpt_path=runs/half_moons/version_0 --format=torch --readout=nystroem",
        ),
    ),
    "compare": Command(
        "Kernel errors of all methods on one data set.",
        (
            "ksm compare --config half_moons",
            "ksm compare --data=HalfMoonsDataModule --kernel_params.sigma=0.3 --sizes=[8,32] --out=runs/moons",
        ),
    ),
    "report": Command("Write one HTML page about a run, with advice.", ("ksm report runs/half_moons/version_0",)),
    "configs": Command(
        "List the configurations that come with the package, or print one.", ("ksm configs half_moons",)
    ),
}
# What people type who know other programs.
_OTHER_NAMES = {"train": "fit", "evaluate": "validate", "eval": "validate", "help": "--help", "version": "--version"}
_ABOUT = """Kernel similarity matching with Hebbian neural networks: train, evaluate and use a network. A
configuration file is code, as the classes that it names are imported: use files you trust. Run
folders and checkpoints are data."""


def answer(args: list[str]) -> str | None:
    """The answer to arguments that need no command to run; None if a command has to run.

    Raises:
        UserError: If the first argument is neither a command nor an option of ``ksm`` itself.
    """
    first = args[0] if args else "--help"
    if first in ("-h", "--help"):
        return help_text()
    if first in ("-V", "--version"):
        return f"ksm {version()}"
    # A file before the command may hold options of several commands.
    if first in COMMANDS or first.partition("=")[0] in ("-c", "--config", "--print_config"):
        return None
    if first.startswith("-"):
        option = first.partition("=")[0]
        hint = did_you_mean(option, ["--help", "--version", "--config"], most=1)
        raise UserError(
            f"ksm has no option {option}{hint or ': a command comes first, such as ksm fit --config half_moons.'}"
        )
    hint = did_you_mean(first, COMMANDS, most=1) or f"; the commands are {', '.join(COMMANDS)}"
    if first in _OTHER_NAMES:
        hint = f", did you mean {_OTHER_NAMES[first]}?"
    raise UserError(f"ksm has no command {first!r}{hint}")


def version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version("ksm-lightning")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"  # a checkout that is not installed


def help_text() -> str:
    """The text of ``ksm --help``."""
    lines = ["usage: ksm COMMAND [OPTIONS]", "", _ABOUT, "", "commands:"]
    for name, command in COMMANDS.items():
        lines += [f"  {name:9} {command.summary}", f"            {command.examples[0]}"]
    lines += [
        "",
        "options:",
        "  -h, --help     Show this text. `ksm COMMAND --help` explains the options of a command.",
        "  -V, --version  Show the version.",
        "  -c, --config   A file with options of several commands, before the command.",
    ]
    return "\n".join(lines)


def description_of(command: str) -> str:
    """The first lines of the help of a command."""
    return f"{COMMANDS[command].summary}\n\n{examples_of(command)}"


def examples_of(command: str) -> str:
    """The examples of a command, one per line."""
    return "\n".join(["examples:", *(f"  {each}" for each in COMMANDS[command].examples)])
