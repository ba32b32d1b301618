"""What the benchmarks share: timing, Markdown tables, and result files of several sections."""

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from ksm_lightning.files import write_text


def seconds_of(work: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def best_of(work: Callable[[], object], times: int) -> float:
    """Shortest time of several calls."""
    return min(seconds_of(work) for _ in range(times))


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
