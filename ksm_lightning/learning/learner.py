"""The Learner: owns a network, its schedule and the state of learning. Every update of a network is made here."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.learning.acceleration import Acceleration
from ksm_lightning.learning.collectives import Collectives, SingleProcess
from ksm_lightning.learning.exact import balance, bound_on, consolidate
from ksm_lightning.learning.moments import SimilarityMoment, similarity_moment
from ksm_lightning.learning.observation import Observation
from ksm_lightning.learning.relocation import relocate
from ksm_lightning.learning.responses import Inverse, ResponseSolver
from ksm_lightning.learning.schedule import Rates, Schedule
from ksm_lightning.learning.tight_rule import make_rule
from ksm_lightning.learning.units import natural_ridge, shrinkage_for
from ksm_lightning.learning.updates import Updates
from ksm_lightning.network import KSMNetwork, TightNetwork

Stage = Literal["unplaced", "unstarted", "learning"]
"""``unplaced``: W waits for data points to start from. ``unstarted``: :meth:`Learner.start` is still to be called."""
# How many times more a landmark must explain elsewhere to be moved while it learns: its gain has to be learned again.
_ADVANTAGE = 3.0


class Snapshot(NamedTuple):
    """A copy of the weights: W (p, m), the gains q (n,) or Q (n, p), and L (n, n)."""

    W: Tensor
    q: Tensor
    L: Tensor

    @classmethod
    def of(cls, network: KSMNetwork) -> "Snapshot":
        """A copy of a network's weights on their device."""
        return cls(*(parameter.detach().clone() for parameter in (network.W, network.gains, network.L)))

    @torch.no_grad()
    def restore(self, network: KSMNetwork) -> None:
        """Copy the weights back."""
        for parameter, value in zip((network.W, network.gains, network.L), self, strict=True):
            parameter.copy_(value)


class Learner:
    """Trains a network. Its main methods: :meth:`start`, :meth:`learn`, :meth:`move_idle_landmarks`, :meth:`finish`.

    The LightningModule, :func:`~ksm_lightning.learning.training.train`, the stream and the divergence guard all use it.
    Code that changes the weights in another way must call :meth:`invalidate`.

    Args:
        network: The network, changed in place.
        schedule: Step sizes and kernel parameters by update. It decides whether the rule is the paper's or natural.
        chooses_ridge: Whether :meth:`start` sets the network's ridge from the data.
        stage: Where learning stands. Default: ``unstarted`` with natural steps, ``learning`` with the paper's rule.
        inverse: How responses are computed, see :class:`~ksm_lightning.learning.responses.ResponseSolver`.
        acceleration: How steps are run, see :class:`~.acceleration.Accelerator`. Observed updates run without it.
        collectives: The other processes. Default: there are none.
    """

    def __init__(
        self,
        network: KSMNetwork,
        schedule: Schedule,
        *,
        chooses_ridge: bool = False,
        stage: Stage | None = None,
        inverse: Inverse = "auto",
        acceleration: Acceleration = "auto",
        collectives: Collectives | None = None,
    ) -> None:
        self.network = network
        self.schedule = schedule
        self.rule, self._is_tight = self._make_rule(), isinstance(network, TightNetwork)
        self.chooses_ridge = chooses_ridge
        self.stage: Stage = stage or ("unstarted" if schedule.is_natural else "learning")
        self.collectives: Collectives = collectives or SingleProcess()
        self.rate_factor = 1.0  # all step sizes are multiplied by this, see `halve_rates`
        self.responses, self._updates = self._make_updates(inverse, acceleration)
        self._base_kernel = network.kernel
        self._kernel_changes: dict[str, float] = {}

    def _make_rule(self) -> Any:
        return make_rule(self.network, self.schedule.is_natural)

    def _make_updates(self, inverse: Inverse, acceleration: Acceleration) -> tuple[ResponseSolver, Updates]:
        network, responses = self.network, ResponseSolver(self.network, inverse)
        return responses, Updates(
            network, self.rule, responses, self.schedule, self._rates, acceleration, self.collectives
        )

    # ------------------------------------------------------------------ start, learn, move, finish

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        """Start natural steps: move idle landmarks, set the common scale of W (or q) and the exact L.

        Args:
            x: A sample of the data (samples, m) without repetitions. Other processes are not asked: the caller gives
                all of them the same weights.
        """
        network, p = self.network, self.network.num_landmarks
        if self.chooses_ridge:
            network.ridge = natural_ridge(network.kernel, x, network.num_neurons, network.bound)
        self._relocate(x, None, most=p)
        self.balance(x, shrinkage_for(p, len(x)))
        self.stage = "learning"

    def learn(
        self,
        batches: Tensor,
        first_update: int = 0,
        *,
        every: int = 1,
        sample: Callable[[int, Tensor], Tensor] | None = None,
        observe: Callable[[int], bool] | None = None,
        on_observation: Callable[[int, Observation, Rates], object] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> int:
        """One update per batch of a block; returns the number of updates, as ``should_stop`` may end it early.

        Args:
            batches: Inputs (updates, batch, m).
            first_update: Number of the first update, counted from 0.
            every: Difference between the numbers of two updates. A stream numbers them by samples.
            sample: Returns points among which idle landmarks are moved, given the update and its batch. Default: none
                are moved.
            observe: Whether an update is observed, given its number.
            on_observation: Called with the number of an observed update, what was seen and the step sizes; after the
                update, or after those that run together.
            should_stop: Called after each update, or after those that run together.
        """
        self.set_kernel_for(first_update)
        numbers = range(first_update, first_update + every * len(batches), every)
        with self._updates.block(batches, numbers):
            index = 0
            while index < len(batches):
                update = numbers[index]
                self.set_kernel_for(update)
                if sample is not None and self.schedule.relocates_before(update):
                    self.move_idle_landmarks(sample(update, batches[index]))
                together = numbers[index : index + self._updates.most_at_once]
                count = self._undisturbed(together, sample is not None)
                for observed in self._updates.run(index, count, observe):
                    if on_observation is not None:
                        on_observation(*observed)
                index += count
                if should_stop is not None and should_stop():
                    return index
        return len(batches)

    def _undisturbed(self, numbers: range, moves: bool) -> int:
        """How many updates, of those with these numbers, follow each other without anything else in between."""
        schedule = self.schedule
        if moves or schedule.phase_ends:  # the kernel may change at the end of a phase
            for count, update in enumerate(numbers[1:], start=1):
                if update in schedule.phase_ends or (moves and schedule.relocates_before(update)):
                    return count
        return len(numbers)

    def move_idle_landmarks(self, x: Tensor, **options: Any) -> int:
        """Move landmarks that explain nothing of a sample (samples, m), see :func:`~.relocation.relocate`."""
        moved = self._relocate(x, self.collectives, advantage=_ADVANTAGE, **options)
        if moved and self._is_tight:
            self.balance(x, shrinkage_for(self.network.num_landmarks, len(x)))
        elif moved:
            self.invalidate()
        return moved

    def _relocate(self, x: Tensor, collectives: Collectives | None, **options: Any) -> int:
        return relocate(self.network, x, collectives=collectives, **options)

    @torch.no_grad()
    def finish(self, blocks: Iterable[Tensor]) -> float:
        """Set the best common scale of W (or q) and the exact L for all data; returns the bound J.

        A tight network gets the exact Q and L.

        Args:
            blocks: All inputs, or this process's share of them, one block (samples, m) at a time.

        Raises ValueError if there are no inputs.
        """
        total, count = similarity_moment(self.network.kernel, blocks, self.network.W)
        summed = self.collectives.sum(torch.cat([total.flatten(), total.new_tensor([float(count)])]))
        if not summed[-1] > 0:
            raise ValueError("The exact L needs data, but there are no inputs.")
        bound = consolidate(self.network, SimilarityMoment(summed[:-1].view_as(total), summed[-1]))
        self.invalidate()
        return bound

    def bound_on(self, x: Tensor) -> float:
        """The bound J for a sample (samples, m): the energy with the exact L (and Q). NaN if it is not finite."""
        return math.nan if self.not_finite() else float(bound_on(self.network, x))

    # ------------------------------------------------------------------ state

    def balance(self, x: Tensor, shrinkage: float = 0.0) -> None:
        """Set the common scale and the exact L for a sample (samples, m), see :func:`~.exact.balance`."""
        balance(self.network, x, shrinkage)
        self.invalidate()

    def invalidate(self) -> None:
        """Drop what was computed from the weights. Call it after they were changed elsewhere."""
        self.responses.invalidate()
        self.rule.reset()

    def restart(self) -> None:
        """Forget an earlier run on perhaps other data: its failures and halved rates."""
        self.rate_factor = 1.0
        self.invalidate()
        self.responses.reset()

    def rates(self, update: int, batch: int) -> Rates:
        """Step sizes of an update for a process's batch of this size. A homogeneous kernel keeps q at 1."""
        return Rates(*self._rates(range(update, update + 1), batch * self.collectives.size)[0].tolist())

    def _rates(self, updates: range, samples: int) -> np.ndarray:
        """Step sizes (updates, 3) of W, q and L for batches of this size, over all processes."""
        table = self.rate_factor * self.schedule.table(updates, self.network.num_neurons, samples)
        if self.network.kernel.is_homogeneous and not self._is_tight:
            table[:, 1] = 0.0
        return table

    def set_kernel_for(self, update: int) -> None:
        """Set the network's kernel to that of the update with this number."""
        changes = self.schedule.kernel_params(update)
        if changes != self._kernel_changes:
            self.network.kernel = self._base_kernel.with_params(**changes) if changes else self._base_kernel
            self._kernel_changes = changes

    def halve_rates(self) -> None:
        """Halve all step sizes from now on."""
        self.rate_factor /= 2

    def snapshot(self) -> Snapshot:
        """A copy of the weights on their device."""
        return Snapshot.of(self.network)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a copy."""
        snapshot.restore(self.network)
        self.invalidate()
        self.responses.reset()

    def health(self) -> Tensor:
        """Sums of W, q and L, which are not finite if any value is not, and NaN if a factorisation failed: (4,)."""
        sums = [parameter.detach().sum(dtype=torch.float64) for parameter in self.network.parameters()]
        return torch.stack([*sums, torch.where(self.responses.failed.to(sums[0]) == 0, 0.0, torch.nan).to(sums[0])])

    def not_finite(self) -> list[str]:
        """Names of what is not finite, empty after sound updates. Synchronises with the device."""
        names = [*dict(self.network.named_parameters()), "the factorisation of L + ridge I"]
        return [name for name, total in zip(names, self.health().tolist(), strict=True) if not math.isfinite(total)]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint contains in addition to the weights and the update count."""
        return {
            "rate_factor": self.rate_factor,
            "inverse": self.responses.state_dict(),
            "rule": self.rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; the weights are loaded separately."""
        self.rate_factor = float(state["rate_factor"])
        self.responses.load_state_dict(state["inverse"])
        self.rule.load_state_dict(state["rule"])
        self.stage = "learning"
