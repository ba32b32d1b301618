"""Half moons and digits against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, make_moons
from torch.testing import assert_close

from ksm_lightning.data import DigitsDataModule, HalfMoonsDataModule


def test_half_moons_are_the_points_of_the_paper():
    data = HalfMoonsDataModule()
    x, labels = make_moons(1600, noise=0.1, random_state=np.random.RandomState(0))
    assert_close(data.train_points.data, torch.tensor(x - x.mean(0), dtype=torch.float32))
    assert data.train_labels.tolist() == labels.tolist()
    assert data.in_features == 2


def test_test_moons_are_a_second_draw_with_the_mean_of_the_training_points_removed():
    data = HalfMoonsDataModule()
    test = data.test_points.data
    assert test.shape == (1600, 2)
    assert torch.cdist(test, data.train_points.data).min() > 0
    assert 0 < test.mean(0).abs().max() < 0.05


def test_digits_are_scaled_by_all_pixels_and_split_by_class():
    data = DigitsDataModule()
    train, test = data.train_points.data, data.test_points.data
    assert (len(train), len(test)) == (1437, 360)
    assert train.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert torch.bincount(data.test_labels).min() >= 34
    scale = float(data.preprocessing.scale[0])
    assert (train * scale).round().max() == load_digits().data.max() == 16
    assert data.image_shape == (8, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HalfMoonsDataModule(num_points=1), "`num_points` must be at least 2"),
        (lambda: HalfMoonsDataModule(noise=-1), "`noise` must be finite and not negative"),
        (lambda: DigitsDataModule(test_fraction=1.5), "`test_fraction` must be between"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
