"""Other kernels and data: no run may fail, and errors should be below those of Nystroem with random landmarks."""

import itertools
import statistics
from typing import Any

import numpy as np
import torch
from common import is_finite, run_all, table
from torch import Tensor

from ksm_lightning import AdaptiveSchedule, DigitsDataModule, make_kernel
from ksm_lightning.baselines import Nystroem
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.learning import train
from ksm_lightning.network.readout import READOUTS, read_out

NAMES = {"nystroem": "Nystroem", "least_squares": "Least squares"}
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
    """Points (samples, m) of a data set by name."""
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
    """Train one network; errors of its features and of Nystroem with the same number of random landmarks."""
    x = load(job["data"])
    name, params = KERNELS[job["kernel"]]
    if name in ("laplacian", "cauchy"):  # half of a typical distance
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
    """The results as Markdown."""
    cells: list[tuple[str, ...]] = []
    ratios: dict[str, list[float]] = {readout: [] for readout in NAMES}
    for kernel, data in itertools.product(KERNELS, DATA):
        rows = [row for row in done if (row["kernel"], row["data"]) == (kernel, data) and row["finite"]]
        values = [statistics.median(row[name] for row in rows) for name in (*READOUTS, "uniform")]
        last = "uniform is exact"  # more landmarks than points, or than the kernel's rank
        if values[3] > 1e-5:
            for readout, value in zip(READOUTS, values, strict=False):
                if readout in ratios:
                    ratios[readout].append(value / values[3])
            last = f"{ratios['nystroem'][-1]:.2f}"
        cells.append((kernel, data, *(f"{value:.4f}" for value in values), last))
    header = (
        "kernel", "data", "neural", "Nystroem on W", "least squares on W", "uniform", "Nystroem on W / uniform"
    )  # fmt: skip
    return [
        f"{NEURONS} neurons, {UPDATES:,} updates, medians over {len({row['seed'] for row in done})} seeds. Uniform is "
        f"Nystroem with the same number of random data points as landmarks, the median of {DRAWS} draws. Non-finite "
        f"runs: {sum(not row['finite'] for row in done)} of {len(done)}.",
        "",
        *table(header, cells),
        "",
        *(
            f"- {NAMES[readout]} on W: below uniform Nystroem in {sum(ratio < 1 for ratio in found)} of {len(found)} "
            f"cases, median ratio {statistics.median(found):.2f}."
            for readout, found in ratios.items()
        ),
    ]


def main(quick: bool) -> list[str]:
    """Run the missing jobs and report all."""
    jobs = [
        {"kernel": kernel, "data": data, "seed": seed}
        for kernel, data, seed in itertools.product(KERNELS, DATA, range(1) if quick else SEEDS)
    ]
    return report(run_all("kernels", jobs, work, quick))
