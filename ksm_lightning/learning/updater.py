"""Updates made fast: what a block of batches shares is computed once, L moves in place, no autograd graph, no waiting.

The same rules as :mod:`ksm_lightning.learning.rules`, which says what they mean.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, Prepared, PullbackParts, SelfTerms, full_precision
from ksm_lightning.learning.rules import GAIN_FLOOR, RESPONSE_LIMIT, TRUST
from ksm_lightning.learning.schedule import Rates
from ksm_lightning.network import functional
from ksm_lightning.network.functional import EnergyTerms
from ksm_lightning.network.ksm_network import KSMNetwork

Inverse = Literal["auto", "exact", "tracked"]
Acceleration = Literal["none", "compile", "cuda_graph"]
# A number of the schedule; a tensor () where a compiled or captured update must not contain it.
Number = float | Tensor
# `auto` keeps the inverse up to date where there are so many neurons for each sample of a batch, measured by
# scripts/benchmark/update.py (at 4 both cost the same), and none of L's steps is larger than this.
NEURONS_PER_SAMPLE, _LARGEST_STEP = 8, 0.05
# The inverse is computed anew when its ridge has drifted by this part of the true one, or after so many updates.
_DRIFT, _OLDEST = 0.15, 64
_SMALL, _FOR_ONE_THREAD = 256, 128


class Collectives(NamedTuple):
    """What an update asks of the other processes; all of them must ask."""

    size: int
    """How many there are."""
    mean: Callable[[Tensor], Tensor]
    """A tensor's mean over all."""
    gather: Callable[[Tensor], Tensor]
    """The rows of all, one below the other."""


class StepSizes(NamedTuple):
    """What differs from update to update beside the batch."""

    W: Number
    q: Number
    L: Number
    """The part of the way that L goes to C."""
    drift: Number
    """How far the ridge of the tracked inverse is above the network's."""


class Observation(NamedTuple):
    """What can be told of an update, from before it was made."""

    k: Tensor
    """Similarities (batch, n), this process's own."""
    y: Tensor
    """Responses (batch, n), this process's own."""
    energy: EnergyTerms
    """Of this process's batch."""
    gradient_norms: tuple[Tensor, Tensor, Tensor]
    """Of W, q and L, averaged over all processes before the norm."""
    smallest_gain: Tensor
    """The smallest ``|q|``."""
    condition: Tensor
    """A lower bound of the condition number of ``L + ridge I``."""


class Updater:
    """Makes updates of a network, one batch of a block after the other.

    Responses need ``(L + ridge I)^-1``. ``exact`` factorises anew for each batch, which costs n^3 / 3. ``tracked``
    keeps the inverse: a batch changes L by a decay and a matrix of the batch's rank, and Woodbury's identity gives the
    new inverse P in products of n^2 times the batch. The decay takes the ridge along, which does not decay in the
    network, so P belongs to another ridge, ``ridge - d``; one more product corrects the responses to first order,
    ``y - d P y``, where ``|d|`` is at most 0.15 of the ridge, and is 0 on average. Then, and after 64
    updates at the latest, P is computed anew. ``auto`` tracks where n is large against the batch.

    Args:
        network: The network, changed in place.
        natural: Whether rates are natural steps or multiply the gradients.
        inverse: ``exact``, ``tracked`` or ``auto``.
        acceleration: ``compile`` has torch.compile fuse the update, ``cuda_graph`` records it once and replays it;
            updates that are observed are made without. Where either is not possible, a warning says so.
        ranks: The other processes, if there are any.
    """

    def __init__(
        self,
        network: KSMNetwork,
        natural: bool,
        *,
        inverse: Inverse = "auto",
        acceleration: Acceleration = "none",
        ranks: Collectives | None = None,
    ) -> None:
        self.network = network
        self.natural = natural
        self.inverse = inverse
        self.acceleration = acceleration
        self.ranks = ranks
        self._accelerated: dict[tuple[Kernel, bool], _Step] = {}
        # A module's attributes are slow to look up, and an update looks often.
        self._W, self._q, self._L = network.W, network.q, network.L
        self._kernel: Kernel | None = None
        self._batches: Tensor | None = None
        self._prepared: list[Prepared] = []
        self._allowed: tuple[Tensor, ...] | None = None
        self._shifted = self._floor = self._ones = torch.empty(0)
        self._eye: Tensor | None = None
        self._failed = torch.zeros((), dtype=torch.int32)
        self._P: Tensor | None = None
        self._place: Tensor | None = None
        self._ridge, self._drift, self._age = 0.0, 0.0, 0

    # ------------------------------------------------------------------ state

    @contextmanager
    def block(self, batches: Tensor) -> Iterator[None]:
        """Within it, :meth:`update` takes the batches of a block (updates, batch, m) by their places."""
        L = self.network.L
        if self._shifted.shape != L.shape or self._shifted.device != L.device or self._shifted.dtype != L.dtype:
            self._shifted = torch.empty_like(L, requires_grad=False)
            # Constants that save operations; a small matrix is shifted faster by adding another.
            self._eye = torch.eye(len(L), dtype=L.dtype, device=L.device) if len(L) <= _SMALL else None
            self._ones = L.new_ones(len(L))
            self._floor = L.new_full((len(L),), GAIN_FLOOR / len(L))
            self._failed = self._failed.to(L.device)
        self._batches, self._kernel = batches, None
        # Threads take longer to meet than a small matrix takes to factorise.
        threads = torch.get_num_threads()
        is_small = L.device.type == "cpu" and threads > 1 and len(L) <= _FOR_ONE_THREAD
        if is_small:
            torch.set_num_threads(1)
        try:
            with torch.no_grad(), full_precision(L.device):
                yield
        finally:
            if is_small:
                torch.set_num_threads(threads)

    @property
    def failed(self) -> Tensor:
        """Not 0 after a factorisation has failed, until :meth:`reset`; () on the network's device."""
        return self._failed

    def forget(self) -> None:
        """Forget what was known of L: somebody else has changed it."""
        self._P = None

    def reset(self) -> None:
        """Forget failures, too: the weights are others now."""
        self.forget()
        self._failed.zero_()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to end with the same bits; empty where nothing is tracked."""
        if self._P is None:
            return {}
        return {"inverse": self._P.clone(), "ridge": self._ridge, "drift": self._drift, "age": self._age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where :meth:`state_dict` was asked.

        Raises:
            ValueError: If it is of another network.
        """
        self.reset()
        if not state:
            return
        L, inverse = self.network.L, state["inverse"]
        if inverse.shape != L.shape:
            raise ValueError(f"The tracked inverse should be {tuple(L.shape)}, got {tuple(inverse.shape)}.")
        self._keep(inverse.to(L, copy=True))
        self._ridge, self._drift, self._age = float(state["ridge"]), float(state["drift"]), int(state["age"])

    # ------------------------------------------------------------------ one update

    def update(self, place: int, rates: Rates, *, observe: bool = False, factorise: bool = False) -> Observation | None:
        """One update of W, q and L from the block's batch at a place, all from the same state.

        Args:
            place: The batch's place.
            rates: How far to go.
            observe: Whether to tell what was seen.
            factorise: Whether to do without the tracked inverse this once: while L changes violently, low-rank updates
                lose its digits.
        """
        network = self.network
        if network.kernel is not self._kernel:
            self._prepare()
        step_L = rates.L if self.natural else 0.5 * rates.L
        tracks = not factorise and self._tracks(step_L)
        if tracks:
            self._refresh(step_L)
        else:
            self._P = None
        allowed = None if self._allowed is None else self._allowed[place]
        numbers = StepSizes(rates.W, rates.q, step_L, self._ridge - network.ridge)
        make = self._make if observe or self.acceleration == "none" else self._accelerate(tracks)
        observation = make(self._prepared[place], allowed, numbers, tracks, observe)
        if tracks:
            self._ridge *= 1 - step_L
            self._age += 1
        return observation

    def _prepare(self) -> None:
        kernel, batches = self.network.kernel, self._batches
        assert batches is not None, "Updates are made within a block."
        self._kernel = kernel
        self._prepared = list(zip(*(part.unbind() for part in kernel.prepare(batches)), strict=True))
        if self.natural:
            length2 = kernel.diag(batches.flatten(0, 1)).view(batches.shape[:2])
            tiny = torch.finfo(length2.dtype).tiny
            self._allowed = length2.clamp(min=0).sqrt_().mul_(RESPONSE_LIMIT).clamp_(min=tiny)[..., None].unbind()

    def _tracks(self, step_L: float) -> bool:
        if self.inverse == "exact" or not 0 < step_L <= _LARGEST_STEP:
            return False
        assert self._batches is not None
        samples = self._batches.shape[1] * (1 if self.ranks is None else self.ranks.size)
        return self.inverse == "tracked" or self._q.shape[0] >= NEURONS_PER_SAMPLE * samples

    def _refresh(self, step_L: float) -> None:
        """Compute the tracked inverse anew, where that is due."""
        ridge = self.network.ridge
        if self._P is not None and self._age < _OLDEST and self._ridge >= (1 - self._drift) * ridge:
            return
        self._drift = min(_DRIFT, 0.5 * _OLDEST * step_L)
        self._ridge, self._age = (1 + self._drift) * ridge, 0
        self._keep(torch.cholesky_inverse(self._factorise(self._shift(self._ridge))))

    def _keep(self, inverse: Tensor) -> None:
        """Put an inverse where it has always been: a recorded update knows no other place."""
        if self._place is None or self._place.device != inverse.device:
            self._place = inverse
        else:
            self._place.copy_(inverse)
        self._P = self._place

    def _shift(self, ridge: float) -> Tensor:
        """``L + ridge I``, in a place of its own."""
        if self._eye is not None:
            return torch.add(self._L, self._eye, alpha=ridge, out=self._shifted)
        self._shifted.copy_(self._L)
        self._shifted.diagonal().add_(ridge)
        return self._shifted

    def _factorise(self, matrix: Tensor) -> Tensor:
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(matrix)
        torch.maximum(self._failed, info, out=self._failed)
        return factor

    def _make(
        self, prepared: Prepared, allowed: Tensor | None, numbers: StepSizes, tracks: bool, observe: bool
    ) -> Observation | None:
        kernel, W, q, L = self._kernel, self._W, self._q, self._L
        assert kernel is not None
        learns_q = not kernel.is_homogeneous
        terms = kernel.self_terms(W)
        k, pullback = kernel.evaluate(prepared, W, terms)  # (batch, n)
        drive = k * q if learns_q else k
        if tracks:
            assert self._P is not None
            factor, y = None, drive @ self._P
            y = _plus(y, y @ self._P, numbers.drift)
        else:
            factor = self._factorise(self._shift(self.network.ridge))
            y = torch.linalg.solve_triangular(factor, drive.mT, upper=False)
            y = torch.linalg.solve_triangular(factor.mT, y, upper=True).mT
        if allowed is not None:
            y = y * (allowed / torch.linalg.vector_norm(y, dim=1, keepdim=True)).clamp_(max=1)
        batch = y.shape[0]
        pulled = pullback(y)  # sums over the batch
        correlation = None  # (n,), likewise
        if learns_q:
            correlation = (y * k).sum(0) if pulled.correlation is None else pulled.correlation
        Y, C = y, None
        if self.ranks is not None:
            pulled, correlation, C = self._over_ranks(
                pulled, correlation, None if tracks else functional.correlation(y)
            )
            Y = self.ranks.gather(y) if tracks else y
        step = self._step_of_W(pulled, terms, batch, learns_q)  # (n, m)
        per_batch = pulled.factor / batch
        observation = self._observe(k, y, Y, step, per_batch, correlation, C, terms, factor) if observe else None
        (self._move_W if self.natural else self._move_W_as_in_the_paper)(step, terms, numbers.W, per_batch, learns_q)
        if correlation is not None:
            self._move_q(correlation, terms.value, numbers.q, batch)
        if C is not None:
            L.lerp_(C, numbers.L)
        elif isinstance(numbers.L, Tensor):
            L.lerp_(functional.correlation(Y), numbers.L)
        else:
            L.addmm_(Y.mT, Y, beta=1 - numbers.L, alpha=numbers.L / Y.shape[0])
        if tracks:
            self._track(Y, numbers.L)
        return observation

    def _step_of_W(self, pulled: PullbackParts, terms: SelfTerms, batch: int, learns_q: bool) -> Tensor:
        """Minus W's gradient, divided by ``q pulled.factor / batch``; (n, m), in the place of what was pulled."""
        step, along, base = pulled.matrix, pulled.along, pulled.base
        if terms.direction is not None:
            slope = terms.slope
            own = self._q if learns_q else self._ones
            if isinstance(slope, Tensor):
                own, slope = own * slope, 1.0
            share = 0.5 * batch * slope / pulled.factor
            if base is None:
                return step.addcmul_(terms.direction, own[:, None], value=-share)
            assert along is not None  # base is w, and so is the direction
            along = torch.add(along, own, alpha=share)
        return step if base is None or along is None else step.addcmul_(base, along[:, None], value=-1)

    def _move_W(self, step: Tensor, terms: SelfTerms, rate: Number, per_batch: float, learns_q: bool) -> None:
        """A natural step: the gradient is divided by ``max(gain, floor) curvature / f(w,w)`` and limited in length."""
        W, q, value, curvature = self._W, self._q, terms.value, terms.curvature
        norm2 = None if value is None else value.clamp(min=torch.finfo(q.dtype).tiny)
        gain = norm2
        if learns_q:
            gain = q * q if norm2 is None else q * q * norm2
        assert gain is not None
        scale = torch.maximum(gain, torch.dot(gain, self._floor))
        if norm2 is not None:
            scale.div_(norm2)
        unit = 1.0  # a curvature that is the same for all is left for the end
        length = torch.linalg.vector_norm(step, dim=1)
        if isinstance(curvature, Tensor):
            scale.mul_(curvature)
            length.mul_(curvature.sqrt())
        else:
            unit = curvature
        row = q / scale if learns_q else scale.reciprocal_()
        # W goes by `size row step`, but never by more than `most sqrt(f(w,w)) step / |step|`.
        size, most = rate * per_batch / unit, TRUST / math.sqrt(unit)
        limit = length.reciprocal_() if norm2 is None else torch.maximum(norm2, norm2.mean()).sqrt_().div_(length)
        part = row * (size / most)
        part = torch.clamp(part, -limit, limit) if learns_q else torch.minimum(part, limit)  # a gain may be negative
        W.addcmul_(step, part[:, None], value=most)

    def _move_W_as_in_the_paper(
        self, step: Tensor, terms: SelfTerms, rate: Number, per_batch: float, learns_q: bool
    ) -> None:
        """The gradient divided by q^2."""
        number = rate * per_batch
        if not learns_q:
            _plus(self._W, step, number)
        elif isinstance(number, Tensor):
            self._W.add_(step / self._q[:, None] * number)
        else:
            self._W.addcdiv_(step, self._q[:, None], value=number)

    def _move_q(self, correlation: Tensor, value: Tensor | None, rate: Number, batch: int) -> None:
        q = self._q
        if self.natural and value is not None:
            correlation = correlation / value.clamp(min=torch.finfo(q.dtype).tiny)
            value = None
        _plus(q, q if value is None else q * value, -rate)
        _plus(q, correlation, rate / batch)

    def _track(self, Y: Tensor, step_L: Number) -> None:
        """The inverse after L's step, by Woodbury's identity: ``Y`` (samples, n) are the responses of all processes."""
        P = self._P
        assert P is not None
        Z = Y @ P  # (samples, n)
        small = Z @ Y.mT
        small.diagonal().add_(len(Y) * (1 - step_L) / step_L)
        V = torch.linalg.solve_triangular(self._factorise(small), Z, upper=False)
        if isinstance(step_L, Tensor):
            P.sub_(V.mT @ V).div_(1 - step_L)
        else:
            P.addmm_(V.mT, V, beta=1 / (1 - step_L), alpha=-1 / (1 - step_L))

    def _over_ranks(
        self, pulled: PullbackParts, correlation: Tensor | None, C: Tensor | None
    ) -> tuple[PullbackParts, Tensor | None, Tensor | None]:
        """Means over all processes, in one reduction."""
        assert self.ranks is not None
        if pulled.base is not None and pulled.base is not self._W:
            pulled = PullbackParts(pulled.dense())  # the base is this process's own, and goes into the mean
        parts = [pulled.matrix, pulled.along, correlation, C]
        given = [part for part in parts if part is not None]
        flat = self.ranks.mean(torch.cat([part.flatten() for part in given]))
        found = iter(torch.split(flat, [part.numel() for part in given]))
        matrix, along, correlation, C = (None if part is None else next(found).view_as(part) for part in parts)
        assert matrix is not None
        return pulled._replace(matrix=matrix, along=along), correlation, C

    def _observe(
        self, k: Tensor, y: Tensor, Y: Tensor, step: Tensor, per_batch: float, correlation: Tensor | None,
        C: Tensor | None, terms: SelfTerms, factor: Tensor | None,
    ) -> Observation:  # fmt: skip
        network = self.network
        q, L, batch = network.q, network.L, len(y)
        own = functional.correlation(y)
        everyones = C if C is not None else own if Y is y else functional.correlation(Y)
        value = torch.ones_like(q) if terms.value is None else terms.value
        gradient_W = step * q[:, None] * per_batch
        gradient_q = torch.zeros_like(q) if correlation is None else q * value - correlation / batch
        if factor is not None:
            pivots = factor.diagonal()
            condition = (pivots.max() / pivots.min()).square()
        else:
            assert self._P is not None
            condition = (L.diagonal().max() + network.ridge) * self._P.diagonal().max()
        return Observation(
            k,
            y,
            functional.energy_terms(k, y, value, q, L, network.ridge, C=own),
            (gradient_W.norm(), gradient_q.norm(), functional.gradient_L(everyones, L).norm()),
            q.abs().min(),
            condition,
        )

    # ------------------------------------------------------------------ acceleration

    def _accelerate(self, tracks: bool) -> "_Step":
        """The compiled or recorded update for what is the case now; made at its first use."""
        kernel = self._kernel
        assert kernel is not None
        step = self._accelerated.get((kernel, tracks))
        if step is None:
            step = self._compiled() if self.acceleration == "compile" else self._captured()
            self._accelerated[kernel, tracks] = step
        return step

    def _state(self) -> list[Tensor]:
        network = self.network
        return [network.W, network.q, network.L, self._failed, *([] if self._P is None else [self._P])]

    def _restore(self, saved: list[Tensor]) -> None:
        for value, before in zip(self._state(), saved, strict=True):
            value.copy_(before)

    def _give_up(self, saved: list[Tensor], error: Exception) -> None:
        self._restore(saved)
        self.acceleration, self._accelerated = "none", {}
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"The update is made without acceleration, which is not possible here: {reason}", stacklevel=2)

    def _tensors(self, numbers: StepSizes) -> tuple[Tensor, ...]:
        W = self.network.W
        return torch.tensor(numbers, dtype=W.dtype).to(W.device, non_blocking=True).unbind()

    def _compiled(self) -> "_Step":
        compiled = torch.compile(self._make, dynamic=False)
        is_first = True

        def step(
            prepared: Prepared, allowed: Tensor | None, numbers: StepSizes, tracks: bool, observe: bool
        ) -> Observation | None:
            nonlocal is_first
            saved = [value.clone() for value in self._state()] if is_first else []
            try:
                compiled(prepared, allowed, StepSizes(*self._tensors(numbers)), tracks, observe)
            except Exception as error:
                if not is_first:
                    raise
                self._give_up(saved, error)
                return self._make(prepared, allowed, numbers, tracks, observe)
            is_first = False
            return None

        return step

    def _captured(self) -> "_Step":
        """One update as a CUDA graph, whose inputs are copied to where it was recorded."""
        graph: torch.cuda.CUDAGraph | None = None
        inputs: list[Tensor] = []

        def step(
            prepared: Prepared, allowed: Tensor | None, numbers: StepSizes, tracks: bool, observe: bool
        ) -> Observation | None:
            nonlocal graph, inputs
            given = [*prepared, *([] if allowed is None else [allowed]), *self._tensors(numbers)]
            if graph is None:
                saved = [value.clone() for value in self._state()]
                inputs = [value.clone() for value in given]
                count = len(prepared)
                own = (tuple(inputs[:count]), None if allowed is None else inputs[count], StepSizes(*inputs[-4:]))
                try:
                    if self.ranks is not None or not torch.cuda.is_available():
                        raise RuntimeError("a CUDA graph needs a CUDA device and a single process.")
                    graph = _record(lambda: self._make(*own, tracks, False))
                except RuntimeError as error:
                    self._give_up(saved, error)
                    return self._make(prepared, allowed, numbers, tracks, observe)
                self._restore(saved)
            for place, value in zip(inputs, given, strict=True):
                place.copy_(value)
            graph.replay()
            return None

        return step


_Step = Callable[[Prepared, Tensor | None, StepSizes, bool, bool], Observation | None]


def _record(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of some work, after the three runs that libraries need to set themselves up."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _plus(value: Tensor, other: Tensor, number: Number) -> Tensor:
    """``value += number other``."""
    return value.add_(other * number) if isinstance(number, Tensor) else value.add_(other, alpha=number)
