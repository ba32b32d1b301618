"""Sharded updates against those of the Learner: every kernel, both rules, 1, 2 and 4 ranks."""

import copy

import pytest
import torch

from helpers.fake_cuda import CUDA
from helpers.learning_cases import blocks, network_for, rates_for
from helpers.paths import ROOT
from helpers.plain_rules import FixedRates, learner_of
from helpers.shards import joined, on_ranks, relative_difference, rows_of, shard_of
from ksm_lightning.kernels import GaussianKernel, LinearKernel, PowerCosineKernel
from ksm_lightning.learning import Rates
from ksm_lightning.sharding import Shard, ShardedLearner, ShardedNetwork

N = 13  # does not divide evenly


def sharded(network, x, rates, natural, ranks, **options) -> dict:
    own = shard_of(network, ranks)
    settling = options.pop("settling", 0)
    learner = ShardedLearner(own, FixedRates(rates, natural, settling), stage="learning", **options)
    learner.learn(x)
    return rows_of(own)


def compare(kernel, natural, updates, sizes, **options):
    # With more neurons than features, L of a linear similarity is singular, and rounding errors grow in its null space,
    # also without shards.
    is_linear = isinstance(kernel, LinearKernel) or getattr(kernel, "alpha", 0) == 1
    x = 0.5 * blocks(updates, m=16 if is_linear else 5)
    network, rates = network_for(kernel, x, natural, N), rates_for(kernel, natural)
    whole = copy.deepcopy(network)
    learner_of(whole, rates, natural, **options).learn(x)
    for size in sizes:
        found = joined(on_ranks(size, lambda ranks: sharded(network, x, rates, natural, ranks, **options)))
        for name, value in whole.named_parameters():
            assert relative_difference(found[name], value.detach()) < 1e-9, (size, name)
            assert relative_difference(found[name], network.get_parameter(name).detach()) > 0 or name == "q"


@pytest.mark.parametrize("natural", [False, True], ids=["paper", "natural"])
def test_ranks_that_share_the_neurons_make_the_updates_of_one(kernel, natural):
    compare(kernel, natural, 12, [1, 2, 4], inverse="tracked")


@pytest.mark.parametrize("natural", [False, True], ids=["paper", "natural"])
def test_an_inverse_for_every_batch_gives_the_same_updates(natural):
    compare(GaussianKernel(0.7), natural, 8, [2], inverse="exact")
    compare(GaussianKernel(0.7), natural, 8, [2], inverse="tracked", settling=5)


@pytest.mark.slow
@pytest.mark.parametrize("natural", [False, True], ids=["paper", "natural"])
def test_they_still_do_after_500_updates(kernel, natural):
    compare(kernel, natural, 500, [1, 2, 4], inverse="tracked")


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("natural", [False, True], ids=["paper", "natural"])
@pytest.mark.parametrize("inverse", ["tracked", "exact"])
def test_updates_on_a_gpu_neither_wait_for_the_host_nor_leave_the_device(monkeypatch, natural, inverse):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmark"))
    from counting import ShapesOnly

    with torch.device(CUDA):
        network = ShardedNetwork(PowerCosineKernel(3), Shard(40, ShapesOnly(4, rank=1)), 5, ridge=1e-3)
        schedule = FixedRates(Rates(0.01, 0.0, 0.05), natural)
        learner = ShardedLearner(network, schedule, stage="learning", inverse=inverse)
        seen = []
        learner.learn(
            torch.empty(3, 8, 5),
            observe=lambda update: update == 1,
            on_observation=lambda *found: seen.append(found[1]),
        )
        values = [*network.parameters(), learner.health(), learner.responses.residual, seen[0].energy.total, seen[0].y]
    assert {value.device.type for value in values} == {"cuda"}
    assert seen[0].y.shape == (8, 40)
