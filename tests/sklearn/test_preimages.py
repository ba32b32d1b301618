"""Samples from features."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from ksm_lightning.sklearn import KSMTransformer
from ksm_lightning.sklearn.preimages import PreImages


def test_a_linear_kernel_with_enough_features_is_inverted_exactly():
    x = np.random.RandomState(0).randn(100, 3) + 2.0
    found = KSMTransformer(4, kernel="linear", updates=5, random_state=0).fit(x)
    np.testing.assert_allclose(found.inverse_transform(found.transform(x)), x, rtol=0, atol=1e-5)
    assert found.reconstruction_error_ < 1e-6


def test_the_stated_error_is_that_of_new_samples():
    x = np.random.RandomState(0).permutation(load_digits().data)[:1200]  # they are sorted by writer
    found = KSMTransformer(50, updates=10, random_state=0).fit(x[:1000])
    new = x[1000:]
    back = found.inverse_transform(found.transform(new))
    error = np.linalg.norm(new - back) / np.linalg.norm(new - new.mean(0))
    assert found.reconstruction_error_ == pytest.approx(error, rel=0.15)
    assert error < 0.5
    assert found.inverse_transform(found.transform(new.astype(np.float32))).dtype == np.float32
    with pytest.raises(ValueError, match="Features have 50 columns, got 3"):
        found.inverse_transform(np.ones((2, 3)))


def test_the_ridge_is_the_best_of_the_normal_equations():
    random = np.random.RandomState(0)
    x = random.randn(60, 2)
    y = np.hstack([x + 0.1 * random.randn(60, 2), random.randn(60, 40)])
    order = np.random.RandomState(0).permutation(60)
    held, kept = order[:12], order[12:]
    y_mean, x_mean = y[kept].mean(0), x[kept].mean(0)
    centred = y[kept] - y_mean
    moment, errors = centred.T @ centred, []
    for power in range(-9, 2):
        ridge = 10.0**power * np.trace(moment) / 42
        A = np.linalg.solve(moment + ridge * np.eye(42), centred.T @ (x[kept] - x_mean))
        back = (y[held] - y_mean) @ A + x_mean
        errors.append(np.linalg.norm(x[held] - back) / np.linalg.norm(x[held] - x[held].mean(0)))
    assert PreImages(y, x).error == pytest.approx(min(errors), rel=1e-6)
    assert min(errors) < 0.9 * errors[0]  # the ridge matters
    constant = PreImages(np.ones((4, 2)), np.full((4, 3), 7.0))
    assert np.allclose(constant(np.ones((1, 2))), 7.0)
