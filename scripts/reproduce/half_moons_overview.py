"""The half-moons network with 16 neurons: data, landmarks, responses of three neurons (the paper's Fig. 2).

.venv/bin/python scripts/reproduce/half_moons_overview.py     half a minute on two cores
"""

import numpy as np
import torch
from figure_script import Arrays, Claim, Script, Workspace, named_phases, panel_letter, percent
from matplotlib.figure import Figure

from ksm_lightning import HalfMoonsDataModule, figures
from ksm_lightning.baselines import SimilarityMatching
from ksm_lightning.evaluation.clustering import kmeans
from ksm_lightning.kernels import GaussianKernel

KERNEL = GaussianKernel(sigma=0.3)


def moons(seed: int = 0, noise: float = 0.1) -> HalfMoonsDataModule:
    """The data: 1,600 points."""
    return HalfMoonsDataModule(data_seed=seed, noise=noise)


def paper_network(workspace: Workspace, n: int, seed: int = 0) -> SimilarityMatching:
    """The paper's schedule from 0.5 N(0, 1), which is more stable than N(0, 1)."""
    phases = named_phases(workspace, "paper_half_moons")
    return SimilarityMatching(KERNEL, n, phases=phases, init_scale=0.5, seed=seed)


def compute(workspace: Workspace) -> Arrays:
    """Train, and compare the landmarks with the centres of KMeans."""
    x = moons().train_points.data
    fitted = paper_network(workspace, 16).fit(x)
    y, W = fitted.transform(x), fitted.network_.W.detach()
    centres = kmeans(x, 16, starts=20).centres
    gaps = torch.cdist(centres, centres).fill_diagonal_(torch.inf)
    spacing = gaps.min(1).values.mean()

    def to_centre(points: torch.Tensor) -> np.ndarray:
        return (torch.cdist(points, centres).min(1).values / spacing).numpy()

    generator = torch.Generator().manual_seed(0)
    drawn = [x[torch.randperm(len(x), generator=generator)[:16]] for _ in range(20)]
    return {
        "random_to_centre": np.stack([to_centre(points) for points in drawn]),
        "again_to_centre": np.stack([to_centre(kmeans(x, 16, seed=seed).centres) for seed in range(1, 21)]),
        "x": x.numpy(), "W": W.numpy(), "y": y.numpy(), "centres": centres.numpy(),
        "to_centre": to_centre(W),
        "to_data": (torch.cdist(x, W).min(1).values / KERNEL.sigma).numpy(),
    }  # fmt: skip


def draw(arrays: Arrays) -> dict[str, Figure]:
    """Draw data, landmarks and the responses of three neurons."""
    x, W, y = arrays["x"], arrays["W"], arrays["y"]
    plane = figures.Plane(x)
    figure = figures.new_figure(15, 7.4, columns=3, rows=2)
    data = figure.add_subplot(2, 3, 1)
    data.scatter(x[:, 0], x[:, 1], s=5, color="0.4")
    data.set_title("Data")
    plane.label(data)
    landmarks = figure.add_subplot(2, 3, 2)
    figures.landmarks_panel(landmarks, x, W, plane)
    landmarks.scatter(*arrays["centres"].T, s=60, facecolor="none", edgecolor="black", label="KMeans centres")
    landmarks.legend(loc="best", fontsize=7)
    panels = [data, landmarks]
    for index, neuron in enumerate(figures.choose_neurons(W, y, 3)):
        panels.append(figure.add_subplot(2, 3, 3 + index))
        figures.tuning_panel(panels[-1], x, y[:, neuron], neuron, plane)
    for axes, letter in zip(panels, "abcde", strict=True):
        panel_letter(axes, letter)
    return {"half_moons_overview": figure}


def claims(arrays: Arrays) -> list[Claim]:
    """Statements about Fig. 2."""
    y = arrays["y"]
    alive = y[:, np.abs(y).max(0) > 0.05 * np.abs(y).max()]
    peak = np.abs(alive).max(0)
    is_positive = np.mean(alive.max(0) > -alive.min(0))
    small = float(np.mean(np.abs(alive) < 0.1 * peak))
    near = float(np.mean(arrays["to_data"] < 1))
    close, again, drawn = (
        float(np.median(arrays[name])) for name in ("to_centre", "again_to_centre", "random_to_centre")
    )
    return [
        Claim(
            "the features tile the input space",
            f"{percent(near)} of the points are within one sigma of a feature; {alive.shape[1]} of 16 neurons respond",
            near > 0.95,
        ),
        Claim(
            "neurons respond with large positive values in a small region, and weakly elsewhere",
            f"the largest response is positive for {percent(is_positive)} of the neurons; {percent(small)} of all "
            "responses are below a tenth of the neuron's largest",
            is_positive == 1 and small > 0.5,
        ),
        Claim(
            "the features closely resemble the centres of KMeans",
            f"median distance from the nearest centre, relative to the spacing of centres: features {close:.2f}, "
            f"centres of another KMeans start {again:.2f}, random data points {drawn:.2f}",
            close < (again + drawn) / 2,
        ),
    ]


SCRIPT = Script("half_moons_overview", compute, draw, claims, minutes=0.3)

if __name__ == "__main__":
    SCRIPT.main()
