"""The arrays of a portrait against full matrices."""

import numpy as np
import pytest

from helpers import references
from helpers.runs import model, moons
from ksm_lightning.evaluation.portrait import portrait_arrays


def test_a_portrait_has_the_similarities_spectra_and_error_of_full_matrices():
    network, x = model(kernel="linear", kernel_params={}).network, moons().train_points.data[:100]
    computed = portrait_arrays(network, x, pairs=100)
    y = network(x)
    assert (y.mean(0) < 0).any()
    assert (computed["y"].mean(0) >= 0).all()  # signs are aligned, because the kernel is odd
    np.testing.assert_allclose(computed["f"], x @ x.mT, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(computed["output"], y @ y.mT, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(computed["output_spectrum"][:2], np.linalg.eigvalsh(y @ y.mT)[::-1][:2], rtol=1e-4)
    np.testing.assert_allclose(computed["input_spectrum"][:2], np.linalg.eigvalsh(x @ x.mT)[::-1][:2], rtol=1e-4)
    assert computed["nrmse"] == pytest.approx(references.nrmse(x @ x.mT, y), rel=1e-4)
