"""The best weights of a run: kept, returned to, measured again, and saved."""

import copy
from unittest.mock import Mock

import pytest
import torch

from helpers import references
from ksm_lightning.kernels import GaussianKernel, LaplacianKernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, TightSchedule, train
from ksm_lightning.learning.best import BestWeights, Snapshot
from ksm_lightning.learning.exact import solve_inner
from ksm_lightning.network import NETWORKS, DataInit, KSMNetwork, functional
from ksm_lightning.network.landmark_error import LandmarkError

SCHEDULES = {"paper": AdaptiveSchedule, "tight": TightSchedule}


@pytest.fixture
def x(rng) -> torch.Tensor:
    return torch.randn(120, 2, generator=rng)


@pytest.fixture(params=["paper", "tight"])
def network(request, x) -> KSMNetwork:
    made = NETWORKS[request.param](GaussianKernel(0.7), 2, 5, init=DataInit(x))
    Learner(made, SCHEDULES[request.param](), chooses_ridge=True).start(x)
    return made


def spoil(network: KSMNetwork) -> None:
    """Move all landmarks to one place."""
    with torch.no_grad():
        network.W.copy_(network.W[:1] + 0.01 * torch.arange(len(network.W))[:, None])


def test_the_best_weights_are_restored_after_later_ones_got_worse(network, x):
    best, before = BestWeights(), copy.deepcopy(network)
    best.watch(network, x)
    best.compare(network)
    spoil(network)
    best.compare(network)
    assert best.restore(network)
    for a, b in zip(network.parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not best.restore(network)  # it is there already


def test_better_weights_replace_the_kept_ones(network, x):
    best, good = BestWeights(), copy.deepcopy(network)
    spoil(network)
    best.watch(network, x)
    best.compare(network)
    bad = best.lowest
    assert not best.restore(good)  # compares, and keeps the better ones
    assert best.lowest < bad
    assert best.restore(network)
    assert torch.equal(network.W, good.W)


def test_a_kept_copy_does_not_follow_the_network(network, x):
    best = BestWeights()
    best.watch(network, x)
    best.compare(network)
    kept = best.best.W.clone()
    spoil(network)
    assert torch.equal(best.best.W, kept)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_never_kept(network, x, bad):
    best = BestWeights()
    best.watch(network, x)
    best.compare(network)
    good = best.best
    with torch.no_grad():
        network.W[0, 0] = bad
    best.compare(network)
    assert best.best is good
    assert best.restore(network)
    assert network.W.isfinite().all()


def test_without_a_sample_nothing_is_kept_or_restored(network):
    best, before = BestWeights(), network.W.detach().clone()
    best.compare(network)
    assert (best.best, best.error, best.state_dict()) == (None, None, {})
    assert not best.restore(network)
    assert torch.equal(network.W, before)


def test_the_error_of_a_tight_network_is_that_of_its_landmarks(x):
    network = NETWORKS["tight"](GaussianKernel(0.7), 2, 3, init=DataInit(x), num_landmarks=6)
    best = BestWeights()
    best.watch(network, x)
    best.compare(network)  # Q and L are not at their solution yet, and do not count
    wide, W = x.double(), network.W.detach().double()
    k = network.kernel(wide, W)
    values, vectors = torch.linalg.eigh(k @ torch.linalg.solve(network.kernel(W, W), k.mT))
    expected = references.nrmse(network.kernel(wide, wide), vectors[:, -3:] * values[-3:].sqrt())
    assert best.lowest == pytest.approx(expected, rel=1e-6)


def test_the_error_of_the_papers_network_includes_its_responses(x):
    network = NETWORKS["paper"](GaussianKernel(0.7), 2, 5, init=DataInit(x))
    best = BestWeights()
    best.watch(network, x)
    best.compare(network)
    wide, W, q = x.double(), network.W.detach().double(), network.q.detach().double()
    kernel, F = network.kernel, network.kernel(x.double(), x.double())
    k = kernel(wide, W)
    L = solve_inner((q * k).mT @ (q * k) / len(x), kernel.diag(W), q, network.ridge).L
    responses = references.nrmse(F, functional.responses(q * k, L, network.ridge))
    landmarks = (F - k @ torch.linalg.solve(kernel(W, W), k.mT)).norm() / F.norm()
    assert best.lowest == pytest.approx((responses * landmarks.item()) ** 0.5, rel=1e-6)


def test_by_landmarks_the_papers_network_is_judged_like_a_tight_one(x):
    network = NETWORKS["paper"](GaussianKernel(0.7), 2, 5, init=DataInit(x))
    best = BestWeights(is_by_landmarks=True)
    best.watch(network, x)
    best.compare(network)
    wide, W = x.double(), network.W.detach().double()
    F, k = network.kernel(wide, wide), network.kernel(wide, W)
    landmarks = (F - k @ torch.linalg.solve(network.kernel(W, W), k.mT)).norm() / F.norm()
    assert best.lowest == pytest.approx(landmarks.item(), rel=1e-6)
    with torch.no_grad():
        network.W.add_(1e-3 * torch.randn(W.shape, generator=torch.Generator().manual_seed(0)))
    is_worse = best.error(network.W) > best.lowest  # by less than the margin of the paper's bound
    assert best.error(network.W) < 1.02 * best.lowest
    assert best.restore(network) == is_worse


def test_more_updates_never_make_landmarks_worse_that_are_kept(x):
    kernel, errors = LaplacianKernel(2.0), {}
    for keeps in (False, True):
        for updates in (1, 300):
            network = train(kernel, x, 10, AdaptiveSchedule(updates), keeps_landmarks=keeps, batch_size=16)
            errors[keeps, updates] = LandmarkError(kernel, x)(network.W.detach().double())
    assert errors[False, 300] > errors[False, 1]  # the paper's bound trades landmarks for responses
    assert errors[True, 300] < 1.01 * errors[True, 1] < errors[False, 300]  # one update may gain a little


@pytest.mark.parametrize(("keeps", "expected"), [(False, [18, 45, 90, 180, 270]), (True, [18, 45, 90, 180, 200, 270])])
def test_a_long_run_that_keeps_landmarks_compares_them_between_searches(x, monkeypatch, keeps, expected):
    learner = Learner(NETWORKS["paper"](GaussianKernel(0.7), 2, 5), AdaptiveSchedule(900), keeps_landmarks=keeps)
    care, move, compare = Mock(wraps=learner._care), Mock(), Mock(wraps=learner.best.compare)
    monkeypatch.setattr(learner, "_care", care)
    monkeypatch.setattr(learner, "_move_if_better", move)
    monkeypatch.setattr(learner.best, "compare", compare)
    learner.learn(x.repeat(30, 1).view(300, 12, 2), sample=lambda update, batch: x)
    assert [call.args[1] for call in care.call_args_list] == expected
    assert move.call_count == 5
    assert compare.call_count == len(expected) + keeps  # and at the start, if landmarks are followed


def test_weights_that_are_not_finite_are_left_to_the_divergence_guard(x, monkeypatch):
    network = NETWORKS["tight"](GaussianKernel(0.7), 2, 5, init=DataInit(x))
    Learner(network, TightSchedule(40), chooses_ridge=True).start(x)
    learner, batches = Learner(network, TightSchedule(40), stage="learning"), x.repeat(4, 1).view(40, 12, 2)
    monkeypatch.setattr(learner, "move_idle_landmarks", lambda *_, **__: 0)
    learner.learn(batches[:9], sample=lambda update, batch: x)
    with torch.no_grad():
        network.W[0] = torch.nan
    learner.learn(batches[9:12], 9, sample=lambda update, batch: x)  # a search is before update 10
    assert "W" in learner.not_finite()
    assert learner.step_factor == 1


def test_state_survives_a_checkpoint_and_waits_for_a_sample(network, x, tmp_path):
    best = BestWeights()
    best.watch(network, x)
    best.compare(network)
    torch.save(best.state_dict(), tmp_path / "best.pt")
    loaded = BestWeights()
    loaded.load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True))
    assert (loaded.is_waiting, loaded.error, loaded.lowest) == (True, None, None)
    spoil(network)
    spoiled = network.W.detach().clone()
    assert not loaded.restore(network)  # which one is better is not known yet
    assert torch.equal(network.W, spoiled)
    loaded.watch(network, x)
    assert loaded.lowest == best.lowest
    assert loaded.restore(network)
    assert torch.equal(network.W, best.best.W)
    loaded.load_state_dict({})
    assert (loaded.best, loaded.is_waiting) == (None, False)


def test_watching_another_sample_measures_the_kept_weights_again(network, x):
    best = BestWeights()
    best.watch(network, x[:60])
    best.compare(network)
    first = best.lowest
    best.watch(network, x[60:])
    assert best.lowest != first
    again = BestWeights()
    again.watch(network, x[60:])
    again.compare(network)
    assert best.lowest == pytest.approx(again.lowest, rel=1e-12)


def test_kept_weights_move_to_the_dtype_of_the_network(network, x):
    """As they move from the CPU, where a checkpoint is read, to the device of the network."""
    best = BestWeights()
    best.watch(network, x)
    best.compare(network)
    wide, loaded = copy.deepcopy(network).double(), BestWeights()
    loaded.load_state_dict(best.state_dict())
    loaded.watch(wide, x.double())
    assert {value.dtype for value in loaded.best} == {torch.float64}
    assert not loaded.restore(wide)
    spoil(wide)
    assert loaded.restore(wide)
    assert torch.equal(wide.W.float(), network.W)


def test_a_snapshot_is_a_copy_of_all_weights(network):
    before, snapshot = copy.deepcopy(network), Snapshot.of(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)
    snapshot.restore(network)
    for a, b in zip(network.parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_learner_returns_to_its_best_weights(network, x):
    """Spoiled after the last search for idle landmarks, a run ends with the weights of that search."""
    learner = Learner(network, SCHEDULES[network.bound](40), stage="learning")
    learner.learn(x.repeat(4, 1).view(40, 12, 2), sample=lambda update, batch: x)
    assert learner.best.error is not None
    spoil(network)
    learner.invalidate()
    assert learner.keep_best()
    assert torch.equal(network.W, learner.best.best.W)
    assert not learner.keep_best()


def test_a_resumed_learner_compares_its_last_weights_with_the_loaded_ones(network, x):
    """Also after the last search for idle landmarks."""
    schedule, batches = SCHEDULES[network.bound](40), x.repeat(4, 1).view(40, 12, 2)
    learner = Learner(network, schedule, stage="learning")
    learner.learn(batches[:38], sample=lambda update, batch: x)
    assert not any(schedule.relocates_before(update) for update in (38, 39))
    state = learner.state_dict()
    resumed = Learner(network, schedule)
    resumed.load_state_dict(state)
    assert resumed.best.is_waiting
    resumed.learn(batches[38:], 38, sample=lambda update, batch: x)
    assert resumed.best.error is not None
    assert resumed.best.lowest <= learner.best.lowest


@pytest.mark.parametrize(("bound", "searches"), [("tight", [10, 30]), ("paper", [1, 24])])
def test_steps_of_landmarks_that_became_worse_are_halved_and_start_again_from_the_best(x, monkeypatch, bound, searches):
    """Of two searches for idle landmarks, the first sees worse landmarks and the second better ones.

    With the paper's bound, if the landmarks are all that is used.
    """
    network = NETWORKS[bound](GaussianKernel(0.7), 2, 5, init=DataInit(x))
    schedule, batches, seen = SCHEDULES[bound](40), x.repeat(4, 1).view(40, 12, 2), []
    Learner(network, schedule, chooses_ridge=True).start(x)
    learner, start = Learner(network, schedule, stage="learning", keeps_landmarks=True), network.W.detach().clone()
    assert [update for update in range(40) if schedule.relocates_before(update)] == searches
    run, full = learner._updates.run, learner.rates(15, 12)

    def watched(index, count, observe):
        if index == searches[0]:
            seen.append((network.W.detach().clone(), learner.step_factor, learner.rates(15, 12)))
        found = run(index, count, observe)
        if index + count == searches[0]:
            spoil(network)
        return found

    monkeypatch.setattr(learner._updates, "run", watched)
    monkeypatch.setattr(learner, "move_idle_landmarks", lambda *_, **__: 0)
    learner.learn(batches, sample=lambda update, batch: x)
    W, factor, rates = seen[0]
    assert torch.equal(W, start)
    assert (factor, rates.W, rates.q, rates.L) == (0.5, full.W / 2, full.q, full.L)
    assert learner._updates._rates[15, 0] == pytest.approx(rates.W)
    assert learner.step_factor == 0.5
    state = learner.state_dict()
    again = Learner(network, schedule)
    again.load_state_dict(state)
    assert (state["step_factor"], again.step_factor, again.rates(15, 12)) == (0.5, 0.5, rates)
    del state["step_factor"]  # as in older checkpoints
    again.load_state_dict(state)
    assert again.step_factor == 1
    learner.restart()
    assert learner.step_factor == 1
