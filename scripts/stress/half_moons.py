"""1,080 half-moons runs per rule over sizes, seeds, starts and units of x, compared with the exact minimum."""

import itertools
from typing import Any

import torch
from common import is_finite, median, run_all, table

from ksm_lightning import AdaptiveSchedule, GaussianKernel, HalfMoonsDataModule, NormalInit, Phase, PhaseSchedule
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.learning import TightSchedule, descent, natural_ridge, train
from ksm_lightning.learning.exact import consolidate, minimise_bound
from ksm_lightning.learning.exact_tight import settle
from ksm_lightning.learning.moments import similarity_moment
from ksm_lightning.network import TightNetwork
from ksm_lightning.network.pivots import pivoted_cholesky
from ksm_lightning.network.readout import read_out

SIZES, SEEDS, STARTS, SCALES = (2, 4, 8, 16, 32, 64), range(20), ("normal_1", "normal_0.5", "data"), (0.01, 1, 100)
UPDATES, BATCH, SIGMA = 2000, 64, 0.3
SCHEDULES = ("adaptive", "tight", "paper")


def points(scale: float) -> torch.Tensor:
    """The 1,600 points, multiplied by ``scale``."""
    data = HalfMoonsDataModule().train_points.data
    assert isinstance(data, torch.Tensor)
    return scale * data


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train one network and compute the errors of its features."""
    x = points(job["scale"])
    kernel = GaussianKernel(sigma=SIGMA * job["scale"])
    paper = PhaseSchedule([Phase(UPDATES, 0.01, 0.01, 0.1)])
    schedule = {"adaptive": AdaptiveSchedule(UPDATES), "tight": TightSchedule(UPDATES), "paper": paper}[job["schedule"]]
    init = None if job["start"] == "data" else NormalInit(float(job["start"].partition("_")[2]))
    network = train(
        kernel, x, job["n"], schedule, bound="tight" if job["schedule"] == "tight" else "paper", batch_size=BATCH,
        init=init, consolidate_at_end=False, seed=job["seed"],
    )  # fmt: skip
    result: dict[str, Any] = {"finite": is_finite(network)}
    if result["finite"]:
        readings = {"online": read_out(network, "neural", x), "nystroem": read_out(network, "nystroem", x)}
        consolidate(network, similarity_moment(kernel, [x], network.W))
        readings["neural"] = read_out(network, "neural", x)
        errors = kernel_nrmse(kernel, x, *readings.values()).tolist()
        result |= dict(zip(readings, errors, strict=True))
    return result


def exact(job: dict[str, Any]) -> dict[str, Any]:
    """The lowest bound from several starts, and the error of that solution."""
    x, kernel = points(1), GaussianKernel(sigma=SIGMA)
    generator = torch.Generator().manual_seed(0)
    if job["schedule"] == "exact_tight":
        bound, y = min((tight_minimum(kernel, x, job["n"], generator) for _ in range(8)), key=lambda one: one[0])
    else:
        ridge = natural_ridge(kernel, x, job["n"])
        minimum = minimise_bound(kernel, x, job["n"], ridge, starts=8, generator=generator)
        bound, y = minimum.bound, minimum.responses(kernel, x, ridge)
    return {"bound": bound, "neural": float(kernel_nrmse(kernel, x.double(), y)[0])}


def tight_minimum(kernel: GaussianKernel, x: torch.Tensor, n: int, generator: torch.Generator) -> tuple[float, Any]:
    """The tight bound that L-BFGS reaches from pivots of the data, and the responses (samples, n) there."""
    x, ridge = x.double(), natural_ridge(kernel, x, n, "tight")
    W = x[pivoted_cholesky(kernel, x, n, generator)]
    W = descent.minimise_bound(kernel, x, W, n, ridge, iterations=400)
    network = TightNetwork(kernel, x.shape[1], n, ridge, lambda *_: W).double()
    network.W.data.copy_(W)
    return settle(network, similarity_moment(kernel, [x], W)), network(x)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job: a training or an exact minimum."""
    return exact(job) if job["schedule"].startswith("exact") else run(job)


def jobs(quick: bool) -> list[dict[str, Any]]:
    """All jobs, the exact minima first."""
    seeds = range(1) if quick else SEEDS
    grid = itertools.product(SCHEDULES, SIZES, seeds, STARTS, SCALES)
    names = ("schedule", "n", "seed", "start", "scale")
    minima = [{"schedule": name, "n": n} for name in ("exact", "exact_tight") for n in SIZES]
    return minima + [dict(zip(names, values, strict=True)) for values in grid]


def report(done: list[dict[str, Any]]) -> list[str]:
    """The results as Markdown."""
    truth = {row["n"]: row for row in done if row["schedule"] == "exact"}
    tight_truth = {row["n"]: row for row in done if row["schedule"] == "exact_tight"}
    runs = [row for row in done if not row["schedule"].startswith("exact")]
    counts, errors, tight_errors = [], [], []
    for schedule, start in itertools.product(SCHEDULES, STARTS):
        rows = [row for row in runs if (row["schedule"], row["start"]) == (schedule, start)]
        bad = sum(not row["finite"] for row in rows)
        best = tight_truth if schedule == "tight" else truth
        near = sum(row["finite"] and row["neural"] <= 1.1 * best[row["n"]]["neural"] for row in rows)
        counts.append((schedule, start, len(rows), bad, f"{near} ({100 * near / len(rows):.1f} %)"))
    for n in SIZES:
        rows = [row for row in runs if row["n"] == n and row["start"] == "data" and row["finite"]]
        adaptive = [row for row in rows if row["schedule"] == "adaptive"]
        paper = [row["online"] for row in rows if row["schedule"] == "paper"]
        cells = [median([row[name] for row in adaptive]) for name in ("neural", "online", "nystroem")]
        errors.append((n, f"{truth[n]['neural']:.4f}", *cells, median(paper), len(paper)))
        tight = [row for row in rows if row["schedule"] == "tight"]
        cells = [median([row[name] for row in tight]) for name in ("neural", "online", "nystroem")]
        tight_errors.append((n, f"{tight_truth[n]['neural']:.4f}", *cells))
    names = ("neural", "online", "Nystroem")
    return [
        f"Runs of {UPDATES:,} updates, batch {BATCH}, sigma {SIGMA} in the units of x, "
        f"{len({row['seed'] for row in runs})} seeds, x multiplied by {', '.join(map(str, SCALES))}. Exact is the "
        "lowest J from 8 starts of L-BFGS.",
        "",
        *table(["schedule", "start", "runs", "non-finite", "within 1.10 of the exact error"], counts),
        "",
        "Medians over all finite runs that start at data points, with the largest value in brackets. Online is the "
        "error before L is set to its exact value.",
        "",
        *table(["n", "exact", *(f"adaptive, {name}" for name in names), "paper, online", "finite, paper"], errors),
        "",
        "The same for the tight bound. Exact is the lowest tight J that was found; runs can have a lower error.",
        "",
        *table(["n", "exact", *(f"tight, {name}" for name in names)], tight_errors),
    ]


def main(quick: bool) -> list[str]:
    """Run the missing jobs and report all."""
    return report(run_all("half_moons", jobs(quick), work, quick))
