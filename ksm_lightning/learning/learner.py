"""The Learner: owns a network, its schedule and the state of learning. Every update of a network is made here."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ksm_lightning.kernels import full_precision
from ksm_lightning.learning.acceleration import Acceleration, Accelerator, Batch, StepSizes
from ksm_lightning.learning.best import BestWeights, Snapshot
from ksm_lightning.learning.collectives import Collectives, SingleProcess, numbers_of_first
from ksm_lightning.learning.exact import balance, consolidate
from ksm_lightning.learning.moments import SimilarityMoment, similarity_moment
from ksm_lightning.learning.observation import Observation
from ksm_lightning.learning.relocation import relocate
from ksm_lightning.learning.responses import Inverse, ResponseSolver
from ksm_lightning.learning.rules import Responses
from ksm_lightning.learning.schedule import Rates, Schedule
from ksm_lightning.learning.tight_rule import make_rule
from ksm_lightning.learning.units import judge_count, natural_ridge, sample_size, shrinkage_for, start_count
from ksm_lightning.network import KSMNetwork, TightNetwork
from ksm_lightning.network.landmark_error import MANY_LANDMARKS, LandmarkError

# Up to this number of neurons, starting threads takes longer than a factorisation on one thread.
_FOR_ONE_THREAD = 128

Stage = Literal["unplaced", "unstarted", "learning"]
"""``unplaced``: W waits for data points to start from. ``unstarted``: :meth:`Learner.start` is still to be called."""


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
        acceleration: Acceleration = "none",
        collectives: Collectives | None = None,
    ) -> None:
        self.network = network
        self.schedule = schedule
        self.rule, self._is_tight = make_rule(network, schedule.is_natural), isinstance(network, TightNetwork)
        self.chooses_ridge = chooses_ridge
        self.stage: Stage = stage or ("unstarted" if schedule.is_natural else "learning")
        self.collectives: Collectives = collectives or SingleProcess()
        self.best = BestWeights(self.collectives)
        self.rate_factor = 1.0  # all step sizes are multiplied by this, see `halve_rates`
        self.responses = ResponseSolver(network, inverse)
        self._accelerator = Accelerator(self._step, self._state, acceleration, network.W)
        self._kernel = self._base_kernel = network.kernel
        self._kernel_changes: dict[str, float] = {}
        self._batches: list[Batch] = []

    # ------------------------------------------------------------------ start, learn, move, finish

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        """Start the adaptive schedule: move idle landmarks, set the common scale of W (or q) and the exact L.

        Args:
            x: A sample of the data (samples, m) without repetitions. Other processes are not asked: the caller gives
                all of them the same weights.
        """
        network, p = self.network, self.network.num_landmarks
        if self.chooses_ridge:
            network.ridge = natural_ridge(network.kernel, x, network.num_neurons, network.bound)
        # Judging it takes n^3 operations: of many landmarks, few are moved without.
        judge = LandmarkError(network.kernel, x[-judge_count(p) :]) if p <= MANY_LANDMARKS else None
        self._move_if_better(x[: sample_size(p)], judge, most=p if judge else MANY_LANDMARKS // 4)
        x = x[: start_count(p)]
        self.balance(x, shrinkage_for(p, len(x)))
        self.stage = "learning"

    def learn(
        self,
        batches: Tensor,
        first_update: int = 0,
        *,
        sample: Callable[[int, Tensor], Tensor] | None = None,
        observe: Callable[[int], bool] | None = None,
        on_observation: Callable[[int, Observation, Rates], object] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> int:
        """One update per batch of a block; returns the number of updates, as ``should_stop`` may end it early.

        Args:
            batches: Inputs (updates, batch, m).
            first_update: Number of the first update, counted from 0.
            sample: Returns points among which idle landmarks are moved, given the update and its batch. Default: none
                are moved.
            observe: Whether an update is observed, given its number.
            on_observation: Called after an observed update with its number, what was seen and the step sizes.
            should_stop: Called after each update.
        """
        until, schedule = 0.0, self.schedule
        if sample is not None and len(batches) and (self.best.is_waiting or (self._is_tight and first_update == 0)):
            self.best.begin(self.network, sample(0, batches[0]))
        with self._block(batches):
            self._accelerator.begin(self._sizes(first_update + index)[1][:3] for index in range(len(batches)))
            for index in range(len(batches)):
                update = first_update + index
                if update >= until:
                    self.set_kernel_for(update)
                    (rates, sizes), until = self._sizes(update), schedule.constant_until(update)
                if sample is not None and schedule.relocates_before(update):
                    self._care(sample, update, batches[index])
                if not self._batches or self.network.kernel is not self._kernel:
                    self._prepare(batches)
                is_observed = observe is not None and observe(update)
                observed = self._update(update, index, sizes, is_observed)
                if observed is not None and on_observation is not None:
                    on_observation(update, observed, rates)
                if should_stop is not None and should_stop():
                    return index + 1
        return len(batches)

    def _care(self, sample: Callable[[int, Tensor], Tensor], update: int, batch: Tensor) -> None:
        """Keep the weights if they are the best so far, then move idle landmarks."""
        error = self.best.error or self.best.watch(self.network, sample(0, batch))
        self.best.compare(self.network)
        self._move_if_better(sample(update, batch), error, self.best.of_landmarks, collectives=self.collectives)

    def _move_if_better(self, x: Tensor, error: LandmarkError | None, now: float | None = None, **options: Any) -> None:
        """Move idle landmarks of a sample, and undo it if their error on another sample, ``now``, does not fall."""
        before, state, n = self.snapshot(), self.rule.state_dict(), self.network.num_neurons
        if not self.move_idle_landmarks(x, **options) or not error:
            return
        errors = [error(self.network.W, n), now or error(before.W, n)]
        after, now = numbers_of_first(options.get("collectives") or SingleProcess(), errors)
        if after >= now:
            before.restore(self.network)
            self.responses.invalidate()
            self.rule.load_state_dict(state)

    def move_idle_landmarks(self, x: Tensor, **options: Any) -> int:
        """Move landmarks that explain nothing of a sample (samples, m), see :func:`~.relocation.relocate`."""
        moved = relocate(self.network, x, **options)
        if moved and self._is_tight:
            self.balance(x, shrinkage_for(self.network.num_landmarks, len(x)))
        elif moved:
            self.invalidate()
        return moved

    def keep_best(self) -> bool:
        """Return to the weights with the best landmarks of the run, if later updates made them worse."""
        if has_returned := self.best.restore(self.network):
            self.invalidate()
        return has_returned

    @torch.no_grad()
    def finish(self, blocks: Iterable[Tensor]) -> float:
        """Set L (and Q) to the exact value for W (and q) and all data; returns the bound J.

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
        """Forget an earlier run on perhaps other data: its best weights, failures and halved rates."""
        self.best, self.rate_factor = BestWeights(self.collectives), 1.0
        self.invalidate()
        self.responses.reset()

    def rates(self, update: int, batch: int) -> Rates:
        """Step sizes of an update for a process's batch of this size. A homogeneous kernel keeps q at 1."""
        return self._rates(update, self.network.num_neurons, batch * self.collectives.size)

    def _rates(self, update: int, num_neurons: int, samples: int) -> Rates:
        rates = self.schedule.rates(update, num_neurons, samples)
        if self.network.kernel.is_homogeneous and not self._is_tight:
            rates = rates._replace(q=0.0)
        return rates if self.rate_factor == 1 else rates.scaled(self.rate_factor)

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

    def drop_recordings(self) -> None:
        """Free the device memory of recorded updates; the next block records again."""
        self._accelerator.drop()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint contains in addition to the weights and the update count."""
        rule, best = self.rule.state_dict(), self.best.state_dict()
        return {"rate_factor": self.rate_factor, "inverse": self.responses.state_dict(), "rule": rule, "best": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; the weights are loaded separately."""
        self.drop_recordings()  # they contain the ridge
        self.rate_factor = float(state["rate_factor"])
        self.responses.load_state_dict(state["inverse"])
        self.rule.load_state_dict(state["rule"])
        self.best.load_state_dict(state["best"])
        self.stage = "learning"

    # ------------------------------------------------------------------ one update

    @contextmanager
    def _block(self, batches: Tensor) -> Iterator[None]:
        """Everything that the updates of a block (updates, batch, m) share."""
        network = self.network
        # Attributes of modules and properties are slow to look up, and an update needs them often.
        self._W, self._gains, self._L = network.W, network.gains, network.L
        self._processes = self.collectives.size
        self._samples = batches.shape[1] * self._processes
        self.responses.prepare()
        self.rule.prepare(self._gains)
        self._batches = []
        threads = torch.get_num_threads()
        is_small = self._L.device.type == "cpu" and threads > 1 and len(self._W) <= _FOR_ONE_THREAD
        if is_small:
            torch.set_num_threads(1)
        try:
            with torch.no_grad(), full_precision(self._L.device):
                yield
        finally:
            self._batches = []
            self.responses.settle()
            if is_small:
                torch.set_num_threads(threads)

    def _prepare(self, batches: Tensor) -> None:
        """Compute what the batches of a block need of the kernel alone, all at once."""
        self._kernel = kernel = self.network.kernel
        prepared = zip(*(part.unbind() for part in kernel.prepare(batches)), strict=True)
        limits: tuple[Tensor, ...] | list[None] = [None] * len(batches)
        if self.rule.response_limit is not None:
            length2 = kernel.diag(batches.flatten(0, 1)).view(batches.shape[:2])
            longest = length2.clamp(min=0).sqrt_().mul_(self.rule.response_limit)
            limits = longest.clamp_(min=torch.finfo(longest.dtype).tiny)[..., None].unbind()
        self._batches = [Batch(parts, limit) for parts, limit in zip(prepared, limits, strict=True)]

    def _sizes(self, update: int) -> tuple[Rates, StepSizes]:
        rates = self._rates(update, len(self._L), self._samples)
        return rates, StepSizes(rates.W, rates.q, self.rule.step_of_L(rates.L), 0.0)

    def _update(self, update: int, index: int, sizes: StepSizes, is_observed: bool) -> Observation | None:
        responses, batch, step_L = self.responses, self._batches[index], float(sizes.L)
        tracks = responses.is_worth_tracking(step_L, self._samples) and not self.schedule.is_settling(update)
        if tracks:
            sizes = sizes._replace(ridge_error=responses.track(step_L))
        elif responses.P is not None:
            responses.invalidate()
        observed = None
        if is_observed or self._accelerator.method == "none":
            observed = self._step(batch, sizes, tracks, is_observed)
        else:
            self._accelerator(self._kernel, batch, index, sizes, tracks, is_single=self._processes == 1)
        if tracks:
            responses.advance(step_L)
        return observed

    def _step(self, batch: Batch, sizes: StepSizes, tracks: bool, observe: bool = False) -> Observation | None:
        """One update of W, q (or Q) and L, all from the same weights."""
        kernel, W, gains, L = self._kernel, self._W, self._gains, self._L
        rule: Any = self.rule  # each rule has statistics of its own
        terms, own = rule.own_terms(kernel, W)
        k, pullback = kernel.evaluate(batch.prepared, W, terms)  # (batch, p)
        y = self.responses.solve(rule.drive(kernel, gains, k), tracks, sizes.ridge_error)
        if batch.limit is not None:
            y = y * (batch.limit / torch.linalg.vector_norm(y, dim=1, keepdim=True)).clamp_(max=1)
        others = self.collectives if self._processes > 1 else None
        seen = rule.correlate(kernel, W, gains, own, Responses(k, y, pullback, tracks), others)
        observation = self._observe(k, y, seen, tracks) if observe else None
        rule.descend_W(W, gains, seen, sizes.W)
        rule.descend_q(gains, seen, sizes.q)
        rule.ascend_L(L, seen, sizes.L)
        rule.after(kernel, W, gains)
        if tracks:
            self.responses.follow(seen.y, sizes.L)
        return observation

    def _observe(self, k: Tensor, y: Tensor, seen: Any, tracks: bool) -> Observation:
        gains = self._gains
        return Observation(
            k, y, self.network.energy_terms(k, y), self.rule.gradient_norms(gains, self._L, seen),
            (gains.abs() if gains.dim() == 1 else gains.norm(dim=0)).min(), self.responses.condition(tracks),
        )  # fmt: skip

    def _state(self) -> list[Tensor]:
        P = self.responses.P
        return [self._W, self._gains, self._L, self.responses.failed, *([] if P is None else [P])]
