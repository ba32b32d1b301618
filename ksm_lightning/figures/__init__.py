"""Figures: arrays in, pictures out. Importing this package imports Matplotlib."""

from ksm_lightning.figures.canvas import draw, new_figure, render
from ksm_lightning.figures.comparison_panels import Curve, curve, error_panel, ranking_panel
from ksm_lightning.figures.network_panels import (
    TUNING,
    Plane,
    among_data,
    choose_neurons,
    energy_panel,
    history_panel,
    image_grid,
    image_grid_panel,
    landmarks_panel,
    responses_panel,
    similarity_panel,
    spectra_panel,
    tuning_panel,
)  # fmt: skip

__all__ = [
    "TUNING", "Curve", "Plane", "among_data", "choose_neurons", "curve", "draw", "energy_panel", "error_panel",
    "history_panel", "image_grid", "image_grid_panel", "landmarks_panel", "new_figure", "ranking_panel", "render",
    "responses_panel", "similarity_panel", "spectra_panel", "tuning_panel",
]  # fmt: skip
