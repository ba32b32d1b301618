"""Kernels given as a function of tensors, NumPy arrays or rows."""

import pickle

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import make_moons
from sklearn.gaussian_process.kernels import RBF
from sklearn.metrics.pairwise import chi2_kernel, rbf_kernel

from ksm_lightning.kernels import Kernel
from ksm_lightning.network.readout_matrices import LEAST_SQUARES_RIDGE, least_squares_matrix
from ksm_lightning.sklearn import KSMClassifier, KSMRegressor, KSMTransformer
from ksm_lightning.sklearn.callable_kernel import callable_kernel

X, Y = make_moons(200, noise=0.1, random_state=0)
SIGMA = {"sigma": 0.5}


def of_tensors(u, v, sigma):
    return torch.exp(-(u[:, None] - v).square().sum(-1) / (2 * sigma**2))


class OwnClass(Kernel):
    def __init__(self, sigma):
        super().__init__()
        self.sigma = sigma

    def gram(self, u, v):
        return of_tensors(u, v, self.sigma)


def of_arrays(u, v, sigma):
    return np.exp(-np.square(u[:, None] - v).sum(-1) / (2 * sigma**2))


def of_rows(u, v, sigma):
    return np.exp(-np.square(u - v).sum() / (2 * sigma**2))


def fitted(kernel, params=SIGMA, x=X, **options):
    return KSMTransformer(8, kernel=kernel, kernel_params=params, random_state=0, **options).fit(x)


def error(transformer, x=X):
    F, y = rbf_kernel(x, gamma=2.0), transformer.transform(x)
    return np.linalg.norm(F - y @ y.T) / np.linalg.norm(F)


def test_a_differentiable_function_learns_as_the_same_built_in_kernel():
    ours, built_in = fitted(of_tensors, updates=20), fitted("gaussian", updates=20)
    assert ours.kernel_.is_differentiable
    assert (ours.n_updates_, built_in.n_updates_) == (20, 20)
    assert error(ours) == pytest.approx(error(built_in), rel=0, abs=1e-6)
    own_class = fitted(OwnClass(0.5), None, updates=20)
    assert np.array_equal(ours.components_, own_class.components_)
    distances = np.linalg.norm(ours.components_[:, None] - X, axis=-1)
    assert distances.min(1).max() > 1e-3  # not at samples


@pytest.mark.parametrize(("kernel", "form"), [(of_arrays, "arrays"), (of_rows, "rows")])
def test_landmarks_of_a_function_without_derivatives_are_samples(kernel, form):
    x = X[:60]
    found = fitted(kernel, x=x)
    assert (found.kernel_.form, found.kernel_.is_differentiable, found.n_updates_) == (form, False, 0)
    W = found.components_
    assert len(np.unique(W, axis=0)) == 12
    assert {tuple(row) for row in W} <= {tuple(row) for row in x}
    M = least_squares_matrix(found.kernel_, torch.tensor(W), torch.tensor(x), 8, ridge=LEAST_SQUARES_RIDGE).numpy()
    z, y = rbf_kernel(x, W, gamma=2.0) @ M, found.transform(x)
    np.testing.assert_allclose(y @ y.T, z @ z.T, rtol=0, atol=1e-9)


def test_all_forms_of_a_function_have_the_same_values():
    x = torch.tensor(X[:30])
    expected = rbf_kernel(X[:30], X[:7], gamma=2.0)
    for function in (of_tensors, of_arrays, of_rows):
        kernel = callable_kernel(function, SIGMA, X)
        np.testing.assert_allclose(kernel(x, x[:7]).numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(kernel.diag(x).numpy(), np.ones(30), rtol=0, atol=1e-12)
        assert kernel(x.float(), x[:7].float()).dtype == kernel.diag(x.float()).dtype == torch.float32


@pytest.mark.parametrize("kernel", [of_tensors, of_arrays])
@pytest.mark.filterwarnings("ignore:`n_components` is")
def test_every_sample_a_landmark_is_exact(kernel):
    assert error(fitted(kernel, x=X[:8]), X[:8]) < 1e-6


def test_functions_and_objects_of_scikit_learn_are_kernels():
    x = np.abs(X)
    assert error(fitted(rbf_kernel, {"gamma": 2.0}, x), x) < 0.2
    assert error(fitted(RBF(0.5), None, x), x) < 0.2
    y = fitted(chi2_kernel, {"gamma": 0.5}, x).transform(x)
    F = chi2_kernel(x, gamma=0.5)
    assert np.linalg.norm(F - y @ y.T) / np.linalg.norm(F) < 0.05


def test_one_formula_may_serve_tensors_and_arrays():
    x = X[:60]
    y = KSMTransformer(8, kernel=lambda u, v: (1 + u @ v.T) ** 2, readout="nystroem", updates=10).fit_transform(x)
    # A quadratic kernel in the plane has a feature space of dimension 6.
    np.testing.assert_allclose(y @ y.T, (1 + x @ x.T) ** 2, rtol=0, atol=1e-6)


def test_a_torch_module_is_not_changed_and_may_have_parameters():
    class Learned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, u, v):
            return (u * self.scale) @ (v * self.scale).T

    module = Learned()
    found = KSMTransformer(2, kernel=module, updates=5, random_state=0).fit(X)
    assert found.kernel_.is_differentiable
    assert module.scale.dtype == torch.float32
    assert "kernel.function.scale" not in dict(found.network_.named_parameters())
    y = found.transform(X)
    np.testing.assert_allclose(y @ y.T, (X * [1, 4]) @ X.T, rtol=0, atol=1e-6)


def test_a_matrix_that_the_function_keeps_is_not_changed():
    kept = rbf_kernel(X, gamma=2.0)
    before = kept.copy()
    numbers = np.arange(200.0)[:, None]
    KSMTransformer(8, kernel=lambda u, v: kept[np.ix_(u[:, 0].astype(int), v[:, 0].astype(int))]).fit(numbers)
    whole = callable_kernel(lambda u, v: torch.from_numpy(kept)[: len(u), : len(v)], {}, X[:20])
    whole(torch.tensor(X), torch.tensor(X)).mul_(-2)
    assert np.array_equal(kept, before)


def test_a_derivative_that_is_not_finite_leaves_landmarks_at_samples():
    with pytest.warns(UserWarning, match="The derivatives of `kernel` are not finite between equal samples") as caught:
        found = fitted(lambda u, v: torch.exp(-(u[:, None] - v).square().sum(-1).sqrt()), None)
    assert caught[0].filename == __file__.replace(".pyc", ".py")
    assert (found.n_updates_, found.kernel_.form) == (0, "tensors")


def test_a_stream_learns_with_a_differentiable_function_only():
    found = KSMTransformer(8, kernel=of_tensors, kernel_params=SIGMA, random_state=0)
    for start in range(0, 200, 20):
        found.partial_fit(X[start : start + 20])
    assert error(found) < 0.4
    with pytest.raises(ValueError, match="`partial_fit` cannot change `kernel`"):
        found.set_params(kernel_params={"sigma": 0.7}).partial_fit(X)
    for other in (fitted(of_arrays), KSMTransformer(kernel=of_arrays, kernel_params=SIGMA)):
        with pytest.raises(ValueError, match="`partial_fit` moves landmarks, and torch cannot compute the derivatives"):
            other.partial_fit(X[:1])


@pytest.mark.parametrize("kernel", [of_tensors, of_arrays])
def test_predictors_take_functions(kernel):
    options = {"n_components": 20, "n_landmarks": 30, "kernel": kernel, "kernel_params": SIGMA, "random_state": 0}
    assert KSMClassifier(**options).fit(X, Y).score(X, Y) > 0.98
    wave = np.sin(3 * X[:, 0])
    assert KSMRegressor(**options).fit(X, wave).score(X, wave) > 0.99


def test_functions_are_cloned_pickled_and_take_sparse_and_float32_samples():
    found = fitted(of_arrays)
    y = found.transform(X)
    assert np.array_equal(clone(found).fit(X).transform(X), y)
    assert np.array_equal(pickle.loads(pickle.dumps(found)).transform(X), y)
    assert np.array_equal(fitted(of_arrays, x=sparse.csr_matrix(X)).transform(X), y)
    narrow = fitted(of_arrays, x=X.astype(np.float32)).transform(X.astype(np.float32))
    assert narrow.dtype == np.float32
    assert KSMTransformer(0.2, kernel=of_arrays, kernel_params=SIGMA, random_state=0).fit(X).n_components_ < 20


@pytest.mark.parametrize("count", [1, 2])
def test_one_sample_is_enough_to_try_a_function(count):
    for function in (of_tensors, of_arrays, of_rows):
        assert callable_kernel(function, SIGMA, X[:count])(torch.eye(2), torch.eye(2)).shape == (2, 2)


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        (lambda u, v: u.sum(1), {}, r"matrix \(a, b\) .*; called with \(3, 2\) and \(2, 2\), it returned \(3,\)\.$"),
        (lambda u, v: np.exp(-((u[:, None] - v) ** 2).sum()), {}, r"it returned \(\)\.$"),
        (lambda u, v: v @ u.T, {}, r"it returned \(2, 3\)\.$"),
        (lambda u, v, c: u @ v.T, {}, "it failed: TypeError: .* missing 1 required positional argument: 'c'"),
        (lambda u, v: torch.exp(u).no_such_name, {}, "AttributeError: 'Tensor' .* with tensors, TypeError: .*NumPy"),
        (lambda u, v: u @ v.T + u[:, :1], {}, "must be symmetric, but the similarity of samples"),
        (lambda u, v: u @ v.T * np.nan, {}, "must be finite, but the similarity of samples 0 and 0 is not"),
        (lambda u, v: -u @ v.T, {}, "no negative similarity of a sample with itself, but that of sample"),
        (lambda u, v: ((u[:, None] - v) ** 2).sum(-1), {}, "largest between equal samples, unlike a distance"),
        (lambda u, v: (u @ v.T) / len(u), {}, "another similarity when it is called with other samples"),
        (of_tensors, {"gamma": 2.0}, "`gamma` is not a parameter of a function .*: put it into `kernel_params`"),
        (of_tensors, {"sigma": 2.0}, "`sigma` is not a parameter of a function .*: put it into `kernel_params`"),
        (RBF, {}, r"`kernel` is the class RBF: pass an object, RBF\(\.\.\.\)"),
        (rbf_kernel, {"updates": 5}, "`updates` is 5, but landmarks stay at samples"),
        (rbf_kernel, {"batch_size": 64}, "`batch_size` is 64, but landmarks stay at samples"),
    ],
)
def test_a_function_that_is_not_a_kernel_is_refused_in_one_sentence(kernel, options, message):
    with pytest.raises(ValueError, match=message):
        KSMTransformer(4, kernel=kernel, **options).fit(X)


def test_a_similarity_that_is_not_finite_later_is_refused():
    x = np.linspace(1.0, 2.0, 50)[:, None]
    x[40] = -1.0
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="similarity of two samples that is not finite"):
        KSMTransformer(4, kernel=lambda u, v: np.sqrt(u) @ np.sqrt(v.T)).fit(x)
