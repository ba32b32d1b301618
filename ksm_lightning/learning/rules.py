"""The learning rules: W and q descend the energy, L ascends it. This is the code that training runs.

A rule gets the correlations of one batch (:class:`Correlations`) and changes W, q and L in place. Angle brackets are
averages over the batch and over all processes. All three steps start from the same weights. The step sizes come from
:mod:`ksm_lightning.learning.schedule`. Besides these steps, the learner sets L exactly at the start and at the end.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, PullbackParts, SelfTerms
from ksm_lightning.learning.collectives import Collectives
from ksm_lightning.network import functional

# A tensor () instead of a float where a compiled update must not contain the number.
StepSize = float | Tensor

# W's step divides by q_i^2 f(w_i, w_i), or by this fraction of its mean if that is larger.
GAIN_FLOOR = 0.01
# Natural steps limit responses to this multiple of sqrt(f(x, x)), their length at a solution.
RESPONSE_LIMIT = 2.0


class Responses(NamedTuple):
    """What a batch of one process makes of the network, before anything is learned from it."""

    k: Tensor  # similarities (batch, p)
    y: Tensor  # responses (batch, n)
    pullback: Callable[[Tensor], PullbackParts]  # from coefficients (batch, p) to sum_b c_bi df(w_i, x_b)/dw_i
    is_tracked: bool  # whether the inverse of L is tracked, which needs the responses of all processes


class Correlations(NamedTuple):
    """The statistics of one batch that the rules need: sums over its samples, averaged over all processes."""

    pullback: PullbackParts  # sum_b y_bi df(w_i, x_b)/dw_i in parts
    direction: Tensor  # towards_W (n, m); it shares memory with the pullback's matrix
    drive: Tensor | None  # sum_b y_bi k_bi (n,); None where q stays 1
    y: Tensor  # responses (samples, n)
    C: Tensor | None  # <y y^T> (n, n) if other processes contribute to it; None if it is y^T y / samples
    own: SelfTerms  # f(w_i, w_i) and its derivatives
    batch: int  # samples in the batch of one process
    rows: Tensor | None = None  # responses (samples, n_r) of the neurons that this process owns; None: all

    @property
    def per_sample(self) -> float:
        """The factor that turns the pullback's sum into a mean."""
        return self.pullback.factor / self.batch


def towards_W(q: Tensor, pulled: PullbackParts, own: SelfTerms, batch: int) -> Tensor:
    """``<y_i df(w_i,x)/dw_i> - q_i/2 df(w_i,w_i)/dw_i`` (n, m), divided by :attr:`Correlations.per_sample`.

    This is ``-de/dw_i / q_i``. It is written into the pullback's matrix.
    """
    step, along, base, factor, _ = pulled
    if own.direction is not None:
        slope = own.slope
        if isinstance(slope, Tensor):
            q, slope = q * slope, 1.0
        share = 0.5 * batch * slope / factor
        if base is None:
            return step.addcmul_(own.direction, q[:, None], value=-share)
        assert along is not None  # the base is w, and so is the direction
        along = torch.add(along, q, alpha=share)
    return step if base is None or along is None else step.addcmul_(base, along[:, None], value=-1)


class GainRule:
    """What the paper's and the natural rule share: every neuron has one landmark, with a gain q."""

    response_limit: float | None = None

    def prepare(self, q: Tensor) -> None:
        """Allocate constants for gains like ``q`` (n,), once per block of updates."""

    def reset(self) -> None:
        """Forget what depends on earlier updates: here nothing does."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: here nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""

    def own_terms(self, kernel: Kernel, W: Tensor) -> tuple[SelfTerms, SelfTerms]:
        """What the kernel, and what this rule need of the landmarks alone: here the same."""
        own = kernel.self_terms(W)
        return own, own

    def drive(self, kernel: Kernel, q: Tensor, k: Tensor) -> Tensor:
        """``b = q * k`` (batch, n). Where the length of w acts as its gain, q stays 1."""
        return k if kernel.is_homogeneous else k * q

    def correlate(
        self, kernel: Kernel, W: Tensor, q: Tensor, own: SelfTerms, seen: Responses, collectives: Collectives | None
    ) -> Correlations:
        """The statistics of a batch, averaged over all processes in one reduction; None: there is one process."""
        y, pulled = seen.y, seen.pullback(seen.y)
        drive, C = None, None
        if not kernel.is_homogeneous:
            drive = (y * seen.k).sum(0) if pulled.correlation is None else pulled.correlation
        if collectives is not None:
            if pulled.base is not None and pulled.base is not W:
                pulled = PullbackParts(pulled.dense())  # the base depends on this process's batch
            parts = [pulled.matrix, pulled.along, drive, None if seen.is_tracked else functional.correlation(y)]
            matrix, along, drive, C = average(parts, collectives)
            assert matrix is not None
            pulled = pulled._replace(matrix=matrix, along=along)
            y = collectives.gather(y) if seen.is_tracked else y
        direction = towards_W(q, pulled, own, len(seen.y))
        return Correlations(pulled, direction, drive, y, C, own, len(seen.y))

    def gradient_norms(self, q: Tensor, L: Tensor, seen: Correlations) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths of the gradients of the energy in W, q and L."""
        value = torch.ones_like(q) if seen.own.value is None else seen.own.value
        gradient_q = torch.zeros_like(q) if seen.drive is None else q * value - seen.drive / seen.batch
        C = functional.correlation(seen.y, seen.rows) if seen.C is None else seen.C
        gradient_W = seen.direction * q[:, None] * seen.per_sample
        return gradient_W.norm(), gradient_q.norm(), functional.gradient_L(C, L).norm()


def average(parts: list[Tensor | None], collectives: Collectives) -> list[Tensor | None]:
    """The parts averaged over all processes, in one reduction; None stays None."""
    given = [part for part in parts if part is not None]
    flat = collectives.mean(torch.cat([part.flatten() for part in given]))
    found = iter(torch.split(flat, [part.numel() for part in given]))
    return [None if part is None else next(found).view_as(part) for part in parts]


class PaperRule(GainRule):
    """The paper's rules: gradient steps with rates ``eta``, W's divided by q^2.

    - ``w_i -= eta_w / q_i^2 de/dw_i``
    - ``q_i -= eta_q de/dq_i``
    - ``L += eta_l de/dL``, with ``de/dL = (C - L) / 2``
    """

    def descend_W(self, W: Tensor, q: Tensor, seen: Correlations, eta: StepSize) -> None:
        """``w_i += eta_w / q_i (<y_i df(w_i,x)/dw_i> - q_i/2 df(w_i,w_i)/dw_i)``."""
        direction, eta = seen.direction, eta * seen.per_sample
        if seen.drive is None:
            add_scaled(W, direction, eta)
        elif isinstance(eta, Tensor):
            W.add_(direction / q[:, None] * eta)
        else:
            W.addcdiv_(direction, q[:, None], value=eta)

    def descend_q(self, q: Tensor, seen: Correlations, eta: StepSize) -> None:
        """``q_i += eta_q (<y_i k_i> - q_i f(w_i,w_i))``."""
        if seen.drive is None:
            return  # the length of w is its gain
        add_scaled(q, q if seen.own.value is None else q * seen.own.value, -eta)
        add_scaled(q, seen.drive, eta / seen.batch)

    def ascend_L(self, L: Tensor, seen: Correlations, step: StepSize) -> None:
        """``L += eta_l / 2 (<y y^T> - L)``; ``step`` is ``eta_l / 2``."""
        move_towards_C(L, seen.y, seen.C, step, seen.rows)

    def step_of_L(self, eta_l: float) -> float:
        """The fraction of the way from L to C that the rate stands for: the gradient has a factor of 1/2."""
        return 0.5 * eta_l


class NaturalRule(GainRule):
    """Natural steps: each parameter moves a fraction of the way to where its own gradient vanishes.

    - ``w_i -= step_w de/dw_i / (q_i^2 curvature_i)``: for a Gaussian kernel a mean shift, for a power-cosine kernel
      ``w_i -> <y_i df/dw_i>``
    - ``q_i -> <y_i k_i> / f(w_i, w_i)``
    - ``L -> C``

    Responses are at most ``2 sqrt(f(x, x))`` long. This bounds everything: C has a trace of at most ``4 <f(x, x)>``, L
    is an average of such C, and q and W move towards averages of products with y. So ``L + ridge I`` can always be
    factorised. Near a solution no response is that long. For W's step, ``q_i^2 f(w_i,w_i)`` counts as at least 1 % of
    its mean, because q may pass through 0.
    """

    response_limit: float | None = RESPONSE_LIMIT

    def __init__(self) -> None:
        self._floor = torch.empty(0)

    def prepare(self, q: Tensor) -> None:
        """Allocate constants for gains like ``q`` (n,), once per block of updates."""
        if self._floor.shape != q.shape or self._floor.device != q.device or self._floor.dtype != q.dtype:
            self._floor = q.new_full(q.shape, GAIN_FLOOR / len(q))

    def floor_of(self, gain: Tensor) -> Tensor:
        """The least ``q_i^2 f(w_i,w_i)`` that counts: a fraction of the mean over all neurons; ()."""
        return torch.dot(gain, self._floor)

    def descend_W(self, W: Tensor, q: Tensor, seen: Correlations, step: StepSize) -> None:
        """``w_i += step_w q_i direction_i / (max(gain_i, floor) curvature_i / f(w_i,w_i))``."""
        curvature, tiny = seen.own.curvature, torch.finfo(q.dtype).tiny  # it may be 0 in float32
        row = 1 / (max(curvature, tiny) if isinstance(curvature, float) else curvature.clamp(min=tiny))
        weighted = q if seen.own.value is None else q * seen.own.value.clamp(min=tiny)
        gain = q * weighted
        row = row * weighted / torch.maximum(gain, self.floor_of(gain))
        W.addcmul_(seen.direction, (row * (step * seen.per_sample))[:, None])

    def descend_q(self, q: Tensor, seen: Correlations, step: StepSize) -> None:
        """``q_i += step_q (<y_i k_i> / f(w_i,w_i) - q_i)``."""
        drive, value = seen.drive, seen.own.value
        if drive is None:
            return  # the length of w is its gain
        if value is not None:
            drive = drive / value.clamp(min=torch.finfo(q.dtype).tiny)
        add_scaled(q, q, -step)
        add_scaled(q, drive, step / seen.batch)

    def ascend_L(self, L: Tensor, seen: Correlations, step: StepSize) -> None:
        """``L += step_l (<y y^T> - L)``, which is ``2 step_l de/dL``."""
        move_towards_C(L, seen.y, seen.C, step, seen.rows)

    def step_of_L(self, step_l: float) -> float:
        """The fraction of the way from L to C, which a natural step is."""
        return step_l


def move_towards_C(L: Tensor, y: Tensor, C: Tensor | None, step: StepSize, rows: Tensor | None = None) -> None:
    """``L += step (C - L)`` with ``C = <y y^T>``: along the gradient ``de/dL = (C - L) / 2``, in place.

    A process that owns the rows ``L`` (n_r, n) of some neurons gives their responses ``rows`` (samples, n_r), too.
    """
    if C is not None:
        L.lerp_(C, step)
    elif isinstance(step, Tensor):
        L.lerp_(functional.correlation(y, rows), step)
    else:
        L.addmm_((y if rows is None else rows).mT, y, beta=1 - step, alpha=step / y.shape[0])


def add_scaled(value: Tensor, other: Tensor, number: StepSize) -> Tensor:
    """``value += number other`` in place."""
    return value.add_(other * number) if isinstance(number, Tensor) else value.add_(other, alpha=number)
