"""Tables of a comparison: one row per run, summaries over seeds, Markdown."""

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ksm_lightning.baselines.methods import METHODS
from ksm_lightning.files import write_csv


class Row(NamedTuple):
    """The error of one representation."""

    method: str
    n: int
    seed: int
    nrmse: float  # NaN if the training of the network diverged
    seconds: float  # time of the fit; all readouts of one network have the time of its training


class Summary(NamedTuple):
    """Statistics over the seeds of one method and one number of features."""

    method: str
    n: int
    seeds: int
    mean: float
    deviation: float
    least: float
    most: float
    diverged: int


def read_rows(path: Path) -> list[Row]:
    """Read the rows of an ``errors.csv``."""
    try:
        with path.open(newline="") as file:
            rows = [
                Row(row["method"], int(row["n"]), int(row["seed"]), float(row["nrmse"]), float(row["seconds"]))
                for row in csv.DictReader(file)
            ]
        if any(row.method not in METHODS for row in rows):
            raise ValueError("unknown method")
        return rows
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the table of a comparison: remove it or choose another folder.") from error


def summarise(rows: Iterable[Row]) -> list[Summary]:
    """Statistics over seeds, ordered as in :data:`METHODS` and by n. Diverged runs are counted and excluded."""
    groups: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        groups.setdefault((row.method, row.n), []).append(row.nrmse)
    order = {name: index for index, name in enumerate(METHODS)}
    summaries = []
    for (name, n), errors in sorted(groups.items(), key=lambda item: (order[item[0][0]], item[0][1])):
        finite = [error for error in errors if not math.isnan(error)] or [math.nan]
        least, most, diverged = min(finite), max(finite), sum(math.isnan(error) for error in errors)
        mean = statistics.fmean(finite)
        deviation = math.sqrt(statistics.fmean((error - mean) ** 2 for error in finite))
        summaries.append(Summary(name, n, len(errors), mean, deviation, least, most, diverged))
    return summaries


def markdown(summaries: Sequence[Summary]) -> str:
    """A Markdown table of means, with standard deviations if there are several seeds."""
    sizes = sorted({entry.n for entry in summaries})
    cells = {(entry.method, entry.n): _cell(entry) for entry in summaries}
    lines = ["| method | " + " | ".join(f"n = {n}" for n in sizes) + " |", "| --- |" + " --- |" * len(sizes)]
    for name in dict.fromkeys(entry.method for entry in summaries):
        lines.append(f"| {METHODS[name].label} | " + " | ".join(cells.get((name, n), "") for n in sizes) + " |")
    return "\n".join(lines)


def _cell(entry: Summary) -> str:
    if entry.diverged == entry.seeds:
        return "diverged"
    text = f"{entry.mean:.4f}" + (f" ± {entry.deviation:.4f}" if entry.seeds > 1 else "")
    return text + (f" ({entry.diverged} diverged)" if entry.diverged else "")


def write_summary(path: Path, summaries: Sequence[Summary]) -> None:
    """Write ``summary.csv``: one line per method and number of features."""
    write_csv(path, Summary._fields, summaries)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write ``errors.csv``: one line per run."""
    write_csv(path, Row._fields, rows)
