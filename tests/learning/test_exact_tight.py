"""The closed form of the tight bound against random perturbations and principal components."""

import pytest
import torch
from torch.testing import assert_close

from helpers import references
from helpers.kernels import Quadratic
from ksm_lightning.kernels import GaussianKernel, LaplacianKernel, LinearKernel, PowerCosineKernel
from ksm_lightning.learning.exact import balance, consolidate, lateral_eigenvalues
from ksm_lightning.learning.exact_tight import add_jitter, settle, solve_inner
from ksm_lightning.learning.moments import similarity_moment
from ksm_lightning.network import TightNetwork, functional, tight

RIDGE = 1e-3
REGULAR = [GaussianKernel(1.0), LaplacianKernel(1.0), PowerCosineKernel(3), Quadratic()]


def state(rng, kernel, p=6, m=3, samples=40):
    """Inputs, landmarks, similarities ``k`` (samples, p) and ``K`` (p, p)."""
    x = torch.randn(samples, m, generator=rng, dtype=torch.float64)
    W = torch.randn(p, m, generator=rng, dtype=torch.float64)
    return x, W, kernel(x, W), kernel(W, W)


def exact(k, K, n, ridge=RIDGE):
    return solve_inner(k.mT @ k / len(k), K, n, ridge)


def nystroem(k, K):
    """``z = K^(-1/2) k`` (samples, p)."""
    values, vectors = torch.linalg.eigh(K)
    return k @ (vectors * values.rsqrt()) @ vectors.mT


def lowest(k, K, Q, L, ridge=RIDGE) -> float:
    """The energy with the responses at their minimum."""
    y = functional.responses(k @ Q.mT, L, ridge)
    return tight.energy_terms(k, y, K, Q, L, ridge).total.item()


def saddle(k, K, Q, ridge=RIDGE) -> float:
    """The energy with the responses at their minimum and L at its maximum, from the cubic of the paper's bound."""
    b = k @ Q.mT
    beta, vectors = torch.linalg.eigh(b.mT @ b / len(b))
    return lowest(k, K, Q, (vectors * lateral_eigenvalues(beta, ridge)) @ vectors.mT, ridge)


@pytest.mark.parametrize("n", [3, 6], ids=["p>n", "p=n"])
@pytest.mark.parametrize("kernel", REGULAR, ids=repr)
def test_no_perturbation_beats_the_closed_form(rng, kernel, n):
    _, _, k, K = state(rng, kernel)
    found = exact(k, K, n)
    best, slack = found.bound.item(), 1e-9 * abs(found.bound.item())
    assert lowest(k, K, found.Q, found.L) == pytest.approx(best, rel=1e-8)
    assert saddle(k, K, found.Q) == pytest.approx(best, rel=1e-8)
    for trial in range(200):
        size = 10.0 ** (trial % 4 - 3)
        Q = found.Q + size * found.Q.norm() * torch.randn(n, 6, generator=rng, dtype=torch.float64)
        assert saddle(k, K, Q) >= best - slack
        noise = size * found.L.norm().sqrt() * torch.randn(n, n, generator=rng, dtype=torch.float64)
        root = found.L.sqrt() + noise  # larger in some directions and smaller in others
        assert lowest(k, K, found.Q, root @ root.mT) <= best + slack


@pytest.mark.parametrize("n", [3, 6], ids=["p>n", "p=n"])
@pytest.mark.parametrize("kernel", REGULAR, ids=repr)
def test_the_gradients_of_Q_and_L_vanish_at_the_closed_form(rng, kernel, n):
    x, W, k, K = state(rng, kernel)
    found = exact(k, K, n)
    y, gradients = tight.hebbian_step(kernel, x, W, found.Q, found.L, RIDGE)
    assert gradients.Q.abs().max() < 1e-9 * (y.mT @ k).div(len(y)).abs().max()
    assert gradients.L.abs().max() < 1e-9 * found.L.abs().max()
    assert gradients.W.abs().max() > 1e-6  # W is not at its minimum


@pytest.mark.parametrize("n", [3, 6], ids=["p>n", "p=n"])
@pytest.mark.parametrize("kernel", REGULAR, ids=repr)
def test_responses_are_shrunk_principal_components_of_the_nystroem_features(rng, kernel, n):
    _, _, k, K = state(rng, kernel)
    found, z = exact(k, K, n), nystroem(k, K)
    mu, U = torch.linalg.eigh(z.mT @ z / len(z))
    mu, U = mu[-n:].flip(0), U[:, -n:].flip(1)
    expected = (1 - RIDGE / mu).clamp(min=0).sqrt() * (z @ U)
    y = functional.responses(k @ found.Q.mT, found.L, RIDGE)
    scale = expected.abs().max().item()
    assert_close(y.abs(), expected.abs(), rtol=1e-7, atol=1e-8 * scale)  # the sign of an eigenvector is free
    assert_close(y @ y.mT, expected @ expected.mT, rtol=1e-7, atol=1e-8 * scale**2)
    assert_close(found.L, torch.diag((mu - RIDGE).clamp(min=0)), rtol=1e-9, atol=1e-10 * scale**2)
    assert found.bound.item() == pytest.approx(-0.25 * (mu - RIDGE).clamp(min=0).square().sum().item(), rel=1e-9)


def test_without_a_ridge_the_bound_is_the_norm_of_the_nystroem_features(rng):
    _, _, k, K = state(rng, REGULAR[0])
    z = nystroem(k, K)
    expected = -0.25 * (z.mT @ z / len(z)).square().sum().item()
    assert exact(k, K, 6, ridge=1e-14).bound.item() == pytest.approx(expected, rel=1e-9)


def test_eigenvalues_below_the_ridge_give_silent_neurons(rng):
    _, _, k, K = state(rng, REGULAR[0])
    z = nystroem(k, K)
    mu = torch.linalg.eigvalsh(z.mT @ z / len(z)).flip(0)
    ridge = float(mu[1] + mu[2]) / 2  # between the second and the third
    found = exact(k, K, 4, ridge)
    y = functional.responses(k @ found.Q.mT, found.L, ridge)
    assert y[:, 2:].abs().max() == 0
    assert y[:, :2].abs().max() > 0.1
    assert_close(found.L.diagonal(), (mu[:4] - ridge).clamp(min=0), rtol=1e-9, atol=1e-12)


def test_shrinkage_moves_the_moment_towards_a_multiple_of_the_identity(rng):
    _, _, k, K = state(rng, REGULAR[0])
    z = nystroem(k, K)
    mu = torch.linalg.eigvalsh(z.mT @ z / len(z)).flip(0)
    found = solve_inner(k.mT @ k / len(k), K, 3, RIDGE, shrinkage=0.25)
    assert_close(found.L.diagonal(), (0.75 * mu + 0.25 * mu.mean())[:3] - RIDGE, rtol=1e-9, atol=1e-12)


def test_every_point_a_landmark_gives_the_error_of_kernel_pca(rng):
    kernel = GaussianKernel(0.7)
    x = torch.randn(30, 2, generator=rng, dtype=torch.float64)
    F = kernel(x, x)
    found = exact(F, add_jitter(F.clone(), torch.float64), 5, ridge=1e-12)
    y = functional.responses(F @ found.Q.mT, found.L, 1e-12)
    values = torch.linalg.eigvalsh(F)
    assert references.nrmse(F, y) == pytest.approx((values[:-5].norm() / values.norm()).item(), rel=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-7)])
def test_a_settled_network_has_the_leading_components_of_its_nystroem_features(rng, dtype, tolerance):
    kernel = GaussianKernel(1.0)
    x, W, k, K = state(rng, kernel)
    network = TightNetwork(kernel, 3, 3, 1e-9, num_landmarks=6).to(dtype)
    with torch.no_grad():
        network.W.copy_(W)
    bound = settle(network, similarity_moment(kernel, x.to(dtype).split(7), network.W))
    z = nystroem(k, K)
    U = torch.linalg.eigh(z.mT @ z)[1][:, -3:]
    y = network(x.to(dtype)).double()
    assert_close(y @ y.mT, z @ U @ U.mT @ z.mT, rtol=0, atol=tolerance)
    assert bound == pytest.approx(exact(k, K, 3, 1e-9).bound.item(), rel=tolerance)
    assert network.energy_of(x.to(dtype)).item() == pytest.approx(bound, rel=tolerance)


def test_balance_and_consolidation_settle_a_tight_network_and_leave_W_alone(rng):
    kernel = GaussianKernel(1.0)
    x, W, k, K = state(rng, kernel)
    network = TightNetwork(kernel, 3, 3, RIDGE, num_landmarks=6).double()
    with torch.no_grad():
        network.W.copy_(W)
    expected = exact(k, K, 3)
    balance(network, x)
    assert_close(network.L.detach(), expected.L, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        network.L.mul_(2)
    assert consolidate(network, similarity_moment(kernel, [x], network.W)) == pytest.approx(
        expected.bound.item(), rel=1e-6
    )
    assert_close(network.L.detach(), expected.L, rtol=1e-6, atol=1e-9)
    assert torch.equal(network.W.detach(), W)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_far_and_silent_landmarks_give_finite_weights(rng, dtype):
    for kernel, odd in ((GaussianKernel(0.7), 1e4), (LinearKernel(), 0.0), (PowerCosineKernel(3), 0.0)):
        x = torch.randn(50, 3, generator=rng, dtype=dtype)
        network = TightNetwork(kernel, 3, 6, 1e-4).to(dtype)
        with torch.no_grad():
            network.W.copy_(torch.cat([x[:4], x[:1], torch.full((1, 3), odd, dtype=dtype)]))
        balance(network, x)
        y = network(x)
        assert y.isfinite().all()
        assert y.norm(dim=1).max() < 2 * kernel.diag(x).sqrt().max()
