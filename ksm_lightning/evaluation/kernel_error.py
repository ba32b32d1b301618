"""The kernel error: how well inner products of representations match a kernel."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from ksm_lightning.kernels import Kernel, Tile, full_precision, random_subset, symmetric_tiles
from ksm_lightning.kernels.limits import TILE
from ksm_lightning.private_apis import is_synced


@torch.no_grad()
def kernel_squared_errors(
    kernel: Kernel, x: Tensor, representations: Sequence[Tensor], tiles: Iterable[Tile] | None = None
) -> Tensor:
    """``||F||^2``, and ``||F - Y Y^T||^2`` of each representation, over all pairs in one pass over F.

    F is computed in tiles, and by symmetry only on and above the diagonal. At most two tiles are in memory.

    Args:
        kernel: The similarity.
        x: Inputs (samples, m).
        representations: Any number of Y (samples, n); n may differ between them.
        tiles: The tiles to sum over, so that processes can share the work and add their sums. Default: all of
            :func:`symmetric_tiles`.

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
    # Within a row in the dtype of the matrix, over rows in float64: exact enough without a float64 copy.
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms.double().square().sum()


def nrmse_from_sums(sums: Tensor) -> Tensor:
    """Errors (number of representations,) from the sums of :func:`kernel_squared_errors`.

    The error is 0 if the difference is 0. It is NaN if the features are NaN or similarities exceed the dtype's range.
    """
    errors = torch.where(sums[1:] == 0, 0.0, sums[1:] / sums[0]).sqrt()
    return torch.where(sums[0].isfinite(), errors, torch.nan)


def kernel_nrmse(kernel: Kernel, x: Tensor, *representations: Tensor, tile: int = TILE) -> Tensor:
    """Normalised error ``||F - Y Y^T||_F / ||F||_F`` with ``F = f(x_s, x_t)`` over all pairs.

    Args:
        kernel: The similarity.
        x: Inputs (samples, m).
        representations: One or more Y (samples, n), scored in the same pass over F.
        tile: Rows and columns per tile.

    Returns:
        Errors (number of representations,), float64.

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
            raise ValueError(f"Each input needs one representation, got {len(x)} inputs and {len(y)} representations.")


class KernelNRMSE(Metric):
    """:func:`kernel_nrmse` of all points passed to :meth:`update`, over batches and processes.

    With several processes, each computes its share of the tiles of F.

    Args:
        kernel: The similarity.
        num_representations: Number of representations to score.
        max_points: Maximum number of points to score, a random but fixed subset. Default: all.
        is_replicated: Whether every process passes the same points. They are then not gathered.
        progress: Called with the number of tiles computed since the last call.
        should_stop: Asked before each tile. If it is true, the other tiles are left out and the error is NaN, on all
            processes.
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

    def __init__(
        self,
        kernel: Kernel,
        num_representations: int = 1,
        max_points: int | None = None,
        *,
        is_replicated: bool = False,
        progress: Callable[[int], object] | None = None,
        should_stop: Callable[[], bool] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs | ({"sync_on_compute": False} if is_replicated else {}))
        if num_representations < 1 or (max_points is not None and max_points < 1):
            raise ValueError(
                "`num_representations` and `max_points` must be at least 1, got "
                f"{num_representations} and {max_points}."
            )
        self.kernel = kernel
        self.max_points = max_points
        self.is_replicated = is_replicated
        self.progress = progress
        self.should_stop = should_stop
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
        """The error over all pairs of points, float64; (num_representations,) if there are several."""
        states = [getattr(self, name) for name in self._names]
        x, *representations = (state if isinstance(state, Tensor) else torch.cat(state) for state in states)
        if self.max_points is not None and len(x) > self.max_points:
            chosen = random_subset(len(x), self.max_points).to(x.device)
            x, representations = x[chosen], [y[chosen] for y in representations]
        _check(x, representations)
        tiles = list(symmetric_tiles(len(x)))
        # Every process has all points, so each computes its share of the tiles.
        is_shared = is_synced(self) or (self.is_replicated and dist.is_available() and dist.is_initialized())
        if is_shared:
            tiles = tiles[dist.get_rank() :: dist.get_world_size()]
        done: list[Tile] = []
        sums = kernel_squared_errors(self.kernel, x, representations, self._counted(tiles, done))
        if len(done) < len(tiles):
            sums.fill_(torch.nan)
        if is_shared:
            dist.all_reduce(sums)
        errors = nrmse_from_sums(sums)
        return errors[0] if len(representations) == 1 else errors

    def _counted(self, tiles: Iterable[Tile], done: list[Tile]) -> Iterator[Tile]:
        for tile in tiles:
            if self.should_stop is not None and self.should_stop():
                return
            yield tile
            done.append(tile)
            if self.progress is not None:
                self.progress(1)
