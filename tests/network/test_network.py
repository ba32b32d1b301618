"""The network and the initialisation of its landmarks."""

import pytest
import torch
from torch.testing import assert_close

from ksm_lightning.kernels import GaussianKernel, LinearKernel
from ksm_lightning.network import functional
from ksm_lightning.network.initialisation import DataInit, NormalInit
from ksm_lightning.network.ksm_network import KSMNetwork


def test_parameters_have_the_papers_shapes_and_initial_values():
    net = KSMNetwork(GaussianKernel(0.3), in_features=3, num_neurons=2000)
    assert {name: tuple(p.shape) for name, p in net.named_parameters()} == {
        "W": (2000, 3),
        "q": (2000,),
        "L": (2000, 2000),
    }
    assert net.W.std().item() == pytest.approx(1.0, abs=0.03)
    assert net.W.mean().item() == pytest.approx(0.0, abs=0.03)
    assert net.q.eq(1).all()
    assert torch.equal(net.L, torch.eye(2000))


def test_forward_is_the_closed_form():
    net = KSMNetwork(GaussianKernel(1.0), 3, 5, ridge=0.01).double()
    net.q.data = torch.rand(5, dtype=torch.float64)
    net.L.data = net.L + 0.3 * torch.ones(5, 5)
    x = torch.randn(7, 3, dtype=torch.float64)
    expected = net.q * net.kernel(x, net.W) @ torch.linalg.inv(net.L + 0.01 * torch.eye(5))
    assert_close(net(x), expected.detach(), rtol=1e-10, atol=1e-10)


def test_solvers_agree():
    closed = KSMNetwork(GaussianKernel(1.0), 3, 5).double()
    slow = KSMNetwork(GaussianKernel(1.0), 3, 5, solver="dynamics").double()
    slow.load_state_dict(closed.state_dict())
    x = torch.randn(7, 3, dtype=torch.float64)
    assert_close(slow(x), closed(x), rtol=1e-6, atol=1e-6)


def test_the_generator_determines_the_initial_W():
    def initial_W(seed):
        return KSMNetwork(
            GaussianKernel(), 2, 4, init=NormalInit(0.5), generator=torch.Generator().manual_seed(seed)
        ).W.detach()

    assert torch.equal(initial_W(1), initial_W(1))
    assert not torch.equal(initial_W(1), initial_W(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_neurons": 0}, "`num_neurons` must be at least 1, got 0"),
        ({"in_features": -1}, "`in_features` must be at least 1"),
        ({"ridge": 0.0}, "`ridge` must be positive and finite"),
        ({"ridge": float("nan")}, "`ridge` must be positive and finite"),
        ({"solver": "magic"}, "`solver` must be"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        KSMNetwork(**{"kernel": LinearKernel(), "in_features": 2, "num_neurons": 3, **arguments})


def test_a_wrong_number_of_features_is_refused():
    net = KSMNetwork(LinearKernel(), in_features=2, num_neurons=3)
    with pytest.raises(ValueError, match=r"inputs of shape \(batch, 2\), got \(4, 3\)"):
        net(torch.zeros(4, 3))


def test_responses_have_no_gradient():
    net = KSMNetwork(LinearKernel(), 2, 3)
    assert not net(torch.zeros(4, 2)).requires_grad


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_invalid_scales_are_refused(scale):
    with pytest.raises(ValueError, match="positive and finite"):
        NormalInit(scale)


def test_data_init_uses_distinct_data_points(rng):
    x = torch.randn(50, 3)
    net = KSMNetwork(GaussianKernel(1.0), 3, 10, init=DataInit(x), generator=rng)
    distances = torch.cdist(net.W.detach(), x)
    assert distances.min(1).values.eq(0).all()
    assert len(distances.argmin(1).unique()) == 10


def test_fewer_points_than_neurons_are_repeated(rng):
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    net = KSMNetwork(GaussianKernel(1.0), 2, 5, init=DataInit(x), generator=rng)
    assert net.W.shape == (5, 2)
    assert torch.equal(net.W.detach().unique(dim=0), x)


def test_data_init_refuses_points_with_another_number_of_features():
    with pytest.raises(ValueError, match=r"points of shape \(samples, 3\), got \(5, 2\)"):
        KSMNetwork(LinearKernel(), 3, 2, init=DataInit(torch.zeros(5, 2)))


def test_gradient_steps_on_a_linear_network_match_the_inner_products():
    """A plain loop over ``hebbian_step``, without Lightning."""
    x = torch.randn(200, 2) * torch.tensor([1.5, 1.0])
    net = KSMNetwork(LinearKernel(), 2, 2, init=NormalInit(0.5))
    W, q, L = net.W.data, net.q.data, net.L.data
    for _ in range(2000):
        step = functional.hebbian_step(net.kernel, x, W, q, L, net.ridge)
        W -= 0.01 * step.gradients.W
        L += 0.5 * step.gradients.L
    y = net(x)
    error = torch.linalg.norm(x @ x.mT - y @ y.mT) / torch.linalg.norm(x @ x.mT)
    assert error < 2 * net.ridge  # the ridge accounts for the remaining error
