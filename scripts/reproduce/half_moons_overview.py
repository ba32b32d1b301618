"""The half-moons network with 16 neurons: data, learned features, responses of three neurons (the paper's Fig. 2).

.venv/bin/python scripts/reproduce/half_moons_overview.py     half a minute on two cores
"""

import numpy as np
import torch
from figure_script import Arrays, Claim, Place, Script, panel_letter, percent
from matplotlib.figure import Figure

from ksm_lightning import HalfMoonsDataModule, figures
from ksm_lightning.baselines import SimilarityMatching
from ksm_lightning.evaluation.clustering import kmeans
from ksm_lightning.kernels import GaussianKernel

KERNEL = GaussianKernel(sigma=0.3)


def moons(seed: int = 0, noise: float = 0.1) -> HalfMoonsDataModule:
    """1,600 points."""
    return HalfMoonsDataModule(data_seed=seed, noise=noise)


def paper_phases(place: Place) -> list[dict[str, float]]:
    """The paper's schedule."""
    length = 200 if place.quick else 10_000
    return [{"updates": length, "eta_w": rate, "eta_q": rate, "eta_l": 10 * rate} for rate in (0.01, 0.001)]


def paper_network(place: Place, n: int, seed: int = 0) -> SimilarityMatching:
    """The paper's schedule from 0.5 N(0, 1), the stabler start."""
    return SimilarityMatching(KERNEL, n, phases=paper_phases(place), init_scale=0.5, seed=seed)


def compute(place: Place) -> Arrays:
    """Train, and hold the features against the centres of KMeans."""
    x = moons().train_points.data
    fitted = paper_network(place, 16).fit(x)
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
    """Five panels."""
    x, W, y = arrays["x"], arrays["W"], arrays["y"]
    plane = figures.Plane(x)
    figure = figures.new_figure(15, 7.4, columns=3, rows=2)
    data = figure.add_subplot(2, 3, 1)
    data.scatter(x[:, 0], x[:, 1], s=5, color="0.4")
    data.set_title("Data")
    plane.label(data)
    features = figure.add_subplot(2, 3, 2)
    figures.landmarks_panel(features, x, W, plane)
    features.scatter(*arrays["centres"].T, s=60, facecolor="none", edgecolor="black", label="KMeans centres")
    features.legend(loc="best", fontsize=7)
    panels = [data, features]
    for place, neuron in enumerate(figures.choose_neurons(W, y, 3)):
        panels.append(figure.add_subplot(2, 3, 3 + place))
        figures.tuning_panel(panels[-1], x, y[:, neuron], neuron, plane)
    for axes, letter in zip(panels, "abcde", strict=True):
        panel_letter(axes, letter)
    return {"half_moons_overview": figure}


def claims(arrays: Arrays) -> list[Claim]:
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
            "neurons respond with large positive values around a small region, and hardly elsewhere",
            f"the largest response is positive for {percent(is_positive)} of the neurons; {percent(small)} of all "
            "responses are below a tenth of the neuron's largest",
            is_positive == 1 and small > 0.5,
        ),
        Claim(
            "the features closely resemble the centres of KMeans",
            f"median distance of a feature from the nearest centre: {close:.2f} of the spacing of centres; of centres "
            f"of another start of KMeans {again:.2f}, of random data points {drawn:.2f}",
            close < (again + drawn) / 2,
        ),
    ]


SCRIPT = Script("half_moons_overview", compute, draw, claims, minutes=0.3)

if __name__ == "__main__":
    SCRIPT.main()
