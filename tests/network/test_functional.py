"""Responses, dynamics, energy and gradients against float64 references."""

import pytest
import torch
from torch.testing import assert_close

from helpers import references
from ksm_lightning.kernels import GaussianKernel, Kernel
from ksm_lightning.network import functional

RIDGE = 1e-3


def state(n: int = 5, m: int = 4, batch: int = 9, dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(batch, m, dtype=torch.float64, generator=g)
    W = torch.randn(n, m, dtype=torch.float64, generator=g)
    q = 0.5 + torch.rand(n, dtype=torch.float64, generator=g)
    A = torch.randn(n, n, dtype=torch.float64, generator=g)
    L = A @ A.mT / n + 0.1 * torch.eye(n, dtype=torch.float64)
    return tuple(t.to(dtype) for t in (x, W, q, L))


def autograd_gradients(kernel, x, y, W, q, L):
    leaves = [t.clone().requires_grad_() for t in (W, q, L)]
    references.differentiable_energy(kernel, x, y, *leaves, RIDGE).backward()
    return [leaf.grad for leaf in leaves]


def check_gradients(kernel, x, W, q, L):
    step = functional.hebbian_step(kernel, x, W, q, L, RIDGE)
    expected = autograd_gradients(kernel, x, step.y, W, q, L)
    for name, value, reference in zip("WqL", step.gradients, expected, strict=True):
        assert_close(value, reference, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_equal_autograd_of_the_energy(kernel):
    check_gradients(kernel, *state())


def test_gradients_by_the_autograd_fallback_equal_autograd_of_the_energy(spec, kernel):
    class Fallback(type(kernel)):
        diag, diag_gradient = Kernel.diag, Kernel.diag_gradient
        prepare, evaluate = Kernel.prepare, Kernel.evaluate

    x, W, q, L = state()
    fallback = Fallback(**spec[1])
    if spec == ("arc_cosine", {"order": 0}):
        fallback.diag = kernel.diag  # acos at f(w, w) has an error of sqrt(eps)
    step = functional.hebbian_step(fallback, x, W, q, L, RIDGE)
    for value, reference in zip(step.gradients, autograd_gradients(kernel, x, step.y, W, q, L), strict=True):
        assert_close(value, reference, rtol=1e-9, atol=1e-9)


def test_gradients_of_zero_vectors_are_finite(kernel):
    x, W, q, L = state()
    x[0], W[1] = 0, 0
    step = functional.hebbian_step(kernel, x, W, q, L, RIDGE)
    assert all(gradient.isfinite().all() for gradient in step.gradients)


def test_responses_minimise_the_energy():
    x, W, q, L = state()
    kernel = GaussianKernel(1.0)
    k = kernel(x, W)
    y = functional.responses(q * k, L, RIDGE).requires_grad_()
    references.differentiable_energy(kernel, x, y, W, q, L, RIDGE).backward()
    assert y.grad.abs().max() < 1e-14


def test_responses_solve_the_linear_system():
    x, W, q, L = state()
    drive = q * GaussianKernel(1.0)(x, W)
    expected = drive @ torch.linalg.inv(L + RIDGE * torch.eye(5, dtype=torch.float64))
    assert_close(functional.responses(drive, L, RIDGE), expected, rtol=1e-11, atol=1e-11)


def test_a_failed_factorisation_returns_nan():
    assert functional.responses(torch.ones(2, 2), -torch.eye(2), RIDGE).isnan().all()


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4])
def test_dynamics_agree_with_the_closed_form(spread):
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=g))[0]
    L = basis @ torch.diag(torch.logspace(0, torch.log10(torch.tensor(spread)), 8, dtype=torch.float64)) @ basis.mT
    drive = torch.randn(6, 8, dtype=torch.float64, generator=g)
    found = functional.run_dynamics(drive, L, RIDGE)
    closed = functional.responses(drive, L, RIDGE)
    assert found.has_converged
    assert found.error <= 1e-8
    assert torch.linalg.norm(found.y - closed) / torch.linalg.norm(closed) < 1e-6


def test_dynamics_agree_with_the_closed_form_in_float32():
    x, W, q, L = state(dtype=torch.float32)
    drive = q * GaussianKernel(1.0)(x, W)
    found = functional.run_dynamics(drive, L, RIDGE)
    assert found.has_converged
    assert found.y.dtype == torch.float32
    exact = functional.responses(drive.double(), L.double(), RIDGE)
    assert torch.linalg.norm(found.y - exact) / torch.linalg.norm(exact) < 1e-6


def test_dynamics_warn_when_they_reach_max_steps():
    with pytest.warns(UserWarning, match="did not converge in 7 steps"):
        found = functional.run_dynamics(torch.ones(1, 2), torch.diag(torch.tensor([1.0, 1e-3])), RIDGE, max_steps=7)
    assert found.steps == 7
    assert not found.has_converged


def test_divergent_dynamics_are_refused():
    with pytest.raises(ValueError, match="positive definite"):
        functional.run_dynamics(torch.ones(1, 2), -torch.eye(2), RIDGE)


def test_zero_drive_gives_zero_responses():
    found = functional.run_dynamics(torch.zeros(3, 2), torch.eye(2), RIDGE)
    assert found.steps == 0
    assert found.y.eq(0).all()


def test_energy_equals_the_mean_over_samples_of_the_paper(kernel):
    x, W, q, L = state()
    k = kernel(x, W)
    y = torch.randn(9, 5, dtype=torch.float64)
    terms = functional.energy_terms(k, y, kernel.diag(W), q, L, RIDGE)
    assert float(terms.total) == pytest.approx(references.energy(k, y, kernel.diag(W), q, L, RIDGE), rel=1e-12)


def test_each_energy_term_equals_its_formula():
    x, W, q, L = state()
    k, y, norms = GaussianKernel(1.0)(x, W), torch.randn(9, 5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    terms = functional.energy_terms(k, y, norms, q, L, RIDGE)
    assert_close(terms.feedforward, -(q * y * k).sum(1).mean())
    assert_close(terms.gain, 0.5 * (q**2).sum())
    assert_close(terms.lateral, 0.5 * torch.einsum("bi,ij,bj->b", y, L, y).mean())
    assert_close(terms.lateral_cost, -0.25 * (L**2).sum())
    assert_close(terms.ridge, 0.5 * RIDGE * (y**2).sum(1).mean())


def test_aligned_signs_keep_the_gram_matrix_of_the_responses():
    W, y = torch.randn(6, 3), torch.randn(50, 6)
    aligned_W, aligned_y = functional.align_signs(W, y)
    assert (aligned_y.mean(0) >= 0).all()
    assert_close(aligned_y @ aligned_y.mT, y @ y.mT)
    flips = torch.where(y.mean(0) < 0, -1.0, 1.0)
    assert_close(aligned_W, W * flips[:, None])
