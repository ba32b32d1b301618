"""The pictures of a page: panels of :mod:`ksm_lightning.figures.panels` as PNG, with words for those who cannot see."""

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from ksm_lightning.baselines.tables import METHODS
from ksm_lightning.figures import panels as figures
from ksm_lightning.kernels import Kernel
from ksm_lightning.runs.finished_run import Series

PAIRED = ("neural", "nystroem")
"""Readouts whose similarities are drawn."""
_TUNED_NEURONS = 3
_ERRORS = {
    "val/kernel_nrmse": "network",
    "val/kernel_nrmse_nystroem": "Nystroem readout",
    "val/kernel_nrmse_least_squares": "least-squares readout",
}
_ACCURACIES = {
    "val/probe_accuracy": "linear probe, validation",
    "test/probe_accuracy": "linear probe, test",
    "val/kmeans_accuracy_y": "KMeans on y",
    "val/kmeans_accuracy_x": "KMeans on x",
}


class Picture(NamedTuple):
    """A PNG and what it shows."""

    png: bytes
    width: int
    height: int
    alt: str
    """What is to be seen, for those who cannot."""
    caption: str
    """What to look for."""


def picture(figure: Figure, alt: str, caption: str = "") -> Picture:
    """A figure as a PNG; its few colours fit a palette, which makes it a third as large."""
    pixels = figures.render(figure)
    file = BytesIO()
    Image.fromarray(pixels).quantize(256, dither=Image.Dither.NONE).save(file, format="PNG", optimize=True)
    return Picture(file.getvalue(), pixels.shape[1], pixels.shape[0], alt, caption)


def draw_curves(curves: Mapping[str, Series], phase_ends: Sequence[int]) -> list[Picture]:
    """What was logged over the updates: energy, errors and accuracies, as far as they were."""
    drawn = []
    steps, values = curves.get("train/energy", Series([], []))
    if len(steps) > 1:
        ends = [end for end in phase_ends if end <= steps[-1]]
        drawn.append(
            picture(
                figures.draw(lambda axes: figures.energy_panel(axes, steps, values, ends)),
                f"Energy of the batches over {steps[-1]:,} updates; the last is {values[-1]:.4g}.",
                "Batches are noisy; their running mean shows where the run settles. Dotted lines are ends of phases.",
            )
        )
    groups = ((_ERRORS, "Kernel error", "NRMSE", "error"), (_ACCURACIES, "What labels say", "accuracy", "accuracy"))
    for names, title, quantity, word in groups:
        known = {label: curves[tag] for tag, label in names.items() if tag in curves}
        if known:
            last = ", ".join(f"{label} {series.values[-1]:.4g}" for label, series in known.items())
            panel = partial(figures.history_panel, curves=known, title=title, quantity=quantity)
            drawn.append(
                picture(
                    figures.draw(panel), f"{title} over the updates; at the end: {last}.", f"The {word} at validations."
                )
            )
    return drawn


def draw_network(
    data: Mapping[str, np.ndarray],
    pairs: Mapping[str, np.ndarray],
    kernel: Kernel,
    image_shape: tuple[int, int] | None,
) -> dict[str, list[Picture]]:
    """The network at work, by section.

    Args:
        data: What :func:`ksm_lightning.callbacks.run_figures.figure_data` computed.
        pairs: Similarities of points: of the inputs as ``f``, and of the readouts by their names.
        kernel: The network's kernel.
        image_shape: Height and width of a point, where points are images.
    """
    y = data["y"]
    features = _draw_images(data, image_shape) if image_shape is not None else _draw_plane(data, kernel)
    near_zero = float((np.abs(y) < 0.1 * np.sqrt((y * y).mean())).mean())
    similarities = [
        _draw_pairs(pairs, "neural", "The network itself", "A dot a pair; the nearer to the red line, the better."),
        _draw_pairs(pairs, "nystroem", "Nystroem readout", "The same pairs by another readout of the same landmarks."),
        picture(
            figures.draw(lambda axes: figures.spectra_panel(axes, data["input_spectrum"], data["output_spectrum"])),
            "Eigenvalues of the input and output similarity matrices by rank.",
            "Where the curves part, directions of the kernel are lost.",
        ),
        picture(
            figures.draw(lambda axes: figures.responses_panel(axes, y)),
            f"Histogram of the responses; {near_zero:.0%} are below a tenth of their root mean square.",
            "A tall middle and a long tail to the right are the mark of sparse responses.",
        ),
    ]
    return {"features": features, "similarities": similarities}


def _draw_pairs(pairs: Mapping[str, np.ndarray], readout: str, title: str, caption: str) -> Picture:
    def panel(axes: Axes) -> None:
        figures.similarity_panel(axes, pairs["f"], pairs[readout])
        axes.set_title(f"Similarities: {title}")

    alt = f"{title}: output similarities of pairs of points against their input similarities, with the identity."
    return picture(figures.draw(panel), alt, caption)


def _draw_images(data: Mapping[str, np.ndarray], shape: tuple[int, int]) -> list[Picture]:
    count = min(100, len(data["W"]))
    size = f"images of {shape[0]} by {shape[1]} pixels"
    weights = figures.image_grid(data["W"], shape, "Learned features $w_i$")
    linearised = figures.image_grid(data["linearised"], shape, "Linearised responses")
    return [
        picture(weights, f"{count} learned features as {size}.", "Each on its own scale: red positive, blue negative."),
        picture(
            linearised,
            f"Linearised responses of {count} neurons as {size}.",
            "The linear filter that comes closest to each neuron.",
        ),
    ]


def _draw_plane(data: Mapping[str, np.ndarray], kernel: Kernel) -> list[Picture]:
    x, y = data["x"], data["y"]
    plane = figures.Plane(x)
    W = figures.among_data(data["W"], x) if kernel.is_homogeneous else data["W"]
    where = "on the first two principal components" if plane.is_projected else "in the plane"
    drawn = [
        picture(
            figures.draw(lambda axes: figures.features_panel(axes, x, W, plane)),
            f"The data and {len(W)} learned features {where}.",
            "Features should tile the data; one far from it never answers.",
        )
    ]

    def tuning(axes: Axes, neuron: int) -> None:
        figures.tuning_panel(axes, x, y[:, neuron], neuron, plane)

    for neuron in figures.choose_neurons(data["W"], y, _TUNED_NEURONS):
        panel = partial(tuning, neuron=neuron)
        drawn.append(picture(figures.draw(panel), f"The data {where}, coloured by the response of neuron {neuron}."))
    return drawn


def draw_ranking(errors: Mapping[str, Sequence[float]]) -> list[Picture]:
    """The methods side by side."""
    labels = {name: label.replace("the network's W", "W") for name, label in METHODS.items()}
    figure = figures.new_figure(5.0, 3.2)
    figure.subplots_adjust(left=0.34)  # for the names
    figures.ranking_panel(figure.add_subplot(), errors, labels)
    return [picture(figure, "Bars of the kernel's error of each method; the numbers are in the table.")]
