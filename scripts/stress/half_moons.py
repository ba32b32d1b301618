"""1,080 half-moons runs with each schedule: sizes, seeds, starts and units of x, against the exact minimum."""

import itertools
from typing import Any

import torch
from common import is_finite, median, run_all

from ksm_lightning import AdaptiveSchedule, GaussianKernel, HalfMoonsDataModule, NormalInit, Phase, PhaseSchedule
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.learning.exact import minimise_bound
from ksm_lightning.learning.train import consolidate, natural_ridge, train
from ksm_lightning.network.readout import read_out

SIZES, SEEDS, STARTS, SCALES = (2, 4, 8, 16, 32, 64), range(20), ("normal_1", "normal_0.5", "data"), (0.01, 1, 100)
UPDATES, BATCH, SIGMA = 2000, 64, 0.3


def points(scale: float) -> torch.Tensor:
    """The 1,600 points in other units."""
    data = HalfMoonsDataModule().train_points.data
    assert isinstance(data, torch.Tensor)
    return scale * data


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One training, from its start to the errors of its features."""
    x = points(job["scale"])
    kernel = GaussianKernel(sigma=SIGMA * job["scale"])
    is_adaptive = job["schedule"] == "adaptive"
    schedule = (
        AdaptiveSchedule(UPDATES) if is_adaptive else PhaseSchedule([Phase(UPDATES, 0.01, 0.01, 0.1)])
    )  # the paper's
    init = None if job["start"] == "data" else NormalInit(float(job["start"].partition("_")[2]))
    network = train(
        kernel, x, job["n"], schedule, batch_size=BATCH, init=init, consolidate_at_end=False, seed=job["seed"]
    )
    result: dict[str, Any] = {"finite": is_finite(network)}
    if result["finite"]:
        readings = {"online": read_out(network, "neural", x), "nystroem": read_out(network, "nystroem", x)}
        consolidate(network, [x], lambda value: value)
        readings["neural"] = read_out(network, "neural", x)
        errors = kernel_nrmse(kernel, x, *readings.values()).tolist()
        result |= dict(zip(readings, errors, strict=True))
    return result


def exact(job: dict[str, Any]) -> dict[str, Any]:
    """The least bound found from several starts, and the error of that solution."""
    x, kernel = points(1), GaussianKernel(sigma=SIGMA)
    ridge = natural_ridge(kernel, x, job["n"])
    found = minimise_bound(kernel, x, job["n"], ridge, starts=8, generator=torch.Generator().manual_seed(0))
    y = found.responses(kernel, x, ridge)
    return {"bound": found.bound, "neural": float(kernel_nrmse(kernel, x.double(), y)[0])}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Either of both."""
    return exact(job) if job["schedule"] == "exact" else run(job)


def jobs(quick: bool) -> list[dict[str, Any]]:
    """All runs, the references first."""
    seeds = range(1) if quick else SEEDS
    grid = itertools.product(("adaptive", "paper"), SIZES, seeds, STARTS, SCALES)
    names = ("schedule", "n", "seed", "start", "scale")
    return [{"schedule": "exact", "n": n} for n in SIZES] + [dict(zip(names, values, strict=True)) for values in grid]


def report(done: list[dict[str, Any]]) -> list[str]:
    """What the runs showed, as Markdown."""
    truth = {row["n"]: row for row in done if row["schedule"] == "exact"}
    runs = [row for row in done if row["schedule"] != "exact"]
    lines = [
        f"Runs of {UPDATES:,} updates, batch {BATCH}, sigma {SIGMA} in units of x, "
        f"{len({row['seed'] for row in runs})} seeds, x in units of {', '.join(map(str, SCALES))}. Exact: the least J "
        "of 8 starts of L-BFGS.",
        "",
        "| schedule | start | runs | non-finite | within 1.10 of the exact error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for schedule, begin in itertools.product(("adaptive", "paper"), STARTS):
        rows = [row for row in runs if (row["schedule"], row["start"]) == (schedule, begin)]
        bad = sum(not row["finite"] for row in rows)
        near = sum(row["finite"] and row["neural"] <= 1.1 * truth[row["n"]]["neural"] for row in rows)
        lines.append(f"| {schedule} | {begin} | {len(rows)} | {bad} | {near} ({100 * near / len(rows):.1f} %) |")
    lines += [
        "",
        "Medians over all finite runs that start at the data (largest in brackets). Online is before consolidation.",
        "",
        "| n | exact | adaptive neural | adaptive online | adaptive Nystroem | paper's neural, online | finite |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for n in SIZES:
        rows = [row for row in runs if row["n"] == n and row["start"] == "data"]
        ours = [row for row in rows if row["schedule"] == "adaptive" and row["finite"]]
        theirs = [row for row in rows if row["schedule"] == "paper"]
        alive = [row["online"] for row in theirs if row["finite"]]
        cells = [median([row[name] for row in ours]) for name in ("neural", "online", "nystroem")]
        lines.append(f"| {n} | {truth[n]['neural']:.4f} | {' | '.join(cells)} | {median(alive)} | {len(alive)} |")
    return lines


def main(quick: bool) -> list[str]:
    """Run what is missing, and report."""
    return report(run_all("half_moons", jobs(quick), work, quick))
