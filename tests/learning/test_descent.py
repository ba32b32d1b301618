"""The batch minimisation of the tight bound against finite differences, its limits and its minimum on half moons."""

import math

import pytest
import torch
from torch.testing import assert_close

from helpers import references
from helpers.kernels import KERNELS
from helpers.learning_cases import ScaledGaussian
from ksm_lightning.data import HalfMoonsDataModule
from ksm_lightning.kernels import GaussianKernel, LinearKernel, PolynomialKernel, PowerCosineKernel, make_kernel
from ksm_lightning.learning import descent
from ksm_lightning.learning.descent import bound_and_gradient, minimise_bound
from ksm_lightning.learning.exact_tight import add_jitter, solve_inner
from ksm_lightning.network import functional
from ksm_lightning.network.pivots import pivoted_cholesky

RIDGE = 1e-3
# The slope of ``f(W, W)`` is taken at two different landmarks, so cusps of these kernels at equal points do not matter.
SPECS = [*KERNELS, None]


def kernel_of(spec):
    return ScaledGaussian() if spec is None else make_kernel(spec[0], **spec[1])


def normal(rng, *shape) -> torch.Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def bound_of(kernel, x, W, n, ridge=RIDGE) -> float:
    """J from the eigenvalues of the Nystroem features, by an eigen-decomposition instead of Cholesky factors."""
    values, vectors = torch.linalg.eigh(add_jitter(kernel(W, W).clone(), torch.float64))
    z = kernel(x, W) @ (vectors * values.clamp(min=1e-300).rsqrt())
    mu = torch.linalg.eigvalsh(z.mT @ z / len(z))[-n:]
    return -0.25 * (mu - ridge).clamp(min=0).square().sum().item()


@pytest.mark.parametrize("n", [2, 4], ids=["p>n", "p=n"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_gradient_equals_finite_differences(rng, spec, n):
    """Along random directions, whose differences of fourth order are precise to about ten digits."""
    kernel, x, W = kernel_of(spec), normal(rng, 60, 5), normal(rng, 4, 5)
    bound, gradient = bound_and_gradient(kernel, x, W, n, RIDGE)
    assert bound == pytest.approx(bound_of(kernel, x, W, n), rel=1e-8)
    assert gradient.norm() > 1e-4 * abs(bound)
    for _ in range(5):
        step = 1e-3 * torch.nn.functional.normalize(normal(rng, 4, 5), dim=0)
        at = {k: bound_of(kernel, x, W + k * step, n) for k in (-2, -1, 1, 2)}
        slope = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / 12
        assert (gradient * step).sum().item() == pytest.approx(slope, rel=1e-5, abs=1e-9 * abs(bound))


def test_in_float32_bound_and_gradient_are_nearly_those_of_float64(rng):
    kernel, x, W = GaussianKernel(0.8), normal(rng, 500, 3), normal(rng, 8, 3)
    wide, narrow = (
        bound_and_gradient(kernel, x, W, 6, RIDGE),
        bound_and_gradient(kernel, x.float(), W.float(), 6, RIDGE),
    )
    assert narrow[0] == pytest.approx(wide[0], rel=1e-5)
    assert narrow[1].dtype == torch.float64
    assert (narrow[1] - wide[1]).norm() < 1e-4 * wide[1].norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bound_that_is_not_finite_is_infinite_and_its_start_is_kept(rng, bad):
    x, W = normal(rng, 60, 3), normal(rng, 4, 3)
    W[1, 0] = bad
    assert bound_and_gradient(LinearKernel(), x, W, 4, RIDGE)[0] == math.inf
    assert minimise_bound(LinearKernel(), x, W, 4, RIDGE, 5) is W


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["random", "far away", "equal landmarks", "data points"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_result_is_finite_and_never_worse_than_the_start(rng, spec, case, dtype):
    kernel, x, W = kernel_of(spec), normal(rng, 80, 5).to(dtype), normal(rng, 4, 5).to(dtype)
    if case == "far away":
        W[2:] *= 100
    elif case == "equal landmarks":
        W[2:] = W[0]
    elif case == "data points":
        W = x[:4].clone()
    first, start = bound_and_gradient(kernel, x, W, 3, RIDGE)[0], W.clone()
    found = minimise_bound(kernel, x, W, 3, RIDGE, 8)
    assert found.dtype == dtype
    assert torch.equal(W, start)  # the argument is not changed
    assert found.isfinite().all()
    last = bound_and_gradient(kernel, x, found, 3, RIDGE)[0]
    assert last <= first
    if case == "random":
        assert last < first - 0.01 * abs(first)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("name", ["gaussian", "laplacian", "cauchy"])
def test_units_of_the_inputs_change_nothing(rng, name, scale):
    x, W = normal(rng, 200, 3), normal(rng, 6, 3)
    plain = minimise_bound(make_kernel(name, sigma=0.8), x, W, 4, RIDGE, 10)
    scaled = minimise_bound(make_kernel(name, sigma=0.8 * scale), scale * x, scale * W, 4, RIDGE, 10)
    assert_close(scaled / scale, plain, rtol=1e-6, atol=1e-6)
    assert (plain - W).norm() > 0.1 * W.norm()


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**12])
@pytest.mark.parametrize("kernel", [PowerCosineKernel(3), PolynomialKernel(2)], ids=str)
def test_the_scale_of_the_similarity_changes_nothing(rng, kernel, scale):
    """With a power of 2, rounding scales as well."""
    x, W = normal(rng, 200, 3), normal(rng, 5, 3)
    unit = scale ** (2 * kernel.degree)
    plain = minimise_bound(kernel, x, W, 4, RIDGE, 10)
    scaled = minimise_bound(kernel, scale * x, scale * W, 4, RIDGE * unit, 10)
    assert_close(scaled / scale, plain, rtol=1e-6, atol=1e-6)
    assert (plain - W).norm() > 0.05 * W.norm()


def test_it_ends_early_when_iterations_gain_little(rng):
    kernel, x = GaussianKernel(0.8), normal(rng, 300, 2)
    ticks = []
    W = minimise_bound(kernel, x, normal(rng, 4, 2), 4, RIDGE, 500, ticks.append)
    assert 3 < sum(ticks) < 200
    assert set(ticks) == {1}
    ticks.clear()
    few = minimise_bound(kernel, x, W, 4, RIDGE, 3, ticks.append)
    assert sum(ticks) <= 3
    first, last = (bound_and_gradient(kernel, x, each, 4, RIDGE)[0] for each in (W, few))
    assert first - last < 0.01 * abs(first)  # nothing was left


def test_the_minimum_of_the_linear_kernel_is_the_principal_subspace(rng):
    x, pca = references.principal_subspace(rng)
    kernel = LinearKernel()
    W = minimise_bound(kernel, x, x[:2], 2, 1e-9, 200)
    k, K = kernel(x, W), kernel(W, W)
    inner = solve_inner(k.mT @ k / len(x), K, 2, 1e-9)
    y = functional.responses(k @ inner.Q.mT, inner.L, 1e-9)
    assert references.nrmse(x @ x.mT, y) == pytest.approx(pca, rel=1e-3)


@pytest.mark.parametrize(("n", "p", "error"), [(16, 16, 0.1065), (32, 32, 0.0230), (16, 24, 0.0968)])
def test_the_minimum_on_half_moons_is_the_ground_truth(monkeypatch, n, p, error):
    """The lowest errors of 300 iterations from six starts; the paper's bound ends at .175 with 16 and .142 with 32."""
    x, kernel, ridge = HalfMoonsDataModule(seed=0).train_points.data.double(), GaussianKernel(0.3), 1e-6
    start = x[pivoted_cholesky(kernel, x, p, torch.Generator().manual_seed(1))]
    early = minimise_bound(kernel, x, start, n, ridge, 150)
    monkeypatch.setattr(descent, "_PROGRESS", 0.0)  # no early end
    W = minimise_bound(kernel, x, early, n, ridge, 200)
    k, K = kernel(x, W), add_jitter(kernel(W, W), torch.float64)
    inner = solve_inner(k.mT @ k / len(x), K, n, ridge)
    y = functional.responses(k @ inner.Q.mT, inner.L, ridge)
    assert references.nrmse(kernel(x, x), y) == pytest.approx(error, rel=0.02)
    assert bound_of(kernel, x, early, n, ridge) == pytest.approx(inner.bound.item(), rel=0.01)
