"""Other kernels on other data: no failure, and an error below that of Nystroem with landmarks drawn at random."""

import itertools
import statistics
from typing import Any

import numpy as np
import torch
from common import is_finite, run_all
from torch import Tensor

from ksm_lightning import AdaptiveSchedule, DigitsDataModule, make_kernel
from ksm_lightning.baselines import Nystroem
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.learning.train import train
from ksm_lightning.network.readout import READOUTS, read_out

NEURONS, UPDATES, SEEDS, DRAWS = 32, 2000, range(5), 20
KERNELS = {
    "laplacian": ("laplacian", {}),
    "cauchy": ("cauchy", {}),
    "polynomial 2": ("polynomial", {"degree": 2}),
    "polynomial 3": ("polynomial", {"degree": 3}),
    "arc-cosine 0": ("arc_cosine", {"order": 0}),
    "arc-cosine 1": ("arc_cosine", {"order": 1}),
}
DATA = ("digits", "mixture in 50 dimensions", "constant feature", "duplicates", "20 points")


def load(name: str) -> Tensor:
    """The points (samples, m) of a data set by name."""
    rng = np.random.default_rng(0)
    if name == "digits":
        data = DigitsDataModule().train_points.data
        assert isinstance(data, Tensor)
        return data
    if name == "mixture in 50 dimensions":
        centres = rng.normal(0, 2, (10, 50))
        return torch.tensor(centres[rng.integers(0, 10, 2000)] + rng.normal(0, 1, (2000, 50)), dtype=torch.float32)
    x = rng.normal(0, 1, (1000, 5))
    if name == "constant feature":
        x[:, 4] = 3.0
    elif name == "duplicates":
        x = np.repeat(x[:50], 20, 0)
    elif name == "20 points":
        x = x[:20]
    return torch.tensor(x, dtype=torch.float32)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One training, and the errors of its features and of Nystroem with as many random landmarks."""
    x = load(job["data"])
    name, params = KERNELS[job["kernel"]]
    if name in ("laplacian", "cauchy"):  # as wide as half the data's typical distance
        few = x[:500].double()
        params = {"sigma": 0.5 * float(torch.pdist(few).median())}
    kernel = make_kernel(name, **params)
    network = train(kernel, x, NEURONS, AdaptiveSchedule(UPDATES), seed=job["seed"])
    if not is_finite(network):
        return {"finite": False}
    features = [read_out(network, readout, x) for readout in READOUTS]
    for draw in range(DRAWS):
        uniform = Nystroem(kernel, min(NEURONS, len(x)), seed=DRAWS * job["seed"] + draw)
        features.append(uniform.fit_transform(x))
    errors = kernel_nrmse(kernel, x, *features).tolist()
    ours, theirs = errors[: len(READOUTS)], errors[len(READOUTS) :]
    return {"finite": True, **dict(zip(READOUTS, ours, strict=True)), "uniform": statistics.median(theirs)}


def report(done: list[dict[str, Any]]) -> list[str]:
    """What the runs showed, as Markdown."""
    lines = [
        f"{NEURONS} neurons, {UPDATES:,} updates, medians over {len({row['seed'] for row in done})} seeds; uniform is "
        f"Nystroem with as many landmarks drawn from the data, the median of {DRAWS} draws. Non-finite runs: "
        f"{sum(not row['finite'] for row in done)} of {len(done)}.",
        "",
        "| kernel | data | neural | Nystroem on W | least squares on W | uniform | Nystroem on W / uniform |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    ratios: dict[str, list[float]] = {"nystroem": [], "least_squares": []}
    for kernel, data in itertools.product(KERNELS, DATA):
        rows = [row for row in done if (row["kernel"], row["data"]) == (kernel, data) and row["finite"]]
        values = [statistics.median(row[name] for row in rows) for name in (*READOUTS, "uniform")]
        last = "uniform is exact"  # the kernel's rank, or the number of points, is below that of the landmarks
        if values[3] > 1e-5:
            for readout, value in zip(READOUTS, values, strict=False):
                if readout in ratios:
                    ratios[readout].append(value / values[3])
            last = f"{ratios['nystroem'][-1]:.2f}"
        lines.append(f"| {kernel} | {data} | {' | '.join(f'{value:.4f}' for value in values)} | {last} |")
    lines.append("")
    for readout, found in ratios.items():
        below = sum(ratio < 1 for ratio in found)
        lines.append(
            f"- {readout} on W: below uniform Nystroem in {below} of {len(found)} cases, median ratio "
            f"{statistics.median(found):.2f}."
        )
    return lines


def main(quick: bool) -> list[str]:
    """Run what is missing, and report."""
    jobs = [
        {"kernel": kernel, "data": data, "seed": seed}
        for kernel, data, seed in itertools.product(KERNELS, DATA, range(1) if quick else SEEDS)
    ]
    return report(run_all("kernels", jobs, work, quick))
