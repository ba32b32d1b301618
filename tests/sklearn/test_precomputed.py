"""Features of a kernel matrix that is computed beforehand."""

import pickle

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_wine, make_moons
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.network.readout import LandmarkFeatures
from ksm_lightning.network.readout_matrices import LEAST_SQUARES_RIDGE, least_squares_matrix, nystroem_matrix
from ksm_lightning.sklearn import KSMClassifier, KSMRegressor, KSMTransformer
from ksm_lightning.sklearn.precomputed import PrecomputedKernel

X, Y = make_moons(200, noise=0.1, random_state=0)
K = rbf_kernel(X, gamma=2.0)
NEW = make_moons(50, noise=0.1, random_state=1)[0]
K_NEW = rbf_kernel(NEW, X, gamma=2.0)


def make(components=8, **options):
    return KSMTransformer(components, kernel="precomputed", random_state=0, **options)


def error(F, y):
    return np.linalg.norm(F - y @ y.T) / np.linalg.norm(F)


@pytest.mark.parametrize(("readout", "landmarks"), [("least_squares", None), ("nystroem", 8)])
def test_features_are_those_of_the_kernel_with_the_same_landmarks(readout, landmarks):
    found = make(readout=readout, n_landmarks=landmarks).fit(K)
    numbers = found.components_[:, 0].astype(int)
    assert found.components_.shape == (landmarks or 32, 1)
    assert len(set(numbers)) == len(numbers)
    W, kernel = torch.tensor(X[numbers]), GaussianKernel(0.5)
    M = nystroem_matrix(kernel, W)
    if landmarks is None:
        M = least_squares_matrix(kernel, W, torch.tensor(X), 8, ridge=LEAST_SQUARES_RIDGE)
    reference = LandmarkFeatures(kernel, W, M)
    for matrix, x in ((K, X), (K_NEW, NEW)):
        y, z = found.transform(matrix), reference(torch.tensor(x)).numpy()
        np.testing.assert_allclose(y @ y.T, z @ z.T, rtol=0, atol=1e-8)
    assert (found.n_features_in_, found.n_updates_, found.n_samples_seen_) == (200, 0, 200)


def test_the_error_is_close_to_the_optimum():
    values = np.linalg.eigvalsh(K)[::-1]
    optimum = np.sqrt((values[12:] ** 2).sum() / (values**2).sum())
    assert error(K, make(12).fit_transform(K)) < 1.1 * optimum
    assert error(K, make(12, n_landmarks=18).fit_transform(K)) < 2.5 * optimum


@pytest.mark.parametrize("readout", ["least_squares", "nystroem"])
def test_every_sample_a_landmark_is_exact(readout):
    some = K[:40, :40]
    found = make(40, readout=readout).fit(some)
    assert found.components_[:, 0].tolist() == list(range(40))
    assert error(some, found.transform(some)) < 1e-6
    exact = KSMTransformer(40, kernel="rbf", gamma=2.0, readout=readout, random_state=0).fit(X[:40])
    y, z = found.transform(K_NEW[:, :40]), exact.transform(NEW)
    np.testing.assert_allclose(y @ y.T, z @ z.T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bound", ["tight", "paper"])
def test_the_networks_own_responses_are_features(bound):
    found = make(bound=bound, readout="neural").fit(K)
    numbers = torch.arange(200.0, dtype=torch.float64)[:, None]
    expected = found.network_.readout_matrix().numpy()
    landmarks = found.components_[:, 0].astype(int)
    np.testing.assert_allclose(found.transform(K), K[:, landmarks] @ expected, rtol=0, atol=1e-10)
    # Only the similarities of landmarks are kept.
    assert found.kernel_.numbers.tolist() == sorted(landmarks)
    at = numbers[landmarks]
    np.testing.assert_array_equal(found.kernel_(at, at).numpy(), K[np.ix_(landmarks, landmarks)])


def test_a_cross_validation_takes_rows_and_columns():
    x, y = load_wine(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    assert make().__sklearn_tags__().input_tags.pairwise
    assert not KSMTransformer().__sklearn_tags__().input_tags.pairwise
    model = make_pipeline(make(30), LogisticRegression(max_iter=1000))
    scores = cross_val_score(model, rbf_kernel(x), y, error_score="raise")
    assert scores.mean() > 0.96


def test_a_kernel_error_and_weights_work_with_a_matrix():
    found = make(0.1).fit(K)
    assert error(K, found.transform(K)) < 0.12
    squares = np.linalg.eigvalsh(K)[::-1] ** 2
    fewest = int((np.cumsum(squares) < (1 - 0.1**2) * squares.sum()).sum()) + 1  # of kernel PCA
    assert fewest <= found.n_components_ <= fewest + 2
    weights = np.zeros(200)
    weights[50:80] = 1
    weighted = make(30).fit(K, sample_weight=weights)
    assert sorted(weighted.components_[:, 0]) == list(range(50, 80))
    y = weighted.transform(K[50:80])
    assert error(K[50:80, 50:80], y) < 1e-6


def test_equal_samples_are_no_problem():
    repeated = np.tile(K[:5, :5], (8, 8))
    y = make(5).fit_transform(repeated)
    assert error(repeated, y) < 1e-6
    assert np.isfinite(make(5).fit_transform(np.zeros((20, 20)))).all()


def test_the_matrix_is_neither_changed_nor_kept():
    matrix = K.copy()
    found = make().fit(matrix)
    y = found.transform(K_NEW)
    assert np.array_equal(matrix, K)
    matrix[:] = 0
    assert np.array_equal(found.transform(K_NEW), y)
    stored = pickle.dumps(found)
    assert len(stored) < K.nbytes / 4
    assert np.array_equal(pickle.loads(stored).transform(K_NEW), y)
    assert np.array_equal(clone(found).fit(K).transform(K_NEW), y)


def test_features_have_the_dtype_of_the_matrix():
    found = make().fit(K.astype(np.float32))
    narrow = found.transform(K_NEW.astype(np.float32))
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, found.transform(K_NEW), rtol=0, atol=1e-4)
    assert make().fit(K).get_feature_names_out().tolist() == [f"ksmtransformer{number}" for number in range(8)]


@pytest.mark.parametrize(
    ("matrix", "options", "message"),
    [
        (K_NEW, {}, r"needs the square matrix of similarities of the samples, got the shape \(50, 200\)"),
        (K + np.triu(K, 1), {}, "matrix must be symmetric, but the similarity of samples .* in one order"),
        (K - 2 * np.eye(200), {}, "no negative similarity of a sample with itself, but that of sample 0 is -1"),
        (1 - K, {}, "unlike a distance"),
        (np.where(K > 0.9, np.nan, K), {}, "Input X contains NaN"),
        (K, {"sigma": 2.0}, "Kernel 'precomputed' has no parameter `sigma`"),
        (K, {"gamma": 2.0}, "Kernel 'precomputed' has no parameter `gamma`"),
        (K, {"kernel_params": {"c": 1}}, "Kernel 'precomputed' has no parameter `c`"),
        (K, {"updates": 5}, "`updates` is 5, but landmarks stay at samples"),
    ],
)
def test_a_matrix_that_is_not_one_of_similarities_is_refused_in_one_sentence(matrix, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options).fit(matrix)


def test_an_asymmetry_beyond_the_first_block_is_found():
    matrix = np.eye(1100)
    matrix[1050, 3] = 0.5
    with pytest.raises(ValueError, match=r"samples (3 and 1050 is 0 .* 0\.5|1050 and 3 is 0\.5 .* 0) in the other"):
        make().fit(matrix)


def test_what_a_matrix_does_not_allow_is_refused_in_one_sentence():
    found = make().fit(K)
    with pytest.raises(ValueError, match=r"X has 7 features, .* expecting 200 .*: .*\(new samples, samples of `fit`\)"):
        found.transform(K_NEW[:, :7])
    for transformer in (found, make()):
        with pytest.raises(ValueError, match="`partial_fit` is not possible with kernel='precomputed'"):
            transformer.partial_fit(K)
    with pytest.raises(ValueError, match="`inverse_transform` is not possible with kernel='precomputed'"):
        found.inverse_transform(found.transform(K))
    with pytest.raises(ValueError, match="`inverse_transform` is not possible with kernel='precomputed'"):
        _ = found.reconstruction_error_
    with pytest.raises(TypeError, match="dense data is required"):
        make().fit(sparse.csr_matrix(K))
    for predictor in (KSMClassifier, KSMRegressor):
        with pytest.raises(ValueError, match="kernel='precomputed' is for KSMTransformer: put it and a linear model"):
            predictor(kernel="precomputed").fit(K, Y)


def test_a_kernel_of_some_samples_keeps_their_numbers():
    kernel = PrecomputedKernel.of(K).only(torch.tensor([30, 4, 17]))
    at = torch.tensor([[17.0], [30.0]])
    np.testing.assert_array_equal(kernel(at, at[:1]).numpy()[:, 0], K[[17, 30], 17].astype(np.float32))
    assert repr(kernel) == "PrecomputedKernel(3 samples)"
