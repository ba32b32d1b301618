"""Matplotlib figures without a screen or global state, and their pixels."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> Figure:
    """An empty figure with margins for ``columns`` by ``rows`` panels; sizes are in inches.

    Margins are fixed, because computing them (``tight_layout``) would take most of the drawing time.
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
    """The pixels (height, width, 3) of a figure, uint8."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]
