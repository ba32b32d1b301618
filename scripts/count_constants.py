#!/usr/bin/env python3
"""Count the tuning constants of ksm_lightning: names in capitals that a module or class assigns from a number.

.venv/bin/python scripts/count_constants.py --lines     a second

A name counts if its value contains a number, also inside of a dictionary, a call or a comprehension. Each name of a
tuple counts. ``FACTS`` lists names that are not a choice of this package.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "ksm_lightning"

FACTS = {
    "baselines/methods.py: _ALL": "registry",
    "data/array.py: _MAX_HEADER": "NumPy",
    "data/loaders.py: MAX_SLOTS": "generator",
    "data/loaders.py: _GOLDEN": "generator",
    "data/loaders.py: _MIX_1": "generator",
    "data/loaders.py: _MIX_2": "generator",
    "data/mnist.py: _SIDE": "MNIST",
    "data/mnist.py: _TEST": "MNIST",
    "data/mnist.py: _TRAIN": "MNIST",
    "extractor.py: FORMAT": "version",
    "files.py: _MAX_NAME": "filesystem",
    "learning/schedule.py: NAMED_PHASES": "paper",
    "learning/schedule.py: _WARM_UP": "paper",
    "runs/checkpoint.py: FORMAT": "version",
    "sklearn/kernel_choice.py: _COEF0": "scikit-learn",
    "sklearn/kernel_choice.py: _DEGREE": "scikit-learn",
}
"""Names that do not count, and where their values come from."""


class Constant(NamedTuple):
    """A name in capitals, and the statement that assigns a number to it."""

    path: str  # below the package
    name: str
    line: int
    source: str

    @property
    def key(self) -> str:
        """How ``FACTS`` names it."""
        return f"{self.path}: {self.name}"


def has_number(value: ast.expr) -> bool:
    """Whether an expression contains a number; True and False are not numbers."""
    literals = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return any(isinstance(literal, int | float | complex) and not isinstance(literal, bool) for literal in literals)


def assignments(statements: list[ast.stmt]) -> Iterator[tuple[list[ast.expr], ast.expr, ast.stmt]]:
    """Targets, value and statement of each assignment of a module, in its classes and branches too."""
    for statement in statements:
        match statement:
            case ast.Assign(targets=targets, value=value):
                yield targets, value, statement
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield [target], value, statement
            case ast.ClassDef(body=body):
                yield from assignments(body)
            case ast.If(body=body, orelse=others) | ast.Try(body=body, orelse=others):
                yield from assignments([*body, *others])


def constants_of(path: str, source: str) -> list[Constant]:
    """All constants of a module, facts included."""
    return [
        Constant(path, node.id, statement.lineno, " ".join((ast.get_source_segment(source, statement) or "").split()))
        for targets, value, statement in assignments(ast.parse(source).body)
        if has_number(value)
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and node.id.isupper()
    ]


def tuning_constants(package: Path = PACKAGE) -> list[Constant]:
    """All constants of the package that are not facts, by file. Raises ValueError if a fact does not exist."""
    files = sorted(package.rglob("*.py"))
    found = [each for file in files for each in constants_of(file.relative_to(package).as_posix(), file.read_text())]
    if unknown := sorted(set(FACTS) - {each.key for each in found}):
        raise ValueError(f"FACTS names constants that do not exist: {', '.join(unknown)}.")
    return [each for each in found if each.key not in FACTS]


def main() -> None:
    """Print the constants of every file and folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true", help="print the assignment of each constant")
    options = parser.parse_args()
    found = tuning_constants()
    for path in sorted({each.path for each in found}):
        here = [each for each in found if each.path == path]
        print(f"{len(here):4}  {path}: {', '.join(each.name for each in here)}")
        if options.lines:
            print(*(f"          {each.line}: {each.source}" for each in here), sep="\n")
    print()
    folders = Counter(each.path.partition("/")[0] for each in found)
    for folder, count in sorted(folders.items()):
        print(f"{count:4}  {folder}")
    print(f"{len(found):4}  in all, without {len(FACTS)} facts")


if __name__ == "__main__":
    main()
