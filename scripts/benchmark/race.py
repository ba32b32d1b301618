#!/usr/bin/env python3
"""Kernel error against the seconds of the fit: the network with each readout, the paper's schedule, landmarks that
are chosen or optimised by other methods, and scikit-learn's own classes.

Writes scripts/benchmark/RACE.md and race.png. All methods of a problem run in one process, one after the other; of
fits that take less than a second, the best of three counts. Errors are those of the points that were fitted.

.venv/bin/python scripts/benchmark/race.py                    about 20 minutes on two cores; MNIST needs KSM_DATA_DIR
.venv/bin/python scripts/benchmark/race.py --only moons_16    one problem; the others are kept
.venv/bin/python scripts/benchmark/race.py --quick            few points and updates, as a check: a minute; only prints
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import sklearn
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from results import chosen_parts, machine, seconds_of, table, write_sections
from sklearn.decomposition import KernelPCA as SklearnKernelPCA
from sklearn.kernel_approximation import Nystroem as SklearnNystroem
from sklearn.kernel_approximation import RBFSampler
from torch import Tensor
from tqdm import tqdm

from ksm_lightning.baselines import Nystroem
from ksm_lightning.baselines.kernel_pca import KernelPCA
from ksm_lightning.baselines.networks import SimilarityMatching
from ksm_lightning.data import CroppedMNISTDataModule, HalfMoonsDataModule
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import GaussianKernel, Kernel, PowerCosineKernel
from ksm_lightning.learning import native

HERE = Path(__file__).resolve().parent
STORE = HERE.parents[1] / "runs" / "race"  # what the figure shows of problems that are not measured again
READOUTS = {"neural": "its responses", "nystroem": "Nystroem on W", "least_squares": "least squares on W"}
LANDMARKS = {
    "uniform": "uniform Nystroem",
    "kmeans": "KMeans Nystroem",
    "cholesky": "pivoted Cholesky",
    "gradient": "gradient landmarks",
}
STYLES = {
    "network, its responses": ("#d81f2a", "o"),
    "network, Nystroem on W": ("#d81f2a", "s"),
    "network, least squares on W": ("#f08a90", "d"),
    "paper's schedule, its responses": ("#7f7f7f", "o"),
    "paper's schedule, Nystroem on W": ("#7f7f7f", "s"),
    "paper's schedule, least squares on W": ("#bbbbbb", "d"),
    "tight bound, default features": ("#7b1fa2", "P"),
    "uniform Nystroem": ("#1f77b4", "v"),
    "KMeans Nystroem": ("#2ca02c", "^"),
    "pivoted Cholesky": ("#17a2b8", "<"),
    "gradient landmarks": ("#e08a00", ">"),
}


class Result(NamedTuple):
    """One fit."""

    method: str
    setting: str
    seconds: float
    error: float | None  # None for a class that has another kernel: it is here for its time


class Problem(NamedTuple):
    """Data, kernel, and how long the networks learn."""

    title: str
    x: Tensor
    kernel: Kernel
    n: int
    updates: tuple[int, ...]  # of the adaptive schedule
    tight_updates: tuple[int, ...]
    tight_landmarks: int
    phases: str


def moons(n: int, is_quick: bool) -> Problem:
    """Half moons with the paper's width."""
    x, some = HalfMoonsDataModule().train_points.data, slice(0, 2 if is_quick else None)
    return Problem(
        f"Half moons, n = {n}", x, GaussianKernel(0.3), n, (125, 500, 2000, 8000)[some], (25, 50, 100, 200)[some],
        n * 3 // 2, "paper_half_moons",
    )  # fmt: skip


def mnist(is_quick: bool) -> Problem:
    """10,000 cropped digits."""
    data = CroppedMNISTDataModule(data_dir=os.environ.get("KSM_DATA_DIR"), download=False)
    data.prepare_data()
    data.setup("fit")
    points = data.train_points
    chosen = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[: 1000 if is_quick else 10_000]
    n, some = 50 if is_quick else 800, slice(0, 1 if is_quick else None)
    return Problem(
        f"MNIST, alpha = 3, n = {n}", points.take(chosen).float(), PowerCosineKernel(3), n,
        (125, 500, 2000, 4000)[some], (25, 100)[some], n * 5 // 4, "released_mnist",
    )  # fmt: skip


PROBLEMS: dict[str, Callable[[bool], Problem]] = {
    "moons_16": partial(moons, 16),
    "moons_64": partial(moons, 64),
    "mnist": mnist,
}
TITLES = {"moons_16": "Half moons, n = 16", "moons_64": "Half moons, n = 64", "mnist": "MNIST, alpha = 3, n = 800"}

# ---------------------------------------------------------------------- fits


def best_fit(fit: Callable[[], Any]) -> tuple[Any, float]:
    """What a fit returns, and its seconds: the best of three if it takes less than one."""
    made: list[Any] = []
    seconds = seconds_of(lambda: made.append(fit()))
    if seconds < 1:
        seconds = min(seconds, *(seconds_of(lambda: made.append(fit())) for _ in range(2)))
    return made[-1], seconds


def error_of(problem: Problem, features: Tensor) -> float:
    return float(kernel_nrmse(problem.kernel, problem.x.double(), features.double()))


def network(problem: Problem, method: str, setting: str, **options: Any) -> Iterator[Result]:
    """A network of the paper's bound with each readout; a readout's own time is added to that of the training."""
    fitted, seconds = best_fit(lambda: SimilarityMatching(problem.kernel, problem.n, **options).fit(problem.x))
    for readout, name in READOUTS.items():
        one = problem.x[:1]
        extra = seconds_of(lambda readout=readout, one=one: fitted.features(one, readout))
        error = error_of(problem, fitted.features(problem.x, readout))
        yield Result(f"{method}, {name}", setting, seconds + extra, error)


def ours(problem: Problem) -> Iterator[Result]:
    """Networks with both bounds and schedules."""
    for updates in problem.updates:
        yield from network(problem, "network", f"{updates:,} updates", updates=updates)
    yield from network(problem, "paper's schedule", f"`{problem.phases}`", phases=problem.phases)
    for updates in problem.tight_updates:
        options = {"bound": "tight", "num_landmarks": problem.tight_landmarks, "readout": "least_squares"}
        fitted, seconds = best_fit(
            lambda updates=updates, options=options: SimilarityMatching(
                problem.kernel, problem.n, updates=updates, **options
            ).fit(problem.x)
        )
        seconds += seconds_of(lambda fitted=fitted: fitted.transform(problem.x[:1]))
        setting = f"{problem.tight_landmarks:,} landmarks, {updates:,} updates"
        yield Result("tight bound, default features", setting, seconds, error_of(problem, fitted.transform(problem.x)))


def others(problem: Problem) -> Iterator[Result]:
    """Landmarks of other methods, the optimum, and scikit-learn's classes."""
    for name, label in LANDMARKS.items():
        fitted, seconds = best_fit(
            lambda name=name: Nystroem(problem.kernel, problem.n, landmarks=name, seed=0).fit(problem.x.double())
        )
        yield Result(label, "", seconds, error_of(problem, fitted.transform(problem.x.double())))
    optimum, seconds = best_fit(lambda: KernelPCA(problem.kernel, problem.n, seed=0).fit(problem.x.double()))
    yield Result("kernel PCA (optimum)", "", seconds, error_of(problem, optimum.transform(problem.x.double())))
    x, is_gaussian = problem.x.double().numpy(), isinstance(problem.kernel, GaussianKernel)
    gamma = 0.5 / problem.kernel.sigma**2 if isinstance(problem.kernel, GaussianKernel) else None
    classes = {
        "scikit-learn's `Nystroem`": SklearnNystroem(gamma=gamma, n_components=problem.n, random_state=0),
        "scikit-learn's `RBFSampler`": RBFSampler(gamma=gamma or 1.0, n_components=problem.n, random_state=0),
        "scikit-learn's `KernelPCA`": SklearnKernelPCA(problem.n, kernel="rbf", gamma=gamma, random_state=0),
    }
    for label, estimator in classes.items():
        fitted, seconds = best_fit(lambda estimator=estimator: estimator.fit(x))
        if not is_gaussian or isinstance(estimator, SklearnKernelPCA):
            other = "centred" if is_gaussian else "Gaussian"
            yield Result(label, f"{other} kernel: time only", seconds, None)
        else:
            yield Result(label, "", seconds, error_of(problem, torch.from_numpy(fitted.transform(x))))


# ---------------------------------------------------------------------- results


def lines_of(results: list[Result]) -> list[str]:
    """The table, fastest first."""
    ordered = sorted(results, key=lambda result: result.seconds)
    rows = [
        (each.method, each.setting, f"{each.seconds:.3g}", "" if each.error is None else f"{each.error:.4f}")
        for each in ordered
    ]
    return table(["method", "", "seconds", "NRMSE"], rows)


def draw(found: dict[str, list[Result]], path: Path) -> None:
    """One panel per problem."""
    figure = Figure(figsize=(5 * len(found), 5.6), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = None
    for index, (name, results) in enumerate(found.items()):
        axes = figure.add_subplot(1, len(found), index + 1)
        for method, (color, marker) in STYLES.items():
            points = [(each.seconds, each.error) for each in results if each.method == method]
            if points:
                axes.loglog(*zip(*points, strict=True), marker=marker, color=color, label=method, markersize=6)
        for each in results:
            if each.method.startswith("kernel PCA") and each.error is not None:
                axes.axhline(each.error, color="black", linewidth=1, label=each.method)
            if each.method.startswith("scikit-learn's `Nystroem`"):
                axes.axvline(
                    each.seconds,
                    color="#1f77b4",
                    linewidth=1,
                    linestyle=":",
                    label="seconds of scikit-learn's Nystroem",
                )
        axes.set(title=TITLES[name], xlabel="seconds of the fit", ylabel="kernel NRMSE" if index == 0 else "")
        axes.grid(alpha=0.3, which="both")
    if axes is not None:
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path)


def stored(name: str) -> list[Result]:
    """The results of a problem that was measured earlier."""
    path = STORE / f"{name}.json"
    return [Result(*each) for each in json.loads(path.read_text())] if path.exists() else []


def main() -> None:
    wanted, is_quick = chosen_parts(__doc__, PROBLEMS)
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    head = f"# Error against seconds\n\n{machine(threads, scikit_learn=sklearn.__version__)}. Written by "
    head += "`scripts/benchmark/race.py`, which says how.\n\n![Error against seconds](race.png)"
    native.PATIENCE = 0  # all candidates run in machine code, which is not compiled while they are timed
    for name in wanted:
        problem = PROBLEMS[name](is_quick)
        for bound in ("paper", "tight"):  # compiles machine code
            SimilarityMatching(problem.kernel, problem.n, bound=bound, updates=20).fit(problem.x)
        results = []
        for work in (ours, others):
            results += list(tqdm(work(problem), desc=f"{problem.title}, {work.__name__}", leave=False))
        lines = lines_of(results)
        print("\n".join([f"## {problem.title}", "", *lines, ""]))
        if not is_quick:
            STORE.mkdir(parents=True, exist_ok=True)
            (STORE / f"{name}.json").write_text(json.dumps(results))
            write_sections(HERE / "RACE.md", head, TITLES, {name: lines})
    known = {name: stored(name) for name in PROBLEMS}
    if is_quick or not wanted:
        return
    if missing := [name for name, results in known.items() if not results]:
        print(f"race.png stays as it is: not measured in this folder yet: {', '.join(missing)}.", file=sys.stderr)
    else:
        draw(known, HERE / "race.png")


if __name__ == "__main__":
    main()
