"""Ridge regression for a grid of penalties against scikit-learn, and limit cases."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from ksm_lightning.evaluation.ridge import fit_ridge


def problem(seeds=2, samples=50, features=8, outputs=3):
    g = torch.Generator().manual_seed(0)
    x = 2 + torch.randn(seeds, samples, features, generator=g, dtype=torch.float64)
    y = x @ torch.randn(features, outputs, generator=g, dtype=torch.float64)
    return x, y + torch.randn(seeds, samples, outputs, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("samples", [50, 5])
def test_every_problem_of_the_grid_has_the_solution_of_scikit_learn(samples, is_weighted):
    x, y = problem(samples=samples)
    weights = torch.rand(2, samples, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = fit_ridge(x, y, [1e-4, 1e-2, 10.0], weights=weights if is_weighted else None)
    for s in range(2):
        used = weights[s].numpy() if is_weighted else np.ones(samples)
        for index, penalty in enumerate((1e-4, 1e-2, 10.0)):
            model = Ridge(alpha=penalty * used.sum(), solver="svd").fit(x[s].numpy(), y[s].numpy(), sample_weight=used)
            np.testing.assert_allclose(found.W[s, index].T.numpy(), model.coef_, rtol=0, atol=1e-9)
            np.testing.assert_allclose(found.b[s, index].numpy(), model.intercept_, rtol=0, atol=1e-9)


def test_a_large_penalty_predicts_the_mean_and_a_small_one_interpolates():
    x, y = problem(seeds=1, samples=8)
    found = fit_ridge(x, y, [1e-12, 1e12])
    torch.testing.assert_close(x[0] @ found.W[0, 0] + found.b[0, 0], y[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(x[0] @ found.W[0, 1] + found.b[0, 1], y.mean(1).expand(8, 3), rtol=0, atol=1e-9)


def test_a_constant_feature_has_no_weight():
    x, y = problem(seeds=1)
    x[:, :, 0] = 7.0
    assert fit_ridge(x, y, [1e-3]).W[0, 0, 0].abs().max() < 1e-9
