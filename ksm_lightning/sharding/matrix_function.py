"""The exact L of a sharded network: a function of a matrix by inverses, without an eigen-decomposition.

The exact L has the eigenvectors of ``B = <b b^T>`` and eigenvalues l with ``l (l + ridge)^2 = beta``
(:mod:`ksm_lightning.learning.exact`). As a function of beta, l increases from 0 and is analytic outside of the negative
axis below ``-4 ridge^3 / 27``, so a sum of simple fractions

``l(beta) = c_0 + sum_j c_j beta / (beta + s_j)``, all c_j >= 0,

with shifts s_j that grow by a factor of e matches it to 1e-4 of ``l + ridge``, which responses are divided by, and

``L = c_0 I + sum_j c_j (I - s_j (B + s_j I)^-1)``

needs one inverse per shift, about 30, each of which is shared out. Eigenvalues below 1e-13 of the trace of B are
rounding errors of float64: their l is that of 1e-13.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from ksm_lightning.kernels.limits import TILE
from ksm_lightning.learning.exact import lateral_eigenvalues
from ksm_lightning.sharding.inversion import invert
from ksm_lightning.sharding.layout import Shard

# Eigenvalues of B below this fraction of its trace are rounding errors.
_RESOLUTION = 1e-13
# Logarithm of the largest shift over the largest eigenvalue.
_BEYOND = 4.0


class Fractions(NamedTuple):
    """``l(beta) = constant + sum_j weights_j beta / (beta + shifts_j)``."""

    constant: float
    weights: np.ndarray
    shifts: np.ndarray

    def __call__(self, beta: np.ndarray) -> np.ndarray:
        values: np.ndarray = self.constant + (self.weights * beta[:, None] / (beta[:, None] + self.shifts)).sum(1)
        return values


def lateral_fractions(ridge: float, largest: float) -> Fractions:
    """Fractions for the eigenvalues l of L, for eigenvalues beta of B up to ``largest``.

    Example:
        >>> found, beta = lateral_fractions(1e-3, largest=1.0), np.array([1e-6, 1e-3, 1.0])
        >>> exact = lateral_eigenvalues(torch.tensor(beta), 1e-3).numpy()
        >>> bool((abs(found(beta) / exact - 1) < 1e-4).all())
        True
    """
    smallest = max(_RESOLUTION * largest, 4 * ridge**3 / 27)  # fractions with smaller shifts are not needed
    shifts = np.exp(np.arange(np.log(smallest), np.log(largest) + _BEYOND))
    is_cut = smallest > 4 * ridge**3 / 27
    first = smallest if is_cut else 1e-3 * smallest  # l is proportional to beta below
    beta = np.exp(np.linspace(np.log(first), np.log(largest), TILE))
    values = lateral_eigenvalues(torch.from_numpy(beta), ridge).numpy()
    columns = beta[:, None] / (beta[:, None] + shifts)
    columns = np.hstack([np.full((len(beta), 1), float(is_cut)), columns]) / values[:, None]  # relative errors
    scale = np.linalg.norm(columns, axis=0) + np.finfo(float).tiny
    weights = nnls(columns / scale, np.ones(len(beta)), maxiter=100 * len(shifts))[0] / scale
    is_used = weights[1:] > 0
    return Fractions(float(weights[0]) if is_cut else 0.0, weights[1:][is_used], shifts[is_used])


@torch.no_grad()
def exact_lateral(B: Tensor, shard: Shard, ridge: float) -> tuple[Tensor, Tensor]:
    """Rows (n_r, n) of the exact L for the rows (n_r, n) of B, float64; and how many inverses failed, ().

    It takes about 30 inverses, ``60 n^3 / ranks`` operations, and memory for three matrices like B.
    """
    trace = float(shard.sum(shard.diagonal(B).sum()))
    L = torch.zeros_like(B)
    failed = torch.zeros((), dtype=torch.int32, device=B.device)
    if not trace > 0:
        return L, failed  # no neuron responds
    fractions = lateral_fractions(ridge, trace)
    work = torch.empty_like(B)
    for weight, shift in zip(fractions.weights.tolist(), fractions.shifts.tolist(), strict=True):
        work.copy_(B)
        shard.diagonal(work).add_(shift)
        failed += (invert(work, shard) != 0).to(failed)
        L.sub_(work, alpha=weight * shift)
    shard.diagonal(L).add_(fractions.constant + float(fractions.weights.sum()))
    return L, failed
