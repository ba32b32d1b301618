"""The error of landmarks on a fixed sample against full matrices and limit cases."""

import pytest
import torch

from helpers import references
from ksm_lightning.kernels import GaussianKernel, PolynomialKernel
from ksm_lightning.network.landmark_error import LandmarkError


@pytest.fixture
def x(rng) -> torch.Tensor:
    return torch.randn(40, 3, generator=rng, dtype=torch.float64)


def test_the_error_is_that_of_the_nystroem_features(x, kernel):
    W = x[:2] + 0.1  # few enough for every kernel, so that f(W, W) is regular
    F, k = kernel(x, x), kernel(x, W)
    approximation = k @ torch.linalg.solve(kernel(W, W), k.mT)
    expected = (F - approximation).norm() / F.norm()
    assert LandmarkError(kernel, x)(W) == pytest.approx(expected.item(), rel=1e-6)
    assert 0.01 < expected < 1


def test_fewer_features_are_the_leading_principal_components(x):
    kernel, W = GaussianKernel(0.7), x[:8]
    k = kernel(x, W)
    approximation = k @ torch.linalg.solve(kernel(W, W), k.mT)
    values, vectors = torch.linalg.eigh(approximation)
    error = LandmarkError(kernel, x)
    for count in (1, 3, 7):
        Y = vectors[:, -count:] * values[-count:].sqrt()
        assert error(W, count) == pytest.approx(references.nrmse(kernel(x, x), Y), rel=1e-9)
    assert error(W, 8) == error(W)
    assert error(W, 3) > error(W, 7) > error(W)


def test_every_point_a_landmark_gives_the_error_of_kernel_pca(x):
    kernel = GaussianKernel(0.7)
    values = torch.linalg.eigvalsh(kernel(x, x))
    error = LandmarkError(kernel, x)
    assert error(x, 5) == pytest.approx((values[:-5].norm() / values.norm()).item(), rel=1e-6)
    assert error(x) < 1e-6


def test_the_error_of_features_is_that_of_full_matrices(x, rng):
    Y = torch.randn(40, 4, generator=rng, dtype=torch.float64)
    error = LandmarkError(GaussianKernel(0.7), x)
    assert error.of_features(Y) == pytest.approx(references.nrmse(GaussianKernel(0.7)(x, x), Y), rel=1e-10)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_landmarks_that_are_not_finite_have_an_infinite_error(x, kernel, bad):
    W = x[:4].clone()
    W[1, 0] = bad
    assert LandmarkError(kernel, x)(W) == torch.inf


def test_similarities_that_overflow_have_an_infinite_error(x):
    W = x[:4].clone()
    W[1] = 1e200  # finite, but its square is not
    assert LandmarkError(PolynomialKernel(2), x)(W) == torch.inf


def test_equal_and_far_landmarks_have_a_finite_error(x):
    error = LandmarkError(GaussianKernel(0.7), x)
    W = torch.cat([x[:4], x[:2], torch.full((1, 3), 1e3, dtype=torch.float64)])
    assert error(W) == pytest.approx(error(x[:4]), rel=1e-6)


def test_landmarks_in_float32_are_measured_in_float64(x):
    error = LandmarkError(GaussianKernel(0.7), x)
    assert error(x[:5].float()) == pytest.approx(error(x[:5]), rel=1e-5)
