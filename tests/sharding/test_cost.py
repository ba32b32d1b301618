"""The cost model against counted operations, numbers and memory. Tensors have shapes only, so sizes can be large."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.paths import ROOT
from helpers.plain_rules import FixedRates
from ksm_lightning.kernels import GaussianKernel, Kernel, PowerCosineKernel
from ksm_lightning.learning import Rates
from ksm_lightning.sharding import Shard, ShardedLearner, ShardedNetwork
from ksm_lightning.sharding.cost import memory, refresh_cost, update_cost


@pytest.fixture(autouse=True)
def _benchmark_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmark"))


def count(kernel: Kernel, n: int, m: int, batch: int, ranks: int, *, natural: bool, refreshes: bool = True):
    """Work and collectives of an update that computes the inverse, and of the next one."""
    from counting import CountedRanks, CountedWork, ShapesOnly

    with FakeTensorMode():
        group = CountedRanks(ShapesOnly(ranks))
        network = ShardedNetwork(kernel, Shard(n, group), m, ridge=1e-3)
        schedule = FixedRates(Rates(0.001, 0.0 if kernel.is_homogeneous else 0.001, 0.001), natural)
        learner = ShardedLearner(network, schedule, stage="learning", inverse="tracked")
        if not refreshes:
            rows = torch.empty_like(network.L, requires_grad=False)
            learner.responses.load_state_dict({"inverse": rows, "ridge": 1e-3, "drift": 0.15, "age": 1})
        found = []
        for update in range(2):
            group.calls = {}
            with CountedWork() as work:
                learner.learn(torch.empty(1, batch, m), update)
            found.append((work, group.calls))
    return found


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    ("kernel", "natural", "means"),
    [(GaussianKernel(), False, 0), (GaussianKernel(), True, 1), (PowerCosineKernel(3), True, 1)],
)
def test_counted_operations_and_numbers_are_those_of_the_model(kernel, natural, means, ranks):
    n, m, batch = 1003, 20, 16
    (first, sent_first), (second, sent_second) = count(kernel, n, m, batch, ranks, natural=natural)
    update, refresh = update_cost(n, m, batch, ranks, means=means), refresh_cost(n, ranks)
    assert second.operations == update.operations
    assert first.operations - second.operations == refresh.operations
    numbers = [sum(map(sum, sent.values())) for sent in (sent_first, sent_second)]
    assert numbers == [update.received + refresh.received, update.received]
    assert {name: len(calls) for name, calls in sent_second.items()} == {"gather": 4, "sum": 1 + means}


def test_no_collective_between_two_refreshes_is_larger_than_batch_times_neurons():
    n, batch = 1003, 16
    _, (work, sent) = count(GaussianKernel(), n, 20, batch, 4, natural=True)
    padded = 4 * -(-n // 4)
    assert max(max(calls) for calls in sent.values()) == batch * padded == update_cost(n, 20, batch, 4).largest
    assert work.largest == n * -(-n // 4)  # the rows of L and of the inverse are the largest tensors


@pytest.mark.parametrize(("n", "ranks"), [(1000, 4), (3000, 16)])
def test_counted_memory_is_that_of_the_model(n, ranks):
    (first, _), (second, _) = count(GaussianKernel(), n, 50, 64, ranks, natural=True)
    model = 4 * memory(n, 50, 64, ranks)
    assert second.peak <= first.peak
    assert 0.95 * model < first.peak < 1.05 * model
    assert first.largest == n * -(-n // ranks)


def test_a_rank_of_256_with_100_000_neurons_allocates_less_than_half_a_gigabyte():
    n, ranks = 100_000, 256
    _, (work, sent) = count(GaussianKernel(), n, 50, 64, ranks, natural=True, refreshes=False)
    assert work.largest == 391 * n
    assert work.peak < 4 * memory(n, 50, 64, ranks) < 0.42e9
    assert work.operations == update_cost(n, 50, 64, ranks).operations
    assert max(max(calls) for calls in sent.values()) == 64 * 391 * ranks


def test_four_ranks_share_the_work_of_8_000_neurons():
    """Of 64 updates and the refresh that follows, and of the memory: the whole network has n^3 for a refresh."""
    n, m, batch = 8000, 50, 64
    update, refresh = update_cost(n, m, batch, 4), refresh_cost(n, 4)
    whole = 64 * (4 * batch * n * m + 10 * batch * n * n) + n**3
    assert (64 * update.operations + refresh.operations) / whole < 0.3
    assert memory(n, m, batch, 4) / (4 * n * n) < 0.35  # L, its shifted copy, the inverse and a factor
