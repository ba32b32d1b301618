#!/usr/bin/env python3
"""The board: kernel features of real data by every method, at equal numbers of features.

Kernel NRMSE on held-out points, seconds of fit and transform, the score of a linear model on the features, and how many
landmarks uniform Nystroem needs for the error of our default. Writes scripts/benchmark/BOARD.md and board.png. Every
finished cell (data set, kernel, n) is stored in runs/board, so an interrupted run continues where it stopped.
real_data.py says which data is needed.

.venv/bin/python scripts/benchmark/board.py                   about 35 minutes on one core
.venv/bin/python scripts/benchmark/board.py --processes 2     two cells at a time, one thread each
.venv/bin/python scripts/benchmark/board.py --other-rows      the section about other random rows, about 20 minutes
.venv/bin/python scripts/benchmark/board.py --draw            only write the table and the plot of the stored cells
"""

import argparse
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

import sklearn
import torch
from real_data import (
    DATA,
    REGRESSION,
    ROUNDING,
    Cell,
    Record,
    Rows,
    cells_of,
    head_of,
    kernel_for,
    kmeans_least_squares,
    named,
    ours,
    ratios_of,
    run_cells,
    sample_of,
    scores,
    short,
    split_rows,
    stored,
)
from results import machine, table, timed, write_sections
from sklearn.exceptions import ConvergenceWarning
from sklearn.kernel_approximation import Nystroem as ScikitNystroem
from sklearn.kernel_approximation import RBFSampler
from torch import Tensor

from ksm_lightning.baselines import Nystroem
from ksm_lightning.evaluation.ridge import fit_ridge
from ksm_lightning.figures.canvas import new_figure
from ksm_lightning.kernels import Kernel, RadialKernel, robust_cholesky
from ksm_lightning.network.readout import READOUTS, LandmarkFeatures

ROOT = Path(__file__).resolve().parents[2]
FIT_ROWS, HELD_OUT_ROWS = 10_000, 2000
SIZES = (32, 128, 512)
OTHER_SPLIT = 400  # first seed of the other random rows, at which nobody looked when constants were chosen
SMALL, SPLITS = 1000, 5  # data sets with fewer rows are split several times, and scores averaged
PENALTIES = tuple(10.0**power for power in range(-10, 1))
# Options of our other networks, by the number of features. Above this number they would double the time of a cell.
OTHER_NETWORKS = {"n landmarks": lambda n: {"n_landmarks": n}, "paper": lambda n: {"bound": "paper"}}
MOST_OF_OTHERS = 128
# Numbers of landmarks of uniform Nystroem, as multiples of n, that are tried for the error of the default.
MULTIPLES = (1, 1.5, 2, 3, 4, 6, 8)

Encoder = Callable[[Tensor], Tensor]


def rows_of(data: str, split: int = 0) -> tuple[Rows, Rows]:
    return split_rows(data, FIT_ROWS, HELD_OUT_ROWS, split)


# ---------------------------------------------------------------------- methods


def fitted_methods(
    kernel: Kernel, x: Tensor, n: int, is_quick: bool, has_others: bool = True
) -> Iterator[tuple[str, Encoder, float]]:
    """Every method with its encoder and the seconds of its fit. Other readouts of a network cost little beyond it."""
    few = {"updates": 20} if is_quick else {}
    default, seconds = timed(lambda: ours(kernel, x, n, **few))
    yield "default", transforming(default), seconds
    for name, options in OTHER_NETWORKS.items() if has_others and n <= MOST_OF_OTHERS else ():
        # The readout does not change the fit, and the neural one takes no time.
        network, seconds = timed(
            lambda options=options: ours(kernel, x, n, readout="neural", **options(n), **few).network_
        )
        for readout in READOUTS:
            encoder, more = timed(lambda network=network, readout=readout: read(network, readout, x, n))
            yield f"{name}, {readout}", encoder, seconds + more
    for readout in ("neural", "nystroem"):
        encoder, _ = timed(lambda readout=readout: read(default.network_, readout, x, n))
        yield f"default, {readout}", encoder, math.nan
    encoder, seconds = timed(lambda: kmeans_least_squares(kernel, x, n))
    yield "KMeans + LS", encoder, seconds
    for selector in ("uniform", "kmeans", "leverage", "cholesky", "gradient"):
        found, seconds = timed(lambda selector=selector: Nystroem(kernel, n, landmarks=selector, seed=0).fit(x))
        yield selector, found.transform, seconds
    if kernel.__class__.__name__ == "GaussianKernel" and isinstance(kernel, RadialKernel):
        gamma = 1 / (2 * kernel.sigma**2)
        for name, other in {
            "scikit-learn's Nystroem": ScikitNystroem(gamma=gamma, n_components=n, random_state=0),
            "scikit-learn's RBFSampler": RBFSampler(gamma=gamma, n_components=n, random_state=0),
        }.items():
            found, seconds = timed(lambda other=other: other.fit(x.numpy()))
            yield name, transforming(found), seconds


def read(network, readout: str, x: Tensor, n: int) -> LandmarkFeatures:
    count = None if readout == "neural" else min(n, len(network.W))
    return LandmarkFeatures.of(network, readout, sample_of(x), num_features=count)


def transforming(estimator) -> Encoder:
    return lambda x: torch.from_numpy(estimator.transform(x.numpy()))


# ---------------------------------------------------------------------- scores


def linear_score(is_regression: bool, train: Tensor, held_out: Tensor, y: Tensor, y_held_out: Tensor) -> float:
    """R2, or accuracy, of ridge regression on features; the last fifth of the training rows chooses the penalty."""
    targets = y.double()[:, None] if is_regression else torch.nn.functional.one_hot(y).double()
    scale = train.square().sum(1).mean().clamp(min=1e-300)
    penalties = [float(scale) * penalty for penalty in PENALTIES]
    part = len(train) * 4 // 5

    def score(features: Tensor, truth: Tensor, W: Tensor, b: Tensor) -> Tensor:
        found = features @ W + b  # (penalties, rows, outputs)
        if is_regression:
            truth = truth.double()
            return 1 - (found[..., 0] - truth).square().mean(1) / truth.var(correction=0)
        count = targets.shape[1]
        return (found[..., :count].argmax(2) == truth).double().mean(1)

    chosen = fit_ridge(train[None, :part], targets[None, :part], penalties)
    best = int(score(train[part:], y[part:], chosen.W[0], chosen.b[0][:, None]).argmax())
    final = fit_ridge(train[None], targets[None], [penalties[best]])
    return float(score(held_out, y_held_out, final.W[0], final.b[0][:, None])[0])


def optimum(kernel: Kernel, x: Tensor, n: int) -> float:
    """Kernel PCA of the held-out points themselves: no n features have a lower error."""
    values = torch.linalg.eigvalsh(kernel(x, x)).flip(0)
    return float((values[n:].square().sum() / values.square().sum()).sqrt())


def uniform_landmarks(kernel: Kernel, x: Tensor, held_out: Tensor, n: int, error: float) -> float:
    """Number of uniform landmarks, as a multiple of n, for an error; interpolated, or the largest that was tried."""
    F = kernel(held_out, held_out)
    order = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))].double()
    last: tuple[float, float] | None = None
    for multiple in MULTIPLES:
        W = order[: round(multiple * n)]
        K = kernel(W, W)
        K.diagonal().add_(1e-10 * K.diagonal().mean())
        y = torch.linalg.solve_triangular(robust_cholesky(K), kernel(W, held_out), upper=False)
        found = float((F - y.mT @ y).norm() / F.norm())
        if found <= error:
            if last is None or last[1] <= found:
                return float(multiple)
            # The error is about a power of the number of landmarks.
            part = math.log(last[1] / error) / math.log(last[1] / max(found, 1e-300))
            return last[0] * (multiple / last[0]) ** part
        last = (float(multiple), found)
        if len(W) == len(x):
            break
    return math.inf


def one_split(cell: Cell, split: int, is_quick: bool) -> Record:
    train, held_out = rows_of(cell.data, split)
    kernel, n, is_regression = kernel_for(cell.kernel, train.x), cell.n, cell.data in REGRESSION
    record: Record = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for name, encoder, seconds in fitted_methods(kernel, train.x, n, is_quick):
            encoder(held_out.x[:10])
            features, transform_seconds = timed(lambda encoder=encoder: encoder(held_out.x))
            features = features.double()
            record[name] = scores(kernel, held_out.x, {name: features})[name]
            record[f"{name}: fit"], record[f"{name}: transform"] = seconds, transform_seconds
            on_train = torch.cat([encoder(part.double()).double() for part in torch.split(train.x, 4096)])
            record[f"{name}: score"] = linear_score(is_regression, on_train, features, train.y, held_out.y)
    record["optimum"] = optimum(kernel, held_out.x, n)
    record["uniform landmarks"] = uniform_landmarks(kernel, train.x, held_out.x, n, record["default"])
    return record


def mean_over_splits(cell: Cell, of_split: Callable[[int], Record], first: int = 0, is_quick: bool = False) -> Record:
    """The numbers of a cell, for a small data set the mean over several splits."""
    rows = sum(len(part.x) for part in rows_of(cell.data))
    splits = 1 if is_quick or rows >= SMALL else SPLITS
    records = [of_split(first + index) for index in range(splits)]
    return {name: fmean(record[name] for record in records) for name in records[0]}


def measure(cell: Cell, is_quick: bool) -> Record:
    return mean_over_splits(cell, lambda split: one_split(cell, split, is_quick), is_quick=is_quick)


def measure_other_rows(cell: Cell, is_quick: bool) -> Record:
    return mean_over_splits(cell, lambda split: errors_of_split(cell, split, is_quick), OTHER_SPLIT, is_quick)


def errors_of_split(cell: Cell, split: int, is_quick: bool) -> Record:
    """Errors and seconds alone."""
    train, held_out = rows_of(cell.data, split)
    kernel, record = kernel_for(cell.kernel, train.x), Record()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for name, encoder, seconds in fitted_methods(kernel, train.x, cell.n, is_quick, has_others=False):
            record |= scores(kernel, held_out.x, {name: encoder(held_out.x).double()})
            record[f"{name}: fit"] = seconds
    record["uniform landmarks"] = uniform_landmarks(kernel, train.x, held_out.x, cell.n, record["default"])
    return record


# ---------------------------------------------------------------------- texts

RIVALS = {
    "KMeans + LS": "KMeans + least squares",
    "kmeans": "KMeans",
    "gradient": "gradient landmarks",
    "cholesky": "pivoted Cholesky",
    "leverage": "leverage scores",
    "uniform": "uniform Nystroem",
    "scikit-learn's Nystroem": "scikit-learn's Nystroem",
    "scikit-learn's RBFSampler": "scikit-learn's RBFSampler",
}
OWN = {
    "default": "default: least squares, more landmarks than features",
    "default, nystroem": "the same landmarks, Nystroem",
    "default, neural": "the same network, its responses",
    "n landmarks, least_squares": "n landmarks, least squares",
    "n landmarks, nystroem": "n landmarks, Nystroem",
    "n landmarks, neural": "n landmarks, responses",
    "paper, least_squares": "paper's bound, least squares",
    "paper, nystroem": "paper's bound, Nystroem",
    "paper, neural": "paper's bound, responses",
}


def lowest_of(record: Mapping[str, float], names: Mapping[str, str]) -> float:
    return min(record[name] for name in names if name in record)


def ratio_to_best(found: Mapping[Cell, Record]) -> dict[Cell, float]:
    """Error of the default over the lowest error of all other methods."""
    pairs = {cell: (record["default"], lowest_of(record, RIVALS)) for cell, record in found.items()}
    return {cell: pair[0] / pair[1] for cell, pair in pairs.items() if not max(pair) < ROUNDING}


def won(ratios: Mapping[Cell, float]) -> str:
    below = sum(ratio < 1 for ratio in ratios.values())
    return f"{below} of {len(ratios)} ({100 * below / max(1, len(ratios)):.0f} %)"


def summary_table(found: Mapping[Cell, Record]) -> list[str]:
    """How often the default has the lowest error, by n, and the cells where it has not."""
    groups = {**{f"n = {n}": {c: r for c, r in found.items() if c.n == n} for n in SIZES}, "all": found}
    rows = []
    for group, members in groups.items():
        if not members:
            continue
        uniform, kmeans = (ratios_of(members, "default", name) for name in ("uniform", "KMeans + LS"))
        best = ratio_to_best(members)
        needed = [record["uniform landmarks"] for cell, record in members.items() if cell in best]
        rows.append(
            (
                group,
                won(best),
                won(uniform),
                won(kmeans),
                f"{median(kmeans.values()):.3f}",
                f"{median(needed):.1f}",
                f"{median(r['default: fit'] / r['KMeans + LS: fit'] for r in members.values()):.2f}",
            )
        )
    lost = {cell: ratio for cell, ratio in ratio_to_best(found).items() if not ratio < 1}
    return [
        *table(
            [
                "",
                "lowest error of all",
                "below uniform Nystroem",
                "below KMeans + LS",
                "median ratio to KMeans + LS",
                "uniform landmarks for the same error, in n (median)",
                "fit seconds / KMeans + LS (median)",
            ],
            rows,
        ),
        "",
        f"Cells where another method is lower, with our error over the lowest one: {named(lost)}.",
    ]


def summary_text(found: Mapping[Cell, Record], cells: int) -> list[str]:
    return [
        f"{len(found)} of {cells} cells. The error of `KSMTransformer(n)` with its defaults, compared with all methods "
        "below that are not ours. Cells where both errors are rounding are left out.",
        "",
        *summary_table(found),
        "",
        "Most are data sets with fewer than 12 rows per feature, or of kernels so narrow that no landmarks represent "
        "new rows: KMeans centres are then as good as any landmarks, and all methods are within 2 %. The power-cosine "
        "kernel on few rows is the exception: n is close to the dimension of its feature space there, and gradient "
        "landmarks are optimised for as long as it takes, ours not at all.",
        "",
        "`transform` takes time in proportion to the number of landmarks, of which the default has 1.5 n "
        "(`n_landmarks=n` is as fast as scikit-learn's `Nystroem`). `fit` takes longer than KMeans + LS mostly on "
        "small data sets, where both take a fraction of a second.",
    ]


def other_rows_text(found: Mapping[Cell, Record], cells: int) -> list[str]:
    return [
        f"{len(found)} of {cells} cells. The same with other random rows to fit and to score. "
        "Constants of the default were chosen while looking at errors of the rows above, but not of these.",
        "",
        *summary_table(found),
    ]


def methods_text(found: Mapping[Cell, Record], cells: int) -> list[str]:
    rows = []
    for name, label in {**OWN, **RIVALS}.items():
        with_it = [record for record in found.values() if name in record and record["default"] > ROUNDING]
        if not with_it:
            continue
        fits = [record[f"{name}: fit"] for record in with_it]
        rows.append(
            (
                label,
                str(len(with_it)),
                f"{median(r[name] / max(r['optimum'], ROUNDING) for r in with_it):.2f}",
                f"{median(r[name] / r['default'] for r in with_it):.3f}",
                "" if math.isnan(fits[0]) else short(median(fits)),
                f"{1e3 * median(r[f'{name}: transform'] for r in with_it):.1f}",
                f"{100 * fmean(r[f'{name}: score'] for r in with_it):.2f}",
            )
        )
    return [
        "Medians over cells. The optimum is kernel PCA of the held-out points themselves, which no method can reach. "
        "Scores are 100 times the accuracy, or R2, of ridge regression on the features, on average.",
        "",
        *table(
            ["method", "cells", "error / optimum", "error / default", "fit s", "transform ms", "mean score"],
            rows,
        ),
    ]


def best_score(record: Record) -> float:
    return max(record[f"{name}: score"] for name in RIVALS if name in record)


def cells_text(found: Mapping[Cell, Record], cells: int) -> list[str]:
    shown = ("default", *RIVALS, "optimum")
    rows = [
        (
            *head_of(cell),
            *(short(record[name]) if name in record else "" for name in shown),
            "" if math.isinf(record["uniform landmarks"]) else f"{record['uniform landmarks']:.1f}",
            f"{short(record['default: fit'])}, {short(record['KMeans + LS: fit'])}",
            f"{100 * record['default: score']:.1f}, {100 * best_score(record):.1f}",
        )
        for cell, record in found.items()
    ]
    header = ["data", "kernel", "n", "default", *RIVALS.values(), "optimum", "uniform landmarks / n"]
    return [
        "Kernel NRMSE. An empty number of uniform landmarks: more than 8 n, or than there are rows. The last columns: "
        "seconds of the fit of our default and of KMeans + LS, and scores of a linear model on the default features "
        "and on the best of the others.",
        "",
        *table([*header, "fit s", "score"], rows),
    ]


SECTIONS = {
    "summary": ("The default against all others", summary_text),
    "other rows": ("Other rows", other_rows_text),
    "methods": ("Methods", methods_text),
    "cells": ("Cells", cells_text),
}


def draw(found: Mapping[Cell, Record], path: Path) -> None:
    """Error over the optimum against the seconds of the fit: one point per cell, and the median of each method."""
    shown = {"default": "#d1495b", "paper, neural": "#e9a03b"} | dict(
        zip(
            RIVALS,
            ("#2a9d4a", "#8fd19e", "#17becf", "#1f77b4", "#8a5cc0", "#8c8c8c", "#555555", "#c7a17a"),
            strict=True,
        )
    )
    labels = {**RIVALS, "default": "ours, default", "paper, neural": "the paper's network"}
    sizes = [n for n in SIZES if any(cell.n == n for cell in found)]
    figure = new_figure(4.2 * len(sizes), 4.2, len(sizes))
    axes = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axis, n in zip(axes, sizes, strict=True):
        for name, color in shown.items():
            points = [
                (record[f"{name}: fit"], record[name] / record["optimum"])
                for cell, record in found.items()
                if cell.n == n and name in record and record["optimum"] > 1e-6
            ]
            if points:
                seconds, errors = zip(*points, strict=True)
                axis.scatter(seconds, errors, s=9, color=color, alpha=0.25, linewidths=0)
                axis.scatter(median(seconds), median(errors), s=70, color=color, edgecolors="white", label=labels[name])
        axis.set(xscale="log", yscale="log", title=f"n = {n}", xlabel="seconds of the fit, one thread")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("kernel NRMSE / optimum, held-out points")
    axes[0].set_ylim(0.9, 100)
    axes[-1].legend(
        *axes[0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8
    )
    figure.savefig(path, bbox_inches="tight")


def finished(path: Path, cells: Sequence[Cell]) -> dict[Cell, Record]:
    """Stored cells in the order of the board."""
    found = stored(path)
    return {cell: found[cell] for cell in cells if cell in found}


def write(names: Sequence[str], found: Mapping[Cell, Record], cells: Sequence[Cell], output: Path) -> None:
    """Write these sections; the others are kept."""
    head = (
        f"# The board: kernel features of real data\n\n{machine('one thread', scikit_learn=sklearn.__version__)}. "
        "Written by `scripts/benchmark/board.py`.\n\n10,000 random rows to fit and 2,000 other rows to score; 80 % of "
        "a smaller data set to fit, and with fewer than 1,000 rows the mean over 5 splits. Columns of tables are "
        "standardised, images divided by the standard deviation of all pixels. Widths of kernels are in units of the "
        "median distance between two points. n is at most half the rows of the fit. Seconds are rough: "
        "other work ran on both cores.\n\n![Error against seconds of the fit](board.png)"
    )
    titles = {name: title for name, (title, _) in SECTIONS.items()}
    write_sections(output, head, titles, {name: SECTIONS[name][1](found, len(cells)) for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="cells at a time, one thread each")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of features. Default: all")
    parser.add_argument(
        "--quick", action="store_true", help="wine, two kernels and few updates, as a check of the code"
    )
    parser.add_argument("--other-rows", action="store_true", help="only measure the default on other random rows")
    parser.add_argument("--again", action="store_true", help="recompute stored cells")
    parser.add_argument("--draw", action="store_true", help="only write the table and the plot of the stored cells")
    parser.add_argument("--folder", type=Path, help="stored cells. Default: runs/board, quick: runs/board_quick")
    parser.add_argument("--output", type=Path, help="result file. Default: BOARD.md here, quick: in the folder")
    options = parser.parse_args()
    folder = options.folder or ROOT / "runs" / ("board_quick" if options.quick else "board")
    output = options.output or (folder if options.quick else Path(__file__).parent) / "BOARD.md"
    if options.quick:
        cells = [Cell("wine", kernel, 32) for kernel in ("Gaussian 0.5", "power cosine 3")]
    else:
        cells = cells_of(tuple(DATA), SIZES, lambda data: len(rows_of(data)[0].x))
    # Cells of images take longest and come last.
    wanted = sorted((cell for cell in cells if cell.n in options.sizes), key=lambda cell: "MNIST" in cell.data)
    if options.other_rows:
        work, path, names = measure_other_rows, folder / "other_rows.jsonl", ["other rows"]
    else:
        work, path = measure, folder / "board.jsonl"
        names = [name for name in SECTIONS if name != "other rows"]
    if not options.draw:
        work = partial(work, is_quick=options.quick)
        for _ in run_cells("board", work, wanted, path, options.processes, options.again):
            write(names, finished(path, cells), cells, output)
    if found := finished(path, cells):
        write(names, found, cells, output)
        if not options.other_rows:
            draw(found, output.with_name("board.png"))
        print(output.read_text())


if __name__ == "__main__":
    main()
