"""How well inner products of representations match a kernel."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from ksm_lightning.kernels import Kernel, Tile, full_precision, random_subset, symmetric_tiles


@torch.no_grad()
def kernel_squared_errors(
    kernel: Kernel, x: Tensor, representations: Sequence[Tensor], tiles: Iterable[Tile] | None = None
) -> Tensor:
    """``||F||^2`` and ``||F - Y Y^T||^2`` of each representation, over all pairs, in one walk over F.

    F is walked in tiles and half of it by symmetry; the sums are float64, and no more than two tiles are held.

    Args:
        kernel: The similarity.
        x: Inputs (samples, m).
        representations: Any number of Y (samples, n), each with its own n.
        tiles: The tiles to walk, all of :func:`symmetric_tiles` unless given; processes may share them, and add up
            what they get.

    Returns:
        The sums (1 + number of representations,), float64.
    """
    sums = torch.zeros(1 + len(representations), dtype=torch.float64, device=x.device)
    with full_precision(x.device):
        for rows, columns, weight in symmetric_tiles(len(x)) if tiles is None else tiles:
            F = kernel(x[rows], x[columns])  # (tile, tile)
            sums[0] += weight * _sum_of_squares(F)
            for index, y in enumerate(representations, start=1):
                is_last = index == len(representations)
                difference = torch.addmm(F, y[rows], y[columns].mT, alpha=-1, out=F if is_last else None)
                sums[index] += weight * _sum_of_squares(difference)
    return sums


def _sum_of_squares(matrix: Tensor) -> Tensor:
    # A row in the matrix's own dtype, the rows together in float64: as exact as needed, and no float64 copy.
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms.double().square().sum()


def nrmse_from_sums(sums: Tensor) -> Tensor:
    """Errors (number of representations,) from what :func:`kernel_squared_errors` gives; 0 where nothing differs.

    NaN where features are, and where similarities are beyond the range of their dtype.
    """
    errors = torch.where(sums[1:] == 0, 0.0, sums[1:] / sums[0]).sqrt()
    return torch.where(sums[0].isfinite(), errors, torch.nan)


def kernel_nrmse(kernel: Kernel, x: Tensor, *representations: Tensor, tile: int = 1024) -> Tensor:
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
    _check(x, representations)
    return nrmse_from_sums(kernel_squared_errors(kernel, x, representations, symmetric_tiles(len(x), tile)))


def _check(x: Tensor, representations: Sequence[Tensor]) -> None:
    if len(x) == 0 or not representations:
        raise ValueError("The kernel error needs at least one sample and one representation.")
    for y in representations:
        if len(y) != len(x):
            raise ValueError(f"There are {len(x)} inputs but {len(y)} representations.")


class KernelNRMSE(Metric):
    """:func:`kernel_nrmse` of the points seen, gathered over batches and processes, which then share the walk over F.

    Args:
        kernel: The similarity.
        num_representations: How many representations of each point are scored.
        max_points: Points to compare at most, a random subset that is always the same; all unless given.
        kwargs: Passed to :class:`torchmetrics.Metric`.

    Raises:
        ValueError: If a number is below 1.

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

    def __init__(
        self, kernel: Kernel, num_representations: int = 1, max_points: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if num_representations < 1 or (max_points is not None and max_points < 1):
            raise ValueError(
                "`num_representations` and `max_points` must be at least 1, got "
                f"{num_representations} and {max_points}."
            )
        self.kernel = kernel
        self.max_points = max_points
        self._names = ["x", *(f"y_{index}" for index in range(num_representations))]
        for name in self._names:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, x: Tensor, *representations: Tensor) -> None:
        """Add inputs (batch, m) and their representations (batch, n)."""
        if len(representations) != len(self._names) - 1:
            raise ValueError(f"Expected {len(self._names) - 1} representations, got {len(representations)}.")
        for name, value in zip(self._names, (x, *representations), strict=True):
            getattr(self, name).append(value)

    def compute(self) -> Tensor:
        """The error over all pairs of the points kept, float64; (num_representations,) if there are several."""
        states = [getattr(self, name) for name in self._names]
        x, *representations = (state if isinstance(state, Tensor) else torch.cat(state) for state in states)
        if self.max_points is not None and len(x) > self.max_points:
            chosen = random_subset(len(x), self.max_points).to(x.device)
            x, representations = x[chosen], [y[chosen] for y in representations]
        _check(x, representations)
        tiles = list(symmetric_tiles(len(x)))
        if self._is_synced:  # every process has all points now, and walks over its share of F
            import torch.distributed as dist

            sums = kernel_squared_errors(
                self.kernel, x, representations, tiles[dist.get_rank() :: dist.get_world_size()]
            )
            dist.all_reduce(sums)
        else:
            sums = kernel_squared_errors(self.kernel, x, representations, tiles)
        errors = nrmse_from_sums(sums)
        return errors[0] if len(representations) == 1 else errors
