"""The rules against plain formulas, and natural steps against the fixed points that define them."""

import copy

import pytest
import torch
from torch.testing import assert_close

from helpers import plain_rules
from helpers.kernels import KERNELS
from helpers.learning_cases import ScaledGaussian, blocks, network_for, rates_for
from helpers.plain_rules import compute_step, largest_difference, learner_of
from ksm_lightning.kernels import GaussianKernel, PowerCosineKernel, make_kernel
from ksm_lightning.learning import Rates
from ksm_lightning.learning.learner import Snapshot
from ksm_lightning.network import KSMNetwork, NormalInit, functional


@pytest.mark.parametrize("natural", [True, False], ids=["natural", "paper"])
@pytest.mark.parametrize("spec", [*KERNELS, None], ids=str)
def test_updates_equal_the_plain_formulas(spec, natural):
    kernel = ScaledGaussian() if spec is None else make_kernel(spec[0], **spec[1])
    x = blocks() * (0.5 if spec and spec[0] == "polynomial" else 1.0)  # the paper's rates diverge for large powers
    ours = network_for(kernel, x, natural)
    theirs, rates = copy.deepcopy(ours), rates_for(kernel, natural)
    before = copy.deepcopy(ours)
    learner_of(ours, rates, natural, inverse="exact").learn(x)
    for batch in x:
        plain_rules.update(theirs, batch, rates, natural)
    assert largest_difference(theirs, before) > 1e-3
    assert largest_difference(ours, theirs) < 1e-9


def test_responses_and_steps_are_limited():
    """A start that responds far too strongly, with a gain near 0 and a landmark far away."""
    kernel, x = GaussianKernel(0.7), blocks(updates=3)
    ours = network_for(kernel, x, natural=True)
    with torch.no_grad():
        ours.L.mul_(1e-3)
        ours.q[0], ours.W[1] = 1e-8, 4.0
    theirs, rates = copy.deepcopy(ours), Rates(0.3, 0.3, 0.25)
    limited = compute_step(ours, x[0], natural=True).y
    assert not torch.allclose(limited, compute_step(ours, x[0], natural=False).y)
    learner_of(ours, rates, True, inverse="exact").learn(x)
    for batch in x:
        plain_rules.update(theirs, batch, rates, natural=True)
    assert largest_difference(ours, theirs) < 1e-9


def natural_step(net: KSMNetwork, x: torch.Tensor, step: float) -> tuple[Snapshot, torch.Tensor, torch.Tensor]:
    """One natural update of the Learner; returns the weights before it, and the batch's k and y by their formulas."""
    learner = learner_of(net, Rates(step, step, step), natural=True, inverse="exact")
    before = learner.snapshot()
    k = net.kernel.gram(x, before.W)
    y = torch.linalg.solve(before.L + net.ridge * torch.eye(net.num_neurons).double(), (k * before.q).mT).mT
    assert (y.norm(dim=1) < 2 * net.kernel.diag(x).sqrt()).all()  # the limit of responses does not act
    learner.learn(x[None])
    return before, k, y


@pytest.mark.parametrize("is_at_fixed_point", [True, False])
def test_a_natural_step_is_a_part_of_the_way_to_a_mean_shift(rng, is_at_fixed_point):
    """``w -> <y k x> / <y k>``, times ``<y k> / q``, which is 1 where q is at its own fixed point."""
    x = torch.randn(50, 2, generator=rng, dtype=torch.float64)
    net = KSMNetwork(GaussianKernel(0.8), 2, 3, init=NormalInit(0.3), generator=rng).double()
    with torch.no_grad():
        net.q.copy_(torch.tensor([0.1, 0.15, 0.2]))
        if is_at_fixed_point:  # a diagonal L with y_i = q_i k_i / <k_i^2>
            net.L.copy_(torch.diag(net.kernel.gram(x, net.W).square().mean(0) - net.ridge))
    before, k, y = natural_step(net, x, step := 0.01)
    weights, drive = y * k, (y * k).mean(0)  # (batch, n), (n,)
    assert torch.allclose(drive, before.q) == is_at_fixed_point
    way = weights.mT @ x / weights.sum(0)[:, None] - before.W
    assert_close(net.W - before.W, step * (drive / before.q)[:, None] * way)
    assert_close(net.q - before.q, step * (drive - before.q))
    assert_close(net.L - before.L, step * (y.mT @ y / len(x) - before.L))


def test_a_natural_step_of_a_power_cosine_kernel(rng):
    """``w -> <y df(w, x)/dw>`` and ``L -> C``; q stays 1."""
    x = torch.randn(50, 4, generator=rng, dtype=torch.float64)
    net = KSMNetwork(PowerCosineKernel(alpha=3), 4, 3, init=NormalInit(0.3), generator=rng).double()
    before, _, y = natural_step(net, x, step := 0.01)
    W = before.W.clone().requires_grad_()
    (mean,) = torch.autograd.grad((y * net.kernel.gram(x, W)).sum() / len(x), W)
    assert_close(net.W - before.W, step * (mean - before.W))
    assert torch.equal(net.q, torch.ones(3, dtype=torch.float64))
    assert_close(net.L - before.L, step * (y.mT @ y / len(x) - before.L))


def test_the_papers_rule_is_gradient_descent(rng):
    """One update of the Learner against ``w -= eta / q^2 de/dw``, ``q -= eta de/dq``, ``L += eta de/dL``."""
    x = torch.randn(50, 2, generator=rng, dtype=torch.float64)
    net = KSMNetwork(GaussianKernel(0.8), 2, 3, generator=rng).double()
    with torch.no_grad():
        net.q.copy_(torch.tensor([0.5, 1.0, 2.0]))
    before, step = copy.deepcopy(net), functional.hebbian_step(net.kernel, x, net.W, net.q, net.L, net.ridge)
    learner_of(net, Rates(0.01, 0.02, 0.1), natural=False).learn(x[None])
    assert_close(net.W, before.W - 0.01 * step.gradients.W / before.q.square()[:, None])
    assert_close(net.q, before.q - 0.02 * step.gradients.q)
    assert_close(net.L, before.L + 0.1 * step.gradients.L)


def test_a_gain_near_0_counts_as_a_part_of_the_mean(rng):
    """The step of W divides by ``q_i^2``, and at least by 1 % of its mean: the smaller gain moves its landmark less."""
    x = torch.randn(50, 2, generator=rng, dtype=torch.float64)
    moved = []
    for gain in (1e-3, 1e-6):
        torch.manual_seed(0)
        net = KSMNetwork(GaussianKernel(0.8), 2, 3).double()
        with torch.no_grad():
            net.q[1] = gain
        before = net.W.detach().clone()
        learner_of(net, Rates(0.1, 0.0, 0.0), natural=True, inverse="exact").learn(x[None])
        moved.append((net.W.detach() - before).norm(dim=1))
    assert_close(moved[1][[0, 2]], moved[0][[0, 2]], rtol=1e-2, atol=0)
    assert_close(moved[1][1], 1e-6 * moved[0][1], rtol=1e-2, atol=0)  # the gradient has a factor of q^2, too
