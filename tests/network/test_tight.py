"""The tight bound: energy and gradients against a slow reference, the bound itself, and the network."""

import pytest
import torch
from torch.testing import assert_close

from helpers import references
from helpers.kernels import Quadratic
from helpers.learning_cases import ScaledGaussian
from ksm_lightning.kernels import GaussianKernel, LaplacianKernel, PolynomialKernel, PowerCosineKernel
from ksm_lightning.network import KSMNetwork, TightNetwork, functional, tight

RIDGE = 1e-3


def state(n: int = 3, p: int = 4, m: int = 4, batch: int = 6):
    """Inputs x, landmarks W, gains Q and a positive definite L."""
    g = torch.Generator().manual_seed(3)
    x, W, Q, A = (
        torch.randn(*shape, dtype=torch.float64, generator=g) for shape in ((batch, m), (p, m), (n, p), (n, n))
    )
    return x, W, Q, A @ A.mT / n + 0.1 * torch.eye(n, dtype=torch.float64)


def check_gradients(kernel, x, W, Q, L):
    y, gradients = tight.hebbian_step(kernel, x, W, Q, L, RIDGE)
    expected_y = kernel.gram(x, W) @ Q.mT @ torch.linalg.inv(L + RIDGE * torch.eye(len(L), dtype=torch.float64))
    assert_close(y, expected_y, rtol=1e-9, atol=1e-9)
    leaves = [t.clone().requires_grad_() for t in (W, Q, L)]
    energy = references.tight_energy(kernel, x, y, *leaves, RIDGE)
    energy.backward()
    for name, value, leaf in zip("WQL", gradients, leaves, strict=True):
        assert_close(value, leaf.grad, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        assert leaf.grad.abs().max() > 0.01
    found = tight.energy_terms(kernel(x, W), y, kernel(W, W), Q, L, RIDGE).total
    assert found.item() == pytest.approx(energy.item(), rel=1e-9, abs=1e-9)
    return energy


@pytest.mark.parametrize("p", [3, 5], ids=["p=n", "p>n"])
def test_gradients_equal_autograd_of_the_energy(kernel, p):
    check_gradients(kernel, *state(p=p))


@pytest.mark.parametrize("p", [3, 5], ids=["p=n", "p>n"])
@pytest.mark.parametrize("kernel", [Quadratic(), ScaledGaussian()], ids=["quadratic", "scaled gaussian"])
def test_gradients_of_a_users_kernel_equal_autograd_of_the_energy(kernel, p):
    x, W, Q, L = state(p=p)
    y, gradients = tight.hebbian_step(kernel, x, W, Q, L, RIDGE)
    leaves = [t.clone().requires_grad_() for t in (W, Q, L)]
    references.tight_energy(kernel, x, y, *leaves, RIDGE).backward()
    for value, leaf in zip(gradients, leaves, strict=True):
        assert_close(value, leaf.grad, rtol=1e-9, atol=1e-9)


def test_a_diagonal_Q_is_the_papers_network(kernel):
    x, W, _, L = state(n=4, p=4)
    q = torch.tensor([0.5, -1.0, 1.5, 2.0], dtype=torch.float64)
    ours, gradients = tight.hebbian_step(kernel, x, W, torch.diag(q), L, RIDGE)
    paper = functional.hebbian_step(kernel, x, W, q, L, RIDGE)
    assert_close(ours, paper.y, rtol=1e-9, atol=1e-12)
    assert_close(gradients.W, paper.gradients.W, rtol=1e-9, atol=1e-9)
    assert_close(gradients.Q.diagonal(), paper.gradients.q, rtol=1e-9, atol=1e-9)
    assert_close(gradients.L, paper.gradients.L, rtol=1e-9, atol=1e-9)
    found = tight.energy_terms(paper.k, ours, kernel(W, W), torch.diag(q), L, RIDGE)
    expected = functional.energy_terms(paper.k, paper.y, kernel.diag(W), q, L, RIDGE)
    for name in expected._fields:
        assert getattr(found, name).item() == pytest.approx(getattr(expected, name).item(), rel=1e-9, abs=1e-9), name


# ---------------------------------------------------------------------- the bound

BOUNDED = [GaussianKernel(0.7), LaplacianKernel(0.7), PolynomialKernel(2), PowerCosineKernel(3), Quadratic()]


def similarity(F, y) -> float:
    """``1/2 sum_i <y_i^s y_i^t f(x_s, x_t)>``, averaged over pairs of samples."""
    return 0.5 * (y.mT @ F @ y).diagonal().sum().item() / len(y) ** 2


def below(k, y, Q, K) -> float:
    """``sum_ij Q_ij <y_i f(w_j, x)> - 1/2 tr(Q K Q^T)``."""
    return (Q * (y.mT @ k) / len(y)).sum().item() - 0.5 * (Q @ K @ Q.mT).trace().item()


@pytest.mark.parametrize("kernel", BOUNDED, ids=repr)
def test_the_bound_holds_for_any_responses_gains_and_landmarks(kernel, rng):
    for _ in range(30):
        x, W, y, Q = (torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((20, 3), (6, 3), (20, 4), (4, 6)))
        F, k, K = kernel(x, x), kernel(x, W), kernel(W, W)
        for gains in (Q, 0.01 * Q, torch.linalg.solve(K + 1e-9 * torch.eye(6, dtype=torch.float64), k.mT @ y / 20).mT):
            assert below(k, y, gains, K) <= similarity(F, y) * (1 + 1e-9)


@pytest.mark.parametrize("kernel", BOUNDED[:2], ids=repr)
def test_the_bound_is_an_equality_at_the_best_Q_if_every_point_is_a_landmark(kernel, rng):
    x, y = (torch.randn(12, m, generator=rng, dtype=torch.float64) for m in (3, 4))
    F = kernel(x, x)
    best = torch.linalg.solve(F, F @ y / 12).mT  # <y k^T> K^-1 with k = K = F
    assert below(F, y, best, F) == pytest.approx(similarity(F, y), rel=1e-9)
    fewer = F[:, :6]
    best = torch.linalg.solve(F[:6, :6], fewer.mT @ y / 12).mT
    assert below(fewer, y, best, F[:6, :6]) < 0.99 * similarity(F, y)


# ---------------------------------------------------------------------- the network


def network(n: int = 3, p: int = 5) -> TightNetwork:
    _, W, Q, L = state(n, p)
    net = TightNetwork(GaussianKernel(0.7), 4, n, RIDGE, num_landmarks=p).double()
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), (W, Q, L), strict=True):
            parameter.copy_(value)
    return net


def test_the_network_maps_landmarks_to_responses(rng):
    net, x = network(), torch.randn(7, 4, generator=rng, dtype=torch.float64)
    assert (net.bound, net.num_neurons, net.num_landmarks, net.in_features) == ("tight", 3, 5, 4)
    assert [name for name, _ in net.named_parameters()] == ["W", "Q", "L"]
    assert net.gains is net.Q
    shifted = net.L + RIDGE * torch.eye(3, dtype=torch.float64)
    expected = torch.linalg.solve(shifted, net.Q @ net.kernel(x, net.W).mT).mT
    assert_close(net(x), expected, rtol=1e-10, atol=1e-10, check_stride=False)
    assert_close(net.kernel(x, net.W) @ net.readout_matrix(), expected, rtol=1e-10, atol=1e-10)
    energy = references.tight_energy(net.kernel, x, net(x), net.W, net.Q, net.L, RIDGE)
    assert net.energy_of(x).item() == pytest.approx(energy.item(), rel=1e-10)


def test_the_dynamics_settle_at_the_closed_form(rng):
    net, x = network(), torch.randn(4, 4, generator=rng, dtype=torch.float64)
    exact = net(x)
    net.solver = "dynamics"
    assert_close(net(x), exact, rtol=1e-3, atol=1e-3)


def test_a_new_network_responds_like_the_papers():
    torch.manual_seed(0)
    ours = TightNetwork(GaussianKernel(0.7), 4, 3)
    torch.manual_seed(0)
    paper, x = KSMNetwork(GaussianKernel(0.7), 4, 3), torch.randn(5, 4)
    assert_close(ours(x), paper(x))


def test_aligned_signs_make_mean_responses_positive_and_leave_W_alone(rng):
    net = network()
    y = torch.randn(9, 3, generator=rng, dtype=torch.float64) - 1
    W, aligned = net.align_signs(y)
    assert torch.equal(W, net.W)
    assert (aligned.mean(0) > 0).all()
    assert_close(aligned @ aligned.mT, y @ y.mT)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (TightNetwork, "`num_landmarks` must be at least the number of neurons, 3, got 2"),
        (KSMNetwork, "every neuron has one landmark, but `num_landmarks` is 2 and `num_neurons` is 3"),
    ],
)
def test_an_impossible_number_of_landmarks_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(GaussianKernel(), 4, 3, num_landmarks=2)
