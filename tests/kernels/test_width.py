"""The width that ``sigma="auto"`` stands for."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist

from ksm_lightning.kernels import GaussianKernel, auto_width, chooses_width, with_width
from ksm_lightning.kernels.width import typical_width


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("unit", [1e-30, 1.0, 1e30])
def test_it_is_0_7_times_the_median_distance_in_any_unit(unit, dtype):
    x = torch.tensor(np.random.RandomState(0).randn(101, 5), dtype=dtype)
    expected = 0.7 * unit * np.median(pdist(x.double().numpy()))
    assert auto_width(unit * x + 0 * x) == pytest.approx(expected, rel=1e-3)


def test_a_large_data_set_is_represented_by_a_sample_of_1000_points():
    x = torch.tensor(np.random.RandomState(1).randn(50_000, 3))
    expected = 0.7 * np.median(pdist(x[:4000].numpy()))
    assert auto_width(x) == pytest.approx(expected, rel=0.03)
    assert auto_width(x) == auto_width(x.clone())  # no randomness of its own


def test_mostly_equal_points_have_the_mean_of_the_other_distances():
    x = torch.tensor([[0.0]] * 20 + [[2.0], [6.0]])
    between = [2.0] * 20 + [6.0] * 20 + [4.0]
    assert auto_width(x) == pytest.approx(0.7 * np.mean(between), rel=1e-3)


@pytest.mark.parametrize("x", [torch.ones(5, 3), torch.zeros(1, 2)], ids=["equal", "single"])
def test_equal_points_have_width_1_and_a_warning(x):
    assert typical_width(x) is None
    with pytest.warns(UserWarning, match=f"`sigma` cannot be chosen from {len(x)} samples that are all equal"):
        assert auto_width(x) == 1.0


def test_a_width_is_open_if_the_kernel_has_one_and_no_number_is_given():
    assert chooses_width("cauchy", {})
    assert chooses_width("gaussian", {"sigma": "auto"})
    assert not chooses_width("gaussian", {"sigma": 2})
    assert not chooses_width("power_cosine", None)
    assert with_width("gaussian", None, 2.5) == {"sigma": 2.5}
    assert with_width("gaussian", {"sigma": 1.5}, 2.5) == {"sigma": 1.5}
    assert with_width("polynomial", {"degree": 3}, 2.5) == {"degree": 3}
    assert GaussianKernel().sigma == 1.0  # an object keeps its numeric default
