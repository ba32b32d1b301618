"""Which neurons a rank owns, and how rows are put together."""

import re

import pytest
import torch

from helpers.shards import on_ranks
from helpers.thread_ranks import RankCollectives, ThreadRanks
from ksm_lightning.sharding import Shard


@pytest.mark.parametrize(("n", "size", "counts"), [(12, 4, [3, 3, 3, 3]), (10, 4, [3, 3, 3, 1]), (7, 1, [7])])
def test_every_neuron_has_one_owner(n, size, counts):
    ranks = ThreadRanks(size)
    shards = [Shard(n, RankCollectives(ranks, rank)) for rank in range(size)]
    assert [shard.count for shard in shards] == counts
    assert [i for shard in shards for i in range(n)[shard.rows]] == list(range(n))
    panels = list(shards[0].panels(2))
    assert [i for panel in panels for i in range(n)[panel.rows]] == list(range(n))
    for panel in panels:
        own = range(n)[shards[0].rows_of(panel.owner)]
        assert own[panel.own] == range(n)[panel.rows]


def test_gathered_and_broadcast_rows_are_those_of_the_whole_matrix():
    whole = torch.arange(70.0).view(10, 7)

    def check(ranks):
        shard = Shard(10, ranks)
        own = whole[shard.rows]
        assert torch.equal(shard.gather(own), whole)
        assert torch.equal(shard.gathered_mT(own.mT), whole.mT)
        for panel in shard.panels(2):
            assert torch.equal(shard.broadcast(panel, own), whole[panel.rows])
        square = torch.arange(100.0).view(10, 10)
        assert torch.equal(shard.diagonal(square[shard.rows]), square.diagonal()[shard.rows])

    on_ranks(4, check)


def test_processes_without_neurons_are_refused():
    message = "9 neurons in equal parts of 3 leave some of 4 processes without any: use at most 3 processes"
    with pytest.raises(ValueError, match=re.escape(message)):
        Shard(9, RankCollectives(ThreadRanks(4), 0))
