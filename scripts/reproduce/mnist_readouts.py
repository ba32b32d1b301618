"""Readouts of the paper's MNIST networks (800 neurons, alpha 1 to 4) beside the optimum; not a figure of the paper.

.venv/bin/python scripts/reproduce/mnist_readouts.py     four minutes, after the networks (6 minutes on two cores)
"""

import numpy as np
import torch
from figure_script import Arrays, Claim, Place, Script, mnist_points
from matplotlib.figure import Figure
from mnist_networks import ALPHAS, network

from ksm_lightning import figures
from ksm_lightning.baselines import KernelPCA
from ksm_lightning.learning import consolidate
from ksm_lightning.metrics import kernel_nrmse, random_subset
from ksm_lightning.readout import read_out

ROWS = ("online", "with the exact L", "Nystroem on W", "least squares on W", "kernel PCA")


def compute(place: Place) -> Arrays:
    """Errors over a random 10,000 digits."""
    x = mnist_points(place)
    scored = x[random_subset(len(x), 10_000)]
    arrays: Arrays = {}
    for alpha in ALPHAS:
        found = network(place, alpha)
        features = [read_out(found, "neural", scored)]
        consolidate(found, torch.split(x, 8192), lambda total: total)
        features.append(read_out(found, "neural", scored))
        features += [read_out(found, readout, scored, sample=x) for readout in ("nystroem", "least_squares")]
        features.append(KernelPCA(found.kernel, found.num_neurons).fit_transform(scored))
        arrays[str(alpha)] = kernel_nrmse(found.kernel, scored, *features).numpy()
    return arrays


def draw(arrays: Arrays) -> dict[str, Figure]:
    """A group of bars a kernel."""
    figure = figures.new_figure(8, 4.6)
    axes = figure.add_subplot()
    colours = ("#7a1015", "#d81f2a", "#1f4fd8", "#8fb0f0", "black")
    for index, (name, colour) in enumerate(zip(ROWS, colours, strict=True)):
        values = [arrays[str(alpha)][index] for alpha in ALPHAS]
        axes.bar(np.arange(4) + 0.16 * (index - 2), values, 0.15, label=name, color=colour)
    axes.set(ylabel="kernel NRMSE", yscale="log", title="MNIST, 800 neurons, the paper's schedule")
    axes.set_xticks(np.arange(4), [f"alpha = {alpha}" for alpha in ALPHAS])
    axes.legend(fontsize=8, loc="upper left")
    return {"mnist_readouts": figure}


def claims(arrays: Arrays) -> list[Claim]:
    table = np.stack([arrays[str(alpha)] for alpha in ALPHAS])  # (alpha, row)
    text = "; ".join(
        f"{name} {', '.join(f'{value:.4f}' for value in table[:, column])}" for column, name in enumerate(ROWS)
    )
    return [
        Claim(
            "Nystroem on the learned features is a better approximation than the representations (Related work)",
            f"alpha 1 to 4: {text}",
            bool((table[:, 2] < table[:, 0]).all()),
            "The exact L repairs alpha = 1, where the noise of L is all there is; for alpha > 1 the bound remains, and "
            "another readout of the same landmarks removes it.",
        )
    ]


SCRIPT = Script("mnist_readouts", compute, draw, claims, minutes=4, needs_mnist=True)

if __name__ == "__main__":
    SCRIPT.main()
