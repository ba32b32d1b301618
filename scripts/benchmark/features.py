#!/usr/bin/env python3
"""Kernel features of real data: does more training ever hurt, and how long does a fit take?

Writes scripts/benchmark/FEATURES.md; errors of all methods are in board.py. Every finished cell (data set, kernel, n)
is stored in runs/features, so an interrupted run continues where it stopped. real_data.py says which data is needed.

.venv/bin/python scripts/benchmark/features.py                    about 3 hours on one core
.venv/bin/python scripts/benchmark/features.py --only updates     one part; the other is kept
.venv/bin/python scripts/benchmark/features.py --processes 2      two cells at a time, one thread each
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import sklearn
from real_data import (
    LARGER,
    Cell,
    Record,
    Rows,
    cells_of,
    features_of,
    head_of,
    is_available,
    kernel_for,
    kmeans_least_squares,
    named,
    ours,
    ratios_of,
    run_cells,
    scores,
    short,
    split_rows,
)
from results import machine, table, timed, write_sections

from ksm_lightning.baselines import Nystroem
from ksm_lightning.network.readout import LandmarkFeatures

ROOT = Path(__file__).resolve().parents[2]
UPDATES = {"tight": 25, "paper": 2000}
TOLERANCE = 1.02  # an error that grows by more than this factor with more updates counts as worse


def points(data: str) -> tuple[Rows, Rows]:
    """20,000 rows to fit and 3,000 to score."""
    return split_rows(data, 20_000, 3000)


# ---------------------------------------------------------------------- the cells of each part


def updates(cell: Cell, is_quick: bool) -> Record:
    """Errors after few and after four times as many updates."""
    ((x, _), (held_out, _)) = points(cell.data)
    kernel = kernel_for(cell.kernel, x)
    features = {}
    for bound in ("tight", "paper"):
        few = 5 if is_quick else UPDATES[bound]
        for name, count in (("few", few), ("many", 4 * few)):
            found = ours(kernel, x, cell.n, bound=bound, updates=count, batch_size=64)
            W = found.network_.W.detach().double()
            features[f"{bound}_nystroem_{name}"] = Nystroem(kernel, len(W), landmarks=W).fit(x).transform(held_out)
            features[f"{bound}_default_{name}"] = features_of(found, held_out)
            if bound == "paper":
                features[f"paper_neural_{name}"] = LandmarkFeatures.of(found.network_, "neural")(held_out)
    return scores(kernel, held_out, features)


def seconds(cell: Cell, is_quick: bool) -> Record:
    """Shortest of two fits, or the time of one fit of a large n; the methods run in turn."""
    ((x, _), (held_out, _)) = points(cell.data)
    kernel, n = kernel_for(cell.kernel, x), cell.n
    times: dict[str, list[float]] = {"ours": [], "kmeans": []}
    for _ in range(2 if n < 1024 else 1):
        default, duration = timed(lambda: ours(kernel, x, n))
        times["ours"].append(duration)
        other, duration = timed(lambda: kmeans_least_squares(kernel, x, n))
        times["kmeans"].append(duration)
    features = {"ours": features_of(default, held_out), "kmeans": other(held_out)}
    return scores(kernel, held_out, features) | {f"{name}_seconds": min(found) for name, found in times.items()}


# ---------------------------------------------------------------------- texts

UPDATE_LABELS = {
    "tight_nystroem": "tight, Nystroem on W",
    "tight_default": "tight, default readout",
    "paper_nystroem": "paper, Nystroem on W",
    "paper_default": "paper, default readout",
    "paper_neural": "paper, neural",
}


def updates_text(found: Mapping[Cell, Record], cells: int) -> list[str]:
    ratios = {name: ratios_of(found, f"{name}_many", f"{name}_few") for name in UPDATE_LABELS}
    summary, losses = [], []
    for name, label in UPDATE_LABELS.items():
        worse = {cell: ratio for cell, ratio in ratios[name].items() if not ratio <= TOLERANCE}
        values = ratios[name].values()
        summary.append((label, f"{median(values):.3f}", f"{max(values):.3f}", str(len(worse))))
        if worse:
            losses += [f"{label}, above {TOLERANCE}: {named(worse)}.", ""]
    rows = [
        (
            *head_of(cell),
            *(
                f"{short(record[f'{name}_few'])}, {short(record[f'{name}_many'])} ({ratios[name].get(cell, 1.0):.3f})"
                for name in UPDATE_LABELS
            ),
        )
        for cell, record in found.items()
    ]
    return [
        f"{len(found)} of {cells} cells. Kernel NRMSE on held-out points after few and four times as many updates, and "
        "the ratio of the two: 25 and 100 iterations with the tight bound, 2,000 and 8,000 updates with batches of 64 "
        "points with the paper's. Nystroem on W has one feature per landmark.",
        "",
        *table(["", "median ratio", "largest ratio", f"cells above {TOLERANCE}"], summary),
        "",
        *losses,
        *table(["data", "kernel", "n", *UPDATE_LABELS.values()], rows),
    ]


def seconds_text(found: Mapping[Cell, Record], cells: int) -> list[str]:
    columns = {"ours_seconds": "s", "kmeans_seconds": "s, KMeans + LS", "ours": "NRMSE", "kmeans": "NRMSE, KMeans + LS"}
    rows = [
        (
            *head_of(cell),
            *(short(record[name]) for name in columns),
            short(record["kmeans_seconds"] / record["ours_seconds"]),
        )
        for cell, record in found.items()
    ]
    faster = [cell for cell, record in found.items() if record["ours_seconds"] < record["kmeans_seconds"]]
    return [
        f"{len(found)} of {cells} cells. A fit with its readout, the best of two in turn (n = 1,024: one). The default "
        f"`KSMTransformer` takes less time in {len(faster)} of {len(found)}.",
        "",
        *table(["data", "kernel", "n", *columns.values(), "speed-up"], rows),
    ]


# ---------------------------------------------------------------------- running and storing


class Part(NamedTuple):
    """One section of the result file."""

    title: str
    cells: Callable[[], list[Cell]]
    quick_cells: list[Cell]
    compute: Callable[[Cell, bool], Record]
    text: Callable[[Mapping[Cell, Record], int], list[str]]


QUICK = [Cell("digits", kernel, 32) for kernel in ("Gaussian 0.5", "power cosine 3")]
PARTS = {
    "updates": Part(
        "More updates",
        lambda: cells_of(LARGER, (32, 128), lambda data: len(points(data)[0].x)),
        QUICK,
        updates,
        updates_text,
    ),
    "seconds": Part(
        "Seconds",
        lambda: [Cell("Covertype", "Gaussian 0.5", n) for n in (128, 512, 1024) if is_available("Covertype")],
        QUICK[:1],
        seconds,
        seconds_text,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure. Default: all")
    parser.add_argument("--processes", type=int, default=1, help="cells at a time; seconds are always measured alone")
    parser.add_argument("--quick", action="store_true", help="digits, n = 32 and few updates, as a check of the code")
    parser.add_argument("--again", action="store_true", help="recompute stored cells")
    parser.add_argument("--folder", type=Path, help="stored cells. Default: runs/features, quick: runs/features_quick")
    parser.add_argument("--output", type=Path, help="result file. Default: FEATURES.md here, quick: in the folder")
    options = parser.parse_args()
    folder = options.folder or ROOT / "runs" / ("features_quick" if options.quick else "features")
    output = options.output or (folder if options.quick else Path(__file__).parent) / "FEATURES.md"
    versions = machine("one thread", scikit_learn=sklearn.__version__)
    head = (
        f"# Kernel features of real data\n\n{versions}. Written by `scripts/benchmark/features.py`.\n\n"
        "20,000 random rows to fit and 3,000 other rows to score; 80 % of digits and of California housing to fit. "
        "Columns of tables are standardised, images divided by the standard deviation of all pixels. Widths of kernels "
        "are in units of the median distance between two points. Seed 0."
    )
    for name in options.only:
        part = PARTS[name]
        cells = part.quick_cells if options.quick else part.cells()
        work, processes = partial(part.compute, is_quick=options.quick), 1 if name == "seconds" else options.processes
        for found in run_cells(name, work, cells, folder / f"{name}.jsonl", processes, options.again):
            titles = {key: part.title for key, part in PARTS.items()}
            write_sections(output, head, titles, {name: part.text(found, len(cells))})
    if output.exists():
        print(output.read_text())


if __name__ == "__main__":
    main()
