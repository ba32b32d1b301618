"""Neurons shared out over processes: each of them owns rows of W, q, L and of the inverse, and none holds n x n."""

from ksm_lightning.sharding.layout import Shard
from ksm_lightning.sharding.sharded_learner import ShardedLearner
from ksm_lightning.sharding.sharded_network import ShardedNetwork

__all__ = ["Shard", "ShardedLearner", "ShardedNetwork"]
