"""How well inner products of representations match a kernel."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from ksm_lightning.kernels import Kernel, full_precision

_TILE = 2048


@torch.no_grad()
def kernel_squared_errors(
    kernel: Kernel, x: Tensor, representations: Sequence[Tensor], *, tile: int = _TILE
) -> tuple[Tensor, Tensor]:
    """``||F - Y Y^T||^2`` of each representation and ``||F||^2``, over all pairs, in one walk over F.

    F is walked in tiles and half of it by symmetry; both sums are float64, and no more than a tile is held.

    Args:
        kernel: The similarity.
        x: Inputs (samples, m).
        representations: Any number of Y (samples, n), each with its own n.
        tile: Rows and columns of a tile.

    Returns:
        Squared errors (number of representations,) and the squared norm of F, float64.
    """
    errors = torch.zeros(len(representations), dtype=torch.float64, device=x.device)
    norm = torch.zeros((), dtype=torch.float64, device=x.device)
    samples = len(x)
    with full_precision(x.device):
        for top in range(0, samples, tile):
            rows = slice(top, top + tile)
            for left in range(top, samples, tile):
                columns = slice(left, left + tile)
                weight = 1 if left == top else 2
                F = kernel(x[rows], x[columns])  # (tile, tile)
                norm += weight * _sum_of_squares(F)
                for index, y in enumerate(representations):
                    difference = torch.addmm(F, y[rows], y[columns].mT, alpha=-1)
                    errors[index] += weight * _sum_of_squares(difference)
    return errors, norm


def _sum_of_squares(matrix: Tensor) -> Tensor:
    # One pass in the matrix's own dtype a row, the rows together in float64: as exact as needed, and no float64 copy.
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms.double().square().sum()


def kernel_nrmse(kernel: Kernel, x: Tensor, *representations: Tensor, tile: int = _TILE) -> Tensor:
    """Normalised error ``||F - Y Y^T||_F / ||F||_F`` with ``F = f(x_s, x_t)`` over all pairs.

    Args:
        kernel: The similarity.
        x: Inputs (samples, m).
        representations: One or more Y (samples, n) to score in the same walk over F.
        tile: Rows and columns held at once.

    Returns:
        Errors (number of representations,), float64.

    Raises:
        ValueError: If there is no sample, or a representation has another number of them.

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> kernel_nrmse(LinearKernel(), x, x, torch.zeros(2, 1))
        tensor([0., 1.], dtype=torch.float64)
    """
    if len(x) == 0 or not representations:
        raise ValueError("The kernel error needs at least one sample and one representation.")
    for y in representations:
        if len(y) != len(x):
            raise ValueError(f"There are {len(x)} inputs but {len(y)} representations.")
    errors, norm = kernel_squared_errors(kernel, x, representations, tile=tile)
    return (errors / norm).sqrt()


class KernelNRMSE(Metric):
    """:func:`kernel_nrmse` of the points seen, gathered over batches and processes.

    Args:
        kernel: The similarity.
        max_points: Points to keep at most, evenly over all that were seen; all unless given.
        kwargs: Passed to :class:`torchmetrics.Metric`.

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> metric = KernelNRMSE(LinearKernel())
        >>> metric.update(torch.eye(2), 0.5 * torch.eye(2))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    x: list[Tensor]
    y: list[Tensor]

    def __init__(self, kernel: Kernel, max_points: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if max_points is not None and max_points < 1:
            raise ValueError(f"`max_points` must be at least 1, got {max_points}.")
        self.kernel = kernel
        self.max_points = max_points
        self.add_state("x", default=[], dist_reduce_fx="cat")
        self.add_state("y", default=[], dist_reduce_fx="cat")

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add inputs (batch, m) and their representations (batch, n)."""
        self.x.append(x)
        self.y.append(y)

    def compute(self) -> Tensor:
        """The error over all pairs of the points kept, float64."""
        x, y = (state if isinstance(state, Tensor) else torch.cat(state) for state in (self.x, self.y))
        if self.max_points is not None and len(x) > self.max_points:
            chosen = torch.arange(self.max_points, device=x.device) * len(x) // self.max_points
            x, y = x[chosen], y[chosen]
        return kernel_nrmse(self.kernel, x, y)[0]
