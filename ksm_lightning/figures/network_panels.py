"""Panels that show one network and its data.

Each function draws on given axes, so that a panel can stand alone or be part of an overview.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from ksm_lightning.figures.canvas import new_figure

_CURVE_COLORS = ("#d81f2a", "#1f4fd8", "#2a9d4a", "#e08a00", "#8a5cc0", "#7a5230")
# As in the paper: grey is no response, red a positive and blue a negative one.
TUNING = LinearSegmentedColormap.from_list("tuning", ["#1f4fd8", "#c8c8c8", "#d81f2a"])


class Plane:
    """The plane that points are drawn in: their first two principal components, or the points if they have at most 2
    features.
    """

    def __init__(self, x: np.ndarray) -> None:
        self.is_projected = x.shape[1] > 2
        self.mean = x.mean(0) if self.is_projected else np.zeros(x.shape[1])
        self.axes = np.eye(x.shape[1], 2)
        if self.is_projected:
            components = np.linalg.svd(x - self.mean, full_matrices=False)[2][:2].T
            self.axes = np.pad(components, ((0, 0), (0, 2 - components.shape[1])))  # (m, 2)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return (x - self.mean) @ self.axes

    def label(self, axes: Axes) -> None:
        """Label the two axes."""
        names = ("principal component 1", "principal component 2") if self.is_projected else ("$x_1$", "$x_2$")
        axes.set(xlabel=names[0], ylabel=names[1])
        axes.set_aspect("equal", adjustable="datalim")


def among_data(W: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Landmarks (n, m) of a homogeneous kernel, scaled to the mean length of the data (samples, m).

    The length of such a landmark only acts as a gain.
    """
    lengths = np.linalg.norm(W, axis=1, keepdims=True)
    scaled: np.ndarray = W * np.linalg.norm(x, axis=1).mean() / np.maximum(lengths, 1e-12)
    return scaled


def landmarks_panel(axes: Axes, x: np.ndarray, W: np.ndarray, plane: Plane) -> None:
    """The data and the landmarks W."""
    points, landmarks = plane(x), plane(W)
    axes.scatter(points[:, 0], points[:, 1], s=5, color="0.75", label="data", rasterized=True)
    u, v = landmarks.T
    axes.scatter(u, v, s=32, color="#d81f2a", edgecolor="white", linewidth=0.7, label="landmarks $w_i$")
    # The axes stay at the data: one distant landmark would shrink the data to a dot.
    low, high = points.min(0), points.max(0)
    margin = 0.5 * max(float((high - low).max()), 1e-12)
    is_far = ((landmarks < low - margin) | (landmarks > high + margin)).any(1)
    outside = f" ({int(is_far.sum())} outside the plot)" if is_far.any() else ""
    axes.set_title(f"Data and {len(W)} landmarks{outside}")
    axes.legend(loc="best", fontsize=8, framealpha=0.9)
    plane.label(axes)
    if is_far.any():
        axes.set_aspect("equal", adjustable="box")
        axes.set(xlim=(low[0] - margin, high[0] + margin), ylim=(low[1] - margin, high[1] + margin))


def tuning_panel(axes: Axes, x: np.ndarray, response: np.ndarray, neuron: int, plane: Plane) -> None:
    """The data coloured by the response of one neuron: grey is 0, red positive, blue negative."""
    limit = max(float(np.abs(response).max()), 1e-12)
    order = np.argsort(np.abs(response))  # strong responses on top
    u, v = plane(x)[order].T
    dots = axes.scatter(u, v, s=5, c=response[order], cmap=TUNING, vmin=-limit, vmax=limit, rasterized=True)
    axes.figure.colorbar(dots, ax=axes, shrink=0.8, label=f"$y_{{{neuron}}}$")
    axes.set_title(f"Response of neuron {neuron}")
    plane.label(axes)


def choose_neurons(centres: np.ndarray, y: np.ndarray, count: int = 3) -> list[int]:
    """The most active neuron, then neurons whose centres (n, m) are far from those already chosen.

    Args:
        centres: Centres (n, m) of the neurons.
        y: Responses (samples, n).
        count: Number of neurons.
    """
    strength = (y * y).mean(0)
    chosen = [int(strength.argmax())]
    alive = strength > 0.05 * strength.max()
    while len(chosen) < min(count, len(centres)):
        distance = np.min([np.linalg.norm(centres - centres[i], axis=1) for i in chosen], axis=0)
        distance[chosen] = -1.0
        chosen.append(int(np.where(alive | (distance < 0), distance, 0.0).argmax()))
    return chosen


def similarity_panel(axes: Axes, similarity: np.ndarray, output: np.ndarray, nrmse: float | None = None) -> None:
    """Output against input similarities, as the density of pairs of points, with the identity."""
    f, o = similarity.ravel(), output.ravel()
    axes.hexbin(f, o, gridsize=70, bins="log", cmap="Greys", mincnt=1, linewidths=0.1)
    low, high = min(f.min(), o.min()), max(f.max(), o.max())
    axes.plot([low, high], [low, high], color="#d81f2a", linewidth=1, label="identity")
    axes.set(xlabel=r"input similarity $f(x_s, x_t)$", ylabel=r"output similarity $y_s \cdot y_t$")
    axes.set_title("Similarities" if nrmse is None else f"Similarities (NRMSE {nrmse:.3f})")
    axes.legend(loc="upper left", fontsize=8)


def spectra_panel(axes: Axes, input_spectrum: np.ndarray, output_spectrum: np.ndarray) -> None:
    """Eigenvalues of both similarity matrices, each relative to the largest."""
    shown = max(10, min(len(input_spectrum), int(1.5 * np.count_nonzero(output_spectrum > 1e-7 * output_spectrum[0]))))
    for spectrum, style, name in (
        (input_spectrum, "-", r"input, $f(x_s, x_t)$"),
        (output_spectrum, "--", r"output, $y_s \cdot y_t$"),
    ):
        values = spectrum[:shown] / max(float(spectrum[0]), 1e-30)
        ranks = np.arange(1, len(values) + 1)
        is_shown = values > 1e-7
        color = "0.4" if style == "-" else "#d81f2a"
        axes.plot(ranks[is_shown], values[is_shown], f".{style}", color=color, markersize=4, linewidth=1.2, label=name)
    axes.set(xlabel="rank", ylabel="eigenvalue / largest", yscale="log")
    axes.set_title("Spectra of the similarities")
    axes.legend(loc="best", fontsize=8)


def energy_panel(axes: Axes, updates: Sequence[int], energies: Sequence[float], phase_ends: Sequence[int] = ()) -> None:
    """Energy of the batches over the updates, the running mean within each phase, and the ends of the phases."""
    steps, values = np.asarray(updates), np.asarray(energies, dtype=float)
    axes.plot(steps, values, color="0.75", linewidth=0.8, label="batch")
    window = min(20, max(2, len(values) // 4))
    means = []
    for start, stop in pairwise([0, *phase_ends, np.inf]):
        phase = (steps > start) & (steps <= stop)
        if len(values) > 1 and phase.any():
            # The first values of a phase have fewer before them.
            sums = np.convolve(values[phase], np.ones(window))[: phase.sum()]
            means.append(sums / np.minimum(np.arange(1, phase.sum() + 1), window))
            axes.plot(steps[phase], means[-1], color="#d81f2a", linewidth=1.5, label=f"mean of up to {window}")
    for end in phase_ends:
        axes.axvline(end, color="0.5", linestyle=":", linewidth=1)
    if len(values):
        # The first energies can be orders of magnitude larger; the axis shows where the run converges.
        low, high = np.percentile(values[len(values) // 3 :], [1, 99])
        spread = high - low
        shown = [mean for curve in means for mean in curve if mean < high + 5 * spread]
        axes.set_ylim(low - 0.5 * spread - 1e-9, max([high + spread, *shown]) + 0.05 * spread + 1e-9)
    axes.set(xlabel="update", ylabel="energy $e$")
    axes.set_title("Energy")
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axes.legend(named.values(), named.keys(), loc="upper right", fontsize=8)


def history_panel(
    axes: Axes, curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], title: str, quantity: str
) -> None:
    """Curves of values over the updates."""
    for (name, (steps, values)), color in zip(curves.items(), _CURVE_COLORS, strict=False):
        axes.plot(steps, values, ".-", color=color, markersize=6, linewidth=1.4, label=name)
    axes.set(xlabel="update", ylabel=quantity)
    values = [value for curve in curves.values() for value in curve[1]]
    if min(values) > 0 and max(values) > 100 * min(values):
        axes.set_yscale("log")  # such as after a warm-up
    axes.set_title(title)
    axes.grid(True, color="0.9", linewidth=0.7)
    axes.legend(loc="best", fontsize=8, framealpha=0.9)


def responses_panel(axes: Axes, y: np.ndarray) -> None:
    """Histogram of the responses of all neurons, in units of their root mean square; the range is -4 to 10."""
    values = y.ravel() / max(float(np.sqrt((y * y).mean())), 1e-12)
    axes.hist(values, bins=140, range=(-4, 10), density=True, color="#d81f2a", alpha=0.8)
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.set(xlabel=r"response $y_i$ / root mean square", ylabel="density", yscale="log")
    axes.set_title("Responses of all neurons")


def image_grid_panel(axes: Axes, images: np.ndarray, shape: tuple[int, int], title: str) -> None:
    """Vectors (n, height * width) as a grid of images, each with its own scale around zero."""
    columns = _grid_columns(len(images))
    rows = -(-len(images) // columns)
    height, width = shape
    canvas = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1), np.nan)
    for index, image in enumerate(images):
        top, left = 1 + index // columns * (height + 1), 1 + index % columns * (width + 1)
        canvas[top : top + height, left : left + width] = image.reshape(shape) / max(np.abs(image).max(), 1e-12)
    axes.imshow(np.ma.masked_invalid(canvas), cmap=TUNING, vmin=-1, vmax=1, interpolation="nearest")
    axes.set_title(title)
    axes.axis("off")


def _grid_columns(count: int) -> int:
    """Number of columns of a grid of ``count`` images that is slightly wider than high."""
    return min(count, int(np.ceil(np.sqrt(count * 1.3))))


def image_grid(images: np.ndarray, shape: tuple[int, int], title: str, most: int = 100) -> Figure:
    """A figure with an :func:`image_grid_panel` of at most ``most`` images, sized to fit."""
    images = images[:most]
    columns = _grid_columns(len(images))
    figure = new_figure(max(3.0, columns * 0.5), max(2.5, -(-len(images) // columns) * 0.5 + 0.4))
    figure.subplots_adjust(0.02, 0.02, 0.98, 1 - 0.35 / figure.get_figheight())
    image_grid_panel(figure.add_subplot(), images, shape, title)
    return figure
