"""The Learner of a sharded network. Every process calls the same methods, with the same batches and samples."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ksm_lightning.learning.acceleration import Acceleration
from ksm_lightning.learning.best import BestWeights, Snapshot
from ksm_lightning.learning.collectives import numbers_of_first
from ksm_lightning.learning.learner import Learner, Stage
from ksm_lightning.learning.neighbours import groups_of_neighbours
from ksm_lightning.learning.observation import Observation
from ksm_lightning.learning.relocation import choose_moves, find_moves_in, place
from ksm_lightning.learning.responses import Inverse
from ksm_lightning.learning.rules import NaturalRule, PaperRule, Responses
from ksm_lightning.learning.schedule import Schedule
from ksm_lightning.learning.updates import Seen, Updates
from ksm_lightning.network import KSMNetwork
from ksm_lightning.network.landmark_error import MANY_LANDMARKS, LandmarkError
from ksm_lightning.sharding import sharded_exact
from ksm_lightning.sharding.layout import Shard
from ksm_lightning.sharding.sharded_network import ShardedNetwork
from ksm_lightning.sharding.sharded_responses import ShardedResponses
from ksm_lightning.sharding.sharded_rule import ShardedNaturalRule

# Landmarks that are searched together if there are more than 2,048: their matrices are not shared out.
_GROUP = 1024


class ShardedLearner(Learner):
    """:class:`~ksm_lightning.learning.Learner` of a :class:`~.sharded_network.ShardedNetwork`.

    W and q of a neuron change on the process that owns it, from the same batch on all processes. More than 2,048
    landmarks are not judged by their error, which takes a matrix (n, n): few idle ones move, as in the start of any
    network of that size, and a run ends with its last landmarks instead of its best.

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

    def _make_best(self) -> BestWeights:
        return ShardedBest(self.shard)

    def _make_updates(self, inverse: Inverse, acceleration: Acceleration) -> tuple[ShardedResponses, Updates]:
        network, responses = self.network, ShardedResponses(self.network, inverse)
        return responses, ShardedUpdates(
            network, self.rule, responses, self.schedule, self._rates, acceleration, self.collectives
        )

    def learn(self, *args: Any, **options: Any) -> int:
        """One update per batch of a block, which is the same on all processes."""
        self.network.release()
        return super().learn(*args, **options)

    def _care(self, sample: Callable[[int, Tensor], Tensor], update: int, batch: Tensor) -> None:
        if self.shard.num_neurons <= MANY_LANDMARKS:
            super()._care(sample, update, batch)
        else:
            self.move_idle_landmarks(sample(update, batch), most=MANY_LANDMARKS // 4)

    def _move_if_better(self, x: Tensor, error: LandmarkError | None, now: float | None = None, **options: Any) -> None:
        before, n = self.snapshot(), self.shard.num_neurons
        options.pop("collectives", None)
        if not self.move_idle_landmarks(x, **options) or not error:
            return
        after = error(self.network.all_landmarks(), n)
        after, now = numbers_of_first(self.shard.ranks, [after, now or error(self.shard.gather(before.W), n)])
        if after >= now:
            before.restore(self.network)
            self.responses.invalidate()

    @torch.no_grad()
    def move_idle_landmarks(self, x: Tensor, **options: Any) -> int:
        """Move landmarks that explain nothing of a sample (samples, m); all processes make the same moves."""
        network, shard, kernel = self.network, self.shard, self.network.kernel
        neurons, points = self._choose_moves(x, **options)
        if not len(neurons):
            return 0
        gain = shard.sum((network.q.square() * kernel.diag(network.W)).double().sum()) / shard.num_neurons
        inhibition = shard.gather(shard.diagonal(network.L)).median()
        weights = (network.W, network.q, network.L)
        place(kernel, weights, neurons, x[points].to(network.W), gain, inhibition, shard.rows.start)
        self.invalidate()
        return len(neurons)

    def _choose_moves(self, x: Tensor, most: int | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Landmarks (moved,) and their new points (moved,): the first process chooses, or each in some groups."""
        kernel, W, ranks = self.network.kernel, self.network.all_landmarks(), self.shard.ranks
        if len(W) <= MANY_LANDMARKS:
            return choose_moves(kernel, x, W, most, collectives=ranks, **options)
        chosen = torch.full((len(W),), -1, device=x.device)
        if not (W.isfinite().all() and x.isfinite().all() and len(x)):
            return chosen[:0], chosen[:0]  # the divergence guard reports it
        groups = groups_of_neighbours(kernel, W, x, _GROUP)[ranks.rank :: ranks.size]
        most = len(W) // 4 if most is None else most
        for neuron, point in find_moves_in(groups, kernel, x, W, most, **options):
            chosen[neuron] = point
        # Groups have no neurons in common, so that at most one process has chosen a point for each.
        chosen = ranks.gather(chosen[None]).amax(0)
        neurons = (chosen >= 0).nonzero()[:, 0]
        return neurons, chosen[neurons]

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


class ShardedBest(BestWeights):
    """Keeps the rows of the best weights of a network of up to 2,048 neurons."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard.ranks)
        self.shard = shard

    def _errors(self, network: KSMNetwork, weights: Snapshot) -> tuple[float, float]:
        W, q = (self.shard.gather(each) for each in (weights.W, weights.q))
        return super()._errors(network, Snapshot(W, q, weights.L))

    def _errors_of_landmarks(self, network: KSMNetwork, best: Snapshot) -> list[float]:
        assert self.error is not None
        return [self.error(self.shard.gather(W)) for W in (network.W.detach(), best.W)]
