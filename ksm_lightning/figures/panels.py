"""Pictures of a network and its data: arrays in, Matplotlib figures out.

Each function draws on axes that it is given, so that the same panel serves alone, in TensorBoard and in an overview.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ksm_lightning.baselines.tables import Summary

_CURVE_COLORS = ("#d81f2a", "#1f4fd8", "#2a9d4a", "#e08a00", "#8a5cc0", "#7a5230")
# Grey is no response, red a positive and blue a negative one, as in the paper.
TUNING = LinearSegmentedColormap.from_list("tuning", ["#1f4fd8", "#c8c8c8", "#d81f2a"])


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> Figure:
    """A figure that needs no screen and no global state, with margins for so many panels.

    Margins are set in inches rather than found by trying, which would take most of the time of a drawing.
    """
    figure = Figure(figsize=(width, height), dpi=120)
    FigureCanvasAgg(figure)
    left, right, bottom, top = 0.95, 0.35, 0.55, 0.4
    panel_width, panel_height = width / columns - left - right, height / rows - bottom - top
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - top / height,
        wspace=(left + right) / panel_width, hspace=(bottom + top) / panel_height,
    )  # fmt: skip
    return figure


def draw(panel: Callable[[Axes], None], width: float = 5.0, height: float = 4.0) -> Figure:
    """A figure with one panel."""
    figure = new_figure(width, height)
    panel(figure.add_subplot())
    return figure


def render(figure: Figure) -> np.ndarray:
    """The figure's pixels (height, width, 3), as bytes."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]


class Plane:
    """Where points are drawn: themselves in two dimensions, else on their first two principal components."""

    def __init__(self, x: np.ndarray) -> None:
        self.is_projected = x.shape[1] > 2
        self.mean = x.mean(0) if self.is_projected else np.zeros(x.shape[1])
        self.axes = np.eye(x.shape[1], 2)
        if self.is_projected:
            found = np.linalg.svd(x - self.mean, full_matrices=False)[2][:2].T
            self.axes = np.pad(found, ((0, 0), (0, 2 - found.shape[1])))  # (m, 2)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return (x - self.mean) @ self.axes

    def label(self, axes: Axes) -> None:
        """Name the two axes."""
        names = ("principal component 1", "principal component 2") if self.is_projected else ("$x_1$", "$x_2$")
        axes.set(xlabel=names[0], ylabel=names[1])
        axes.set_aspect("equal", adjustable="datalim")


def among_data(W: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Landmarks (n, m) of a homogeneous kernel as long as the data (samples, m); their own length is but a gain."""
    lengths = np.linalg.norm(W, axis=1, keepdims=True)
    shown: np.ndarray = W * np.linalg.norm(x, axis=1).mean() / np.maximum(lengths, 1e-12)
    return shown


def features_panel(axes: Axes, x: np.ndarray, W: np.ndarray, plane: Plane) -> None:
    """The data and the learned features W among it."""
    points, features = plane(x), plane(W)
    axes.scatter(points[:, 0], points[:, 1], s=5, color="0.75", label="data", rasterized=True)
    axes.scatter(
        features[:, 0], features[:, 1], s=32, color="#d81f2a", edgecolor="white", linewidth=0.7, label="features $w_i$"
    )
    # A landmark that was lost can be hundreds of times as far away as the data is wide, which would be a dot then.
    low, high = points.min(0), points.max(0)
    margin = 0.5 * max(float((high - low).max()), 1e-12)
    is_far = ((features < low - margin) | (features > high + margin)).any(1)
    beyond = f", {int(is_far.sum())} of them far outside" if is_far.any() else ""
    axes.set_title(f"Data and {len(W)} learned features{beyond}")
    axes.legend(loc="best", fontsize=8, framealpha=0.9)
    plane.label(axes)
    if is_far.any():
        axes.set_aspect("equal", adjustable="box")
        axes.set(xlim=(low[0] - margin, high[0] + margin), ylim=(low[1] - margin, high[1] + margin))


def tuning_panel(axes: Axes, x: np.ndarray, response: np.ndarray, neuron: int, plane: Plane) -> None:
    """The data coloured by the response of one neuron: grey none, red positive, blue negative."""
    limit = max(float(np.abs(response).max()), 1e-12)
    order = np.argsort(np.abs(response))  # strong responses on top
    points = plane(x)[order]
    dots = axes.scatter(
        points[:, 0], points[:, 1], s=5, c=response[order], cmap=TUNING, vmin=-limit, vmax=limit, rasterized=True
    )
    axes.figure.colorbar(dots, ax=axes, shrink=0.8, label=f"$y_{{{neuron}}}$")
    axes.set_title(f"Response of neuron {neuron}")
    plane.label(axes)


def choose_neurons(W: np.ndarray, y: np.ndarray, count: int) -> list[int]:
    """The strongest neuron and others with features far from those chosen: a few that differ."""
    strength = (y * y).mean(0)
    chosen = [int(strength.argmax())]
    alive = strength > 0.05 * strength.max()
    while len(chosen) < min(count, len(W)):
        distance = np.min([np.linalg.norm(W - W[i], axis=1) for i in chosen], axis=0)
        distance[chosen] = -1.0
        chosen.append(int(np.where(alive | (distance < 0), distance, 0.0).argmax()))
    return chosen


def similarity_panel(axes: Axes, similarity: np.ndarray, output: np.ndarray, nrmse: float | None = None) -> None:
    """Input similarities against output similarities, a dot a pair, with the identity."""
    f, o = similarity.ravel(), output.ravel()
    axes.hexbin(f, o, gridsize=70, bins="log", cmap="Greys", mincnt=1, linewidths=0.1)
    low, high = min(f.min(), o.min()), max(f.max(), o.max())
    axes.plot([low, high], [low, high], color="#d81f2a", linewidth=1, label="identity")
    axes.set(xlabel=r"input similarity $f(x_s, x_t)$", ylabel=r"output similarity $y_s \cdot y_t$")
    axes.set_title("Similarities" if nrmse is None else f"Similarities (NRMSE {nrmse:.3f})")
    axes.legend(loc="upper left", fontsize=8)


def spectra_panel(axes: Axes, input_spectrum: np.ndarray, output_spectrum: np.ndarray) -> None:
    """Eigenvalues of both similarity matrices, each divided by its largest."""
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
    """Energy of the batches over the updates, their running mean in each phase, and where a phase ends."""
    steps, values = np.asarray(updates), np.asarray(energies, dtype=float)
    axes.plot(steps, values, color="0.75", linewidth=0.8, label="batch")
    window = min(len(values), 20)
    borders = [0, *phase_ends, np.inf]
    for start, stop in pairwise(borders):
        phase = (steps > start) & (steps <= stop)
        if window > 1 and phase.sum() >= window:
            mean = np.convolve(values[phase], np.ones(window) / window, mode="valid")
            axes.plot(steps[phase][window - 1 :], mean, color="#d81f2a", linewidth=1.5, label=f"mean of {window}")
    for end in phase_ends:
        axes.axvline(end, color="0.5", linestyle=":", linewidth=1)
    if len(values):
        # A start or a warm-up can be orders of magnitude away; the figure is about where the run settles.
        low, high = np.percentile(values[len(values) // 3 :], [1, 99])
        axes.set_ylim(low - 0.5 * (high - low) - 1e-9, high + (high - low) + 1e-9)
    axes.set(xlabel="update", ylabel="energy $e$")
    axes.set_title("Energy")
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axes.legend(named.values(), named.keys(), loc="upper right", fontsize=8)


def history_panel(
    axes: Axes, curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], title: str, quantity: str
) -> None:
    """StepSizes that were measured now and then over the updates, a curve each."""
    for (name, (steps, values)), color in zip(curves.items(), _CURVE_COLORS, strict=False):
        axes.plot(steps, values, ".-", color=color, markersize=6, linewidth=1.4, label=name)
    axes.set(xlabel="update", ylabel=quantity)
    values = [value for curve in curves.values() for value in curve[1]]
    if min(values) > 0 and max(values) > 100 * min(values):
        axes.set_yscale("log")  # the end of a warm-up can be that far away
    axes.set_title(title)
    axes.grid(True, color="0.9", linewidth=0.7)
    axes.legend(loc="best", fontsize=8, framealpha=0.9)


def responses_panel(axes: Axes, y: np.ndarray) -> None:
    """How often neurons respond how strongly, over all points; in units of the responses' root mean square.

    Responses beyond 10 of these units, if there are any, are left out.
    """
    values = y.ravel() / max(float(np.sqrt((y * y).mean())), 1e-12)
    axes.hist(values, bins=140, range=(-4, 10), density=True, color="#d81f2a", alpha=0.8)
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.set(xlabel=r"response $y_i$ / root mean square", ylabel="density", yscale="log")
    axes.set_title("Responses of all neurons")


def image_grid_panel(axes: Axes, images: np.ndarray, shape: tuple[int, int], title: str) -> None:
    """Vectors (n, height * width) as small images side by side, each on its own scale about zero."""
    columns = grid_columns(len(images))
    rows = -(-len(images) // columns)
    height, width = shape
    canvas = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1), np.nan)
    for index, image in enumerate(images):
        top, left = 1 + index // columns * (height + 1), 1 + index % columns * (width + 1)
        canvas[top : top + height, left : left + width] = image.reshape(shape) / max(np.abs(image).max(), 1e-12)
    axes.imshow(np.ma.masked_invalid(canvas), cmap=TUNING, vmin=-1, vmax=1, interpolation="nearest")
    axes.set_title(title)
    axes.axis("off")


def grid_columns(count: int) -> int:
    """Images in a row of a grid that is a little wider than high."""
    return min(count, int(np.ceil(np.sqrt(count * 1.3))))


def image_grid(images: np.ndarray, shape: tuple[int, int], title: str, most: int = 100) -> Figure:
    """A figure of :func:`image_grid_panel` that is as large as its images need."""
    images = images[:most]
    columns = grid_columns(len(images))
    figure = new_figure(max(3.0, columns * 0.5), max(2.5, -(-len(images) // columns) * 0.5 + 0.4))
    figure.subplots_adjust(0.02, 0.02, 0.98, 1 - 0.35 / figure.get_figheight())
    image_grid_panel(figure.add_subplot(), images, shape, title)
    return figure


class Curve(NamedTuple):
    """Errors of one method against the number of features."""

    sizes: Sequence[int]
    mean: Sequence[float]
    least: Sequence[float]
    most: Sequence[float]


def curve(entries: Sequence[Summary]) -> Curve:
    """The curve of one method from the seeds together; sizes at which all runs diverged are left out."""
    kept = [entry for entry in entries if entry.diverged < entry.seeds]
    columns = [(entry.n, entry.mean, entry.least, entry.most) for entry in kept]
    return Curve(*zip(*columns, strict=True)) if columns else Curve((), (), (), ())


# One look for each method in every figure: this package's in red, the optimum in black, the others in between.
_METHOD_STYLES: dict[str, tuple[str, str, str]] = {
    "kernel_pca": ("black", "-", "o"),
    "nystroem_uniform": ("#8c8c8c", "-", "s"),
    "nystroem_kmeans": ("#2a9d4a", "-", "^"),
    "nystroem_leverage": ("#8a5cc0", "-", "v"),
    "nystroem_cholesky": ("#1f77b4", "-", "D"),
    "nystroem_gradient": ("#17becf", "-", "P"),
    "random_fourier": ("#e08a00", "-", "x"),
    "neural_fourier": ("#e08a00", ":", "+"),
    "linear": ("#7a5230", "-", "*"),
    "ksm": ("#d81f2a", "--", "o"),
    "ksm_nystroem": ("#d81f2a", "-", "s"),
    "ksm_least_squares": ("#f08a90", "-", "d"),
}


# Errors of float32 features below this are rounding.
_ROUNDING = 1e-6


def error_panel(axes: Axes, curves: Mapping[str, Curve], labels: Mapping[str, str], title: str) -> None:
    """The kernel's NRMSE against the number of features, a curve a method; bands reach from the least to the most."""
    for name, curve in curves.items():
        color, line, marker = _METHOD_STYLES.get(name, ("0.3", "-", "."))
        axes.plot(
            curve.sizes, curve.mean, line, color=color, marker=marker, markersize=4.5, linewidth=1.4, label=labels[name]
        )
        axes.fill_between(curve.sizes, curve.least, curve.most, color=color, alpha=0.15, linewidth=0)
    axes.set_title(title)
    axes.set(xlabel="features $n$", ylabel="kernel NRMSE")
    if not any(value > 0 for curve in curves.values() for value in curve.mean):
        axes.text(0.5, 0.5, "no error to show", ha="center", transform=axes.transAxes)
        return
    axes.set(xscale="log", yscale="log")
    least = min(value for curve in curves.values() for value in curve.mean if value > 0)
    axes.set_ylim(bottom=max(0.6 * least, _ROUNDING))
    sizes = sorted({n for curve in curves.values() for n in curve.sizes})
    # A label that would run into the next one is left out.
    is_named = [after / n > 1.4 for n, after in zip(sizes, [*sizes[1:], np.inf], strict=True)]
    axes.set_xticks(sizes, [str(n) if named else "" for n, named in zip(sizes, is_named, strict=True)])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.grid(True, which="major", color="0.9", linewidth=0.7)
    axes.legend(loc="best", fontsize=7, framealpha=0.9)


def ranking_panel(axes: Axes, errors: Mapping[str, Sequence[float]], labels: Mapping[str, str]) -> None:
    """The kernel's NRMSE of several methods at one n, a bar each, the least on top; a line reaches over the seeds."""
    means = {name: float(np.mean(values)) for name, values in errors.items()}
    order = sorted(means, key=lambda name: -means[name])
    axes.barh(
        [labels[name] for name in order],
        [means[name] for name in order],
        color=[_METHOD_STYLES.get(name, ("0.3", "-", "."))[0] for name in order],
        height=0.6,
    )
    for place, name in enumerate(order):
        axes.plot([min(errors[name]), max(errors[name])], [place, place], color="0.2", linewidth=1.2)
        axes.annotate(
            f"{means[name]:.3g}",
            (max(errors[name]), place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set(xlabel="kernel NRMSE", xlim=(0, 1.15 * max(1e-12, *(max(values) for values in errors.values()))))
    axes.set_title("Errors with as many features")
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.spines[["top", "right"]].set_visible(False)
