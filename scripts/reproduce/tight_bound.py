"""Beyond the paper: the tight bound, whose error falls with n, and features compressed from twice as many landmarks.

Half moons (n = 2 to 64), MNIST with alpha = 3 (n = 16 to 1,024) and, if KSM_DATA_DIR holds tabular/covertype.npz,
20,000 rows of Covertype (n = 16 to 512; Gaussian, sigma half the median distance).

.venv/bin/python scripts/reproduce/tight_bound.py             30 minutes on two cores; continues where it stopped
.venv/bin/python scripts/reproduce/tight_bound.py --quick     half a minute
"""

import os
from pathlib import Path

import numpy as np
import torch
from comparisons import Entries, curves_of, entries_of, run_comparison
from figure_script import Arrays, Claim, Script, Workspace, extent_of, many, mnist_points, panel_letter
from half_moons_overview import KERNEL, moons
from matplotlib.figure import Figure

from ksm_lightning import GaussianKernel, PowerCosineKernel, figures
from ksm_lightning.kernels import Kernel

METHODS = ("kernel_pca", "nystroem_kmeans", "ksm", "ksm_tight", "ksm_compressed")
SIZES = {
    "moons": (2, 4, 8, 16, 32, 64),
    "mnist": (16, 64, 256, 1024),
    "covertype": (16, 32, 64, 128, 256, 512),
}
TITLES = {
    "moons": "Half moons, sigma = 0.3",
    "mnist": "MNIST, power-cosine, alpha = 3",
    "covertype": "Covertype, Gaussian, half the median distance",
}
ROWS = 20_000


def covertype() -> torch.Tensor | None:
    """Standardised rows of Covertype (20,000, 54), or None if the file is missing."""
    path = Path(os.environ.get("KSM_DATA_DIR", "")) / "tabular" / "covertype.npz"
    if not path.is_file():
        return None
    x = torch.tensor(np.load(path)["x"], dtype=torch.float64)
    deviation = x.std(0)
    x = (x - x.mean(0)) / torch.where(deviation > 0, deviation, 1.0)
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:ROWS]].float()


def compute(workspace: Workspace) -> Arrays:
    """One comparison per data set."""
    x = moons().train_points.data
    assert isinstance(x, torch.Tensor)
    sets: dict[str, tuple[Kernel, torch.Tensor]] = {
        "moons": (KERNEL, x),
        "mnist": (PowerCosineKernel(3), mnist_points(workspace)),
    }
    rows = covertype()
    if rows is not None:
        sets["covertype"] = (GaussianKernel(0.5 * float(torch.pdist(rows[:2000]).median())), rows)
    arrays: Arrays = {}
    for name, (kernel, points) in sets.items():
        is_moons = name == "moons"
        arrays |= run_comparison(
            workspace, f"tight_{name}", kernel, points[:2000] if workspace.is_quick else points,
            (4, 16) if workspace.is_quick else SIZES[name], methods=METHODS,
            seeds=range(5) if is_moons and not workspace.is_quick else (0,), max_points=1600 if is_moons else 5000,
            updates=100 if workspace.is_quick else 2000 if is_moons else 4000,
        )  # fmt: skip
    return arrays


def draw(arrays: Arrays) -> dict[str, Figure]:
    """One panel per data set."""
    names = [name for name in SIZES if entries_of(arrays, f"tight_{name}")]
    figure = figures.new_figure(5.6 * len(names), 5.0, columns=len(names))
    for index, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), index + 1)
        figures.error_panel(axes, curves_of(arrays, f"tight_{name}"), TITLES[name])
        axes.legend(loc="lower left", fontsize=7.5, framealpha=0.9)
        panel_letter(axes, "abc"[index])
    return {"tight_bound": figure}


def ratios(entries: Entries, method: str) -> list[float]:
    """Errors of a method divided by kernel PCA's, by n."""
    return [entries[method][n].mean / entries["kernel_pca"][n].mean for n in sorted(entries[method])]


def claims(arrays: Arrays) -> list[Claim]:
    """Our statements, measured."""
    found = []
    for name in SIZES:
        entries = entries_of(arrays, f"tight_{name}")
        if not entries:
            continue
        sizes = sorted(entries["ksm_tight"])
        means = {method: [entries[method][n].mean for n in sizes] for method in METHODS}
        at = f"n = {', '.join(map(str, sizes))}"
        falls = [b < a for a, b in zip(means["ksm_tight"], means["ksm_tight"][1:], strict=False)]
        found += [
            Claim(
                f"{TITLES[name]}: the error of the tight network's responses falls with n",
                f"{at}: tight {many(means['ksm_tight'], 4)}; the paper's network {many(means['ksm'], 4)}; KMeans and "
                f"Nystroem {many(means['nystroem_kmeans'], 4)}; kernel PCA {many(means['kernel_pca'], 4)}",
                extent_of([fall for fall in falls if fall], falls),
            ),
            Claim(
                f"{TITLES[name]}: n features of 2n landmarks are within 10 % of kernel PCA",
                f"{many(means['ksm_compressed'], 4)}, {many(ratios(entries, 'ksm_compressed'), 3)} times kernel PCA",
                extent_of([ratio for ratio in ratios(entries, "ksm_compressed") if ratio <= 1.1], sizes),
                "Kernel PCA is fitted to the scored points, the features to all.",
            ),
        ]
    return found


SCRIPT = Script("tight_bound", compute, draw, claims, minutes=30, needs_mnist=True)

if __name__ == "__main__":
    SCRIPT.main()
