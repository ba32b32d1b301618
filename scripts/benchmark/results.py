"""What the benchmarks share: timing, Markdown tables, and result files of several sections."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ksm_lightning.files import write_text


def seconds_of(work: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    return timed(work)[1]


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Result and wall-clock time of one call."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def best_of(work: Callable[[], object], times: int) -> float:
    """Shortest time of several calls."""
    return min(seconds_of(work) for _ in range(times))


def chosen_parts(description: str | None, parts: Iterable[str]) -> tuple[list[str], bool]:
    """The parts of a benchmark that the command line asks for, and whether it wants a quick check.

    The part ``mnist`` is left out, with a message, if KSM_DATA_DIR is not set.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round; results are only printed")
    parser.add_argument("--only", choices=parts, help="measure one part and keep the others. Default: all parts")
    options = parser.parse_args()
    wanted = [options.only] if options.only else list(parts)
    if "mnist" in wanted and not os.environ.get("KSM_DATA_DIR"):
        print("MNIST is skipped: set KSM_DATA_DIR to the folder that holds MNIST/raw.", file=sys.stderr)
        wanted.remove("mnist")
    return wanted, options.quick


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def machine(*facts: str, **versions: str) -> str:
    """Processor, facts such as the number of threads, and versions of Python, torch and other libraries."""
    known = {"Python": platform.python_version(), "torch": torch.__version__, **versions}
    names = [f"{name.replace('_', '-')} {version}" for name, version in known.items()]
    return ", ".join([platform.processor() or platform.machine(), *facts, *names])


def write_sections(path: Path, head: str, titles: Mapping[str, str], measured: Mapping[str, Sequence[str]]) -> None:
    """Write a result file. Measured sections replace those in the file; the other sections are kept.

    Args:
        path: The Markdown file.
        head: Its first lines.
        titles: Titles of all sections by name, in order.
        measured: Lines of the sections that were measured, by name.
    """
    old = path.read_text() if path.exists() else ""
    sections = []
    for name, title in titles.items():
        kept = old.partition(f"## {title}\n")[2].partition("\n## ")[0]
        text = "\n".join(measured[name]) if name in measured else kept
        if text.strip():
            sections.append(f"## {title}\n\n{text.strip()}\n")
    write_text(path, "\n\n".join([head.strip(), "\n".join(sections)]))
