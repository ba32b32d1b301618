"""The parser of ``ksm``: every mistake becomes one sentence, which names the configuration file at fault."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
from lightning.pytorch.cli import LightningArgumentParser

from ksm_lightning.cli.front import description_of
from ksm_lightning.cli.packaged_configs import CONFIG_OPTIONS
from ksm_lightning.cli.run_options import options_of_run
from ksm_lightning.cli.user_error import UserError, did_you_mean, one_line
from ksm_lightning.files import draft_of
from ksm_lightning.runs.yaml_config import read_config

_HINT = r"; see \S+( \S+)* --help\.?"
# The messages of jsonargparse about a data section without a class, and about no data section at all.
_REQUIRED = r"(?:([\w.]+): )?the following arguments are required: (\w+)"
_NO_DATA = r"data: (Not a valid subclass|Expected an instantiatable .*KSMDataModule is)|.* are required: (\w+\.)?data$"


class Commands:
    """The commands of a parser, each listed in ``--help`` with the description of its own parser."""

    def __init__(self, action: Any) -> None:
        self._action = action
        self.parsers: dict[str, KSMArgumentParser] = {}

    def add_subcommand(self, name: str, parser: "KSMArgumentParser", **kwargs: Any) -> None:
        """Add a command; replaces ``help``, for which LightningCLI passes the docstring of the Trainer's method."""
        self.parsers[name] = parser
        self._action.add_subcommand(name, parser, **{**kwargs, "help": parser.description})


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, jsonargparse.DefaultHelpFormatter):
    """Shows the lines of a description as they are."""


class KSMArgumentParser(LightningArgumentParser):
    """A parser that raises :class:`UserError` instead of printing a page of usage.

    Args:
        command: The command with a Trainer whose options it parses, None for the main parser.
        is_positional: Whether arguments without a default are given without the name of an option.
        options: Those of the base class.
    """

    def __init__(self, *, command: str | None = None, is_positional: bool = False, **options: Any) -> None:
        if command is not None:
            options |= {"usage": f"ksm {command} [OPTIONS]", "description": description_of(command)}
        # An abbreviated option would be a misspelt one that is believed.
        super().__init__(**{"formatter_class": _HelpFormatter, "allow_abbrev": False, **options})
        self.command, self.is_positional = command, is_positional
        self.commands: Commands | None = None
        self._typed = ""

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Commands:  # type: ignore[override]
        self.commands = Commands(super().add_subcommands(*args, **kwargs))
        return self.commands

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if self.command is not None:  # called by the main parser, which checks the files
            return super().parse_args(args, *rest, **kwargs)
        given = list(sys.argv[1:] if args is None else args)
        self._typed = f" {given[0]}" if self.commands and given else ""
        files = {path: path for path in config_files(given)}  # by what stands after --config
        for path in files:
            check_config_file(path)
        if self.commands and not files and (run := options_of_run(given)) is not None:
            files = {run.text: str(run.path)}
            given.insert(1, f"--config={run.text}")
        try:
            return super().parse_args(given, *rest, **kwargs)
        except UserError as error:
            at_fault = self._file_at_fault(given[:1] if self.commands else [], files, str(error))
            if at_fault is None:
                raise
            raise UserError(f"{at_fault}: {error}") from error

    def _file_at_fault(self, command: Sequence[str], files: Mapping[str, str], message: str) -> str | None:
        """The first file that leads to the same error without any further options."""
        for count, path in enumerate(files.values(), start=1):
            try:
                super().parse_args([*command, *(f"--config={each}" for each in list(files)[:count])])
            except UserError as error:
                if str(error) == message:
                    return path
        return None

    def save(self, cfg: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Write a configuration to a new file, completely or not at all."""
        with draft_of(Path(path), is_new=not kwargs.get("overwrite", False)) as draft:
            super().save(cfg, str(draft), *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        command, message = self.prog.replace(" [options]", "") + self._typed, _shorten(message).rstrip(".")
        if (required := re.fullmatch(_REQUIRED, message)) and not re.match(_NO_DATA, message):
            section, name = required.groups()
            option = name.upper() if self.is_positional else f"--{section + '.' if section else ''}{name}"
            message = f"{option} is required"
        if re.match(_NO_DATA, message):
            raise UserError(
                "No data set is chosen: give a complete file first, such as --config half_moons, or a "
                "datamodule, such as --data=HalfMoonsDataModule."
            ) from ex
        unknown = re.match(r"unrecognized arguments: (--[\w.]+)", message)
        hint = did_you_mean(unknown[1], self._options(), most=1).rstrip("?") if unknown else ""
        raise UserError(f"{message}{hint}; see {command} --help.") from ex

    def _options(self) -> list[str]:
        """The options of the command that was typed."""
        commands = self.commands.parsers if self.commands else {}
        return re.findall(r"--[\w.]+", commands.get(self._typed.strip(), self).format_help())


def add_config_option(parser: "KSMArgumentParser") -> None:
    """Add ``--config`` to a parser."""
    text = (
        "Options as YAML: a file, or a name that `ksm configs` lists. Later files and options win. A configuration is "
        "code, as the classes that it names are imported: use files you trust."
    )
    action = jsonargparse.ActionConfigFile  # type: ignore[attr-defined]
    parser.add_argument("-c", "--config", action=action, help=text, metavar="FILE")


def config_files(args: Sequence[str]) -> list[str]:
    """The configuration files that command-line arguments name.

    Example:
        >>> config_files(["fit", "--config", "a.yaml", "-c=b.yaml", "--config=c.yaml"])
        ['a.yaml', 'b.yaml', 'c.yaml']
    """
    paths = []
    for arg, following in pairwise([*args, ""]):
        option, is_joined, value = arg.partition("=")
        if option in CONFIG_OPTIONS:
            paths.append(value if is_joined else following)
    return paths


def check_config_file(path: str) -> None:
    """Raise UserError if an existing file is not YAML with named options. The parser would not name the file."""
    if not Path(path).is_file():
        return
    try:
        content = read_config(Path(path))
    except ValueError as error:
        raise UserError(f"The configuration {path} {error}.") from error
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise UserError(f"The configuration {path} must hold named options, such as `model: ...`, got {found}.")


def _shorten(message: str) -> str:
    """The message of jsonargparse in one line: the option and what is wrong with it.

    For a value that may have one of several types, jsonargparse lists one complaint per type. The first one is about
    the intended type, except where it only says that the value has another type.
    """
    key = re.search(r'Parser key "([^"]+)":', message)
    union = re.search(r"Errors:\s+- (.*?)\s+Given value type:", message, re.DOTALL)
    if key and union:
        complaints = [each for each in re.split(r"\s+- ", union[1]) if "NoneType" not in each]
        if not complaints[0].startswith("Expected a <class"):
            del complaints[1:]
        message = f"{key[1]}: {'; '.join(complaints)}"
    message = re.sub(_HINT, "", one_line(message)).replace("but is abstract", "but this one has abstract methods")
    message = re.sub(r'Parser key "([^"]+)": ', r"\1: ", message)
    message = re.sub(r"Expected a (?:typing\.)?Literal\[([^]]*)\]", r"Expected one of \1", message)
    message = re.sub(r"^([\w.]+): --(\w+ is required)", r"--\1.\2", message)  # of a class within the options
    return re.sub(r"(?:a )?<class '(?:\w+\.)*(\w+)'>", r"\1", message)
