"""The Learner of a sharded network. Every process calls the same methods, with the same batches and samples."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ksm_lightning.learning.acceleration import Acceleration
from ksm_lightning.learning.learner import Learner, Stage
from ksm_lightning.learning.observation import Observation
from ksm_lightning.learning.relocation import choose_moves, place
from ksm_lightning.learning.responses import Inverse
from ksm_lightning.learning.rules import NaturalRule, PaperRule, Responses
from ksm_lightning.learning.schedule import Schedule
from ksm_lightning.learning.updates import Seen, Updates
from ksm_lightning.sharding import sharded_exact
from ksm_lightning.sharding.sharded_network import ShardedNetwork
from ksm_lightning.sharding.sharded_responses import ShardedResponses
from ksm_lightning.sharding.sharded_rule import ShardedNaturalRule


class ShardedLearner(Learner):
    """:class:`~ksm_lightning.learning.Learner` of a :class:`~.sharded_network.ShardedNetwork`.

    W and q of a neuron change on the process that owns it, from the same batch on all processes.

    Args:
        network: The network, changed in place.
        schedule: As of a Learner, like the other arguments.
    """

    network: ShardedNetwork
    responses: ShardedResponses

    def __init__(
        self,
        network: ShardedNetwork,
        schedule: Schedule,
        *,
        chooses_ridge: bool = False,
        stage: Stage | None = None,
        inverse: Inverse = "auto",
    ) -> None:
        self.shard = network.shard
        # All processes learn from the same batch, so what it shows has no other parts.
        super().__init__(
            network, schedule, chooses_ridge=chooses_ridge, stage=stage, inverse=inverse, acceleration="none"
        )

    def _make_rule(self) -> NaturalRule | PaperRule:
        return ShardedNaturalRule(self.shard) if self.schedule.is_natural else PaperRule()

    def _make_updates(self, inverse: Inverse, acceleration: Acceleration) -> tuple[ShardedResponses, Updates]:
        network, responses = self.network, ShardedResponses(self.network, inverse)
        return responses, ShardedUpdates(
            network, self.rule, responses, self.schedule, self._rates, acceleration, self.collectives
        )

    def learn(self, *args: Any, **options: Any) -> int:
        """One update per batch of a block, which is the same on all processes."""
        self.network.release()
        return super().learn(*args, **options)

    @torch.no_grad()
    def _relocate(self, x: Tensor, **options: Any) -> int:
        """Move landmarks that explain nothing of a sample (samples, m); all processes make the same moves."""
        network, shard, kernel = self.network, self.shard, self.network.kernel
        options["collectives"] = shard.ranks
        neurons, points = choose_moves(kernel, x, network.all_landmarks(), **options)
        if not len(neurons):
            return 0
        gain = shard.sum((network.q.square() * kernel.diag(network.W)).double().sum()) / shard.num_neurons
        inhibition = shard.gather(shard.diagonal(network.L)).median()
        weights = (network.W, network.q, network.L)
        place(kernel, weights, neurons, x[points].to(network.W), gain, inhibition, shard.rows.start)
        return len(neurons)

    @torch.no_grad()
    def finish(self, blocks: Iterable[Tensor]) -> float:
        """Set the best scale and the exact L for all data, see :func:`~.sharded_exact.consolidate`; returns J."""
        self.network.release()
        self.responses.reset()
        bound = sharded_exact.consolidate(self.network, blocks)
        self.invalidate()
        return bound

    def bound_on(self, x: Tensor) -> float:
        return math.nan if self.not_finite() else sharded_exact.bound_on(self.network, x)

    def balance(self, x: Tensor, shrinkage: float = 0.0) -> None:
        """Set the common scale and the first L for a sample (samples, m), see :func:`~.sharded_exact.balance`."""
        sharded_exact.balance(self.network, x, shrinkage)
        self.invalidate()

    def health(self) -> Tensor:
        return self.shard.sum(super().health())


class ShardedUpdates(Updates):
    """Updates of the neurons of one process."""

    network: ShardedNetwork

    def _correlate(self, own: Any, k: Tensor, y: Tensor, pullback: Callable[[Tensor], Any], tracks: bool) -> Any:
        rows = y[:, self.network.shard.rows]  # (batch, n_r)
        seen = self.rule.correlate(self._kernel, self._W, self._gains, own, Responses(k, rows, pullback, tracks), None)
        return seen._replace(y=y, rows=rows)

    def _observation(self, found: Seen, tracks: bool) -> Observation:
        shard, (k, y, seen) = self.network.shard, found
        norms = torch.stack(self.rule.gradient_norms(self._gains, self._L, seen)).double()
        W, q, L = shard.sum(norms.square()).sqrt()
        smallest = shard.ranks.gather(self._gains.detach().abs().min()[None]).min()
        return Observation(
            shard.gathered_mT(k), y, self.network.energy_terms(k, y), (W, q, L), smallest,
            self.responses.condition(tracks),
        )  # fmt: skip
