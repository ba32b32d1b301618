"""The second moment of the similarities, the one statistic of the data that the exact solutions need."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel


class SimilarityMoment(NamedTuple):
    """The second moment of the similarities ``k = f(x, W)`` over some inputs; enough to solve for q and L."""

    total: Tensor  # sum k k^T (n, n), float64
    samples: Tensor | int

    def of_drive(self, q: Tensor) -> Tensor:
        """``B = <b b^T> = q G q`` (n, n), float64, for the drive ``b = q * k`` and ``G = <k k^T>``."""
        q = q.double()
        return q[:, None] * self.total * q / self.samples


@torch.no_grad()
def similarity_moment(kernel: Kernel, blocks: Iterable[Tensor], W: Tensor) -> SimilarityMoment:
    """The second moment of ``f(x, W)`` over all inputs, which come as blocks (samples, m), in one pass.

    Similarities are computed in the dtype of W, so that the sum contains the rounding noise that the responses will
    have. The sum is float64.
    """
    total = torch.zeros(len(W), len(W), dtype=torch.float64, device=W.device)
    count = 0
    for x in blocks:
        for part in torch.split(x.to(W), 8192):
            k = kernel(part, W).double()
            total.addmm_(k.mT, k)
            count += len(part)
    return SimilarityMoment(total, count)
