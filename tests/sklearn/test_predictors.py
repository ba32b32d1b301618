"""KSMClassifier and KSMRegressor: scikit-learn's checks, its linear models as references, weights, and the choices."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_moons
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import ksm_lightning
from helpers.estimator_checks import check_all
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.sklearn import KSMClassifier, KSMRegressor, KSMTransformer
from ksm_lightning.sklearn.held_out import LabelledSamples, canonical_samples, choose_width, held_out_parts


def moons(count=120, seed=0):
    return make_moons(count, noise=0.15, random_state=seed)


def three_classes(count=150, seed=0):
    x = np.random.RandomState(seed).randn(count, 3)
    return x, (x[:, 0] > 0.3).astype(int) + (x[:, 0] + x[:, 1] ** 2 > 1.0)


def waves(count=150, noise=0.1, seed=0):
    random = np.random.RandomState(seed)
    x = random.uniform(-3, 3, (count, 2))
    return x, np.sin(2 * x[:, 0]) + x[:, 1] + noise * random.randn(count)


def classifier(components=12, **options) -> KSMClassifier:
    return KSMClassifier(components, **{"updates": 5, "random_state": 0, **options})


def regressor(components=12, **options) -> KSMRegressor:
    return KSMRegressor(components, **{"updates": 5, "random_state": 0, **options})


def test_every_check_of_scikit_learn_passes_and_none_is_skipped():
    check_all(
        ("KSMClassifier", {"n_components": 4, "updates": 3}), ("KSMRegressor", {"n_components": 30, "updates": 3})
    )


def test_both_are_exported():
    assert ksm_lightning.KSMClassifier is KSMClassifier
    assert ksm_lightning.KSMRegressor is KSMRegressor


@pytest.mark.parametrize(("options", "landmarks"), [({}, 12), ({"n_landmarks": 15}, 15), ({"bound": "paper"}, 12)])
def test_there_is_a_landmark_per_component_unless_more_are_wanted(options, landmarks):
    model = classifier(**options).fit(*moons())
    assert model.transformer_.components_.shape == (landmarks, 2)
    assert model.coef_.shape == (1, 12)
    assert model.get_params()["n_landmarks"] == options.get("n_landmarks")


# ---------------------------------------------------------------------- references


@pytest.mark.parametrize("data", [moons, three_classes])
@pytest.mark.parametrize("penalty", ["auto", 0.3])
def test_the_classifier_is_logistic_regression_on_its_features(data, penalty):
    """The minimum is unique, so probabilities agree to the tolerance of the solvers."""
    x, y = data()
    model = classifier(penalty=penalty).fit(x, y)
    features = model.transformer_.transform(x)
    reference = LogisticRegression(C=1 / model.penalty_, tol=1e-10, max_iter=100_000).fit(features, y)
    np.testing.assert_allclose(model.predict_proba(x), reference.predict_proba(features), rtol=0, atol=1e-4)
    assert model.coef_.shape == reference.coef_.shape
    np.testing.assert_allclose(model.coef_, reference.coef_, rtol=0, atol=1e-3 * np.abs(reference.coef_).max())
    assert np.array_equal(model.predict(x), reference.predict(features))
    assert model.decision_function(x).shape == reference.decision_function(features).shape


@pytest.mark.parametrize("outputs", [None, 1, 3])
@pytest.mark.parametrize("penalty", ["auto", 0.3])
def test_the_regressor_is_ridge_regression_on_its_features(outputs, penalty):
    x, y = waves()
    y = 50 + 7 * (y if outputs is None else np.stack([y * (k + 1) + k * x[:, 0] for k in range(outputs)], axis=1))
    weights = np.random.RandomState(1).rand(len(x)) + 0.1
    model = regressor(penalty=penalty).fit(x, y, sample_weight=weights)
    features = model.transformer_.transform(x)
    reference = Ridge(alpha=model.penalty_, solver="svd").fit(features, y, sample_weight=weights)
    expected = reference.predict(features).reshape(y.shape)  # scikit-learn drops the dimension of a single column
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-8)
    assert model.predict(x).shape == y.shape
    assert np.shape(model.coef_) == (12,) if outputs is None else (outputs, 12)
    assert np.shape(model.intercept_) == (() if outputs is None else (outputs,))


def test_a_large_penalty_predicts_shares_of_classes_and_the_mean():
    x, y = three_classes()
    shares = np.bincount(y) / len(y)
    np.testing.assert_allclose(classifier(penalty=1e9).fit(x, y).predict_proba(x), np.tile(shares, (150, 1)), atol=1e-4)
    x, y = waves()
    np.testing.assert_allclose(regressor(penalty=1e12).fit(x, y).predict(x), np.full(150, y.mean()), atol=1e-8)


def test_a_landmark_per_sample_and_a_small_penalty_interpolate():
    x, y = waves(40, noise=1.0)
    np.testing.assert_allclose(regressor(40, sigma=1.0, penalty=1e-9).fit(x, y).predict(x), y, rtol=0, atol=1e-4)
    assert classifier(40, sigma=1.0, penalty=1e-4).fit(x, y > 0).score(x, y > 0) == 1.0


# ---------------------------------------------------------------------- labels, weights, order


def test_labels_may_be_strings():
    x, y = three_classes()
    names = np.array(["one", "two", "three"])
    model, by_number = (classifier(sigma=2.0, penalty=0.1).fit(x, labels) for labels in (names[y], y))
    assert model.classes_.tolist() == ["one", "three", "two"]
    np.testing.assert_allclose(model.predict_proba(x)[:, [0, 2, 1]], by_number.predict_proba(x), rtol=0, atol=1e-5)
    assert (model.predict(x) == names[by_number.predict(x)]).mean() > 0.99
    assert model.score(x, names[y]) > 0.85
    probabilities = model.predict_proba(x)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert np.array_equal(model.classes_[probabilities.argmax(1)], model.predict(x))


@pytest.mark.parametrize(("make", "data"), [(classifier, three_classes), (regressor, waves)])
def test_weights_are_repetitions_and_the_order_of_samples_does_not_matter(make, data):
    x, y = data(60)
    weights = np.random.RandomState(0).randint(0, 4, 60)
    weighted = make().fit(x, y, sample_weight=weights)
    repeated = make().fit(x.repeat(weights, axis=0), y.repeat(weights))
    order = np.random.RandomState(1).permutation(60)
    mixed = make().fit(x[order], y[order], sample_weight=weights[order])
    assert np.array_equal(weighted.predict(x), repeated.predict(x))
    assert np.array_equal(weighted.coef_, repeated.coef_)
    assert np.array_equal(weighted.coef_, mixed.coef_)
    assert not np.array_equal(weighted.coef_, make().fit(x, y).coef_)
    assert weighted.penalty_ == repeated.penalty_


@pytest.mark.parametrize(("make", "data"), [(classifier, three_classes), (regressor, waves)])
def test_the_unit_of_weights_does_not_matter_for_an_automatic_penalty(make, data):
    x, y = data(60)
    weights = np.random.RandomState(0).rand(60)
    one, other = (make().fit(x, y, sample_weight=unit * weights) for unit in (1, 1024))
    np.testing.assert_allclose(other.penalty_, 1024 * one.penalty_)
    np.testing.assert_allclose(other.coef_, one.coef_, rtol=1e-6, atol=1e-6)


def test_a_class_without_weight_is_not_a_class():
    x, y = three_classes()
    assert classifier().fit(x, y, sample_weight=y != 2).classes_.tolist() == [0, 1]
    with pytest.raises(ValueError, match="at least 2 classes, got 1 class: 1"):
        classifier().fit(x, y, sample_weight=y == 1)


def test_canonical_samples_merge_what_is_equal():
    x = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [1.0, 2.0], [5.0, 6.0]])
    y, weights = np.array([0, 1, 0, 1, 1]), np.array([1.0, 2.0, 0.5, 4.0, 0.0])
    found = canonical_samples(x, y, weights)
    triples = {
        (*row, int(label)): float(weight) for row, label, weight in zip(found.x.tolist(), *found[1:], strict=True)
    }
    assert triples == {(1.0, 2.0, 0): 1.5, (1.0, 2.0, 1): 4.0, (3.0, 4.0, 1): 2.0}


# ---------------------------------------------------------------------- choices


def test_parts_cover_all_samples_once_with_equal_shares_of_classes():
    labels = torch.tensor([0] * 50 + [1] * 25 + [2] * 2)
    parts = held_out_parts(77, labels)
    assert parts.sum(0).tolist() == [1] * 77
    assert [int(part[labels == 0].sum()) for part in parts] == [10] * 5
    assert [int(part[labels == 1].sum()) for part in parts] == [5] * 5
    assert held_out_parts(3).sum(0).tolist() == [1, 1, 1]


def test_the_width_of_a_function_that_the_kernel_can_represent_is_found():
    """Targets are a random function of a Gaussian kernel of width 0.5."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(600, 2, generator=g, dtype=torch.float64) * 4
    centres = torch.rand(20, 2, generator=g, dtype=torch.float64) * 4
    y = GaussianKernel(0.5)(x, centres) @ torch.randn(20, 1, generator=g, dtype=torch.float64)
    samples = LabelledSamples(x, y, torch.ones(600, dtype=torch.float64))
    widths = [0.03, 0.5, 8.0]
    assert choose_width(GaussianKernel, widths, samples, held_out_parts(600), 60) == 0.5
    assert choose_width(GaussianKernel, widths[::-1], samples, held_out_parts(600), 60) == 0.5


def test_the_chosen_width_is_better_than_a_bad_one():
    (x, y), (fresh, truth) = moons(600), moons(2000, seed=1)
    chosen = classifier(30, updates=None).fit(x, y)
    assert chosen.transformer_.sigma == chosen.transformer_.kernel_.sigma
    score = chosen.score(fresh, truth)
    assert score > 0.97
    for bad in (0.005, 20.0):
        with pytest.warns(UserWarning, match="is too"):
            assert classifier(30, sigma=bad).fit(x, y).score(fresh, truth) < score - 0.02


def test_a_given_width_is_used_as_it_is():
    x, y = moons(18)  # as many as landmarks: nothing is trained
    assert classifier(sigma=0.37).fit(x, y).transformer_.kernel_.sigma == 0.37
    assert classifier(kernel="rbf", gamma=2.0).fit(x, y).transformer_.kernel_.sigma == 0.5
    laplacian = [classifier(kernel="laplacian", kernel_params=given).fit(x, y) for given in (None, {"sigma": "auto"})]
    assert laplacian[0].transformer_.kernel_.sigma == laplacian[1].transformer_.kernel_.sigma != 1
    model = classifier(kernel="power_cosine", kernel_params={"alpha": 3}).fit(x, y)
    assert model.transformer_.kernel_.alpha == 3


def test_a_kernel_error_determines_the_number_of_features():
    model = classifier(0.2).fit(*moons())
    assert model.coef_.shape == (1, model.transformer_.n_components_)
    assert 1 < model.transformer_.n_components_ < 60


def test_noise_raises_the_penalty():
    penalties = [regressor(150, sigma=1.0).fit(*waves(noise=noise)).penalty_ for noise in (1e-4, 1.0)]
    assert penalties[0] < 1e-2 * penalties[1]


def test_many_samples_are_chosen_from_and_all_are_fitted():
    """11,000 samples: choices look at 10,000 of them."""
    x, y = moons(11_000)
    model = classifier().fit(x.astype(np.float32), y)
    features = model.transformer_.transform(x.astype(np.float32)).astype(np.float64)
    reference = LogisticRegression(C=1 / model.penalty_, tol=1e-8, max_iter=10_000).fit(features, y)
    np.testing.assert_allclose(model.predict_proba(x), reference.predict_proba(features), rtol=0, atol=5e-3)
    assert model.transformer_.n_samples_seen_ == 11_000
    assert model.score(x, y) > 0.97


def test_defaults_classify_iris():
    model = make_pipeline(StandardScaler(), KSMClassifier(random_state=0))
    assert cross_val_score(model, *load_iris(return_X_y=True), cv=3).mean() > 0.94


# ---------------------------------------------------------------------- use


def test_they_are_pickled_and_cloned():
    x, y = moons()
    for model in (classifier().fit(x, y), regressor().fit(x, y)):
        again = pickle.loads(pickle.dumps(model))
        assert np.array_equal(again.predict(x), model.predict(x))
        fresh = clone(model)
        with pytest.raises(NotFittedError):
            fresh.predict(x)
        assert np.array_equal(fresh.fit(x, y).coef_, model.coef_)


def test_parameters_of_the_transformer_are_searched():
    x, y = moons()
    search = GridSearchCV(classifier(), {"sigma": [0.3, 5.0], "n_components": [4, 16]}, cv=3).fit(x, y)
    assert search.best_params_ == {"sigma": 0.3, "n_components": 16}
    assert search.best_estimator_.transformer_.n_components == 16
    own = set(KSMTransformer().get_params()) - {"alpha", "half_life"}
    assert own | {"penalty"} == set(KSMClassifier().get_params()) == set(KSMRegressor().get_params())


def test_data_frames_keep_their_names():
    x, y = moons()
    frame = pd.DataFrame(x, columns=["a", "b"])
    model = classifier().fit(frame, y)
    assert model.feature_names_in_.tolist() == ["a", "b"]
    assert np.array_equal(model.predict(frame), classifier().fit(x, y).predict(x))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a"]])


def test_few_samples_are_enough():
    x = np.array([[0.0, 1.0], [2.0, 3.0]])
    assert classifier().fit(x, ["a", "b"]).predict(x).tolist() == ["a", "b"]
    with pytest.warns(UserWarning, match="all equal"):
        assert regressor().fit(x[:1], [5.0]).predict(x).tolist() == [5.0, 5.0]


@pytest.mark.parametrize("make", [classifier, regressor])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty": 0}, "`penalty` must be 'auto' or a positive number, got 0"),
        ({"penalty": "best"}, "`penalty` must be 'auto' or a positive number, got 'best'"),
        ({"penalty": np.inf}, "`penalty` must be 'auto' or a positive number, got inf"),
        (
            {"n_components": 0},
            "`n_components` must be a whole number of at least 1, or a kernel error between 0 and 1, got 0",
        ),
        ({"sigma": -1.0}, "`sigma` must be positive and finite, got -1"),
        ({"kernel": "linear", "sigma": 2.0}, "Kernel 'linear' has no parameter `sigma`"),
        ({"readout": "pca"}, "There is no readout 'pca'"),
    ],
)
def test_invalid_parameters_are_refused_in_fit(make, options, message):
    x, y = moons(20)
    with pytest.raises(ValueError, match=message):
        make().set_params(**options).fit(x, y)


@pytest.mark.parametrize("make", [classifier, regressor])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(19), r"1D array of 20 weights, one per sample, got shape \(19,\)"),
        (np.ones((20, 1)), r"got shape \(20, 1\)"),
        (np.arange(20) - 1.0, "not negative"),
        (np.full(20, np.nan), "must be finite"),
        (np.zeros(20), "not all of its weights may be zero"),
    ],
)
def test_invalid_weights_are_refused(make, weights, message):
    x, y = moons(20)
    with pytest.raises(ValueError, match=message):
        make().fit(x, y, sample_weight=weights)


def test_text_is_not_a_target_of_a_regression():
    with pytest.raises(ValueError, match=r"must be numbers, but they are text: use KSMClassifier"):
        KSMRegressor(4).fit(np.eye(4), ["a", "b", "a", "b"])
