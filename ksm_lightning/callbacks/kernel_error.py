"""The kernel's NRMSE over the evaluated points, on the device."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from tqdm import tqdm

from ksm_lightning.callbacks.evaluation import Evaluation, progress
from ksm_lightning.data import KSMDataModule
from ksm_lightning.evaluation.kernel_error import kernel_squared_errors, nrmse_from_sums
from ksm_lightning.kernels.pairs import Tile, random_subset, symmetric_tiles
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.readout import Readout, check_readout


class KernelErrorEvaluation(Evaluation):
    """Logs ``val/kernel_nrmse`` and ``test/kernel_nrmse``: ``||F - Y Y^T||_F / ||F||_F`` over all pairs of points.

    ``val`` is over the training points, for which the approximation is made, ``test`` over the test points. In a
    warm-up F is of the warm-up's kernel. Several processes share the walk over F.

    Besides the network's own representation other readouts of the same landmarks are scored in the same walk, and
    logged as ``val/kernel_nrmse_nystroem`` and so on: what the bound keeps the network from reaching.

    Args:
        readouts: What to score: ``neural``, ``nystroem``, ``least_squares``.
        max_points: Points to compare at most, a random subset that is always the same; the cost grows with its square.
        min_updates_between: During training, validations are skipped until so many updates have passed since the last
            evaluation; the end of the run never is.

    Raises:
        ValueError: If a number is impossible.
    """

    def __init__(
        self,
        readouts: Sequence[Readout] = ("neural", "nystroem"),
        max_points: int = 10_000,
        min_updates_between: int = 0,
    ) -> None:
        super().__init__(min_updates_between)
        if not readouts:
            raise ValueError("`readouts` must name at least one of the readouts.")
        self.readouts = [check_readout(name) for name in readouts]
        if max_points < 1:
            raise ValueError(f"`max_points` must be at least 1, got {max_points}.")
        self.max_points = max_points

    def evaluate(
        self, trainer: L.Trainer, model: KernelSimilarityMatching, data: KSMDataModule, stage: str
    ) -> dict[str, float]:
        points = data.evaluation_points(stage)
        x = points.take(random_subset(len(points), self.max_points).to(points.device)).to(model.network.W)
        representations = [model.features(x, readout, data.readout_sample(readout)) for readout in self.readouts]
        tiles = list(symmetric_tiles(len(x)))[trainer.global_rank :: trainer.world_size]
        with progress(trainer, len(tiles), "Kernel error") as bar:
            sums = kernel_squared_errors(model.network.kernel, x, representations, _counted(tiles, bar))
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        assert isinstance(sums, torch.Tensor)
        names = ["" if readout == "neural" else f"_{readout}" for readout in self.readouts]
        errors = nrmse_from_sums(sums).tolist()
        return {f"{stage}/kernel_nrmse{name}": error for name, error in zip(names, errors, strict=True)}


def _counted(tiles: Iterable[Tile], bar: "tqdm[Any]") -> Iterator[Tile]:
    for tile in tiles:
        yield tile
        bar.update()
