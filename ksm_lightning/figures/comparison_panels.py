"""Panels that compare methods. Labels and line styles come from :data:`ksm_lightning.baselines.methods.METHODS`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from ksm_lightning.baselines.methods import METHODS
from ksm_lightning.baselines.tables import Summary
from ksm_lightning.kernels.limits import FLOAT32_ROUNDING


class Curve(NamedTuple):
    """Errors of one method by number of features: mean, smallest and largest over seeds."""

    sizes: Sequence[int]
    mean: Sequence[float]
    least: Sequence[float]
    most: Sequence[float]


def curve(entries: Sequence[Summary]) -> Curve:
    """The curve of one method from its summaries. Sizes at which all runs diverged are left out."""
    kept = [entry for entry in entries if entry.diverged < entry.seeds]
    columns = [(entry.n, entry.mean, entry.least, entry.most) for entry in kept]
    return Curve(*zip(*columns, strict=True)) if columns else Curve((), (), (), ())


def error_panel(axes: Axes, curves: Mapping[str, Curve], title: str) -> None:
    """The kernel error by number of features, one curve per name of a method; bands span the seeds."""
    for name, curve in curves.items():
        label, (color, line, marker) = METHODS[name].label, METHODS[name].style
        axes.plot(curve.sizes, curve.mean, line, color=color, marker=marker, markersize=4.5, linewidth=1.4, label=label)
        axes.fill_between(curve.sizes, curve.least, curve.most, color=color, alpha=0.15, linewidth=0)
    axes.set_title(title)
    axes.set(xlabel="features $n$", ylabel="kernel NRMSE")
    if not any(value > 0 for curve in curves.values() for value in curve.mean):
        axes.text(0.5, 0.5, "no errors to show", ha="center", transform=axes.transAxes)
        return
    axes.set(xscale="log", yscale="log")
    least = min(value for curve in curves.values() for value in curve.mean if value > 0)
    axes.set_ylim(bottom=max(0.6 * least, FLOAT32_ROUNDING))
    sizes = sorted({n for curve in curves.values() for n in curve.sizes})
    # Labels that would overlap the next one are left out.
    is_named = [after / n > 1.4 for n, after in zip(sizes, [*sizes[1:], np.inf], strict=True)]
    axes.set_xticks(sizes, [str(n) if named else "" for n, named in zip(sizes, is_named, strict=True)])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.grid(True, which="major", color="0.9", linewidth=0.7)
    axes.legend(loc="best", fontsize=7, framealpha=0.9)


def ranking_panel(axes: Axes, errors: Mapping[str, Sequence[float]]) -> None:
    """Bars of the kernel errors of the seeds, by name of the method, smallest on top; lines span the seeds."""
    means = {name: float(np.mean(values)) for name, values in errors.items()}
    order = sorted(means, key=lambda name: -means[name])
    axes.barh(
        [METHODS[name].label.replace("the network's W", "W") for name in order],
        [means[name] for name in order],
        color=[METHODS[name].style.color for name in order],
        height=0.6,
    )
    for row, name in enumerate(order):
        axes.plot([min(errors[name]), max(errors[name])], [row, row], color="0.2", linewidth=1.2)
        axes.annotate(
            f"{means[name]:.3g}", (max(errors[name]), row), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set(xlabel="kernel NRMSE", xlim=(0, 1.15 * max(1e-12, *(max(values) for values in errors.values()))))
    axes.set_title("Kernel error at equal n")
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.spines[["top", "right"]].set_visible(False)
