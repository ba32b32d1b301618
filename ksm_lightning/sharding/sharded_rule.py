"""The natural rule of a process that owns some of the neurons. The paper's rule needs no other neurons as it is."""

import torch
from torch import Tensor

from ksm_lightning.learning.rules import GAIN_FLOOR, NaturalRule
from ksm_lightning.sharding.layout import Shard


class ShardedNaturalRule(NaturalRule):
    """:class:`~ksm_lightning.learning.rules.NaturalRule` whose limits refer to the means over all neurons.

    Args:
        shard: The neurons of this process.
    """

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.shard = shard

    def prepare(self, q: Tensor) -> None:
        """Nothing is prepared: the number of neurons is not that of q (n_r,)."""

    def floor_of(self, gain: Tensor) -> Tensor:
        total: Tensor = self.shard.sum(torch.sum(gain))
        return total * (GAIN_FLOOR / self.shard.num_neurons)
