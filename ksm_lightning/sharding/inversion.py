"""The inverse of a positive definite matrix whose rows are shared out, in place and without iterations."""

import torch
from torch import Tensor

from ksm_lightning.sharding.layout import Panel, Shard

PANEL = 128
"""Rows of a panel. Every process multiplies it by the inverse of its diagonal block, ``panel / n_r`` of the whole work;
smaller panels make slower products."""
PROBES = 4
"""Vectors by which the residual of an inverse is measured."""


@torch.no_grad()
def invert(matrix: Tensor, shard: Shard, panel: int = PANEL) -> Tensor:
    """Replace rows (n_r, n) of a symmetric positive definite matrix by those of its inverse, on all processes.

    Block Gauss-Jordan elimination: a panel K of rows is sent to all processes, and with ``D = A_KK^-1``

    ``A_IJ -= A_IK D A_KJ``, ``A_KJ = D A_KJ``, ``A_IK = -A_IK D``, ``A_KK = D``.

    Pivots of a positive definite matrix need no exchange of rows. All processes have the same work in every step,
    ``2 n^3 / ranks`` operations in all, and receive ``n^2`` numbers, one panel at a time. Newton-Schulz iterations from
    an inverse whose ridge is off by 15 % would take five steps of ``4 n^3 / ranks`` each, and would not converge from
    an arbitrary start.

    Args:
        matrix: The rows of this process, overwritten.
        shard: Which rows they are.
        panel: Largest number of rows that are sent at once.

    Returns:
        A number that is not 0 if a diagonal block could not be factorised; () int32, the same on all processes.
    """
    failed = torch.zeros((), dtype=torch.int32, device=matrix.device)
    for each in shard.panels(panel):
        torch.maximum(failed, _eliminate(matrix, shard, each), out=failed)
    return failed


def _eliminate(matrix: Tensor, shard: Shard, panel: Panel) -> Tensor:
    """One step of the elimination; returns the status of the factorisation, ()."""
    rows = shard.broadcast(panel, matrix)  # (panel, n)
    factor, info = torch.linalg.cholesky_ex(rows[:, panel.rows])
    D = torch.cholesky_inverse(factor)
    scaled = D @ rows  # (panel, n)
    scaled[:, panel.rows] = D
    columns = matrix[:, panel.rows].clone()  # (n_r, panel)
    matrix[:, panel.rows] = 0
    matrix.addmm_(columns, scaled, alpha=-1)
    if panel.owner == shard.ranks.rank:
        matrix[panel.own] = scaled
    status: Tensor = info
    return status


@torch.no_grad()
def residual(L: Tensor, ridge: float, inverse: Tensor, shard: Shard) -> Tensor:
    """``|(L + ridge I) P v - v| / |v|`` for a few fixed vectors v; () on the device, the same on all processes.

    Args:
        L: Rows (n_r, n) of this process.
        ridge: Added to the diagonal of L.
        inverse: Rows (n_r, n) of P, the inverse of ``L + ridge I``.
        shard: Which rows they are.
    """
    signs = torch.randint(0, 2, (shard.num_neurons, PROBES), generator=torch.Generator().manual_seed(0))
    v = (2 * signs - 1).to(L)
    solved = shard.gather(inverse @ v)  # (n, probes)
    error = L @ solved + ridge * solved[shard.rows] - v[shard.rows]
    return (shard.sum(error.double().square().sum()) / v.numel()).sqrt()
