"""The inner solution against brute force, and the minimiser against autograd and known solutions."""

import pytest
import torch
from torch.testing import assert_close

from helpers import references
from helpers.kernels import KERNELS
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import GaussianKernel, LinearKernel, PolynomialKernel, PowerCosineKernel, make_kernel
from ksm_lightning.learning import exact_tight
from ksm_lightning.learning.exact import (
    bound_on,
    consolidate,
    lateral_eigenvalues,
    minimise_bound,
    optimal_scale,
    set_scale,
    similarity_moment,
    solve_inner,
)
from ksm_lightning.network import KSMNetwork, TightNetwork, functional

RIDGE = 1e-3


def state(rng, n=5, m=3, samples=40, kernel=None):
    kernel = kernel or GaussianKernel(1.0)
    x = torch.randn(samples, m, generator=rng, dtype=torch.float64)
    W = torch.randn(n, m, generator=rng, dtype=torch.float64)
    q = 0.5 + torch.rand(n, generator=rng, dtype=torch.float64)
    return kernel, x, W, q


def reduced_energy(kernel, x, W, q, L, ridge=RIDGE) -> torch.Tensor:
    """The energy with the responses at their minimum, for autograd."""
    k = kernel.gram(x, W)
    shifted = L + ridge * torch.eye(len(q), dtype=torch.float64)
    y = torch.linalg.solve(shifted, (q * k).mT).mT
    return references.differentiable_energy(kernel, x, y, W, q, L, ridge)


def exact(kernel, x, W, q, ridge=RIDGE):
    moment = similarity_moment(kernel, x.split(7), W)
    assert moment.samples == len(x)
    return solve_inner(moment.of_drive(q), kernel.diag(W), q, ridge)


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 10.0])
def test_eigenvalues_solve_the_cubic(ridge):
    beta = torch.tensor([0.0, 1e-18, 1e-9, 1e-3, 1.0, 1e9], dtype=torch.float64)
    found = lateral_eigenvalues(beta, ridge)
    assert_close(found * (found + ridge) ** 2, beta, rtol=1e-12, atol=0.0)
    assert lateral_eigenvalues(torch.tensor([-1e-20], dtype=torch.float64), ridge).item() == 0


def test_without_a_ridge_the_eigenvalue_is_the_cube_root():
    assert_close(lateral_eigenvalues(torch.tensor([8.0, 27.0]).double(), 0.0), torch.tensor([2.0, 3.0]).double())


def test_the_closed_form_is_the_maximum_over_L(rng):
    kernel, x, W, q = state(rng)
    found = exact(kernel, x, W, q)
    L = found.L.clone().requires_grad_()
    energy = reduced_energy(kernel, x, W, q, L)
    assert found.bound.item() == pytest.approx(energy.item(), rel=1e-12)
    (slope,) = torch.autograd.grad(energy, L)
    assert slope.abs().max() < 1e-12
    # Concave: every other positive definite L gives a smaller value.
    for size in (1e-3, 0.1, 10.0):
        for _ in range(10):
            root = torch.randn(5, 5, generator=rng, dtype=torch.float64)
            other = found.L + size * root @ root.mT * found.L.diagonal().mean()
            assert reduced_energy(kernel, x, W, q, other) < energy


@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_gradients_of_the_bound_are_the_local_rules_at_the_exact_L(rng, spec):
    kernel = make_kernel(spec[0], **spec[1])
    _, x, W, q = state(rng, n=3, kernel=kernel)
    W, q = W.requires_grad_(), q.requires_grad_()
    k = kernel.gram(x, W)
    b = q * k
    beta = torch.linalg.eigvalsh(b.mT @ b / len(x))
    root = lateral_eigenvalues(beta.detach(), RIDGE)
    # d(bound)/d(beta) = -1 / (2 (l + ridge)), by the envelope theorem.
    norms = (W * W).sum(1) ** kernel.order if hasattr(kernel, "order") else kernel.diag(W)
    surrogate = 0.5 * (q * q * norms).sum() - (beta / (2 * (root + RIDGE))).sum()
    by_autograd = torch.autograd.grad(surrogate, [W, q], allow_unused=True)
    L = exact(kernel, x, W.detach(), q.detach()).L
    found = functional.hebbian_step(kernel, x, W.detach(), q.detach(), L, RIDGE).gradients
    assert_close(found.W, by_autograd[0], rtol=1e-8, atol=1e-9)
    assert_close(found.q, by_autograd[1], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("ridge", [1e-12, RIDGE, 0.1])
def test_the_optimal_scale_is_the_best_common_gain(rng, ridge):
    kernel, x, W, _ = state(rng)
    beta = torch.linalg.eigvalsh(similarity_moment(kernel, [x], W).of_drive(torch.ones(5)))
    c = optimal_scale(beta, kernel.diag(W), ridge)

    def bound(gain):
        return exact(kernel, x, W, gain * torch.ones(5, dtype=torch.float64), ridge=ridge).bound.item()

    best = bound(c)
    assert best < bound(0.999 * c)
    assert best < bound(1.001 * c)
    assert best == pytest.approx(min(bound(c * f) for f in (0.5, 0.9, 0.999, 1.0, 1.001, 1.1, 2.0)))


def test_a_scale_at_which_nothing_responds_is_not_taken(rng):
    """With a large ridge the bound is lowest without any response, from which no update would ever return."""
    beta = torch.rand(5, generator=rng, dtype=torch.float64)
    assert optimal_scale(beta, torch.ones(5), ridge=10.0) == 1
    assert optimal_scale(0 * beta, torch.ones(5), ridge=0.0) == 1


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
@pytest.mark.parametrize(
    "kernel", [GaussianKernel(0.7), LinearKernel(), PowerCosineKernel(2), PolynomialKernel(2)], ids=str
)
def test_the_end_of_a_run_has_the_exact_scale_and_L_of_whatever_scale_it_came_with(rng, kernel, factor):
    x = torch.randn(200, 3, generator=rng, dtype=torch.float64)
    network = KSMNetwork(kernel, 3, 6, RIDGE, lambda *_: x[:6]).double()
    set_scale(kernel, network.W, network.q, torch.tensor(factor))
    before = exact(kernel, x, network.W, network.q).bound.item()
    bound = consolidate(network, similarity_moment(kernel, [x], network.W))
    assert bound <= before
    ended = exact(kernel, x, network.W, network.q)
    assert bound == pytest.approx(ended.bound.item(), rel=1e-9)
    assert_close(network.L.detach(), ended.L)
    for c in (0.999, 1.001):
        set_scale(kernel, network.W, network.q, torch.tensor(c, dtype=torch.float64))
        assert exact(kernel, x, network.W, network.q).bound.item() > bound
        set_scale(kernel, network.W, network.q, torch.tensor(1 / c, dtype=torch.float64))
    if kernel.is_homogeneous:
        assert (network.q == 1).all()


@pytest.mark.parametrize("samples", [4, 40])
@pytest.mark.parametrize("is_tight", [False, True])
def test_the_bound_on_a_sample_is_the_energy_with_the_exact_solution(rng, is_tight, samples):
    """Also of fewer samples than neurons, whose Gram matrix is the smaller one."""
    kernel, x, W, q = state(rng, samples=samples)
    if is_tight:
        network = TightNetwork(kernel, 3, 4, RIDGE, lambda *_: W, num_landmarks=5).double()
    else:
        network = KSMNetwork(kernel, 3, 5, RIDGE, lambda *_: W).double()
        network.q.data.copy_(q)
    expected, found = network.L.detach().clone(), bound_on(network, x).item()
    assert_close(network.L.detach(), expected)  # nothing has changed
    moment = similarity_moment(kernel, [x], network.W)
    if is_tight:
        exact_tight.settle(network, moment)
    else:
        network.L.data.copy_(solve_inner(moment.of_drive(q), kernel.diag(W), q, RIDGE).L)
    assert found == pytest.approx(network.energy_of(x).item(), rel=1e-7)


def test_the_minimum_of_the_linear_kernel_is_the_principal_subspace(rng):
    """With n = 2, Y Y^T is the best rank-2 approximation and has the error of PCA."""
    x, pca = references.principal_subspace(rng)
    found = minimise_bound(LinearKernel(), x, 2, 1e-9, generator=rng)
    error = kernel_nrmse(LinearKernel(), x, found.responses(LinearKernel(), x, 1e-9)).item()
    assert error == pytest.approx(pca, rel=1e-3)


def test_more_starts_find_the_same_or_a_lower_minimum(rng):
    x = torch.randn(80, 2, generator=rng, dtype=torch.float64)
    kernel = GaussianKernel(0.7)
    found = minimise_bound(kernel, x, 4, RIDGE, starts=3, generator=torch.Generator().manual_seed(0))
    alone = minimise_bound(kernel, x, 4, RIDGE, starts=1, generator=torch.Generator().manual_seed(0))
    assert found.bound <= alone.bound
    gradients = functional.hebbian_step(kernel, x, found.W, found.q, found.L, RIDGE).gradients
    assert max(gradients.W.abs().max(), gradients.q.abs().max(), gradients.L.abs().max()) < 1e-6
    assert found.bound == pytest.approx(exact(kernel, x, found.W, found.q).bound.item(), rel=1e-12)
