"""Figures: what the panels show, and that they draw in limit cases."""

import numpy as np
import pytest

from ksm_lightning import figures
from ksm_lightning.baselines import METHODS


@pytest.fixture
def points() -> np.ndarray:
    return np.random.RandomState(0).randn(300, 2)


def test_tuning_colours_are_grey_red_and_blue():
    red, grey, blue = (np.array(figures.TUNING(value)[:3]) for value in (1.0, 0.5, 0.0))
    assert red[0] > 2 * red[2]
    assert blue[2] > 2 * blue[0]
    assert np.ptp(grey) < 0.02


def test_the_chosen_neurons_differ_and_are_active():
    W = np.array([[0.0, 0.0], [0.1, 0.0], [5.0, 0.0], [0.0, 9.0]])
    y = np.array([[1.0, 0.9, 0.8, 1e-6]] * 3)
    assert figures.choose_neurons(W, y, 2) == [0, 2]
    assert sorted(figures.choose_neurons(W, y, 9)) == [0, 1, 2, 3]


def test_points_with_many_features_are_projected_on_their_principal_plane():
    rng = np.random.RandomState(0)
    x = rng.randn(100, 5) * [1, 5, 1, 3, 1]
    plane = figures.Plane(x)
    assert plane.is_projected
    np.testing.assert_allclose(plane(x).var(0), np.linalg.eigvalsh(np.cov(x.T, bias=True))[::-1][:2], rtol=1e-9)
    assert figures.Plane(x[:1])(x[:3]).shape == (3, 2)
    line = figures.Plane(np.arange(5.0)[:, None])
    assert line(np.arange(5.0)[:, None]).shape == (5, 2)


def test_a_distant_landmark_does_not_hide_the_data(points):
    x = points
    W = x[:6].copy()
    W[2] = [300.0, -2000.0]
    axes = figures.draw(lambda axes: figures.landmarks_panel(axes, x, W, figures.Plane(x))).axes[0]
    assert axes.get_title() == "Data and 6 landmarks (1 outside the plot)"
    assert max(np.abs([*axes.get_xlim(), *axes.get_ylim()])) < 10


def test_bars_and_curves_show_the_given_values():
    errors = {"kernel_pca": [0.1], "ksm_nystroem": [0.5, 0.7]}
    bars = figures.draw(lambda axes: figures.ranking_panel(axes, errors)).axes[0]
    # From bottom to top.
    assert [label.get_text() for label in bars.get_yticklabels()] == ["Nystroem on W", "kernel PCA (optimum)"]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([0.6, 0.1])
    series = {"one": ([1, 2], [0.5, 0.25]), "two": ([1], [0.75])}
    curves = figures.draw(lambda axes: figures.history_panel(axes, series, "Title", "error")).axes[0]
    assert [line.get_ydata().tolist() for line in curves.lines] == [[0.5, 0.25], [0.75]]
    assert [text.get_text() for text in curves.get_legend().get_texts()] == ["one", "two"]


def test_the_mean_energy_starts_with_the_run_and_with_each_phase():
    updates, energies = list(range(1, 41)), np.random.RandomState(0).randn(40)
    axes = figures.draw(lambda axes: figures.energy_panel(axes, updates, energies, [30])).axes[0]
    means = {line.get_xdata()[0]: line for line in axes.lines if line.get_label() == "mean of up to 10"}
    assert sorted(means) == [1, 31]
    for first, last in ((1, 30), (31, 40)):
        assert means[first].get_xdata().tolist() == list(range(first, last + 1))
        expected = [energies[max(first - 1, end - 10) : end].mean() for end in range(first, last + 1)]
        np.testing.assert_allclose(means[first].get_ydata(), expected, rtol=1e-10, atol=1e-12)
    short = figures.draw(lambda axes: figures.energy_panel(axes, [50, 100], [3.0, 1.0])).axes[0]
    assert [line.get_ydata().tolist() for line in short.lines] == [[3.0, 1.0], [3.0, 2.0]]


def test_panels_of_a_silent_network_are_drawn():
    x, y = np.random.RandomState(0).randn(20, 2), np.zeros((20, 3))
    plane = figures.Plane(x)
    figures.draw(lambda axes: figures.tuning_panel(axes, x, y[:, 0], 0, plane))
    figures.draw(lambda axes: figures.energy_panel(axes, [], []))
    figures.draw(lambda axes: figures.similarity_panel(axes, x @ x.T, y @ y.T, 1.0))
    assert figures.choose_neurons(x[:3], y, 2) == [0, 1]


def test_every_method_has_a_distinct_style_in_the_error_panel():
    curves = {name: figures.Curve([2, 4], [0.5, 0.25], [0.4, 0.2], [0.6, 0.3]) for name in METHODS}
    axes = figures.draw(lambda axes: figures.error_panel(axes, curves, "Title")).axes[0]
    assert axes.get_title() == "Title"
    assert [line.get_label() for line in axes.lines] == [method.label for method in METHODS.values()]
    assert len({method.style for method in METHODS.values()}) == len(METHODS)


def test_an_error_panel_without_errors_is_drawn():
    axes = figures.draw(lambda axes: figures.error_panel(axes, {}, "")).axes[0]
    assert [text.get_text() for text in axes.texts] == ["no errors to show"]
