"""KSMTransformer in scikit-learn: estimator checks, pipelines, and learning from a stream one sample at a time."""

import copy
import logging
import pickle
import re
import warnings
from statistics import fmean

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, make_moons
from sklearn.exceptions import NotFittedError
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from torch.testing import assert_close

from helpers import references
from helpers.estimator_checks import check_all
from helpers.kernels import Quadratic
from ksm_lightning.kernels import (
    CauchyKernel,
    GaussianKernel,
    LaplacianKernel,
    auto_width,
    register_kernel,
    registry,
)
from ksm_lightning.learning import AdaptiveSchedule, fit_network, train, training
from ksm_lightning.learning.samples import canonical_order
from ksm_lightning.network.readout import READOUTS, LandmarkFeatures
from ksm_lightning.sklearn import KSMTransformer

SIGMA = {"sigma": 0.3}


def small(components=8, **options) -> KSMTransformer:
    """The paper's network, with its own responses as features."""
    defaults = {"kernel_params": SIGMA, "updates": 40, "random_state": 0, "bound": "paper", "readout": "neural"}
    return KSMTransformer(components, **{**defaults, **options})


def tight(components=8, **options) -> KSMTransformer:
    """The default features, with few updates."""
    return KSMTransformer(components, **{"kernel_params": SIGMA, "updates": 40, "random_state": 0, **options})


def two_moons(count=300, seed=0, noise=0.1):
    return make_moons(count, noise=noise, random_state=seed)


def gaussian_gram(x, z, sigma) -> np.ndarray:
    return np.exp(-((x[:, None] - z[None]) ** 2).sum(-1) / (2 * sigma**2))


def error(transformer, x) -> float:
    """``||F - Y Y^T|| / ||F||`` in numpy."""
    F, y = gaussian_gram(x, x, transformer.kernel_.sigma), transformer.transform(x)
    return float(np.linalg.norm(F - y @ y.T) / np.linalg.norm(F))


# ---------------------------------------------------------------------- scikit-learn's own checks


def test_every_check_of_scikit_learn_passes_and_none_is_skipped():
    check_all(*(("KSMTransformer", {"n_components": 4, "updates": 3, "readout": readout}) for readout in READOUTS))


@pytest.mark.slow
def test_every_check_passes_for_other_kernels():
    options = {"n_components": 8, "updates": 20}
    check_all(*(("KSMTransformer", options | {"kernel": kernel}) for kernel in ("linear", "cauchy", "arc_cosine")))


@pytest.mark.slow
def test_every_check_passes_with_default_parameters():
    check_all(("KSMTransformer", {}))


# ---------------------------------------------------------------------- learned features


@pytest.mark.parametrize("readout", READOUTS)
def test_fit_equals_train(readout):
    x, _ = two_moons()
    x = x[canonical_order(x)]
    found = small(readout=readout, random_state=7, batch_size=16).fit(x)
    seed = int(np.random.RandomState(7).randint(2**31 - 1))
    network = train(
        GaussianKernel(0.3), torch.tensor(x), 8, AdaptiveSchedule(40), batch_size=16, seed=seed
    )  # fmt: skip
    assert np.array_equal(found.components_, network.W.detach().numpy())
    expected = LandmarkFeatures.of(network, readout, torch.tensor(x))(torch.tensor(x))
    assert_close(torch.tensor(found.transform(x)), expected, rtol=0, atol=1e-12)
    assert found.network_.num_neurons == 8
    assert (found.n_features_in_, found.n_samples_seen_, found.n_updates_) == (2, 300, 40)


def test_features_equal_the_definition():
    x, _ = two_moons(60)
    found = small(readout="neural").fit(x)
    network = found.network_
    q, L = network.q.detach().double().numpy(), network.L.detach().double().numpy()
    drive = references.gram("gaussian", SIGMA, torch.tensor(x), torch.tensor(found.components_)).numpy()
    expected = drive * q @ np.linalg.inv(L + network.ridge * np.eye(8))
    np.testing.assert_allclose(found.transform(x), expected, rtol=0, atol=1e-10)


def test_the_default_number_of_updates_depends_on_the_bound_and_the_components():
    x, _ = two_moons(600)
    with pytest.MonkeyPatch.context() as patch:
        lengths = []

        def short(kernel, x, n, schedule, **options):
            lengths.append(schedule.total_updates)
            return train(kernel, x, n, AdaptiveSchedule(1), **options)  # the paper's bound

        patch.setattr(training, "train", short)
        for components in (2, 400, 500):
            KSMTransformer(components, kernel_params=SIGMA, bound="paper", random_state=0).fit(x)
    assert lengths == [2000, 2000, 2500]
    made = [tight(n, updates=None).fit(x).n_updates_ for n in (2, 60, 61)]
    assert 0 < made[0] <= made[1] <= 25
    assert made[2] == 0  # fewer than 10 samples for each component
    assert tight(60, updates=3).fit(x).n_updates_ == 3


def test_landmarks_of_few_samples_stay_at_the_centres_that_training_starts_from():
    x, _ = two_moons(100)
    x = x[canonical_order(x)]
    found = tight(20, updates=None, random_state=7).fit(x)
    seed = int(np.random.RandomState(7).randint(2**31 - 1))
    network = fit_network(GaussianKernel(0.3), torch.tensor(x), 20, 0, bound="tight", num_landmarks=30, seed=seed)
    assert np.array_equal(found.components_, network.W.detach().numpy())
    assert found.n_updates_ == 0
    assert found.partial_fit(x[:50]).n_samples_seen_ == 150


@pytest.mark.parametrize("weight", [0.5, 100.0])
def test_equal_weights_do_not_matter(weight):
    x, _ = two_moons(100)
    found = tight(20, updates=None).fit(x, sample_weight=np.full(100, weight))
    assert np.array_equal(found.components_, tight(20, updates=None).fit(x).components_)


def test_weights_of_few_samples_do_not_make_landmarks_fit_them():
    x, _ = two_moons(100)
    fresh, _ = two_moons(400, seed=100)
    weights = np.random.RandomState(0).rand(100) + 0.5  # 100,000 counts
    weighted, plain = tight(20, updates=None).fit(x, sample_weight=weights), tight(20, updates=None).fit(x)
    assert error(weighted, fresh) < 1.1 * error(plain, fresh)


@pytest.mark.parametrize(("readout", "landmarks"), [("neural", 8), ("nystroem", 12), ("least_squares", 16)])
def test_tight_features_are_those_of_a_tight_network(readout, landmarks):
    x, _ = two_moons()
    x = x[canonical_order(x)]
    found = tight(readout=readout, n_landmarks=landmarks, random_state=7, batch_size=64).fit(x)
    seed = int(np.random.RandomState(7).randint(2**31 - 1))
    network = fit_network(
        GaussianKernel(0.3), torch.tensor(x), 8, 40, bound="tight", num_landmarks=landmarks, seed=seed
    )
    assert np.array_equal(found.components_, network.W.detach().numpy())
    expected = LandmarkFeatures.of(network, readout, torch.tensor(x))(torch.tensor(x))
    assert_close(torch.tensor(found.transform(x)), expected, rtol=0, atol=1e-12)
    assert found.transform(x).shape == (300, 8)
    assert len(found.get_feature_names_out()) == 8


def test_the_default_has_more_landmarks_than_features_and_nearly_the_lowest_error():
    x, _ = two_moons(600)
    fitted = KSMTransformer(16, kernel_params=SIGMA, random_state=0).fit(x)
    F = references.gram("gaussian", SIGMA, torch.tensor(x), torch.tensor(x))
    spectrum = torch.linalg.eigvalsh(F).flip(0)
    optimum = float((spectrum[16:].square().sum() / spectrum.square().sum()).sqrt())
    assert fitted.components_.shape == (24, 2)
    assert optimum <= error(fitted, x) < 1.03 * optimum
    assert error(small(16, updates=2000).fit(x), x) > 1.5 * optimum  # the paper's network


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": "loose"}, "`bound` must be 'tight' or 'paper', got 'loose'"),
        ({"n_landmarks": 7}, "`n_landmarks` must be at least `n_components`, 8, .* got 7"),
        ({"n_landmarks": 9, "bound": "paper"}, "equal to it with bound='paper', got 9"),
        ({"n_landmarks": 8.5}, "`n_landmarks` must be a whole number of at least 1, got 8.5"),
    ],
)
def test_impossible_bounds_and_landmarks_are_refused(options, message):
    x, _ = two_moons(60)
    for method in ("fit", "partial_fit"):
        with pytest.raises(ValueError, match=message):
            getattr(tight(**options), method)(x)


@pytest.mark.filterwarnings("ignore:`n_components` is")
@pytest.mark.parametrize("kernel", ["gaussian", "power_cosine"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_tight_features_of_fewer_samples_than_landmarks_are_exact(kernel, count):
    x = np.random.RandomState(0).randn(count, 3)
    width = 1.0 if kernel == "gaussian" else "auto"
    fitted = KSMTransformer(10, kernel=kernel, sigma=width, updates=20, random_state=0).fit(x)
    assert fitted.components_.shape == (count, 3)
    assert fitted.n_updates_ == 0
    y, F = fitted.transform(x), fitted.kernel_(torch.tensor(x), torch.tensor(x)).numpy()
    assert np.linalg.norm(F - y @ y.T) < 2e-3 * np.linalg.norm(F)
    assert np.isfinite(fitted.transform(10 * np.random.RandomState(1).randn(50, 3))).all()


@pytest.mark.parametrize("readout", ["neural", "least_squares"])
def test_a_stream_of_tight_features_comes_close_to_the_optimum(readout):
    x, _ = two_moons(1000)
    order = np.random.RandomState(0).permutation(len(x))
    found = tight(16, readout=readout)
    for part in np.array_split(x[order], 50):
        found.partial_fit(part)
    assert error(found, x) < 0.115  # kernel PCA of 1,600 points: 0.096
    assert found.n_samples_seen_ == 1000
    with pytest.raises(ValueError, match="call `fit` to start again"):
        found.set_params(n_landmarks=20).partial_fit(x[:5])
    with pytest.raises(ValueError, match="`n_landmarks` from 24 to 16 and `bound` from tight to paper: call `fit`"):
        found.set_params(n_landmarks=None, bound="paper").partial_fit(x[:5])


@pytest.mark.filterwarnings("ignore:The kernel error of these features", "ignore:`n_components` is")
@pytest.mark.parametrize(("readout", "bound"), [("neural", 0.2), ("nystroem", 1e-6), ("least_squares", 1e-6)])
def test_more_components_than_samples_leave_a_small_error(readout, bound):
    """The landmarks are the samples: Nystroem features are exact there, and those of scikit-learn on new points."""
    x, _ = two_moons(40)
    fresh, _ = two_moons(400, seed=100)
    found = small(60, readout=readout, updates=200).fit(x)
    assert error(found, x) < bound
    sampled = Nystroem(gamma=0.5 / 0.3**2, n_components=40).fit(x).transform(fresh)
    F = gaussian_gram(fresh, fresh, 0.3)
    if readout != "neural":
        assert error(found, fresh) < 1.1 * np.linalg.norm(F - sampled @ sampled.T) / np.linalg.norm(F)


def test_a_linear_kernel_with_enough_components_is_exact():
    x = np.random.RandomState(0).randn(100, 3)
    for readout in ("nystroem", "least_squares"):
        y = KSMTransformer(5, kernel="linear", readout=readout, updates=20, random_state=0).fit_transform(x)
        np.testing.assert_allclose(y @ y.T, x @ x.T, rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:`n_components` is")
@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize(
    "x",
    [np.ones((1, 3)), np.ones((20, 3)), np.zeros((20, 3)), np.repeat(np.eye(3), 8, 0), np.eye(3)],
    ids=["one sample", "constant", "zero", "duplicates", "few"],
)
def test_degenerate_data_has_valid_features(x, readout):
    """The kernel is 1 between equal samples and exp(-1) between rows of the identity."""
    fitted = KSMTransformer(6, sigma=1.0, readout=readout, updates=300, random_state=0).fit(x)
    y = fitted.transform(x)
    tolerance = {"neural": 0.1, "nystroem": 0.01, "least_squares": 1e-6}[readout]
    np.testing.assert_allclose(y @ y.T, gaussian_gram(x, x, 1.0), rtol=0, atol=tolerance)


def test_an_offset_of_the_data_does_not_change_the_error():
    """The order of the batches depends on the numbers, and single runs differ by 10 %."""
    x, _ = two_moons()

    def mean_error(offset):
        fits = (small(16, updates=300, random_state=seed).fit(x + offset) for seed in range(5))
        return fmean(error(fitted, x + offset) for fitted in fits)

    assert mean_error(1e6) == pytest.approx(mean_error(0.0), rel=0.05)


# ---------------------------------------------------------------------- pipelines


def exact_features(x, z, sigma):
    """Features of z whose inner products are the Gaussian kernel exactly, on the span of the samples x."""
    values, vectors = np.linalg.eigh(gaussian_gram(x, x, sigma))
    is_kept = values > 1e-6 * values.max()  # the rest has no visible effect
    return gaussian_gram(z, x, sigma) @ (vectors[:, is_kept] / np.sqrt(values[is_kept]))


def test_half_moons_are_classified_as_well_as_with_the_exact_kernel():
    x, labels = two_moons(400, noise=0.2)
    z, others = two_moons(1500, seed=1, noise=0.2)
    exact = LogisticRegression(max_iter=5000).fit(exact_features(x, x, 0.3), labels)
    wanted = exact.score(exact_features(x, z, 0.3), others)
    assert wanted > 0.96
    features = KSMTransformer(n_components=16, kernel_params=SIGMA, random_state=0)
    pipeline = make_pipeline(features, LogisticRegression()).fit(x, labels)
    assert pipeline.score(z, others) > wanted - 0.01
    assert LogisticRegression().fit(x, labels).score(z, others) < wanted - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("readout", READOUTS)
def test_digits_are_classified_at_least_as_well_as_with_nystroem(readout):
    x, labels = load_digits(return_X_y=True)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)

    def accuracy(features):
        return cross_val_score(make_pipeline(features, LogisticRegression(max_iter=2000)), x, labels, cv=folds).mean()

    ours = accuracy(KSMTransformer(100, kernel_params={"sigma": 24}, readout=readout, random_state=0))
    theirs = [accuracy(Nystroem(gamma=1 / (2 * 24**2), n_components=100, random_state=seed)) for seed in range(3)]
    assert ours > 0.96
    assert ours >= max(theirs)


def test_the_first_fold_of_digits_is_classified_as_well_as_with_nystroem():
    """One of the five folds above with fewer updates, for the default test run."""
    x, labels = load_digits(return_X_y=True)
    train, test = next(StratifiedKFold(5, shuffle=True, random_state=0).split(x, labels))

    def accuracy(features):
        pipeline = make_pipeline(features, LogisticRegression(max_iter=2000)).fit(x[train], labels[train])
        return pipeline.score(x[test], labels[test])

    ours = accuracy(KSMTransformer(100, kernel_params={"sigma": 24}, updates=100, random_state=0))
    assert ours >= accuracy(Nystroem(gamma=1 / (2 * 24**2), n_components=100, random_state=0))
    assert ours > 0.95


@pytest.mark.filterwarnings("ignore:The kernel error of these features", "ignore:.*is too wide")
def test_a_grid_search_finds_the_width():
    x, labels = two_moons(200)
    pipeline = make_pipeline(small(12), LogisticRegression())
    grid = {"ksmtransformer__kernel_params": [{"sigma": width} for width in (0.3, np.float32(5), np.int64(30))]}
    search = GridSearchCV(pipeline, grid, cv=3, error_score="raise").fit(x, labels)
    assert search.best_params_ == {"ksmtransformer__kernel_params": {"sigma": 0.3}}
    assert search.best_estimator_[0].kernel_ == search.best_estimator_[0].network_.kernel
    assert search.best_score_ > 0.95


@pytest.mark.parametrize("kernel", ["gaussian", LaplacianKernel(0.4)])
def test_a_clone_is_not_fitted_and_learns_the_same(kernel):
    x, _ = two_moons(100)
    fitted = small(kernel=kernel).fit(x)
    copied = clone(fitted)
    assert copied.get_params()["n_components"] == 8
    with pytest.raises(NotFittedError):
        copied.transform(x)
    assert not hasattr(copied, "components_")
    assert np.array_equal(copied.fit(x).transform(x), fitted.transform(x))


def test_feature_names_and_data_frames():
    x, _ = two_moons(30)
    frame = pd.DataFrame(x, columns=["height", "width"], index=range(100, 130))
    fitted = small(3).set_output(transform="pandas").fit(frame)
    assert list(fitted.feature_names_in_) == ["height", "width"]
    found = fitted.transform(frame)
    names = ["ksmtransformer0", "ksmtransformer1", "ksmtransformer2"]
    assert list(fitted.get_feature_names_out()) == list(found.columns) == names
    assert list(found.index) == list(range(100, 130))
    np.testing.assert_array_equal(found.to_numpy(), small(3).fit(x).transform(x))
    with pytest.raises(ValueError, match="feature names"):
        fitted.transform(frame[["width", "height"]])


def test_repr_shows_the_parameters_that_are_not_default():
    text = repr(KSMTransformer(16, kernel_params=SIGMA, random_state=3))
    assert text == "KSMTransformer(kernel_params={'sigma': 0.3}, n_components=16, random_state=3)"


# ---------------------------------------------------------------------- input and output


def test_features_have_the_dtype_of_the_samples():
    x, _ = two_moons(100)
    for dtype, wanted in ((np.float32, np.float32), (np.float64, np.float64), (np.float16, np.float64)):
        fitted = small().fit(x.astype(dtype))
        assert fitted.transform(x.astype(dtype)).dtype == wanted
        assert fitted.components_.dtype == wanted
    whole = (10 * x).astype(np.int64)
    assert small(kernel_params={"sigma": 3}).fit_transform(whole).dtype == np.float64
    wide = small(updates=200).fit(x)
    np.testing.assert_allclose(wide.transform(x.astype(np.float32)), wide.transform(x), rtol=0, atol=1e-5)


def test_read_only_input_is_accepted_and_no_input_is_changed(tmp_path):
    x, _ = two_moons(100)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    frozen = x.copy()
    frozen.setflags(write=False)
    expected = small().fit(x).transform(x)
    for same in (mapped, frozen, np.asfortranarray(x), x.tolist(), torch.tensor(x)):
        assert np.array_equal(small().fit(same).transform(same), expected)
    free = x.copy()
    small().fit(free).partial_fit(free)
    assert np.array_equal(free, x)


def test_features_are_computed_in_blocks():
    """Samples around the end of the first block of 4,096."""
    x = np.random.RandomState(0).rand(4100, 2)
    fitted = small().fit(x[:200])
    np.testing.assert_allclose(
        fitted.transform(x)[[0, 4095, 4096, 4099]], fitted.transform(x[[0, 4095, 4096, 4099]]), rtol=0, atol=1e-12
    )


def test_changing_components_does_not_change_the_features():
    x, _ = two_moons(50)
    fitted = small().fit(x)
    before = fitted.transform(x)
    fitted.components_[:] = 0
    assert np.array_equal(fitted.transform(x), before)


def test_the_same_seed_gives_the_same_features_without_global_randomness():
    x, _ = two_moons(100)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002 (the global state is the point)
    torch_before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = small(random_state=1).fit(x).partial_fit(x[:20]).transform(x)
    assert torch.equal(torch.random.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002
    torch.manual_seed(6)
    assert np.array_equal(small(random_state=1).fit(x).partial_fit(x[:20]).transform(x), first)
    assert not np.allclose(small(random_state=2).fit(x).partial_fit(x[:20]).transform(x), first, atol=1e-3)
    assert np.array_equal(small(random_state=np.random.RandomState(1)).fit(x).partial_fit(x[:20]).transform(x), first)


def test_only_verbose_prints(capsys, caplog):
    x, _ = two_moons(50)
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings():
        warnings.simplefilter("error")
        small().fit(x).partial_fit(x).transform(x)
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []
    small(verbose=True).fit(x)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(r"KSMTransformer: 100%.*40/40", err)


@pytest.mark.parametrize(("width", "message"), [
    (0.001, "GaussianKernel(sigma=0.001) is too narrow for 8 features"),
    (0.03, "GaussianKernel(sigma=0.03) is too narrow for 8 features"),
    (30.0, "GaussianKernel(sigma=30.0) is too wide: two different points have a mean similarity of 0.9989"),
])  # fmt: skip
def test_a_kernel_that_is_too_narrow_or_too_wide_gives_a_warning(width, message):
    x, _ = two_moons(200)
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        small(sigma=width, kernel_params=None).fit(x)
    assert f"Try sigma={auto_width(torch.tensor(x)):g}, which sigma='auto' chooses" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_suitable_kernel_gives_no_warning():
    x, _ = two_moons(200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for width in (0.2, 0.3, 3.0, "auto"):
            small(sigma=width, kernel_params=None, updates=5).fit(x)
        small(kernel_params={"sigma": 0.001}, updates=5).fit(np.repeat(x[:1], 20, 0))  # equal samples
        small(1, kernel_params={"sigma": 0.001}, updates=5).fit(x[:1])  # a single sample


@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_features_far_above_random_landmarks_give_a_warning_once(method):
    """The paper's network has a floor: with 40 neurons on half moons, random landmarks are many times better."""
    x, _ = two_moons(300)
    found = getattr(small(40, bound="paper", readout="neural"), method)(x)
    with pytest.warns(UserWarning, match="The kernel error of these features is 0.* use readout='nystroem'") as caught:
        y = found.transform(x)
    ours, uniform = map(float, re.findall(r"0\.\d+", str(caught[0].message)))
    F = gaussian_gram(x, x, 0.3)
    assert ours == pytest.approx(np.linalg.norm(F - y @ y.T) / np.linalg.norm(F), rel=0.05)
    sampled = [Nystroem(gamma=0.5 / 0.3**2, n_components=40, random_state=s).fit_transform(x) for s in range(5)]
    errors = [np.linalg.norm(F - z @ z.T) / np.linalg.norm(F) for z in sampled]
    assert 0.5 * min(errors) < uniform < 2 * max(errors)
    assert ours > 2 * uniform
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.transform(x)
        getattr(small(40, bound="paper", readout="nystroem"), method)(x).transform(x)
        getattr(small(8), method)(x).transform(x)


# ---------------------------------------------------------------------- kernels


def test_kernels_by_name_and_as_objects():
    x, _ = two_moons(100)
    by_name = small(kernel="laplacian", kernel_params={"sigma": 0.4}).fit(x)
    given = LaplacianKernel(0.4)
    as_object = small(kernel=given, kernel_params=None).fit(x)
    changed = small(kernel=LaplacianKernel(9.0), kernel_params={"sigma": 0.4}).fit(x)
    for other in (as_object, changed):
        assert other.kernel_.sigma == 0.4
        assert np.array_equal(other.transform(x), by_name.transform(x))
    assert as_object.kernel_ is not given
    assert small(kernel=CauchyKernel(0.4), kernel_params={}).fit(x).kernel_.sigma == 0.4


def test_a_custom_kernel_works_registered_or_not():
    x, _ = two_moons(60)
    # A quadratic kernel in the plane has a feature space of dimension 6, so 8 landmarks are exact.
    y = KSMTransformer(8, kernel=Quadratic(0.5), readout="nystroem", updates=20, random_state=0).fit_transform(x)
    np.testing.assert_allclose(y @ y.T, (0.5 + x @ x.T) ** 2, rtol=0, atol=1e-7)
    register_kernel("test_estimator_quadratic")(Quadratic)
    named = KSMTransformer(
        8, kernel="test_estimator_quadratic", kernel_params={"offset": 0.5}, readout="nystroem", updates=20,
        random_state=0,
    ).fit_transform(x)  # fmt: skip
    del registry._KERNELS["test_estimator_quadratic"]
    assert np.array_equal(named, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0}, "`n_components` must be a whole number of at least 1, or a kernel error .*, got 0"),
        ({"n_components": 2.5}, "`n_components` must be a whole number of at least 1, or a kernel error .*, got 2.5"),
        (
            {"n_components": "all"},
            "`n_components` must be a whole number of at least 1, or a kernel error .*, got 'all'",
        ),
        ({"batch_size": -1}, "`batch_size` must be a whole number"),
        ({"updates": 0}, "`updates` must be a whole number of at least 1, got 0"),
        ({"readout": "pca"}, "There is no readout 'pca': choose one of neural, nystroem, least_squares"),
        ({"kernel": "gauss"}, "No kernel is registered as 'gauss'; known kernels: arc_cosine"),
        (
            {"kernel": 3},
            "`kernel` must be a registered name, a ksm_lightning.Kernel, a function or 'precomputed', got 3",
        ),
        ({"kernel_params": {"scale": 1}}, "Kernel 'gaussian' has no parameter `scale`: its parameters are sigma"),
        ({"kernel_params": {"sigma": -1}}, "`sigma` must be positive and finite, got -1"),
        ({"kernel": GaussianKernel(), "kernel_params": {"gamma": 1}}, "GaussianKernel has no parameter 'gamma'"),
        ({"random_state": "x"}, "cannot be used to seed"),
    ],
)
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_invalid_parameters_are_refused_in_fit(options, message, method):
    estimator = small().set_params(**options)  # accepts any value
    with pytest.raises(ValueError, match=message):
        getattr(estimator, method)(two_moons(20)[0])


def test_similarities_out_of_the_range_of_float32_are_refused():
    x = np.full((10, 2), 1e15, dtype=np.float32) * np.random.RandomState(0).rand(10, 2).astype(np.float32)
    with pytest.raises(ValueError, match=r"out of the range of torch\.float32: remove it, or scale"):
        small(kernel="polynomial", kernel_params={"degree": 2}).fit(x)


# ---------------------------------------------------------------------- one sample at a time


def stream(transformer, x, batch=1) -> KSMTransformer:
    for start in range(0, len(x), batch):
        transformer.partial_fit(x[start : start + batch])
    return transformer


def shuffled_moons(count, seed):
    x, _ = two_moons(count, seed=seed)
    return x[np.random.RandomState(seed).permutation(count)]


def test_a_stream_of_single_samples_comes_close_to_fit():
    """Measured on four seeds: 0.184 to 0.190 (neural), 0.124 to 0.131 (nystroem), 0.122 to 0.127 (least_squares).

    ``fit`` reaches 0.181, 0.126 and 0.124 on average.
    """
    fresh, _ = two_moons(400, seed=100)
    x = shuffled_moons(803, seed=1)
    found = stream(small(16), x[:800])
    for number, (readout, bound) in enumerate({"neural": 0.21, "nystroem": 0.14, "least_squares": 0.14}.items()):
        found.set_params(readout=readout).partial_fit(x[800 + number : 801 + number])
        assert error(found, fresh) < bound, readout
    assert found.n_samples_seen_ == 803


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("readout", READOUTS)
def test_a_long_stream_comes_within_an_eighth_of_fit(seed, readout):
    fresh, _ = two_moons(400, seed=100)
    x = shuffled_moons(4000, seed)
    whole = KSMTransformer(16, kernel_params=SIGMA, readout=readout, random_state=seed).fit(x)
    single = stream(KSMTransformer(16, kernel_params=SIGMA, readout=readout, random_state=seed), x)
    assert error(single, fresh) < 1.125 * error(whole, fresh)


def test_one_sample_is_enough_for_features():
    x = np.array([[1.0, 2.0]])
    fitted = small(readout="nystroem").partial_fit(x)
    assert fitted.transform(x) @ fitted.transform(x).T == pytest.approx(1.0)
    assert (fitted.n_samples_seen_, fitted.n_features_in_, fitted.components_.shape) == (1, 2, (1, 2))
    assert np.array_equal(np.unique(fitted.components_, axis=0), x)


def test_as_many_neurons_as_samples_represent_all_of_them():
    """A restart, at powers of 2, uses all samples so far. The error is 0.002, as landmarks lie next to the samples.

    With half as many neurons it is much larger.
    """
    x, _ = two_moons(8)
    assert error(stream(small(8, readout="nystroem"), x), x) < 0.01
    assert error(stream(small(4, readout="nystroem"), x), x) > 0.3


def test_the_error_falls_with_the_number_of_samples():
    fresh, _ = two_moons(400, seed=100)
    x, found, errors = shuffled_moons(1024, seed=3), small(16, readout="nystroem"), []
    for start, end in ((0, 4), (4, 16), (16, 64), (64, 1024)):
        errors.append(error(stream(found, x[start:end]), fresh))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.6
    assert errors[-1] < 0.2


def test_the_split_of_a_stream_into_calls_does_not_matter_for_full_batches():
    x = shuffled_moons(512, seed=2)
    whole = small(batch_size=32).partial_fit(x)
    parts = stream(small(batch_size=32), x, batch=64)
    assert np.array_equal(parts.components_, whole.components_)
    assert np.array_equal(parts.transform(x), whole.transform(x))
    assert (parts.n_updates_, parts.n_samples_seen_) == (whole.n_updates_, 512)


def test_transform_does_not_change_the_stream():
    x = shuffled_moons(70, seed=2)
    transformed, untouched = small(readout="least_squares"), small(readout="least_squares")
    for row in x:
        transformed.partial_fit(row[None]).transform(x[:3])
        untouched.partial_fit(row[None])
    assert np.array_equal(transformed.transform(x), untouched.transform(x))


def test_features_follow_the_current_network():
    x = shuffled_moons(100, seed=2)
    found = stream(small(), x[:90])
    before = found.transform(x)
    found.partial_fit(x[90:])
    assert not np.array_equal(found.transform(x), before)
    network = found.network_
    expected = network.forward(torch.tensor(x)).numpy()
    np.testing.assert_allclose(found.transform(x), expected, rtol=0, atol=1e-8)


def test_a_stream_continues_identically_after_pickling():
    x = shuffled_moons(140, seed=4)
    whole = stream(small(), x)
    for again in (lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy):
        half = again(stream(small(), x[:90]))
        assert np.array_equal(half.transform(x), stream(small(), x[:90]).transform(x))
        rest = stream(half, x[90:])
        assert np.array_equal(rest.components_, whole.components_)
        assert np.array_equal(rest.transform(x), whole.transform(x))


def test_a_stream_continues_from_fit_with_small_steps():
    x = shuffled_moons(400, seed=5)
    fresh, _ = two_moons(400, seed=100)
    fitted = small(16, updates=500).fit(x)
    before, landmarks = error(fitted, fresh), fitted.components_
    stream(fitted, shuffled_moons(200, seed=6))
    assert (fitted.n_samples_seen_, fitted.n_updates_) == (600, 700)
    moved = np.linalg.norm(fitted.components_ - landmarks, axis=1)
    assert 0 < moved.max() < 0.1
    assert error(fitted, fresh) < 1.05 * before


@pytest.mark.filterwarnings("ignore:The kernel error of these features")  # the paper's own responses
def test_partial_fit_on_the_data_of_fit_keeps_the_error():
    """Regression test: with 100 components and a wide kernel the error was 13 after one call."""
    x = shuffled_moons(2000, seed=0)
    fitted = KSMTransformer(updates=300, bound="paper", readout="neural", random_state=0).fit(x)
    before = error(fitted, x[:500])
    assert error(fitted.partial_fit(x[:500]), x[:500]) < 1.15 * before
    fitted = KSMTransformer(updates=30, random_state=0).fit(x)
    assert error(fitted, x[:500]) < 1e-8
    assert error(fitted.partial_fit(x[:500]), x[:500]) < 1e-8


@pytest.mark.parametrize("other", [{"n_components": 9}, {"kernel": "laplacian"}, {"kernel_params": {"sigma": 0.4}}])
def test_partial_fit_refuses_other_components_or_kernels(other):
    x = shuffled_moons(60, seed=1)
    found = small().partial_fit(x[:50])
    before = found.transform(x)
    with pytest.raises(ValueError, match="call `fit` to start again"):
        found.set_params(**other).partial_fit(x[50:])
    assert np.array_equal(found.transform(x), before)
    assert found.fit(x).n_samples_seen_ == 60


def test_an_unknown_readout_does_not_change_the_stream():
    x = shuffled_moons(60, seed=1)
    found = small().partial_fit(x[:50])
    before = found.components_
    with pytest.raises(ValueError, match="There is no readout 'pca'"):
        found.set_params(readout="pca").partial_fit(x[50:])
    assert np.array_equal(found.components_, before)
    assert (found._stream.seen, found.n_samples_seen_) == (50, 50)


@pytest.mark.filterwarnings("ignore:The kernel error of these features")  # the paper's own responses
def test_samples_that_are_too_large_are_refused():
    x = shuffled_moons(60, seed=1)
    bad = np.vstack([x, [[1e200, 0.0]]])
    for method in ("fit", "partial_fit"):
        with pytest.raises(ValueError, match=r"Sample 60 has values of up to 1\.0e\+200"):
            getattr(small(), method)(bad)
    with pytest.raises(ValueError, match="Features are out of the range"):
        small(kernel="polynomial", kernel_params={"degree": 3}).fit(x).transform(np.full((1, 2), 1e150))


def test_only_least_squares_stores_training_samples():
    x = np.random.RandomState(0).rand(4000, 50)
    sizes = [
        len(pickle.dumps(small(4, readout=readout, updates=2, kernel_params={"sigma": 3}).fit(x)))
        for readout in ("neural", "least_squares")
    ]
    assert sizes[0] < 1000 * 50 * 8 + 50_000  # the reservoir of the stream
    assert sizes[1] > 4000 * 50 * 8


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_single_samples_that_wait_are_learned_as_if_they_did_not(bound):
    """Also when the estimator is asked, copied or changed in between."""
    x = shuffled_moons(700, seed=2)
    options = {"bound": bound, "n_landmarks": 8, "readout": "nystroem"}
    waited, asked = small(**options), small(**options)
    for row in x:
        waited.partial_fit(row[None])
        assert asked.partial_fit(row[None]).n_updates_ == asked._stream.updates  # nothing waits any more
    assert waited._waiting.rows
    assert waited.n_samples_seen_ == asked.n_samples_seen_ == 700
    copied = pickle.loads(pickle.dumps(waited))
    assert np.array_equal(copied.transform(x), asked.transform(x))
    assert np.array_equal(waited.components_, asked.components_)
    assert waited.n_updates_ == asked.n_updates_
    assert waited.n_updates_ > 0 or bound == "tight"  # whose updates need 256 samples between two restarts


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_a_single_sample_that_is_not_sound_is_refused_at_once(bad):
    x = shuffled_moons(100, seed=2)
    found = small().partial_fit(x)
    found.partial_fit(x[:1])
    with pytest.raises(ValueError, match=r"NaN|infinity|out of the range"):
        found.partial_fit(np.array([[bad, 0.0]]))
    assert found.n_samples_seen_ == 101
    with pytest.raises(ValueError, match="3 features"):
        found.partial_fit(np.zeros((1, 3)))
    with pytest.raises(ValueError, match="call `fit` to start again"):
        found.set_params(n_components=9).partial_fit(x[:1])


def test_kernel_parameters_changed_in_place_are_noticed():
    x, params = shuffled_moons(100, seed=2), {"sigma": 0.3}
    found = small(kernel_params=params).partial_fit(x)
    params["sigma"] = 0.4
    with pytest.raises(ValueError, match="call `fit` to start again"):
        found.partial_fit(x[:1])


def test_fit_resets_the_stream():
    x = shuffled_moons(200, seed=5)
    expected = small().fit(x).transform(x)
    assert np.array_equal(stream(small(), x + 5).fit(x).transform(x), expected)
    wide = small(kernel_params={"sigma": 2.0}).fit(np.random.RandomState(0).randn(50, 7))
    assert wide.fit(x).n_features_in_ == 2


def test_a_stream_follows_a_shift_of_the_distribution():
    """Features of the shifted data are 0 at first and accurate after learning from it."""
    shift = np.array([6.0, 0.0])
    old, new = shuffled_moons(300, seed=7), shuffled_moons(2500, seed=8) + shift
    fresh = two_moons(300, seed=100)[0] + shift
    found = stream(small(16, readout="nystroem"), old)
    assert error(found, fresh) > 0.99
    stream(found, new, batch=8)
    assert error(found, fresh) < 0.35


def test_memory_is_bounded():
    found, sizes = small(8), []
    for seed in range(6):
        found.partial_fit(np.random.RandomState(seed).rand(1000, 2))
        sizes.append(len(pickle.dumps(found)))
        assert len(found._stream.reservoir.rows) == 1000 == found._stream.reservoir.capacity
    assert max(sizes) < 1.05 * sizes[0]
    assert found.n_samples_seen_ == 6000


def test_a_stream_keeps_the_dtype_of_its_first_samples():
    x = shuffled_moons(50, seed=1)
    found = stream(small(), x.astype(np.float32))
    found.partial_fit(x)
    assert found.components_.dtype == np.float32
    assert found.transform(x.astype(np.float32)).dtype == np.float32
    assert found.transform(x).dtype == np.float64


def test_invalid_samples_do_not_change_the_stream():
    x = shuffled_moons(50, seed=1)
    found = stream(small(), x)
    before = found.transform(x)
    for bad, message in ((np.ones((1, 3)), "3 features"), (np.full((1, 2), np.nan), "NaN"), (np.ones(2), "1D array")):
        with pytest.raises(ValueError, match=message):
            found.partial_fit(bad)
    assert np.array_equal(found.transform(x), before)
    assert found.n_samples_seen_ == 50


def test_a_stream_without_samples_is_not_fitted():
    with pytest.raises(NotFittedError):
        small().transform(np.ones((1, 2)))
    with pytest.raises(ValueError, match=r"0 sample\(s\)"):
        small().partial_fit(np.ones((0, 2)))


def test_a_half_life_that_is_too_short_is_refused_before_anything_is_learned(monkeypatch):
    monkeypatch.setattr(
        "ksm_lightning.sklearn.component_search.fit_network", lambda *args, **options: pytest.fail("it learned")
    )
    with pytest.raises(ValueError, match="at least the number of landmarks, 12"):
        KSMTransformer(8, half_life=5).fit(np.random.RandomState(0).randn(50, 2))
