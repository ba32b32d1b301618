"""What is logged about an update, as the learner computes it."""

from typing import NamedTuple

from torch import Tensor

from ksm_lightning.network.functional import EnergyTerms


class Observation(NamedTuple):
    """What an update computed, from before the weights changed."""

    k: Tensor  # similarities (batch, n) of this process
    y: Tensor  # responses (batch, n) of this process
    energy: EnergyTerms  # of this process's batch
    gradient_norms: tuple[Tensor, Tensor, Tensor]  # of W, q and L, averaged over all processes
    smallest_gain: Tensor  # the smallest |q|; in a tight network the smallest length of a column of Q
    condition: Tensor  # a lower bound of the condition number of L + ridge I
