"""Kernels by the parameters of an estimator, in the names of this package and of scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import polynomial_kernel, rbf_kernel
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ksm_lightning.kernels import CauchyKernel, GaussianKernel, auto_width
from ksm_lightning.sklearn import KSMTransformer
from ksm_lightning.sklearn.kernel_choice import PARAMETERS, choose_kernel

X = np.random.RandomState(0).randn(60, 4)
UNSET = dict.fromkeys(PARAMETERS) | {"sigma": "auto"}


def chosen(kernel, **options):
    params = {name: options.pop(name, UNSET[name]) for name in PARAMETERS}
    return choose_kernel(kernel, params, options.pop("kernel_params", None), X=X)


@pytest.mark.parametrize(
    ("kernel", "options", "reference"),
    [
        ("rbf", {"gamma": 0.3}, lambda x: rbf_kernel(x, gamma=0.3)),
        ("gaussian", {"gamma": 0.3}, lambda x: rbf_kernel(x, gamma=0.3)),
        ("gaussian", {"sigma": 2.0}, lambda x: rbf_kernel(x, gamma=1 / 8)),
        ("poly", {}, polynomial_kernel),
        ("poly", {"degree": 2, "gamma": 0.3, "coef0": 0.5}, lambda x: polynomial_kernel(x, None, 2, 0.3, 0.5)),
        ("poly", {"kernel_params": {"degree": 2}, "gamma": 1}, lambda x: polynomial_kernel(x, None, 2, 1, 1)),
        ("polynomial", {"degree": 2, "coef0": 0.0}, lambda x: polynomial_kernel(x, None, 2, None, 0)),
        ("polynomial", {"degree": 2}, lambda x: (x @ x.T) ** 2),
    ],
)
def test_kernels_are_those_of_scikit_learn(kernel, options, reference):
    found = chosen(kernel, **options)
    assert not found.chooses_width
    x = torch.tensor(X)
    np.testing.assert_allclose(found.kernel(x, x).numpy(), reference(X), rtol=1e-10, atol=1e-12)


def test_a_width_is_open_until_a_number_is_given():
    for kernel in ("rbf", "gaussian", "laplacian", "cauchy"):
        assert chosen(kernel).chooses_width
        assert chosen(kernel).with_width(2.5).sigma == 2.5
        assert chosen(kernel, kernel_params={"sigma": "auto"}).chooses_width
    assert chosen("cauchy", sigma=3).with_width(2.5).sigma == 3
    assert chosen("cauchy", kernel_params={"sigma": 3}).kernel.sigma == 3
    assert chosen(CauchyKernel(0.4)).kernel.sigma == 0.4
    assert chosen(CauchyKernel(0.4), sigma=0.5).kernel.sigma == 0.5
    assert not chosen("power_cosine", alpha=2).chooses_width


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        ("rbf", {"gamma": 0.1, "sigma": 2.0}, "`sigma` is 2.0 and `gamma` is 0.1: give only one of them"),
        ("rbf", {"gamma": -1.0}, "`gamma` must be positive and finite, got -1.0"),
        ("rbf", {"gamma": "scale"}, "`gamma` must be positive and finite, got 'scale'"),
        ("laplacian", {"gamma": 1.0}, "the gamma of scikit-learn multiplies the L1 distance: give `sigma`"),
        ("cauchy", {"gamma": 1.0}, "Kernel 'cauchy' has no parameter `gamma`: its parameters are sigma"),
        ("gaussian", {"sigma": "wide"}, "`sigma` must be 'auto' or a positive number, got 'wide'"),
        ("gaussian", {"alpha": 2}, "Kernel 'gaussian' has no parameter `alpha`: its parameters are sigma"),
        ("linear", {"sigma": 2.0}, "Kernel 'linear' has no parameter `sigma`: it has none"),
        ("poly", {"alpha": 2}, "Kernel 'poly' has no parameter `alpha`: its parameters are degree, gamma, coef0"),
        ("poly", {"coef0": -1.0}, "`coef0` must be 0 or positive"),
        ("gaussian", {"sigma": 2.0, "kernel_params": {"sigma": 3}}, "`sigma` is 2.0 and `kernel_params` has 3"),
        ("cosine", {}, "scale every sample to length 1 .*Normalizer.* and use kernel='linear'"),
        ("sigmoid", {}, "it is not a similarity"),
        (GaussianKernel(), {"alpha": 2}, "GaussianKernel has no parameter 'alpha'"),
    ],
)
def test_a_wrong_parameter_is_refused_in_one_sentence(kernel, options, message):
    with pytest.raises(ValueError, match=message):
        chosen(kernel, **options)


def test_the_default_width_follows_the_data():
    for unit in (1e-3, 1.0, 1e4):
        fitted = KSMTransformer(4, updates=3, random_state=0).fit(unit * X)
        assert fitted.kernel_.sigma == auto_width(torch.tensor(unit * X))
    assert KSMTransformer(4, kernel=GaussianKernel(), updates=3).fit(X).kernel_.sigma == 1.0


def test_parameters_of_the_kernel_are_parameters_of_the_estimator():
    fitted = KSMTransformer(4, updates=3).set_params(sigma=3).fit(X)
    assert fitted.kernel_.sigma == 3.0
    assert fitted.set_params(kernel="power_cosine", sigma="auto", alpha=2).fit(X).kernel_.alpha == 2
    pipeline = make_pipeline(KSMTransformer(6, updates=3, random_state=0), LogisticRegression())
    grid = {"ksmtransformer__sigma": [1.5, "auto"]}
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(X, X[:, 0] > 0)
    assert search.cv_results_["param_ksmtransformer__sigma"].tolist() == [1.5, "auto"]


def test_a_stream_chooses_its_width_from_its_first_samples():
    x = np.random.RandomState(1).randn(600, 4)
    one = KSMTransformer(4, random_state=0).partial_fit(x[:1])
    assert one.kernel_.sigma == 1.0
    widths = [one.partial_fit(row[None]).kernel_.sigma for row in x[1:]]
    assert widths[2:6] == [auto_width(torch.tensor(x[:4]))] * 4  # chosen again whenever the samples have doubled
    assert set(widths[254:]) == {auto_width(torch.tensor(x[:256]))}
    assert one.n_samples_seen_ == 600
    whole = KSMTransformer(4, random_state=0).partial_fit(x)
    assert whole.kernel_.sigma == auto_width(torch.tensor(x))
    fitted = KSMTransformer(4, updates=3, random_state=0).fit(x)
    assert fitted.partial_fit(3 * x[:50]).kernel_.sigma == auto_width(torch.tensor(x))


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine])
def test_the_defaults_classify_as_well_as_those_of_nystroem(load):
    """With sigma = 1 the accuracies were 0.63 and 0.71."""
    x, labels = load(return_X_y=True)

    def accuracy(features):
        pipeline = make_pipeline(StandardScaler(), features, LogisticRegression(max_iter=2000))
        return cross_val_score(pipeline, x, labels, cv=3).mean()

    ours = accuracy(KSMTransformer(random_state=0))
    assert ours > accuracy(Nystroem(random_state=0)) - 0.01
    assert ours > 0.95


def test_the_degree_of_an_offset_polynomial_is_its_power():
    x = np.random.RandomState(0).randn(30, 2)
    found = KSMTransformer(4, kernel="offset_polynomial", degree=2, random_state=0).fit(x)
    assert found.kernel_.params()["power"] == 2
