"""Sharded networks on threads, and the whole network that their rows make."""

from collections.abc import Callable

import torch

from helpers.thread_ranks import ThreadRanks
from ksm_lightning.network import KSMNetwork
from ksm_lightning.sharding import Shard, ShardedNetwork


def shard_of(network: KSMNetwork, ranks) -> ShardedNetwork:
    """The rows of a network that a rank owns."""
    own = ShardedNetwork(network.kernel, Shard(network.num_neurons, ranks), network.in_features, network.ridge)
    own = own.to(network.W)
    own.take(network.W, network.q, network.L)
    return own


def on_ranks(size: int, function: Callable) -> list:
    """Results of ``function(ranks)`` on each of ``size`` threads; the first error is raised."""
    results = ThreadRanks(size).run(function)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def rows_of(network: ShardedNetwork) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in network.named_parameters()}


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The weights of all neurons from the rows of each rank."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
