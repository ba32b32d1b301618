"""Responses in training: ``y = (L + ridge I)^-1 b``, by a factorisation per batch or by an inverse that is tracked."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ksm_lightning.learning.rules import StepSize, add_scaled
from ksm_lightning.network import KSMNetwork
from ksm_lightning.private_apis import version_of

Inverse = Literal["auto", "exact", "tracked"]
# `auto` tracks the inverse from this number of neurons per sample of a batch on (scripts/benchmark/update.py: at 4 both
# take the same time), and only for steps of L up to this size.
NEURONS_PER_SAMPLE, _LARGEST_STEP = 8, 0.05
# The tracked inverse is recomputed when its ridge is off by this fraction, or after this number of updates.
_DRIFT, _OLDEST = 0.15, 64


class ResponseSolver:
    """Solves ``(L + ridge I) y = b`` for the batches of a run, while L changes a little after each of them.

    ``exact`` factorises ``L + ridge I`` for every batch, which costs ``n^3 / 3``. ``tracked`` keeps the inverse P: a
    batch changes L by a decay and a matrix of the batch's rank, so Woodbury's identity gives the new P in products of
    ``n^2`` times the batch. The decay also shrinks the ridge inside P, while the network's is constant, so P belongs to
    the ridge ``ridge - d``. One more product corrects responses to first order, ``y - d P y``; ``|d|`` is at most 0.15
    of the ridge and 0 on average. Beyond that, and after 64 updates at the latest, P is recomputed. ``auto`` tracks
    where n is large compared with the batch.

    A failed factorisation is recorded in :attr:`failed` on the device, to avoid a host synchronisation.

    Args:
        network: The network whose L and ridge are solved with.
        inverse: ``exact``, ``tracked`` or ``auto``.
    """

    def __init__(self, network: KSMNetwork, inverse: Inverse = "auto") -> None:
        self.network = network
        self.inverse = inverse
        self.P: Tensor | None = None
        """The tracked inverse (n, n); None where it is not valid."""
        self.failed = torch.zeros((), dtype=torch.int32)
        """Not 0 after a factorisation has failed, until :meth:`reset`; () on the network's device."""
        self._factor: Tensor | None = None
        self._buffer: Tensor | None = None
        self._L = network.L  # a module's attributes are slow to look up
        self._shifted = torch.empty(0)
        self._ridge, self._drift, self._age = 0.0, 0.0, 0
        self._version: int | None = None  # of the L that P belongs to; None: of the weights that are loaded next

    # ------------------------------------------------------------------ state

    def prepare(self) -> None:
        """Allocate buffers like the network's L, once per block of updates."""
        self._L = L = self.network.L
        if self._shifted.shape != L.shape or self._shifted.device != L.device or self._shifted.dtype != L.dtype:
            self._shifted = torch.empty_like(L, requires_grad=False)
            self.failed = self.failed.to(L.device)
        self._drop_if_outdated()
        if self.P is not None and (self.P is not self._buffer or self.P.device != L.device or self.P.dtype != L.dtype):
            self._keep(self.P.to(L))

    def settle(self) -> None:
        """Note after a block of updates which L the tracked inverse belongs to."""
        self._version = version_of(self.network.L)

    def _drop_if_outdated(self) -> None:
        """Drop the tracked inverse if L was changed since the last block, such as by `consolidate` on the network."""
        if self._version is not None and self._version != version_of(self.network.L):
            self.invalidate()

    def invalidate(self) -> None:
        """Drop the tracked inverse, after L was changed elsewhere."""
        self.P = None

    def reset(self) -> None:
        """Drop the tracked inverse and forget failures, after all weights were replaced."""
        self.invalidate()
        self.failed.zero_()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue bitwise; empty where nothing is tracked, or L was changed since."""
        self._drop_if_outdated()
        if self.P is None:
            return {}
        return {"inverse": self.P.clone(), "ridge": self._ridge, "drift": self._drift, "age": self._age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Raises ValueError if it belongs to a network of another size."""
        self.reset()
        if not state:
            return
        L, inverse = self.network.L, state["inverse"]
        if inverse.shape != L.shape:
            raise ValueError(f"The tracked inverse must have the shape {tuple(L.shape)}, got {tuple(inverse.shape)}.")
        self._version = None
        self.P = inverse.clone()  # `prepare` moves it to the network's device, into the buffer
        self._ridge, self._drift, self._age = float(state["ridge"]), float(state["drift"]), int(state["age"])

    # ------------------------------------------------------------------ one update

    def is_worth_tracking(self, step_L: float, samples: int) -> bool:
        """Whether to track the inverse for this step of L and this number of samples, over all processes."""
        if self.inverse == "exact" or not 0 < step_L <= _LARGEST_STEP:
            return False
        return self.inverse == "tracked" or self._L.shape[1] >= NEURONS_PER_SAMPLE * samples

    def track(self, step_L: float) -> float:
        """Recompute the tracked inverse if it is due; returns how far the ridge inside it is above the network's."""
        ridge = self.network.ridge
        if self.P is None or self._is_due(self._ridge, self._age):
            self._drift = min(_DRIFT, 0.5 * _OLDEST * step_L)
            self._ridge, self._age = (1 + self._drift) * ridge, 0
            self._recompute(self._ridge)
        return self._ridge - ridge

    def _recompute(self, ridge: float) -> None:
        """Set the tracked inverse to that of ``L + ridge I``."""
        self._keep(torch.cholesky_inverse(self._factorise(self._shift(ridge))))

    def _is_due(self, ridge: float, age: int) -> bool:
        """Whether the tracked inverse, with this ridge inside it and of this age, must be recomputed."""
        return age >= _OLDEST or ridge < (1 - self._drift) * self.network.ridge

    def error_after(self, steps_L: Sequence[float]) -> float | None:
        """What :meth:`track` will return after these steps; None if it will recompute the inverse."""
        ridge = self._ridge
        for step in steps_L:
            ridge *= 1 - step
        return None if self._is_due(ridge, self._age + len(steps_L)) else ridge - self.network.ridge

    def solve(self, drive: Tensor, tracks: bool, ridge_error: StepSize) -> Tensor:
        """Responses (batch, n) to a drive ``b`` (batch, n)."""
        if tracks:
            assert self.P is not None
            y = drive @ self.P
            return add_scaled(y, y @ self.P, ridge_error)
        self._factor = None  # frees the memory of the last one
        self._factor = factor = self._factorise(self._shift(self.network.ridge))
        half = torch.linalg.solve_triangular(factor, drive.mT, upper=False)
        solution: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
        return solution.mT

    def follow(self, y: Tensor, step_L: StepSize) -> None:
        """Update the tracked inverse after ``L += step_L (<y y^T> - L)``, by Woodbury's identity.

        Args:
            y: Responses of all processes (samples, n).
            step_L: The step that L has made.
        """
        P = self.P
        assert P is not None
        Z = y @ P  # (samples, n)
        small = Z @ y.mT
        small.diagonal().add_(len(y) * (1 - step_L) / step_L)
        V = torch.linalg.solve_triangular(self._factorise(small), Z, upper=False)
        if isinstance(step_L, Tensor):
            P.sub_(V.mT @ V).div_(1 - step_L)
        else:
            P.addmm_(V.mT, V, beta=1 / (1 - step_L), alpha=-1 / (1 - step_L))

    def advance(self, step_L: float) -> None:
        """Count a tracked update, whose decay shrank the ridge inside the inverse."""
        self._ridge *= 1 - step_L
        self._age += 1

    def condition(self, tracks: bool) -> Tensor:
        """A lower bound of the condition number of ``L + ridge I`` in the last :meth:`solve`; ()."""
        if tracks:
            assert self.P is not None
            return (self._L.diagonal().max() + self.network.ridge) * self.P.diagonal().max()
        assert self._factor is not None
        pivots = self._factor.diagonal()
        return (pivots.max() / pivots.min()).square()

    def _keep(self, inverse: Tensor) -> None:
        """Store an inverse in the same buffer as before: a recorded update refers to that buffer."""
        if self._buffer is None or self._buffer.device != inverse.device or self._buffer.dtype != inverse.dtype:
            self._buffer = inverse
        elif self._buffer is not inverse:
            self._buffer.copy_(inverse)
        self.P = self._buffer

    def _shift(self, ridge: float) -> Tensor:
        """``L + ridge I`` in a buffer of its own."""
        self._shifted.copy_(self._L)
        self._shifted.diagonal().add_(ridge)
        return self._shifted

    def _factorise(self, matrix: Tensor) -> Tensor:
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(matrix)
        torch.maximum(self.failed, info, out=self.failed)
        return factor
