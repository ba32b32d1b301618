"""The pictures of a report: panels of :mod:`ksm_lightning.figures` as PNG, with alternative texts and captions."""

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from ksm_lightning import figures
from ksm_lightning.kernels import Kernel
from ksm_lightning.runs import metric_names
from ksm_lightning.runs.finished_run import Series

PAIRED = ("neural", "nystroem")
"""Readouts whose similarities are shown."""
_ERRORS = {
    metric_names.kernel_nrmse("val"): "network",
    metric_names.kernel_nrmse("val", "nystroem"): "Nystroem readout",
    metric_names.kernel_nrmse("val", "least_squares"): "least-squares readout",
}
_ACCURACIES = {
    metric_names.probe_accuracy("val"): "linear probe, validation",
    metric_names.probe_accuracy("test"): "linear probe, test",
    metric_names.kmeans_accuracy("val", "y"): "KMeans on y",
    metric_names.kmeans_accuracy("val", "x"): "KMeans on x",
}


class Picture(NamedTuple):
    """A PNG with its texts."""

    png: bytes
    width: int
    height: int
    alt: str  # the content, for readers who cannot see the picture
    caption: str  # how to read it


def picture(figure: Figure, alt: str, caption: str = "") -> Picture:
    """A figure as a PNG with a palette of 256 colours, which reduces its size to a third."""
    pixels = figures.render(figure)
    file = BytesIO()
    Image.fromarray(pixels).quantize(256, dither=Image.Dither.NONE).save(file, format="PNG", optimize=True)
    return Picture(file.getvalue(), pixels.shape[1], pixels.shape[0], alt, caption)


def draw_curves(curves: Mapping[str, Series], phase_ends: Sequence[int]) -> list[Picture]:
    """Curves of the logged energies, kernel errors and accuracies over the updates."""
    drawn = []
    steps, values = curves.get(metric_names.TRAIN_ENERGY, Series([], []))
    if len(steps) > 1:
        ends = [end for end in phase_ends if end <= steps[-1]]
        drawn.append(
            picture(
                figures.draw(lambda axes: figures.energy_panel(axes, steps, values, ends)),
                f"Energy of the batches over {steps[-1]:,} updates; the last is {values[-1]:.4g}.",
                "Energies of batches are noisy; their running mean shows the trend. Dotted lines are ends of phases.",
            )
        )
    groups = ((_ERRORS, "Kernel error", "NRMSE", "error"), (_ACCURACIES, "Accuracy", "accuracy", "accuracy"))
    for names, title, quantity, word in groups:
        known = {label: curves[tag] for tag, label in names.items() if tag in curves}
        if known:
            last = ", ".join(f"{label} {series.values[-1]:.4g}" for label, series in known.items())
            panel = partial(figures.history_panel, curves=known, title=title, quantity=quantity)
            alt = f"{title} over the updates; last values: {last}."
            drawn.append(picture(figures.draw(panel), alt, f"The {word} at each validation."))
    return drawn


def draw_network(
    data: Mapping[str, np.ndarray], pairs: Mapping[str, np.ndarray], kernel: Kernel, image_shape: tuple[int, int] | None
) -> dict[str, list[Picture]]:
    """Pictures of the network by section of the page.

    Args:
        data: Arrays of :func:`ksm_lightning.evaluation.portrait.portrait_arrays`.
        pairs: Similarities of points: of the inputs as ``f``, and of each readout by its name.
        kernel: The network's kernel.
        image_shape: Height and width of the points; None if they are not images.
    """
    y = data["y"]
    landmarks = _draw_images(data, image_shape) if image_shape is not None else _draw_plane(data, kernel)
    near_zero = float((np.abs(y) < 0.1 * np.sqrt((y * y).mean())).mean())
    similarities = [
        _draw_pairs(pairs, "neural", "Network", "Density of pairs of points; the closer to the red line, the better."),
        _draw_pairs(pairs, "nystroem", "Nystroem readout", "The same pairs with another readout of the landmarks."),
        picture(
            figures.draw(lambda axes: figures.spectra_panel(axes, data["input_spectrum"], data["output_spectrum"])),
            "Eigenvalues of the input and output similarity matrices by rank.",
            "The output has at most n eigenvalues. The closer the curves, the better.",
        ),
        picture(
            figures.draw(lambda axes: figures.responses_panel(axes, y)),
            f"Histogram of the responses; {near_zero:.0%} are below 10% of their root mean square.",
            "A high peak at 0 and a long right tail indicate sparse responses.",
        ),
    ]
    return {"landmarks": landmarks, "similarities": similarities}


def _draw_pairs(pairs: Mapping[str, np.ndarray], readout: str, title: str, caption: str) -> Picture:
    def panel(axes: Axes) -> None:
        figures.similarity_panel(axes, pairs["f"], pairs[readout])
        axes.set_title(f"Similarities: {title}")

    alt = f"{title}: output against input similarities of pairs of points, with the identity."
    return picture(figures.draw(panel), alt, caption)


def _draw_images(data: Mapping[str, np.ndarray], shape: tuple[int, int]) -> list[Picture]:
    count = min(100, len(data["W"]))
    size = f"images of {shape[0]} by {shape[1]} pixels"
    weights = figures.image_grid(data["W"], shape, "Landmarks $w_i$")
    linearised = figures.image_grid(data["linearised"], shape, "Linearised responses")
    return [
        picture(weights, f"{count} landmarks as {size}.", "Each with its own scale: red is positive, blue negative."),
        picture(
            linearised,
            f"Linearised responses of {count} neurons as {size}.",
            "The linear filter that best approximates each neuron.",
        ),
    ]


def _draw_plane(data: Mapping[str, np.ndarray], kernel: Kernel) -> list[Picture]:
    x, y = data["x"], data["y"]
    plane = figures.Plane(x)
    W = figures.among_data(data["W"], x) if kernel.is_homogeneous else data["W"]
    where = "on the first two principal components" if plane.is_projected else "in the plane"
    drawn = [
        picture(
            figures.draw(lambda axes: figures.landmarks_panel(axes, x, W, plane)),
            f"The data and {len(W)} landmarks {where}.",
            "Landmarks should cover the data. A landmark far from the data never responds.",
        )
    ]
    for neuron in figures.choose_neurons(data["centres"], y):
        panel = partial(figures.tuning_panel, x=x, response=y[:, neuron], neuron=neuron, plane=plane)
        drawn.append(picture(figures.draw(panel), f"The data {where}, coloured by the response of neuron {neuron}."))
    return drawn


def draw_ranking(errors: Mapping[str, Sequence[float]]) -> list[Picture]:
    """Bars of the kernel errors of all methods."""
    figure = figures.new_figure(5.0, 3.2)
    figure.subplots_adjust(left=0.34)  # for the labels
    figures.ranking_panel(figure.add_subplot(), errors)
    return [picture(figure, "Bar chart of the kernel error of each method; the table has the numbers.")]
