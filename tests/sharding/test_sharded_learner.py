"""Whole trainings on shared neurons: start, updates with moved landmarks and the exact end."""

import pytest
import torch

from helpers.learning_cases import blocks, network_for
from helpers.runs import moons
from helpers.shards import joined, on_ranks, relative_difference, rows_of, shard_of
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, relocation
from ksm_lightning.network import KSMNetwork
from ksm_lightning.sharding import ShardedLearner

UPDATES = 120


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor(moons(num_points=400).load()[0].x, dtype=torch.float64)
    order = torch.randint(len(x), (UPDATES, 64), generator=torch.Generator().manual_seed(1))
    return x, x[order]


def first_network(x: torch.Tensor) -> KSMNetwork:
    """A network with two landmarks far from all data, which the start or a search must move."""
    W = torch.cat([x[:14], torch.full((2, 2), 50.0, dtype=x.dtype)])
    return KSMNetwork(GaussianKernel(0.3), 2, 16, init=lambda *_: W).double()


def train(learner: Learner, x: torch.Tensor, batches: torch.Tensor) -> list[float]:
    energies: list[float] = []
    learner.start(x)
    learner.learn(
        batches, sample=lambda update, batch: x[:300], observe=lambda update: update % 40 == 0,
        on_observation=lambda update, seen, rates: energies.append(float(seen.energy.total)),
    )  # fmt: skip
    return [*energies, learner.finish(torch.split(x, 150)), float(learner.health().sum())]


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_on_half_moons_ends_like_one_on_a_whole_network(size):
    x, batches = data()
    whole = first_network(x)
    expected = train(Learner(whole, AdaptiveSchedule(UPDATES), chooses_ridge=True, acceleration="none"), x, batches)

    def work(ranks):
        own = shard_of(first_network(x), ranks)
        values = train(ShardedLearner(own, AdaptiveSchedule(UPDATES), chooses_ridge=True), x, batches)
        y = own(x)
        return values, rows_of(own), float(kernel_nrmse(own.kernel, x, y)[0]), float(own.energy_of(x, y)), own.ridge

    results = on_ranks(size, work)
    error, energy = float(kernel_nrmse(whole.kernel, x, whole(x))[0]), float(whole.energy_of(x))
    for values, _, found, found_energy, ridge in results:
        assert values == pytest.approx(expected, rel=1e-4)
        assert found == pytest.approx(error, rel=1e-2)
        assert found == pytest.approx(error, rel=1e-3)
        assert found_energy == pytest.approx(energy, rel=1e-4)
        assert ridge == whole.ridge
    assert error < 0.2
    W = joined([result[1] for result in results])["W"]
    assert relative_difference(W, whole.W.detach()) < 1e-6
    assert W.abs().max() < 5  # the two landmarks have moved


def test_observed_updates_show_what_a_whole_network_shows():
    x = 0.5 * blocks(4)
    network = network_for(GaussianKernel(0.7), x, natural=True, n=13)

    def observe(learner):
        seen = []
        learner.learn(x, observe=lambda update: True, on_observation=lambda update, found, rates: seen.append(found))
        return seen

    results = on_ranks(
        2, lambda ranks: observe(ShardedLearner(shard_of(network, ranks), AdaptiveSchedule(), stage="learning"))
    )
    expected = observe(Learner(network, AdaptiveSchedule(), stage="learning", acceleration="none", inverse="exact"))
    for found in results:
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.k, theirs.k)
            torch.testing.assert_close(ours.y, theirs.y)
            torch.testing.assert_close(torch.stack(ours.energy), torch.stack(theirs.energy))
            torch.testing.assert_close(torch.stack(ours.gradient_norms), torch.stack(theirs.gradient_norms))
            assert float(ours.smallest_gain) == pytest.approx(float(theirs.smallest_gain))
            assert float(ours.condition) > 1


def test_more_than_2048_landmarks_are_not_searched(monkeypatch):
    x, batches = data()
    monkeypatch.setattr(relocation, "MANY_LANDMARKS", 12)

    def work(ranks):
        learner = ShardedLearner(shard_of(first_network(x), ranks), AdaptiveSchedule(UPDATES), stage="learning")
        learner.learn(batches[:30], sample=lambda update, batch: x[:300])
        return rows_of(learner.network)["W"]

    assert torch.equal(torch.cat(on_ranks(2, work))[14:], first_network(x).W.detach()[14:])


def test_a_value_that_is_not_finite_is_seen_by_all_ranks():
    network = first_network(data()[0])
    network.W.data[0, 0] = torch.nan
    learners = on_ranks(
        2, lambda ranks: ShardedLearner(shard_of(network, ranks), AdaptiveSchedule(), stage="learning").not_finite()
    )
    assert learners == [["W"], ["W"]]


def test_the_whole_network_of_all_ranks_has_their_weights(monkeypatch):
    x, _ = data()
    network = first_network(x)

    def work(ranks):
        own = shard_of(network, ranks)
        return own.whole(), own(x[:5]), own

    results = on_ranks(2, work)
    for whole, y, _ in results:
        for name, value in network.named_parameters():
            assert torch.equal(whole.get_parameter(name), value)
        torch.testing.assert_close(y, network(x[:5]))
    monkeypatch.setattr("ksm_lightning.sharding.sharded_network.MANY_LANDMARKS", 8)
    with pytest.raises(ValueError, match=r"^This needs matrices of 16 x 16 numbers on one device, which parallel="):
        results[0][2].whole()
