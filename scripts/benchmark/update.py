#!/usr/bin/env python3
"""Time per update: a plain PyTorch loop of the paper's algorithm, our update alone, and the whole `ksm fit`.

Writes scripts/benchmark/RESULTS.md and update.png.

.venv/bin/python scripts/benchmark/update.py                  about 15 minutes on two cores; MNIST needs KSM_DATA_DIR
.venv/bin/python scripts/benchmark/update.py --only start     one part; the others are kept
.venv/bin/python scripts/benchmark/update.py --quick          small sizes, as a check: 2 minutes; writes no results
"""

import os
from pathlib import Path

import lightning
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measurements import (
    accuracy,
    cross_validation,
    crossover,
    half_moons,
    imports,
    memory,
    mnist,
    native_or_torch,
    scaling,
)
from results import chosen_parts, machine, table, write_sections

from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.learning import AdaptiveSchedule, Phase, PhaseSchedule
from ksm_lightning.learning.native import MOST_LANDMARKS, MOST_PRODUCTS
from ksm_lightning.learning.responses import NEURONS_PER_SAMPLE

HERE = Path(__file__).parent
QUICK_PICTURE = Path("runs") / "benchmark" / "quick.png"


def exponent(values: list[int], times: list[float]) -> float:
    """Slope in a double-logarithmic plot."""
    return float(np.polyfit(np.log(values), np.log(times), 1)[0])


def draw(curves: dict[str, tuple[str, list[int], list[float]]], path: Path) -> None:
    """Draw the time per update by n, batch and input size, with fitted slopes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(12, 3.8), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    for index, (name, (rest, values, times)) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), index + 1)
        axes.loglog(values, times, "o-", color="#d81f2a", markersize=4)
        upper = values[len(values) // 2 :]
        slope = exponent(upper, times[len(values) // 2 :])
        axes.set_title(f"{rest}; slope {slope:.2f} from {upper[0]:,}", fontsize=10)
        axes.set(xlabel=name, ylabel="milliseconds per update")
        axes.set_xticks(values, [f"{value:,}" for value in values], fontsize=8)
        marks = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]
        shown = [mark for mark in marks if 0.8 * min(times) <= mark <= 1.25 * max(times)]
        axes.set_yticks(shown, [f"{mark:g}" for mark in shown], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.savefig(path)


def rounds_for(is_quick: bool) -> int:
    """Number of turns of each candidate."""
    return 1 if is_quick else 4


def heading() -> str:
    """Machine and method."""
    cores, threads = f"{os.cpu_count()} cores", f"{torch.get_num_threads()} threads"
    facts = machine(cores, threads, lightning=lightning.__version__)
    return (
        f"# Time per update\n\n{facts}. Written by `scripts/benchmark/update.py`. The candidates of a table run in "
        f"turn in one process, each for some seconds; the best of {rounds_for(False)} rounds counts. Times are "
        "milliseconds per update, and speed-ups are relative to the plain loop (`plain.py`).\n\n"
        "`ksm fit` is the whole command from its first update to its last validation, with TensorBoard, progress bar, "
        "checkpoints and divergence guard at their defaults. On half moons it includes validations with kernel error "
        "and linear probe. The figures drawn after the last update are not included."
    )


def moons_report(is_quick: bool) -> list[str]:
    """The section about half moons."""
    rows, updates = [], 400 if is_quick else 20_000
    for n, target in ((16, 20), (64, 12)):
        found = half_moons(n, rounds_for(is_quick), updates)
        for name, label in (
            ("plain", "plain loop"),
            ("torch", "our update by torch operations, the paper's rates"),
            ("torch_natural", "our update by torch operations, natural steps"),
            ("bare", "our update in machine code, the paper's rates"),
            ("natural", "our update in machine code, natural steps"),
            ("fit", f"`ksm fit`, the paper's schedule, {updates:,} updates (target: at least {target} times)"),
            ("fit_adaptive", f"`ksm fit`, adaptive schedule, {updates // 4:,} updates"),
        ):
            own = found["torch_natural" if name == "natural" else "torch"]
            rows.append(
                [
                    str(n), label, f"{found[name]:.4f}", f"{found['plain'] / found[name]:.1f}",
                    f"{own / found[name]:.1f}" if name in ("bare", "natural") else "",
                ]
            )  # fmt: skip
    return table(["n", "", "ms", "speed-up", "over torch operations"], rows)


def native_report(is_quick: bool) -> list[str]:
    """The section about when machine code is faster."""
    sizes = [(16, 2, 64), (64, 2, 64), (128, 2, 64), (160, 100, 64), (192, 2, 64), (256, 2, 64), (16, 400, 64)]
    sizes += [(64, 400, 64), (128, 400, 64), (192, 400, 64), (16, 2, 1024), (64, 2, 512), (64, 2, 1), (128, 2, 1)]
    rows = []
    for n, m, batch in sizes[:2] if is_quick else sizes:
        native, other = native_or_torch(n, m, batch, max(1, rounds_for(is_quick) - 1))
        products = f"{n * batch * max(n, m):,}"
        rows.append([str(n), str(m), str(batch), products, f"{native:.3f}", f"{other:.3f}", f"{other / native:.1f}"])
    return [
        f"Natural steps, a Gaussian kernel, blocks of 50 updates. `auto` uses machine code up to {MOST_LANDMARKS} "
        f"landmarks and {MOST_PRODUCTS:,} products.",
        "",
        *table(["n", "m", "batch", "products", "machine code, ms", "torch, ms", "ratio"], rows),
    ]


def start_report(is_quick: bool) -> list[str]:
    """The section about start-up."""
    found = imports(1 if is_quick else 5)
    ours = "`import ksm_lightning.module, ksm_lightning.extractor` after that"
    times = {name: f"{seconds:.2f} ({seconds / found['torch']:.2f})" for name, seconds in found.items()}
    rows = [
        ["`import torch` (times it)", times["torch"]],
        ["`import ksm_lightning`", f"{times['package']}; target: at most 1.5"],
        ["`from ksm_lightning import KSMNetwork, train`", f"{times['network']}; target: at most 1.5"],
        ["`import torch, sklearn.base, sklearn.utils.validation`", times["sklearn"]],
        ["`from ksm_lightning.sklearn import KSMTransformer`", times["estimator"]],
        ["`import lightning`", times["lightning"]],
        [ours, f"{found['above']:.2f} (target: at most 0.30)"],
        ["`ksm --help`", f"{times['help']}; target: at most 1.5"],
        ["`ksm`", f"{times['nothing']}; target: at most 1.5"],
        ["`ksm --version`", f"{times['version']}; target: at most 1.5"],
        ["`ksm fti`, a typo", f"{times['typo']}; target: at most 1.5"],
        ["`ksm --nonsense`", f"{times['option']}; target: at most 1.5"],
        ["`ksm fit --config half_mons`, a typo", times["config"]],
        ["`ksm fit --help`", times["fit_help"]],
    ]
    scores = cross_validation(1 if is_quick else 3)
    searches = [
        [state, str(jobs), *(f"{seconds:.2f}" for seconds in each), f"{each[2] / scores[state, 1][2]:.2f}"]
        for (state, jobs), each in scores.items()
    ]
    return [
        *table(["", "s"], rows),
        "",
        "`cross_val_score` of a pipeline with `KSMTransformer(n_components=20)` on wine, 5 folds. The first call "
        "starts the worker processes, which import torch and scikit-learn. A process that finds no machine code on "
        "disk does not compile for a few hundred updates.",
        "",
        *table(
            [
                "machine code",
                "jobs",
                "whole process, s",
                "first call, s",
                "second call, s",
                "times one job (target: 2)",
            ],
            searches,
        ),
    ]


def mnist_report(is_quick: bool) -> list[str]:
    """The section about MNIST."""
    x, rounds = CroppedMNISTDataModule().train_points.data, rounds_for(is_quick)
    n, updates = (100, 100) if is_quick else (800, 1000)
    found = mnist(x, n, rounds, updates)
    rows = [
        [label, f"{found[name]:.2f}", f"{found['plain'] / found[name]:.1f}", f"{found[name] / found['products']:.2f}"]
        for name, label in (
            ("plain", "plain loop"),
            ("products", "matrix products of an update alone"),
            ("exact", "our update, factorised"),
            ("tracked", "our update, tracked inverse: the default here (target: at most 1.8 times the products)"),
            ("natural", "our update, largest natural steps, tracked inverse"),
            ("fit", f"`ksm fit`, {updates:,} updates without validation (target: at least 8 times)"),
        )
    ]
    before, peak = memory(n, 50 if is_quick else 300)
    length = 100 if is_quick else 1000
    halves = PhaseSchedule([Phase(length // 2, 0.001, 0.0, 0.01), Phase(length // 2, 0.0001, 0.0, 0.001)])
    errors = [
        [name, *(f"{error:.1e}" for error in accuracy(x, n, schedule, length))]
        for name, schedule in (("adaptive", AdaptiveSchedule(length)), ("the paper's rates", halves))
    ]
    return [
        *table(["", "ms", "speed-up", "relative to the products"], rows),
        "",
        f"The products alone are {found['plain'] / found['products']:.1f} times as fast as the plain loop. No update "
        "with these products can be faster.",
        "",
        f"Peak memory of `ksm fit` with validation, probe and figures: {peak:.2f} GiB, {peak - before:.2f} GiB more "
        "than the imports alone (target: at most 1.2).",
        "",
        f"Largest relative error of the responses to a batch over {length:,} updates, compared with float64 and the "
        "same weights:",
        "",
        *table(["schedule", "tracked, float32", "factorised, float32"], errors),
    ]


def sizes_report(is_quick: bool) -> list[str]:
    """The section about sizes."""
    rounds = max(1, rounds_for(is_quick) - 1)
    sizes = [16, 50, 100] if is_quick else [16, 50, 100, 200, 400, 800, 1600, 3200]
    batches = [16, 32, 64] if is_quick else [16, 32, 64, 128, 256, 512, 1024]
    inputs = [10, 40, 160] if is_quick else [10, 40, 160, 640, 2560]
    fixed = 100 if is_quick else 800
    curves = {
        "neurons n": ("batch 64, 400 inputs", sizes, scaling("neurons", sizes, lambda n: (n, 64, 400), rounds)),
        "batch": (f"n = {fixed}, 400 inputs", batches, scaling("batch", batches, lambda b: (fixed, b, 400), rounds)),
        "inputs m": (f"n = {fixed}, batch 64", inputs, scaling("inputs", inputs, lambda m: (fixed, 64, m), rounds)),
    }
    draw(curves, QUICK_PICTURE if is_quick else HERE / "update.png")
    lines = ["Largest natural steps, power-cosine kernel. ![Time per update by size](update.png)", ""]
    for name, (rest, values, times) in curves.items():
        header = [f"{name} ({rest})", *(f"{value:,}" for value in values)]
        lines += [*table(header, [["ms", *(f"{time:.3g}" for time in times)]]), ""]
    times = dict(zip(sizes, curves["neurons n"][2], strict=True))
    if 3200 in times:
        lines += [
            f"From n = 800 to 3,200 the exponent is {exponent([800, 3200], [times[800], times[3200]]):.2f} "
            "(target: at most 2.4).",
            "",
        ]
    neurons = 128 if is_quick else 1024
    rows = [
        [str(ratio), f"{exact:.2f}", f"{tracked:.2f}", f"{exact / tracked:.2f}"]
        for ratio, exact, tracked in crossover(neurons, rounds)
    ]
    return [
        *lines,
        f"When a tracked inverse is faster, for n = {neurons}. `auto` tracks from {NEURONS_PER_SAMPLE} neurons per "
        "sample on.",
        "",
        *table(["neurons per sample", "factorised, ms", "tracked, ms", "ratio"], rows),
    ]


PARTS = {
    "moons": moons_report,
    "native": native_report,
    "mnist": mnist_report,
    "sizes": sizes_report,
    "start": start_report,
}
TITLES = {
    "moons": "Half moons, batch 64",
    "native": "Machine code or torch",
    "mnist": "MNIST, 400 inputs, n = 800, batch 64",
    "sizes": "Sizes",
    "start": "Start-up",
}


def main() -> None:
    wanted, is_quick = chosen_parts(__doc__, PARTS)
    for part in wanted:
        lines = PARTS[part](is_quick)
        title = f"{part} in small" if is_quick else TITLES[part]
        print("\n".join([f"## {title}", "", *lines, ""]))
        if not is_quick:
            write_sections(HERE / "RESULTS.md", heading(), TITLES, {part: lines})


if __name__ == "__main__":
    main()
