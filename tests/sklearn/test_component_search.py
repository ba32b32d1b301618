"""The number of components for a kernel error; sparse samples and weights in `fit`."""

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.datasets import make_moons

from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.sklearn import KSMTransformer
from ksm_lightning.sklearn.component_search import find_components, smallest_errors


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("limit", [0.5, 0.1, 0.01])
def test_the_smallest_number_is_found_with_few_trials(limit, factor):
    tried = []

    def error_of(n):
        tried.append(n)
        return factor * 0.97**n

    n, error = find_components(error_of, 0.97 ** torch.arange(400.0), limit, most=400)
    smallest = int(np.ceil(np.log(limit / factor) / np.log(0.97)))
    assert max(1, smallest) <= n <= max(1, smallest) + max(1, 0.03 * n)
    assert error == error_of(n) <= limit
    assert len(tried) <= 9


def test_the_largest_number_is_the_answer_if_none_is_enough():
    assert find_components(lambda n: 1 / n, 1 / torch.arange(1.0, 100.0), 1e-3, most=50) == (50, 1 / 50)
    assert find_components(lambda n: 0.0, torch.zeros(10), 0.5, most=8) == (1, 0.0)


def test_predicted_errors_are_those_of_kernel_pca():
    x = torch.tensor(np.random.RandomState(0).randn(40, 2))
    F = GaussianKernel(1.0)(x, x)
    values, vectors = torch.linalg.eigh(F)
    top = (vectors[:, -5:] * values[-5:]) @ vectors[:, -5:].mT
    errors = smallest_errors(GaussianKernel(1.0), x)
    assert errors[5] == pytest.approx(float((F - top).norm() / F.norm()), rel=1e-6)
    assert (len(errors), float(errors[0]), float(errors[-1])) == (41, pytest.approx(1.0), 0.0)


def test_fit_takes_a_kernel_error_instead_of_a_number_of_components():
    x, _ = make_moons(600, noise=0.1, random_state=0)
    found = KSMTransformer(0.1, sigma=0.3, updates=20, random_state=0).fit(x)
    y, n = found.transform(x), found.n_components_
    F = np.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / (2 * 0.3**2))
    values = np.linalg.eigvalsh(F)[::-1]
    optimum = np.sqrt(np.cumsum((values**2)[::-1])[::-1] / (values**2).sum())  # of kernel PCA with 0, 1, ... features
    assert np.linalg.norm(F - y @ y.T) / np.linalg.norm(F) < 0.1
    assert optimum[n - 4] > 0.1 / 1.5  # no more components than necessary
    assert y.shape == (600, n)
    assert found.partial_fit(x[:5]).transform(x).shape == (600, n)
    with pytest.raises(ValueError, match="A stream needs a number of components: call `fit` first"):
        KSMTransformer(0.1).partial_fit(x)
    with pytest.raises(ValueError, match="`n_landmarks` follows from `n_components`"):
        KSMTransformer(0.1, n_landmarks=20).fit(x)
    with pytest.warns(UserWarning, match="5 components have a kernel error of 0.*: raise `max_components`, 5"):
        assert KSMTransformer(0.1, sigma=0.3, updates=5, max_components=5, random_state=0).fit(x).n_components_ == 5


def test_more_components_than_samples_give_a_warning():
    x = np.random.RandomState(0).randn(6, 2)
    with pytest.warns(UserWarning, match="`n_components` is 8, but 6 samples determine no more than 6 features"):
        KSMTransformer(8, random_state=0).fit(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sparse_samples_have_the_features_of_dense_ones(dtype):
    x = np.random.RandomState(0).randn(200, 12).astype(dtype)
    x[np.abs(x) < 1] = 0
    rows = sparse.csr_matrix(x)
    dense, thin = (KSMTransformer(8, updates=5, random_state=0).fit(each) for each in (x, rows))
    assert dense.kernel_.sigma == thin.kernel_.sigma
    assert np.array_equal(dense.components_, thin.components_)
    found = thin.transform(rows)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, dense.transform(x), rtol=0, atol=1e-6)
    assert KSMTransformer(8, random_state=0).partial_fit(rows[:50]).transform(rows).shape == (200, 8)


def test_weights_equal_repetitions_and_the_order_does_not_matter():
    random = np.random.RandomState(0)
    x, weights = random.randn(120, 3), random.randint(0, 4, 120)
    order = random.permutation(120)
    options = {"n_components": 6, "updates": 10, "random_state": 0}
    weighted = KSMTransformer(**options).fit(x[order], sample_weight=weights[order])
    repeated = KSMTransformer(**options).fit(np.repeat(x, weights, 0))
    assert np.array_equal(weighted.components_, repeated.components_)
    np.testing.assert_allclose(weighted.transform(x), repeated.transform(x), rtol=0, atol=1e-9)
    assert not np.allclose(KSMTransformer(**options).fit(x).components_, repeated.components_)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(7), r"1D array of 8 weights, one per sample, got shape \(7,\)"),
        (np.zeros(8), "not all of its weights may be zero"),
        (-np.ones(8), "not negative"),
        (np.full(8, np.nan), "must be finite"),
    ],
)
def test_wrong_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        KSMTransformer(2).fit(np.eye(8), sample_weight=weights)
