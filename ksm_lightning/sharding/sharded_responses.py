"""Responses of a sharded network in training: each process owns rows of the inverse of ``L + ridge I``."""

import math
import warnings

import torch
from torch import Tensor

from ksm_lightning.kernels.limits import NOTICEABLE
from ksm_lightning.learning.responses import Inverse, ResponseSolver
from ksm_lightning.learning.rules import StepSize
from ksm_lightning.sharding.inversion import invert, residual
from ksm_lightning.sharding.layout import Shard
from ksm_lightning.sharding.sharded_network import ShardedNetwork


class ShardedResponses(ResponseSolver):
    """:class:`~ksm_lightning.learning.responses.ResponseSolver` for rows of L and of the inverse P.

    An update gathers four matrices (batch, n): the drive, the responses before and after the correction of the ridge,
    and the factor V of the change of P; and sums one matrix (batch, batch). ``exact`` computes the inverse for every
    batch, ``tracked`` every 15 to 64 updates (:func:`~ksm_lightning.sharding.inversion.invert`).

    Args:
        network: The network whose L and ridge are solved with.
        inverse: ``exact``, ``tracked`` or ``auto``.
    """

    network: ShardedNetwork

    def __init__(self, network: ShardedNetwork, inverse: Inverse = "auto") -> None:
        super().__init__(network, inverse)
        self.shard: Shard = network.shard
        self.residual = torch.zeros((), dtype=torch.float64)
        """Largest residual of the inverses that were computed in the last block of updates; () on the device."""

    def prepare(self) -> None:
        """Bring the inverse to the device of the network, once per block of updates."""
        self._L = L = self.network.L
        self.failed = self.failed.to(L.device)
        self.residual = torch.zeros((), dtype=torch.float64, device=L.device)
        self._drop_if_outdated()
        if self.P is not None and (self.P is not self._buffer or self.P.device != L.device or self.P.dtype != L.dtype):
            self._keep(self.P.to(L))

    def warn_if_inaccurate(self) -> None:
        """Warn if an inverse of the last block of updates was inaccurate. Synchronises with the device."""
        found = float(self.residual)
        if found > NOTICEABLE or math.isnan(found):
            warnings.warn(
                f"The inverse of L + ridge I was recomputed with a residual of {found:.1e}, and responses are reliable "
                f"up to {NOTICEABLE}: raise `ridge`, or train in float64 (precision=64-true).",
                stacklevel=2,
            )

    def _recompute(self, ridge: float) -> None:
        self.P = self._inverted(ridge)

    def _inverted(self, ridge: float) -> Tensor:
        """Rows (n_r, n) of ``(L + ridge I)^-1``, in the buffer of the tracked inverse."""
        L = self._L
        if self._buffer is None or self._buffer.device != L.device or self._buffer.dtype != L.dtype:
            self._buffer = torch.empty_like(L, requires_grad=False)
        self._buffer.copy_(L)
        self.shard.diagonal(self._buffer).add_(ridge)
        torch.maximum(self.failed, invert(self._buffer, self.shard), out=self.failed)
        found = residual(L, ridge, self._buffer, self.shard)
        # A failure is reported by the divergence guard.
        torch.maximum(self.residual, torch.where(self.failed == 0, found, 0.0), out=self.residual)
        return self._buffer

    def solve(self, drive: Tensor, tracks: bool, ridge_error: StepSize) -> Tensor:
        """Responses (batch, n) of all neurons to the drive (batch, n_r) of this process's."""
        b = self.shard.gather(drive.mT)  # (n, batch)
        if not tracks:
            return self.shard.gather(self._inverted(self.network.ridge) @ b).mT
        assert self.P is not None
        y = self.P @ b  # (n_r, batch)
        return self.shard.gather(y + (self.P @ self.shard.gather(y)) * ridge_error).mT

    def follow(self, y: Tensor, step_L: StepSize) -> None:
        """Update the rows of the inverse after ``L += step_L (<y y^T> - L)``, by Woodbury's identity.

        Args:
            y: Responses of all neurons (samples, n).
            step_L: The step that L has made.
        """
        assert self.P is not None
        Z = y @ self.P.mT  # (samples, n_r)
        small = self.shard.sum(Z @ y[:, self.shard.rows].mT)
        small.diagonal().add_(len(y) * (1 - step_L) / step_L)
        V = torch.linalg.solve_triangular(self._factorise(small), Z, upper=False)  # (samples, n_r)
        growth = 1 / (1 - float(step_L))
        self.P.addmm_(V.mT, self.shard.gathered_mT(V), beta=growth, alpha=-growth)

    def condition(self, tracks: bool) -> Tensor:
        """A lower bound of the condition number of ``L + ridge I`` in the last :meth:`solve`; ()."""
        inverse = self.P if tracks else self._buffer
        assert inverse is not None
        largest = torch.stack([self.shard.diagonal(each).max() for each in (self._L, inverse)])
        largest = self.shard.ranks.gather(largest[None]).amax(0)
        return (largest[0] + self.network.ridge) * largest[1]
