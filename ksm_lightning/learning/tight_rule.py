"""The learning rule of the tight bound: W and Q descend its energy, L ascends it. This is the code that training runs.

Angle brackets are averages over the batch and over all processes; symbols are those of
:mod:`ksm_lightning.network.tight`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, Pullback, SelfTerms
from ksm_lightning.learning.collectives import Collectives
from ksm_lightning.learning.exact_tight import add_jitter
from ksm_lightning.learning.rules import (
    RESPONSE_LIMIT,
    NaturalRule,
    PaperRule,
    Responses,
    StepSize,
    add_scaled,
    average,
    move_towards_C,
)
from ksm_lightning.network import KSMNetwork, TightNetwork, functional

# W's step averages the squared length of its direction over the last updates, with this part of the past.
MEMORY = 0.99


class LandmarkTerms(NamedTuple):
    """What an update needs of the landmarks alone."""

    self_terms: SelfTerms
    K: Tensor  # f(W, W) (p, p), float64, with a jitter
    factor: Tensor  # its Cholesky factor (p, p), in the dtype of W
    pullback: Pullback  # of f(W, W), float64
    keeps_lengths: bool  # whether Q stands for the lengths of landmarks, too


class TightCorrelations(NamedTuple):
    """The statistics of one batch that the rule needs, averaged over all processes."""

    gradient_W: Tensor  # de/dW (p, m), for the Q that is best for the batch
    yk: Tensor  # <y k^T> (n, p)
    target: Tensor  # <y k^T> K^-1 (n, p), where the gradient of Q vanishes
    y: Tensor  # responses (samples, n)
    C: Tensor | None  # <y y^T> (n, n) if other processes contribute to it
    own: LandmarkTerms


class TightRule:
    """Natural steps of Q and L, and normalised steps of W.

    - ``Q -> <y k^T> K^-1``, a fraction of the way, as ``L -> <y y^T>``
    - ``w_j`` moves along ``<(Q^T y)_j df(w_j,x)/dw_j> - sum_l (Q^T Q)_jl df(w_j,w_l)/dw_j`` by a length in units of the
      kernel, ``step_w m^(-1/4) |dw| / |dphi|``

    The direction of W is the small difference of two large terms, and batches that differ in Q show mostly noise. So it
    is computed with the Q that is best for the batch itself: then only the part of ``dphi(w_j)`` outside the span of
    the landmarks counts. Its length is normalised for each landmark (as in RMSprop, but by row, which does not depend
    on the axes of x). With batches of several times p this reaches the exact minimum of the bound.

    If the length of an input only scales a kernel, the lengths of landmarks stay as they are: Q scales them better, and
    steps across a landmark would lengthen it for ever.
    """

    response_limit: float | None = RESPONSE_LIMIT

    def __init__(self) -> None:
        self._square = torch.empty(0)
        self._steps = 0
        self._own: LandmarkTerms | None = None

    # ------------------------------------------------------------------ state

    def prepare(self, Q: Tensor) -> None:
        """Forget what was computed from W, which may have changed since the last block of updates."""
        self._own = None

    def reset(self) -> None:
        """Forget the lengths of W's directions, after landmarks were moved elsewhere."""
        self._square = torch.empty(0)
        self._steps, self._own = 0, None

    def state_dict(self) -> dict[str, Any]:
        """The mean squared lengths of W's directions, which a resumed run needs; empty before the first update."""
        if not self._steps:
            return {}
        return {"square": self._square.clone(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.reset()
        if state:
            self._square = state["square"].clone()
            self._steps = int(state["steps"])

    def lengths(self, W: Tensor) -> tuple[Tensor, int]:
        """Running mean of the squared lengths of W's directions (p,), and how many updates it contains.

        :mod:`~ksm_lightning.learning.native` changes it in place.
        """
        if len(self._square) != len(W):
            self._square, self._steps = torch.zeros_like(W[:, 0].double()), 0
        self._square = self._square.to(W.device)
        return self._square, self._steps

    def count(self, updates: int) -> None:
        """Count updates that the running mean contains."""
        self._steps += updates
        self._own = None

    # ------------------------------------------------------------------ one update

    def own_terms(self, kernel: Kernel, W: Tensor) -> tuple[SelfTerms, LandmarkTerms]:
        """What the kernel needs of the landmarks, and ``K = f(W, W)`` with its factorisation.

        Kept from the end of the last update. A failed factorisation is NaN, to avoid a host synchronisation.
        """
        if self._own is None:
            wide = W.detach().double()
            K, pullback = kernel.value_and_pullback(wide, wide)
            K = add_jitter((K + K.mT).div_(2), W.dtype)
            factor, info = torch.linalg.cholesky_ex(K)
            factor = factor.to(W.dtype).masked_fill_(info != 0, torch.nan)
            self._own = LandmarkTerms(kernel.self_terms(W), K, factor, pullback, keeps_lengths(kernel))
        return self._own.self_terms, self._own

    def drive(self, kernel: Kernel, Q: Tensor, k: Tensor) -> Tensor:
        """``Q k`` (batch, n)."""
        return k @ Q.mT

    def correlate(
        self, kernel: Kernel, W: Tensor, Q: Tensor, own: LandmarkTerms, seen: Responses, collectives: Collectives | None
    ) -> TightCorrelations:
        """The statistics of a batch. Several processes average them in two reductions: W's direction needs <y k^T>."""
        k, y, C = seen.k, seen.y, None
        batch = len(y)
        yk: Tensor | None = (y.mT @ k).div_(batch)  # (n, p)
        if collectives is not None:
            yk, C = average([yk, None if seen.is_tracked else functional.correlation(y)], collectives)
        assert yk is not None
        target = torch.cholesky_solve(yk.mT, own.factor).mT  # (n, p)
        gradient = seen.pullback((y @ target).div_(-batch)).dense()  # (p, m)
        if collectives is not None:
            gradient = collectives.mean(gradient)
            y = collectives.gather(y) if seen.is_tracked else y
        gradient = gradient + own.pullback((target.mT @ target).double()).to(gradient.dtype)
        return TightCorrelations(gradient, yk, target, y, C, own)

    def gradient_norms(self, Q: Tensor, L: Tensor, seen: TightCorrelations) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths of the gradients of the energy in W, Q and L."""
        C = functional.correlation(seen.y) if seen.C is None else seen.C
        gradient_Q = Q @ seen.own.K.to(Q.dtype) - seen.yk
        return seen.gradient_W.norm(), gradient_Q.norm(), functional.gradient_L(C, L).norm()

    def descend_W(self, W: Tensor, Q: Tensor, seen: TightCorrelations, step: StepSize) -> None:
        """``w_j -= step_w m^(-1/4) length_j direction_j / sqrt(square_j)``, with the running mean of its square."""
        terms = seen.own.self_terms
        value = torch.ones(len(W), dtype=W.dtype, device=W.device) if terms.value is None else terms.value
        length = (value.clamp(min=torch.finfo(W.dtype).tiny) / terms.curvature).sqrt()  # |dw| of a step |dphi| = |phi|
        direction = seen.gradient_W * length[:, None]
        square, steps = self.lengths(W)
        square.lerp_(direction.double().square().sum(1), 1 - MEMORY)
        norm = (square / (1 - MEMORY ** (steps + 1))).sqrt_().clamp_(min=torch.finfo(torch.float64).tiny)
        before = torch.linalg.vector_norm(W, dim=1)
        W.addcmul_(direction, ((length / norm).to(W.dtype) * (step * W.shape[1] ** -0.25))[:, None], value=-1)
        if seen.own.keeps_lengths:
            now = torch.linalg.vector_norm(W, dim=1)
            W.mul_(torch.where(now > 0, before / torch.where(now > 0, now, 1.0), 1.0)[:, None])
        self.count(1)

    def descend_q(self, Q: Tensor, seen: TightCorrelations, step: StepSize) -> None:
        """``Q += step_q (<y k^T> K^-1 - Q)``."""
        add_scaled(Q, seen.target - Q, step)

    def ascend_L(self, L: Tensor, seen: TightCorrelations, step: StepSize) -> None:
        """``L += step_l (<y y^T> - L)``."""
        move_towards_C(L, seen.y, seen.C, step)

    def step_of_L(self, step_l: float) -> float:
        """The fraction of the way from L to C, which a natural step is."""
        return step_l


def keeps_lengths(kernel: Kernel) -> bool:
    """Whether ``f(a x, w) = a^d f(x, w)``: features of landmarks then do not depend on their lengths."""
    return kernel.degree is not None


def make_rule(network: KSMNetwork, is_natural: bool) -> PaperRule | NaturalRule | TightRule:
    """The rule of a network: by its bound, and for the paper's bound by whether step sizes are natural."""
    if not isinstance(network, TightNetwork):
        return NaturalRule() if is_natural else PaperRule()
    if not is_natural:
        raise ValueError("The tight bound learns by the adaptive schedule: leave out `phases`, or choose bound=paper.")
    return TightRule()
