"""The configurations that come with the package, by name: ``ksm fit --config half_moons`` works in any folder."""

import argparse
import re
from pathlib import Path

from ksm_lightning.cli.user_error import UserError, did_you_mean

CONFIG_OPTIONS = ("--config", "-c")
_COMPARE = "compare/"


def folder() -> Path:
    """The folder of the configurations: in the package once it is installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def names() -> list[str]:
    """The names of all configurations, such as ``half_moons`` and ``compare/half_moons``."""
    root = folder()
    found = [path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")]
    return sorted(found, key=lambda name: (name.startswith(_COMPARE), name))


def find(given: str, command: str = "fit") -> Path:
    """The file that ``--config`` means: an existing file, or a configuration of this package.

    Args:
        given: A path or a name, such as ``half_moons``, ``half_moons.yaml`` or ``configs/half_moons.yaml``.
        command: The command; ``compare`` has configurations of its own, which may be named without ``compare/``.

    Raises:
        UserError: If it is neither.
    """
    return Path(given) if Path(given).is_file() else _packaged(given, command)


def _packaged(given: str, command: str) -> Path:
    prefix = _COMPARE if command == "compare" else ""
    name, known = given.removeprefix("configs/").removeprefix(prefix).removesuffix(".yaml"), names()
    if prefix + name in known:
        return folder() / f"{prefix}{name}.yaml"
    if command in ("fit", "compare"):
        known = [each.removeprefix(prefix) for each in known if each.startswith(_COMPARE) == bool(prefix)]
    hint = did_you_mean(name, known) or "; ksm configs lists those of the package."
    raise UserError(f"There is no configuration {given}, neither as a file nor in the package{hint}")


def with_found_files(args: list[str]) -> list[str]:
    """Command-line arguments in which every ``--config NAME`` has become the path of its file.

    Raises:
        UserError: If a file does not exist.

    Example:
        >>> with_found_files(["fit", "--config=half_moons"])[1].endswith("configs/half_moons.yaml")
        True
    """
    command, found, is_value = args[0] if args else "", [], False
    for arg in args:
        option, _, value = arg.partition("=")
        if is_value and _is_name(arg):
            arg = str(find(arg, command))
        elif option in CONFIG_OPTIONS and _is_name(value):
            arg = f"{option}={find(value, command)}"
        is_value = arg in CONFIG_OPTIONS
        found.append(arg)
    return found


def _is_name(value: str) -> bool:
    """Whether a value is a path or a name; it may also be YAML itself, such as ``{model: {updates: 100}}``."""
    return bool(value) and not re.search(r"[{}\n]|: ", value)


def configs(args: list[str]) -> str:
    """What ``ksm configs`` prints: all configurations with their first lines, or the text of some of them."""
    parser = argparse.ArgumentParser(
        prog="ksm configs", description="List the configurations that come with the package, or print them."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a configuration to print, such as half_moons")
    chosen = parser.parse_args(args).names
    if chosen:
        return "\n".join(_packaged(name, "configs").read_text(encoding="utf-8").rstrip("\n") for name in chosen)
    lines = []
    for name in names():
        lines += [name, *(f"    {line}" for line in _heading(folder() / f"{name}.yaml")), ""]
    return "\n".join(
        [
            *lines,
            f"The files are in {folder()}.",
            "Print one:  ksm configs half_moons",
            "Copy one:   ksm configs half_moons > mine.yaml      then: ksm fit --config mine.yaml",
        ]
    )


def _heading(path: Path) -> list[str]:
    """The command of a configuration, with names in place of paths, and what to expect of it."""
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    command, _, expected = first.removeprefix("# ").partition("      ")
    short = re.sub(r"configs/(\S+)\.yaml", r"\1", command)
    if path.parent.name == "compare":
        short = short.replace(_COMPARE, "")
    return [short, (expected or second).removeprefix("#").strip()]
