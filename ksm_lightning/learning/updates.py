"""How the updates of a block are computed: by torch operations, compiled, or natively."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels import full_precision
from ksm_lightning.kernels.limits import BYTES_AT_ONCE, UPDATES_AT_ONCE
from ksm_lightning.learning.acceleration import Acceleration, Accelerator, Batch, StepSizes
from ksm_lightning.learning.collectives import Collectives
from ksm_lightning.learning.native import MOST_LANDMARKS, NativeUpdates
from ksm_lightning.learning.observation import Observation
from ksm_lightning.learning.responses import ResponseSolver
from ksm_lightning.learning.rules import Responses
from ksm_lightning.learning.schedule import Rates, Schedule
from ksm_lightning.network import KSMNetwork


class Seen(NamedTuple):
    """What a batch makes of the network, before anything is learned from it."""

    k: Tensor  # similarities (batch, p)
    y: Tensor  # responses (batch, n)
    correlations: Any  # what the rule needs


class Observed(NamedTuple):
    """An observed update."""

    update: int
    observation: Observation
    rates: Rates


class Updates:
    """Changes the weights of a network by its learning rule, one update per batch of a block.

    Args:
        network: The network, changed in place.
        rule: Its learning rule.
        responses: Computes its responses.
        schedule: Says when the inverse of L cannot be tracked.
        rates: Returns the step sizes (updates, 3) of W, q and L, given the numbers of updates and the number of samples
            of each, over all processes.
        acceleration: How updates are run, see :class:`~.acceleration.Accelerator`. Observed ones are not compiled.
        collectives: The other processes.
    """

    def __init__(
        self,
        network: KSMNetwork,
        rule: Any,
        responses: ResponseSolver,
        schedule: Schedule,
        rates: Callable[[range, int], np.ndarray],
        acceleration: Acceleration,
        collectives: Collectives,
    ) -> None:
        self.network, self.rule, self.responses, self.collectives = network, rule, responses, collectives
        self.schedule, self.rates = schedule, rates
        self._native = NativeUpdates(network, rule, is_forced=acceleration == "native")
        self._allows_native = acceleration in ("auto", "native") and responses.inverse != "tracked"
        self._accelerator = Accelerator(self._step, self._state, network.W) if acceleration == "compile" else None
        self._kernel = network.kernel
        self._block = torch.empty(0)
        self._batches: list[Batch] = []

    @contextmanager
    def block(self, batches: Tensor, numbers: range) -> Iterator[None]:
        """Everything that the updates of a block (updates, batch, m), with these numbers, share."""
        network = self.network
        # Attributes of modules and properties are slow to look up, and an update needs them often.
        self._W, self._gains, self._L = network.W, network.gains, network.L
        self._processes = self.collectives.size
        self._samples = batches.shape[1] * self._processes
        self._block, self._numbers = batches, numbers
        self._sizes = self._table()
        self.is_native = self._allows_native and self._processes == 1 and self._native.fits(batches)
        self.responses.prepare()
        self.rule.prepare(self._gains)
        self._batches = []
        threads = torch.get_num_threads()
        is_small = (
            self._L.device.type == "cpu" and threads > 1 and len(self._W) <= MOST_LANDMARKS
        )  # starting threads takes longer
        if is_small and not self.is_native:
            torch.set_num_threads(1)
        try:
            with torch.no_grad(), full_precision(self._L.device):
                yield
        finally:
            self._block, self._batches = torch.empty(0), []
            self.responses.settle()
            if is_small and not self.is_native:
                torch.set_num_threads(threads)

    @property
    def most_at_once(self) -> int:
        """Largest number of updates that :meth:`run` should be given, so that signals are seen in between."""
        if self.is_native:
            numbers = self._block.shape[1] * (len(self._W) + len(self._L))  # that an observed update shows
            return max(1, min(UPDATES_AT_ONCE, BYTES_AT_ONCE // (8 * numbers)))
        return 1

    def run(self, index: int, count: int, observe: Callable[[int], bool] | None = None) -> list[Observed]:
        """Make the updates of the batches from this index of the block on, with one kernel and nothing in between.

        Returns what those showed that are observed, given their numbers. Only machine code makes several updates.
        """
        if self.is_native:
            return self._run_natively(index, count, observe)
        assert count == 1
        self._prepare()
        tracks = self._begin(index)
        sizes = self._step_sizes(index, tracks)
        observed = []
        if observe is not None and observe(self._numbers[index]):
            observed.append(self._observe(index, sizes, tracks))
        else:
            self._advance(index, sizes, tracks)
        if tracks:
            self.responses.advance(float(self._sizes[index][2]))
        return observed

    def _run_natively(self, index: int, count: int, observe: Callable[[int], bool] | None) -> list[Observed]:
        self.responses.invalidate()
        stop = index + count
        chosen = [] if observe is None else [i for i in range(index, stop) if observe(self._numbers[i])]
        block, sizes = self._block[index:stop], self._sizes[index:stop]
        failed, shown = self._native.run(block, sizes, [i - index for i in chosen])
        if failed:
            self.responses.failed.fill_(failed)
        return [self._observed(i, each) for i, each in zip(chosen, shown, strict=True)]

    def _observed(self, index: int, observation: Observation) -> Observed:
        return Observed(self._numbers[index], observation, Rates(*self._rates[index].tolist()))

    def _observe(self, index: int, sizes: StepSizes, tracks: bool) -> Observed:
        seen = self._see(self._batches[index], sizes, tracks)
        observation = self._observation(seen, tracks)
        self._learn(seen, sizes, tracks)
        return self._observed(index, observation)

    # ------------------------------------------------------------------ one update

    def _table(self) -> np.ndarray:
        """The step sizes of W, q and L (updates, 3); L's is the fraction of the way to C."""
        self._rates = self.rates(self._numbers, self._samples)
        sizes = self._rates.copy()
        sizes[:, 2] = self.rule.step_of_L(sizes[:, 2])
        if self._accelerator is not None:
            self._accelerator.begin(sizes)
        return sizes

    def _prepare(self) -> None:
        """Compute what the batches of the block need of the kernel alone, all at once."""
        if self._batches and self.network.kernel is self._kernel:
            return
        self._kernel, batches = self.network.kernel, self._block
        kernel = self._kernel
        prepared = zip(*(part.unbind() for part in kernel.prepare(batches)), strict=True)
        limits: tuple[Tensor, ...] | list[None] = [None] * len(batches)
        if self.rule.response_limit is not None:
            length2 = kernel.diag(batches.flatten(0, 1)).view(batches.shape[:2])
            longest = length2.clamp(min=0).sqrt_().mul_(self.rule.response_limit)
            limits = longest.clamp_(min=torch.finfo(longest.dtype).tiny)[..., None].unbind()
        self._batches = [Batch(parts, limit) for parts, limit in zip(prepared, limits, strict=True)]

    def _begin(self, index: int) -> bool:
        """Whether the update tracks the inverse of L; an inverse that is not tracked any more is dropped."""
        step_L, responses = float(self._sizes[index][2]), self.responses
        tracks = responses.is_worth_tracking(step_L, self._samples)
        tracks = tracks and not self.schedule.is_settling(self._numbers[index])
        if not tracks and responses.P is not None:
            responses.invalidate()
        return tracks

    def _step_sizes(self, index: int, tracks: bool) -> StepSizes:
        W, q, step_L = self._sizes[index].tolist()
        return StepSizes(W, q, step_L, self.responses.track(step_L) if tracks else 0.0)

    def _advance(self, index: int, sizes: StepSizes, tracks: bool) -> None:
        """One update that is not observed, compiled if that is wanted and possible."""
        batch, compiled = self._batches[index], self._accelerator
        if compiled is None or not compiled(self._kernel, batch, index, float(sizes.ridge_error), tracks):
            self._step(batch, sizes, tracks)

    def _step(self, batch: Batch, sizes: StepSizes, tracks: bool) -> None:
        """One update of W, q (or Q) and L, all from the same weights."""
        self._learn(self._see(batch, sizes, tracks), sizes, tracks)

    def _see(self, batch: Batch, sizes: StepSizes, tracks: bool) -> Seen:
        """What a batch shows: similarities, responses, and their statistics over all processes."""
        kernel, W, gains = self._kernel, self._W, self._gains
        rule: Any = self.rule  # each rule has statistics of its own
        terms, own = rule.own_terms(kernel, W)
        k, pullback = kernel.evaluate(batch.prepared, W, terms)  # (batch, p)
        y = self.responses.solve(rule.drive(kernel, gains, k), tracks, sizes.ridge_error)
        if batch.limit is not None:
            y = y * (batch.limit / torch.linalg.vector_norm(y, dim=1, keepdim=True)).clamp_(max=1)
        return Seen(k, y, self._correlate(own, k, y, pullback, tracks))

    def _correlate(self, own: Any, k: Tensor, y: Tensor, pullback: Callable[[Tensor], Any], tracks: bool) -> Any:
        """What the rule needs of similarities k (batch, p) and responses y (batch, n), averaged over all processes."""
        others = self.collectives if self._processes > 1 else None
        seen = Responses(k, y, pullback, tracks)
        return self.rule.correlate(self._kernel, self._W, self._gains, own, seen, others)

    def _learn(self, found: Seen, sizes: StepSizes, tracks: bool) -> None:
        rule, W, gains, L, seen = self.rule, self._W, self._gains, self._L, found.correlations
        rule.descend_W(W, gains, seen, sizes.W)
        rule.descend_q(gains, seen, sizes.q)
        rule.ascend_L(L, seen, sizes.L)
        if tracks:
            self.responses.follow(seen.y, sizes.L)

    def _observation(self, found: Seen, tracks: bool) -> Observation:
        gains, (k, y, seen) = self._gains, found
        return Observation(
            k, y, self.network.energy_terms(k, y), self.rule.gradient_norms(gains, self._L, seen),
            (gains.abs() if gains.dim() == 1 else gains.norm(dim=0)).min(), self.responses.condition(tracks),
        )  # fmt: skip

    def _state(self) -> list[Tensor]:
        return [self._W, self._gains, self._L, *self.responses.state()]
