"""The rule of the tight bound: updates against plain float64 formulas, limit cases, units, and its state."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers import references
from helpers.learning_cases import ScaledGaussian, blocks
from helpers.plain_rules import largest_difference, learner_of
from ksm_lightning.kernels import ArcCosineKernel, GaussianKernel, Kernel, LinearKernel, PowerCosineKernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, Phase, PhaseSchedule, Rates, TightSchedule, train
from ksm_lightning.network import KSMNetwork, NormalInit, TightNetwork

RATES = Rates(0.05, 0.2, 0.1)


def network_for(kernel: Kernel, x: Tensor, n: int = 4, p: int = 5) -> TightNetwork:
    """A network in float64 after the start of the schedule on a block (updates, batch, m)."""
    torch.manual_seed(1)
    network = TightNetwork(kernel, x.shape[2], n, init=NormalInit(0.7), num_landmarks=p).double()
    Learner(network, TightSchedule(), chooses_ridge=True).start(x.flatten(0, 1))
    return network


class PlainRule:
    """One update as the docstrings of TightRule describe it, without a jitter."""

    def __init__(self, network: TightNetwork) -> None:
        self.network = network
        self.square, self.steps = torch.zeros_like(network.W[:, 0]), 0

    def update(self, x: Tensor, rates: Rates) -> Tensor:
        """Change W, Q and L by one batch (batch, m); returns the responses."""
        net, kernel = self.network, self.network.kernel
        W, Q, L = (parameter.detach().clone() for parameter in (net.W, net.Q, net.L))
        (p, m), batch = W.shape, len(x)
        k, K = kernel(x, W), references.landmark_gram(kernel, W)
        y = torch.linalg.solve(L + net.ridge * torch.eye(len(L), dtype=torch.float64), Q @ k.mT).mT
        allowed = 2 * kernel.diag(x).sqrt()
        y = torch.stack([row * min(1.0, float(most / row.norm())) for row, most in zip(y, allowed, strict=True)])
        target = torch.linalg.solve(K, k.mT @ y / batch).mT

        leaf = W.clone().requires_grad_()
        references.tight_energy(kernel, x, y, leaf, target, L, net.ridge).backward()
        length = (kernel.diag(W) / kernel.curvature(W)).sqrt()
        direction = leaf.grad * length[:, None]
        self.steps += 1
        self.square = 0.99 * self.square + 0.01 * direction.square().sum(1)
        square = self.square / (1 - 0.99**self.steps)
        moved = W.clone()
        for j in range(p):
            moved[j] -= rates.W * m**-0.25 * length[j] * direction[j] / square[j].sqrt()
            if kernel.degree is not None:
                moved[j] *= W[j].norm() / moved[j].norm()

        with torch.no_grad():
            net.W.copy_(moved)
            net.Q.add_(rates.q * (target - Q))
            net.L.add_(rates.L * (y.mT @ y / batch - L))
        return y


@pytest.mark.parametrize("p", [4, 5], ids=["p=n", "p>n"])
def test_updates_equal_the_formulas_of_the_docstrings(kernel, p):
    x = blocks(updates=4, batch=12, m=6)  # five landmarks do not span them: there W has a direction
    ours = network_for(kernel, x, p=p)
    theirs = copy.deepcopy(ours)
    before = copy.deepcopy(ours)
    learner, plain = learner_of(ours, RATES, natural=True), PlainRule(theirs)
    learner.learn(x[:2])
    learner.learn(x[2:], first_update=2)  # the running mean continues in the next block
    for batch in x:
        plain.update(batch, RATES)
    assert largest_difference(ours, theirs) < 1e-6
    assert largest_difference(before, theirs) > 1e-2


@pytest.mark.parametrize("acceleration", ["none", "auto"])
@pytest.mark.parametrize("kernel", [PowerCosineKernel(3), LinearKernel(), ArcCosineKernel(1)], ids=str)
def test_landmarks_of_a_homogeneous_kernel_keep_their_lengths(kernel, acceleration):
    """Regression test: every step lengthened them a little, by 13 orders of magnitude in 8,000 updates."""
    x = blocks(updates=300, batch=32)
    network = network_for(kernel, x, n=3, p=4)
    before = network.W.detach().clone()
    learner_of(network, Rates(0.25, 0.2, 0.1), natural=True, acceleration=acceleration).learn(x)
    assert_close(network.W.norm(dim=1), before.norm(dim=1), rtol=1e-9, atol=0)
    assert float((network.W.detach() - before).norm() / before.norm()) > 0.1


def test_updates_of_a_users_kernel_equal_the_formulas_of_the_docstrings():
    kernel, x = ScaledGaussian(), blocks(updates=3, batch=12)
    ours = network_for(kernel, x)
    theirs = copy.deepcopy(ours)
    learner_of(ours, RATES, natural=True).learn(x)
    plain = PlainRule(theirs)
    for batch in x:
        plain.update(batch, RATES)
    assert largest_difference(ours, theirs) < 1e-6


def test_long_responses_are_limited():
    """With an L that is too small, responses of the first batch exceed twice sqrt(f(x, x))."""
    x = blocks(updates=1, batch=12)
    ours = network_for(GaussianKernel(0.7), x)
    with torch.no_grad():
        ours.L.mul_(1e-3)
    theirs = copy.deepcopy(ours)
    learner_of(ours, RATES, natural=True).learn(x)
    y = PlainRule(theirs).update(x[0], RATES)
    assert y.norm(dim=1).max().item() == pytest.approx(2.0)
    assert largest_difference(ours, theirs) < 1e-6


def test_a_tracked_inverse_gives_the_same_updates():
    x = blocks(updates=20, batch=8)
    exact = network_for(GaussianKernel(2.0), x, n=64, p=70)
    tracked = copy.deepcopy(exact)
    rates = Rates(0.01, 0.02, 0.02)
    learner_of(exact, rates, natural=True, inverse="exact").learn(x)
    learner = learner_of(tracked, rates, natural=True, inverse="tracked")
    learner.learn(x)
    assert learner.responses.state_dict()
    assert largest_difference(tracked, exact) < 1e-3


def test_nothing_moves_with_steps_of_0(kernel):
    x = blocks(updates=3, batch=12)
    network = network_for(kernel, x)
    before = copy.deepcopy(network)
    learner_of(network, Rates(0.0, 0.0, 0.0), natural=True).learn(x)
    assert largest_difference(network, before) == 0


@pytest.mark.parametrize("part", range(3), ids=["W", "Q", "L"])
def test_each_step_size_moves_its_own_parameter(part):
    x = blocks(updates=1, batch=12)
    network = network_for(GaussianKernel(0.7), x)
    before = copy.deepcopy(network)
    learner_of(network, Rates(*(0.1 if i == part else 0.0 for i in range(3))), natural=True).learn(x)
    moved = [not torch.equal(a, b) for a, b in zip(network.parameters(), before.parameters(), strict=True)]
    assert moved == [i == part for i in range(3)]


def test_units_of_the_inputs_change_nothing():
    x = blocks(updates=40, batch=12, m=3).flatten(0, 1)
    plain = train(GaussianKernel(0.8), x, 6, TightSchedule(40), bound="tight", num_landmarks=8, batch_size=64)
    scaled = train(GaussianKernel(800.0), 1e3 * x, 6, TightSchedule(40), bound="tight", num_landmarks=8, batch_size=64)
    assert_close(scaled.W / 1e3, plain.W, rtol=1e-6, atol=1e-6)
    assert_close(scaled(1e3 * x) @ scaled(1e3 * x).mT, plain(x) @ plain(x).mT, rtol=1e-5, atol=1e-6)


def test_the_scale_of_the_similarity_changes_nothing():
    """``f`` of 100-fold inputs is 10^4 times as large, and responses 100 times as long."""
    x = blocks(updates=40, batch=12, m=3).flatten(0, 1)
    runs = [
        train(PowerCosineKernel(3), c * x, 4, TightSchedule(40), bound="tight", batch_size=64) for c in (1.0, 100.0)
    ]
    assert_close(runs[1].W / 100, runs[0].W, rtol=1e-6, atol=1e-6)
    assert_close(runs[1](100 * x) / 100, runs[0](x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kernel", "odd"),
    [(GaussianKernel(0.7), 1e4), (LinearKernel(), 0.0), (PowerCosineKernel(3), 0.0)],
    ids=["gaussian", "linear", "power cosine"],
)
def test_equal_far_and_silent_landmarks_stay_finite(kernel, odd, dtype):
    x = blocks(updates=40, batch=16).to(dtype)
    network = TightNetwork(kernel, 5, 6, 1e-4, num_landmarks=8).to(dtype)
    with torch.no_grad():
        network.W.copy_(torch.cat([x[0, :5], x[0, :2], torch.full((1, 5), odd, dtype=dtype)]))
    learner = Learner(network, TightSchedule(40), stage="learning")
    learner.balance(x.flatten(0, 1))
    learner.learn(x)  # without a sample: nothing is relocated
    assert learner.not_finite() == []
    y = network(x[0])
    assert y.norm(dim=1).max() < 4 * kernel.diag(x[0]).sqrt().max()
    assert (network.W.norm(dim=1) <= max(3 * odd, 100.0)).all()


def test_a_failed_factorisation_becomes_nan_instead_of_an_error():
    x = blocks(updates=1, batch=12)
    network = network_for(GaussianKernel(0.7), x)
    with torch.no_grad():
        network.W[0] = torch.nan
    learner = learner_of(network, RATES, natural=True)
    learner.learn(x)
    assert {"W", "Q"} <= set(learner.not_finite())


def test_an_observation_has_the_energy_and_gradients_before_the_update():
    x = blocks(updates=1, batch=12)
    network = network_for(GaussianKernel(0.7), x)
    before, seen = copy.deepcopy(network), []
    learner_of(network, RATES, natural=True).learn(
        x, observe=lambda update: True, on_observation=lambda update, observation, rates: seen.append(observation)
    )
    leaves = [t.detach().clone().requires_grad_() for t in (before.Q, before.L)]
    energy = references.tight_energy(before.kernel, x[0], before(x[0]), before.W.detach(), *leaves, before.ridge)
    energy.backward()
    assert seen[0].energy.total.item() == pytest.approx(energy.item(), rel=1e-8)
    for norm, leaf in zip(seen[0].gradient_norms[1:], leaves, strict=True):
        assert norm.item() == pytest.approx(leaf.grad.norm().item(), rel=1e-6)
    assert seen[0].smallest_gain.item() == pytest.approx(before.Q.norm(dim=0).min().item())


def test_a_learner_continues_from_its_state_bitwise():
    x = blocks(updates=6, batch=12)
    whole = network_for(GaussianKernel(0.7), x)
    halves = copy.deepcopy(whole)
    learner_of(whole, RATES, natural=True).learn(x)
    first = learner_of(halves, RATES, natural=True)
    assert first.state_dict()["rule"] == {}
    first.learn(x[:3])
    state = first.state_dict()
    assert state["rule"]["steps"] == 3
    second = learner_of(halves, RATES, natural=True)
    second.load_state_dict(state)
    kept = state["rule"]["square"].clone()
    second.learn(x[3:], first_update=3)
    assert torch.equal(state["rule"]["square"], kept)  # the state is a copy
    for a, b in zip(whole.parameters(), halves.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("change", ["invalidate", "balance", "finish", "restore"])
def test_averages_are_forgotten_when_weights_change_elsewhere(change):
    x = blocks(updates=2, batch=12)
    learner = learner_of(network_for(GaussianKernel(0.7), x), RATES, natural=True)
    learner.learn(x[:1])
    argument = {"balance": [x[0]], "finish": [[x[0]]], "restore": [learner.snapshot()]}.get(change, [])
    getattr(learner, change)(*argument)
    assert learner.state_dict()["rule"] == {}


def test_moved_landmarks_get_exact_gains():
    x = blocks(updates=4, batch=24)
    network = network_for(GaussianKernel(2.0), x, n=4, p=8)
    learner = learner_of(network, RATES, natural=True)
    learner.learn(x[:1])
    with torch.no_grad():
        network.W[4:] = network.W[0]
    points = x.flatten(0, 1)
    assert learner.move_idle_landmarks(points, most=4) > 0
    assert len(torch.unique(network.W, dim=0)) > 5
    before = network.Q.detach().clone()
    learner.balance(points, 8 / (8 + len(points)))
    assert torch.equal(network.Q, before)


def test_averages_survive_a_search_that_moves_nothing():
    x = blocks(updates=1, batch=24)
    learner = learner_of(network_for(GaussianKernel(0.7), x), RATES, natural=True)
    learner.learn(x)
    assert learner.move_idle_landmarks(x[0], most=0) == 0
    assert learner.state_dict()["rule"]["steps"] == 1


class Pair:
    """The collectives of one of two learners that run in threads."""

    size = 2

    def __init__(self, rank: int, values: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.values, self.barrier = rank, values, barrier

    def gather(self, rows: Tensor) -> Tensor:
        self.values[self.rank] = rows.clone()
        self.barrier.wait()
        found = torch.cat(self.values)
        self.barrier.wait()
        return found

    def sum(self, value: Tensor) -> Tensor:
        return self.gather(value[None]).sum(0)

    def mean(self, value: Tensor) -> Tensor:
        return self.sum(value) / 2


@pytest.mark.parametrize("inverse", ["exact", "tracked"])
def test_two_learners_of_half_a_batch_equal_one_of_a_whole(inverse):
    """tests/test_distributed.py does the same with processes."""
    x, rates = blocks(updates=6, batch=8), Rates(0.02, 0.02, 0.02)
    n, p, sigma = (64, 70, 2.0) if inverse == "tracked" else (4, 5, 0.7)
    alone = network_for(GaussianKernel(sigma), x, n, p)
    networks = [copy.deepcopy(alone) for _ in range(2)]
    learner_of(alone, rates, natural=True, inverse=inverse).learn(x)
    values, barrier = [None, None], threading.Barrier(2, timeout=60)
    learners = [
        learner_of(network, rates, natural=True, inverse=inverse, collectives=Pair(rank, values, barrier))
        for rank, network in enumerate(networks)
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda learner, half: learner.learn(half), learners, x.split(4, dim=1)))
    assert bool(learners[0].responses.state_dict()) == (inverse == "tracked")
    assert largest_difference(networks[0], networks[1]) == 0
    assert largest_difference(networks[0], alone) < 1e-6


def test_the_tight_bound_has_no_phases():
    network = TightNetwork(GaussianKernel(), 2, 3)
    with pytest.raises(ValueError, match="The tight bound learns by the adaptive schedule: leave out `phases`"):
        Learner(network, PhaseSchedule([Phase(5)]))
    assert type(Learner(network, TightSchedule()).rule).__name__ == "TightRule"
    assert type(Learner(KSMNetwork(GaussianKernel(), 2, 3), AdaptiveSchedule()).rule).__name__ == "NaturalRule"
