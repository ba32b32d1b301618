"""The inverse of a positive definite matrix whose rows are shared out, in place and without iterations."""

import torch
from torch import Tensor

from ksm_lightning.sharding.layout import Shard

# Rows of a panel. Every process multiplies a panel by the inverse of its diagonal block, which costs panel / n_r of the
# rest; smaller panels make slower products.
PANEL = 128
# Vectors by which the residual of an inverse is measured.
_PROBES = 4


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
        rows = shard.broadcast(each, matrix)  # (panel, n)
        factor, info = torch.linalg.cholesky_ex(rows[:, each.rows])
        torch.maximum(failed, info, out=failed)
        D = torch.cholesky_inverse(factor)
        scaled = D @ rows  # (panel, n)
        scaled[:, each.rows] = D
        columns = matrix[:, each.rows].clone()  # (n_r, panel)
        matrix[:, each.rows] = 0
        matrix.addmm_(columns, scaled, alpha=-1)
        if each.owner == shard.ranks.rank:
            matrix[each.own] = scaled
    return failed


@torch.no_grad()
def residual(L: Tensor, ridge: float, inverse: Tensor, shard: Shard) -> Tensor:
    """``|(L + ridge I) P v - v| / |v|`` for a few fixed vectors v; () on the device, the same on all processes.

    Args:
        L: Rows (n_r, n) of this process.
        ridge: Added to the diagonal of L.
        inverse: Rows (n_r, n) of P, the inverse of ``L + ridge I``.
        shard: Which rows they are.
    """
    signs = torch.randint(0, 2, (shard.num_neurons, _PROBES), generator=torch.Generator().manual_seed(0))
    v = (2 * signs - 1).to(L)
    solved = shard.gather(inverse @ v)  # (n, probes)
    error = L @ solved + ridge * solved[shard.rows] - v[shard.rows]
    return (shard.sum(error.double().square().sum()) / v.numel()).sqrt()
