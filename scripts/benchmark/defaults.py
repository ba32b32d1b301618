#!/usr/bin/env python3
"""`KSMClassifier()` and `KSMRegressor()` without any option, compared with scikit-learn's `Nystroem` and a grid search.

Writes scripts/benchmark/DEFAULTS.md. Every finished cell is stored in runs/defaults, so an interrupted run continues
where it stopped. The folder KSM_DATA_DIR holds MNIST/raw, FashionMNIST/raw and
tabular/{covertype,electricity,california_housing}.npz with the arrays x and y; missing data sets are skipped.

.venv/bin/python scripts/benchmark/defaults.py                       about 20 minutes on one core
.venv/bin/python scripts/benchmark/defaults.py --only iris wine      some data sets; the others are kept
.venv/bin/python scripts/benchmark/defaults.py --again ours          recompute the cells of one method
.venv/bin/python scripts/benchmark/defaults.py --quick               one split of iris, as a check of the code
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn
import torch
from results import machine, table
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import pairwise_distances
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from ksm_lightning.files import write_text
from ksm_lightning.sklearn import KSMClassifier, KSMRegressor

ROOT = Path(__file__).resolve().parents[2]
TRAIN_ROWS, TEST_ROWS = 10_000, 10_000
FEW = 3000  # data sets of fewer rows are split several times
SPLITS = 5
GRID_ROWS, GRID_FOLDS = 3000, 3  # rows of the training part on which the grid is searched, and folds there
WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # in units of the median distance of two samples; gamma = 1 / (2 width^2)
STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0)  # C of LogisticRegression, 1 / alpha of Ridge
ITERATIONS = 1000

Arrays = tuple[np.ndarray, np.ndarray]
Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Record = dict[str, Any]


class Cell(NamedTuple):
    """One result."""

    data: str
    n: int
    split: int
    method: str


# ---------------------------------------------------------------------- data


def tabular(file: str, folder: Path) -> Arrays:
    with np.load(folder / "tabular" / file) as arrays:
        return arrays["x"].astype(np.float32), arrays["y"]


def images(name: str, folder: Path) -> Arrays:
    """The 60,000 training images, followed by the 10,000 test images."""
    from torchvision import datasets  # a slow import

    parts = [getattr(datasets, name)(str(folder), train=is_train, download=False) for is_train in (True, False)]
    x = np.concatenate([part.data.numpy().reshape(len(part.data), -1) for part in parts]).astype(np.float32)
    return x, np.concatenate([part.targets.numpy() for part in parts])


def builtin(load: Callable[..., Arrays], folder: Path) -> Arrays:
    return load(return_X_y=True)


CLASSIFICATION: dict[str, Callable[[Path], Arrays]] = {
    "MNIST": partial(images, "MNIST"),
    "Fashion-MNIST": partial(images, "FashionMNIST"),
    "Covertype": partial(tabular, "covertype.npz"),
    "Electricity": partial(tabular, "electricity.npz"),
    "digits": partial(builtin, load_digits),
    "breast cancer": partial(builtin, load_breast_cancer),
    "wine": partial(builtin, load_wine),
    "iris": partial(builtin, load_iris),
}
REGRESSION: dict[str, Callable[[Path], Arrays]] = {
    "California housing": partial(tabular, "california_housing.npz"),
    "diabetes": partial(builtin, load_diabetes),
}
DATA = CLASSIFICATION | REGRESSION


@cache
def arrays_of(data: str) -> Arrays | None:
    """Inputs and labels, or None with a message if they cannot be loaded."""
    try:
        return DATA[data](Path(os.environ.get("KSM_DATA_DIR") or Path.home() / ".cache" / "ksm_lightning"))
    except (OSError, RuntimeError) as error:
        print(f"{data} is skipped; check KSM_DATA_DIR ({' '.join(str(error).split())})", file=sys.stderr)
        return None


def split_of(data: str, seed: int) -> Split:
    """Samples and labels to fit, samples and labels to score. A quarter of a small data set is for the score."""
    arrays = arrays_of(data)
    assert arrays is not None
    x, y = arrays
    if "MNIST" in data:
        chosen = np.random.RandomState(seed).permutation(60_000)[:TRAIN_ROWS]
        return x[chosen], y[chosen], x[60_000:], y[60_000:]
    test = min(len(x) // 4, TEST_ROWS)
    classes = None if data in REGRESSION else y
    fitted, scored, labels, truth = train_test_split(x, y, test_size=test, random_state=seed, stratify=classes)
    return fitted[:TRAIN_ROWS], labels[:TRAIN_ROWS], scored, truth


# ---------------------------------------------------------------------- methods


def timed_score(model: Any, parts: Split) -> Record:
    """Seconds of the fit and score on the test part. CPU seconds: other programs hardly change them."""
    x, y, fresh, truth = parts
    started = time.process_time()
    model.fit(x, y)
    return {"seconds": time.process_time() - started, "score": model.score(fresh, truth)}


def ours(cell: Cell) -> Record:
    """The estimator with its defaults."""
    predictor = (KSMRegressor if cell.data in REGRESSION else KSMClassifier)(cell.n, random_state=cell.split)
    found = timed_score(make_pipeline(StandardScaler(), predictor), split_of(cell.data, cell.split))
    return found | {"sigma": predictor.transformer_.kernel_.sigma, "penalty": predictor.penalty_}


def default(cell: Cell) -> Record:
    """scikit-learn's estimators with their defaults."""
    linear = Ridge() if cell.data in REGRESSION else LogisticRegression()
    features = Nystroem(n_components=cell.n, random_state=cell.split)
    return timed_score(make_pipeline(StandardScaler(), features, linear), split_of(cell.data, cell.split))


def scores_of_grid(data: str, n: int, seed: int, parts: Split, median: float) -> np.ndarray:
    """Score on the second part of a split of every width and strength: (widths, strengths)."""
    x, y, fresh, truth = parts
    found = []
    for width in WIDTHS:
        features = Nystroem(gamma=0.5 / (width * median) ** 2, n_components=n, random_state=seed).fit(x)
        z, fresh_z = features.transform(x), features.transform(fresh)
        models = (
            Ridge(alpha=1 / C) if data in REGRESSION else LogisticRegression(C=C, max_iter=ITERATIONS)
            for C in STRENGTHS
        )
        found.append([model.fit(z, y).score(fresh_z, truth) for model in models])
    return np.array(found)


def grid(cell: Cell) -> Record:
    """Width and strength with the best mean score of cross-validation in the training part, and the best of all.

    The score is that of the chosen width and strength, fitted to the whole training part; ``oracle`` is the best score
    on the test part of any width and strength.
    """
    x, y, fresh, truth = split_of(cell.data, cell.split)
    started = time.process_time()
    scaler = StandardScaler().fit(x)
    x, fresh = scaler.transform(x), scaler.transform(fresh)
    median = float(np.median(pairwise_distances(x[:1000])[np.triu_indices(min(1000, len(x)), 1)]))
    some, some_y = x[:GRID_ROWS], y[:GRID_ROWS]
    folds = KFold if cell.data in REGRESSION else StratifiedKFold
    scores = [
        scores_of_grid(
            cell.data, cell.n, cell.split, (some[fitted], some_y[fitted], some[held_out], some_y[held_out]), median
        )
        for fitted, held_out in folds(GRID_FOLDS, shuffle=True, random_state=0).split(some, some_y)
    ]
    best = np.unravel_index(np.mean(scores, axis=0).argmax(), (len(WIDTHS), len(STRENGTHS)))
    searched = time.process_time() - started
    on_test = scores_of_grid(cell.data, cell.n, cell.split, (x, y, fresh, truth), median)
    return {
        "seconds": searched,
        "score": float(on_test[best]),
        "oracle": float(on_test.max()),
        "width": WIDTHS[best[0]],
        "strength": STRENGTHS[best[1]],
    }


METHODS: dict[str, Callable[[Cell], Record]] = {"ours": ours, "default": default, "grid": grid}


# ---------------------------------------------------------------------- results


def stored(path: Path) -> dict[Cell, Record]:
    """Finished cells of an earlier run."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {Cell(*(record.pop(name) for name in Cell._fields)): record for record in records}


class Row(NamedTuple):
    """Means over the splits of one data set."""

    splits: int
    ours: float
    default: float
    grid: float
    oracle: float
    deviation: float  # of the difference between ours and the grid, over splits
    seconds: tuple[float, ...]  # of the methods


def row_of(found: Mapping[Cell, Record], data: str, n: int) -> Row | None:
    """The row of a data set, if all methods have finished the same splits."""
    splits = {method: [cell.split for cell in found if cell == (data, n, cell.split, method)] for method in METHODS}
    common = sorted(set.intersection(*map(set, splits.values())))
    if not common:
        return None
    scores = {
        method: np.array([found[Cell(data, n, split, method)]["score"] for split in common]) for method in METHODS
    }
    oracle = np.mean([found[Cell(data, n, split, "grid")]["oracle"] for split in common])
    seconds = (
        float(np.mean([found[Cell(data, n, split, method)]["seconds"] for split in common])) for method in METHODS
    )
    means = (float(scores[method].mean()) for method in METHODS)
    return Row(len(common), *means, float(oracle), float((scores["ours"] - scores["grid"]).std()), tuple(seconds))


def section(
    found: Mapping[Cell, Record], names: Iterable[str], n: int, unit: str, factor: float, margin: float
) -> list[str]:
    """Lines about the data sets of one kind."""
    rows = {data: row for data in names if (row := row_of(found, data, n)) is not None}
    if not rows:
        return []
    digits = 2 if factor == 100 else 4
    cells = [
        (
            data,
            str(row.splits),
            *(f"{factor * value:.{digits}f}" for value in (row.ours, row.default, row.grid, row.oracle)),
            f"{factor * (row.ours - row.grid):+.{digits}f}"
            + (f" ± {factor * row.deviation:.{digits}f}" if row.splits > 1 else ""),
            f"{factor * (row.ours - row.oracle):+.{digits}f}",
            *(f"{value:.1f}" for value in row.seconds),
        )
        for data, row in rows.items()
    ]
    within, within_oracle = (
        sum(factor * (row.ours - other) >= -margin for row, other in zip(rows.values(), others, strict=True))
        for others in ([row.grid for row in rows.values()], [row.oracle for row in rows.values()])
    )
    header = [
        f"n = {n}, {unit}", "splits", "ours, default", "scikit-learn, default", "scikit-learn, grid",
        "best of the grid", "ours - grid", "ours - best", "s, ours", "s, default", "s, grid",
    ]  # fmt: skip
    return [
        *table(header, cells),
        "",
        f"At most {margin:g} below the grid search: {within} of {len(rows)}; below the best of the grid: "
        f"{within_oracle} of {len(rows)}.",
        "",
    ]


def text_of(found: Mapping[Cell, Record]) -> str:
    widths = ", ".join(f"{width:g}" for width in WIDTHS)
    lines = [
        "# Defaults",
        "",
        f"{machine('one thread', scikit_learn=sklearn.__version__)}. Written by `scripts/benchmark/defaults.py`.",
        "",
        "All methods follow `StandardScaler` and have n features. *Ours* is `KSMClassifier()` or `KSMRegressor()`; "
        "scikit-learn's is `Nystroem` and `LogisticRegression` or `Ridge`, by default and with a grid of "
        f"{len(WIDTHS)} widths ({widths} times the median distance of two samples) and {len(STRENGTHS)} strengths (C, "
        f"1 / alpha: {STRENGTHS[0]:g} to {STRENGTHS[-1]:g}). The grid is searched by {GRID_FOLDS}-fold "
        f"cross-validation in up to {GRID_ROWS:,} rows of the training part, and the winner is fitted to all of it. "
        "*Best of the grid* is the best score on the test part, which nobody knows beforehand, on average over splits. "
        "Seconds are CPU seconds of the fit, or of the search.",
        "",
        f"Up to {TRAIN_ROWS:,} random rows to fit; {TEST_ROWS:,} other rows, or a quarter of a small data set, to "
        f"score. Data sets of fewer than {FEW:,} rows are split {SPLITS} times; after ± is the standard deviation of "
        "the difference over splits.",
        "",
    ]
    for n in sorted({cell.n for cell in found}):
        lines += section(found, CLASSIFICATION, n, "accuracy in %", 100, 1.0)
        lines += section(found, REGRESSION, n, "R²", 1, 0.01)
    return "\n".join(lines).rstrip() + "\n"


def cells_of(names: Iterable[str], sizes: Iterable[int]) -> list[Cell]:
    """All cells of the available data sets, small ones first."""
    available = [name for name in names if arrays_of(name) is not None]
    found = []
    for n in sizes:
        for data in sorted(available, key=lambda name: arrays_of(name)[0].size):  # type: ignore[index]
            splits = SPLITS if len(arrays_of(data)[0]) < FEW else 1  # type: ignore[index]
            found += [Cell(data, n, split, method) for split in range(splits) for method in METHODS]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=DATA, default=list(DATA), help="data sets. Default: all")
    parser.add_argument("--components", nargs="+", type=int, default=[100], help="numbers of features. Default: 100")
    parser.add_argument("--again", nargs="+", choices=METHODS, default=[], help="methods whose cells are recomputed")
    parser.add_argument("--quick", action="store_true", help="one split of iris, 10 components, as a check of the code")
    parser.add_argument("--folder", type=Path, help="stored cells. Default: runs/defaults, quick: runs/defaults_quick")
    parser.add_argument("--output", type=Path, help="result file. Default: DEFAULTS.md here, quick: in the folder")
    options = parser.parse_args()
    folder = options.folder or ROOT / "runs" / ("defaults_quick" if options.quick else "defaults")
    output = options.output or (folder if options.quick else Path(__file__).parent) / "DEFAULTS.md"
    path = folder / "cells.jsonl"
    cells = cells_of(["iris"], [10])[: len(METHODS)] if options.quick else cells_of(options.only, options.components)
    found = stored(path)
    missing = [cell for cell in cells if cell not in found or cell.method in options.again]
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        # scikit-learn's defaults stop early, and folds of small data sets have fewer samples than components.
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="n_components > n_samples")
        for cell in tqdm(missing, desc="defaults", unit="cell"):
            found[cell] = METHODS[cell.method](cell)
            write_text(path, "".join(f"{json.dumps(key._asdict() | value)}\n" for key, value in found.items()))
            write_text(output, text_of(found))
    print(text_of(found))


if __name__ == "__main__":
    main()
