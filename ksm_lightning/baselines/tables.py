"""Errors of several methods as tables: a row a run, the seeds together, Markdown for people."""

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ksm_lightning.files import write_csv

METHODS: dict[str, str] = {
    "kernel_pca": "kernel PCA (optimum)",
    "nystroem_uniform": "Nystroem, uniform",
    "nystroem_kmeans": "Nystroem, KMeans",
    "nystroem_leverage": "Nystroem, leverage scores",
    "nystroem_cholesky": "Nystroem, pivoted Cholesky",
    "nystroem_gradient": "Nystroem, gradient",
    "random_fourier": "random Fourier",
    "neural_fourier": "neural Fourier",
    "linear": "linear similarity matching",
    "ksm": "network",
    "ksm_nystroem": "Nystroem on the network's W",
    "ksm_least_squares": "least squares on the network's W",
}
"""Names of the methods, and what they are called in a table."""


class Row(NamedTuple):
    """One representation, scored."""

    method: str
    n: int
    seed: int
    nrmse: float
    """NaN where the training of a network diverged."""
    seconds: float
    """Of the fit; that of a network counts for each of its readouts."""


class Summary(NamedTuple):
    """The seeds of a method and a number of features together."""

    method: str
    n: int
    seeds: int
    mean: float
    deviation: float
    least: float
    most: float
    diverged: int


def read_rows(path: Path) -> list[Row]:
    """The rows of an ``errors.csv``.

    Raises:
        ValueError: If it is no such file.
    """
    try:
        with path.open(newline="") as file:
            rows = [
                Row(row["method"], int(row["n"]), int(row["seed"]), float(row["nrmse"]), float(row["seconds"]))
                for row in csv.DictReader(file)
            ]
        if any(row.method not in METHODS for row in rows):
            raise ValueError("a method without a name here")
        return rows
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of a comparison: remove it, or choose another folder.") from error


def summarise(rows: Iterable[Row]) -> list[Summary]:
    """Seeds together, in the order of :data:`METHODS` and n; diverged runs are counted and left out of the rest."""
    groups: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        groups.setdefault((row.method, row.n), []).append(row.nrmse)
    order = {name: place for place, name in enumerate(METHODS)}
    summaries = []
    for (name, n), errors in sorted(groups.items(), key=lambda item: (order[item[0][0]], item[0][1])):
        sound = [error for error in errors if not math.isnan(error)] or [math.nan]
        least, most, diverged = min(sound), max(sound), sum(math.isnan(error) for error in errors)
        mean = statistics.fmean(sound)
        deviation = math.sqrt(statistics.fmean((error - mean) ** 2 for error in sound))
        summaries.append(Summary(name, n, len(errors), mean, deviation, least, most, diverged))
    return summaries


def markdown(summaries: Sequence[Summary]) -> str:
    """A table of means, with the deviation over seeds where there are several."""
    sizes = sorted({entry.n for entry in summaries})
    cells = {(entry.method, entry.n): _cell(entry) for entry in summaries}
    lines = ["| method | " + " | ".join(f"n = {n}" for n in sizes) + " |", "| --- |" + " --- |" * len(sizes)]
    for name in dict.fromkeys(entry.method for entry in summaries):
        lines.append(f"| {METHODS[name]} | " + " | ".join(cells.get((name, n), "") for n in sizes) + " |")
    return "\n".join(lines)


def _cell(entry: Summary) -> str:
    if entry.diverged == entry.seeds:
        return "diverged"
    text = f"{entry.mean:.4f}" + (f" ± {entry.deviation:.4f}" if entry.seeds > 1 else "")
    return text + (f" ({entry.diverged} diverged)" if entry.diverged else "")


def write_summary(path: Path, summaries: Sequence[Summary]) -> None:
    """``summary.csv``: a line a method and number of features."""
    write_csv(path, Summary._fields, summaries)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """``errors.csv``: a line a run."""
    write_csv(path, Row._fields, rows)
