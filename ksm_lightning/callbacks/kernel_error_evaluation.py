"""The kernel error at validations, tests and milestones of a run."""

from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import Tensor
from tqdm import tqdm

from ksm_lightning.callbacks.evaluations import ReadoutEvaluation, evaluated_points
from ksm_lightning.data.datamodule import KSMDataModule, datamodule_of
from ksm_lightning.evaluation.kernel_error import KernelNRMSE
from ksm_lightning.kernels import symmetric_tiles
from ksm_lightning.kernels.limits import EXACT_UP_TO
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.readout import Readout
from ksm_lightning.runs import metric_names
from ksm_lightning.runs.metric_names import Stage


class KernelErrorEvaluation(ReadoutEvaluation):
    """Logs ``val/kernel_nrmse`` and ``test/kernel_nrmse``: ``||F - Y Y^T||_F / ||F||_F`` over all pairs of points.

    ``val`` uses the training points, which the network approximates, and ``test`` the test points. During a warm-up, F
    is the matrix of the warm-up kernel. Several processes share the work.

    Other readouts of the same landmarks are scored in the same pass and logged as ``val/kernel_nrmse_nystroem`` and so
    on. They show the part of the error that is due to the network's upper bound.

    Between validations, loggers get the errors of at most 2,000 of the points: at update 0 and at the updates 1, 2, 4,
    8 and so on, or at the end of the next block of updates.

    Args:
        readouts: Readouts to score: ``neural``, ``nystroem``, ``least_squares``.
        max_points: Maximum number of points, a random but fixed subset. The cost grows with its square.
        min_updates_between: Minimum number of training updates between two evaluations; the end is always evaluated.
        num_features: Number of features of all readouts except ``neural``, at most the number of landmarks. Default:
            the number of neurons.
    """

    def __init__(
        self,
        readouts: Sequence[Readout] = ("neural", "nystroem"),
        max_points: int = 10_000,
        min_updates_between: int = 0,
        num_features: int | None = None,
    ) -> None:
        super().__init__(readouts, num_features, min_updates_between)
        if not readouts:
            raise ValueError("`readouts` must name at least one readout, got none.")
        if max_points < 1:
            raise ValueError(f"`max_points` must be at least 1, got {max_points}.")
        self.max_points = max_points

    def count_for(self, readout: Readout) -> int | None:
        return None if readout == "neural" else self.num_features

    def evaluate(
        self, trainer: L.Trainer, model: KernelSimilarityMatching, data: KSMDataModule, stage: Stage
    ) -> dict[str, float]:
        x = evaluated_points(model, data, stage, self.max_points)[0]
        return self._errors(trainer, model, data, x, stage, may_leave=True)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self._follow(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        if isinstance(pl_module, KernelSimilarityMatching) and pl_module.run_state.is_milestone:
            self._follow(trainer, pl_module)

    def _follow(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        """Log the errors between two validations. Monitors do not get them."""
        data = datamodule_of(trainer)
        assert data is not None
        assert isinstance(model, KernelSimilarityMatching)
        if trainer.loggers and trainer.enable_validation and not model.learner.not_finite():
            x = evaluated_points(model, data, "val", min(self.max_points, EXACT_UP_TO))[0]
            scores = self._errors(trainer, model, data, x, "val")  # quick, and the checkpoint is still to be saved
            for logger in trainer.loggers:
                logger.log_metrics(scores, trainer.global_step)

    def _errors(
        self,
        trainer: L.Trainer,
        model: KernelSimilarityMatching,
        data: KSMDataModule,
        x: Tensor,
        stage: Stage,
        may_leave: bool = False,
    ) -> dict[str, float]:
        representations = []
        for readout in self.readouts:
            if may_leave and model.is_alone:
                model.leave_if_stopped()
            representations.append(model.features(x, readout, data.readout_sample(readout), self.count_for(readout)))
        tiles = sum(1 for _ in symmetric_tiles(len(x)))
        with _late_bar(trainer, len(range(trainer.global_rank, tiles, trainer.world_size)), "Kernel error") as bar:
            metric = KernelNRMSE(
                model.network.kernel, len(self.readouts), is_replicated=trainer.world_size > 1, progress=bar.update,
                should_stop=lambda: may_leave and model.run_state.stop.is_set, sync_on_compute=False,
            )  # fmt: skip
            metric.update(x, *representations)
            errors = metric.compute().reshape(-1).tolist()
        names = [metric_names.kernel_nrmse(stage, readout) for readout in self.readouts]
        return dict(zip(names, errors, strict=True))


def _late_bar(trainer: L.Trainer, total: int, description: str) -> "tqdm[Any]":
    """A progress bar that appears after two seconds, on the first process, if the trainer shows progress bars."""
    bar = trainer.progress_bar_callback
    is_shown = trainer.is_global_zero and bar is not None and not bar.is_disabled  # type: ignore[attr-defined]
    return tqdm(total=total, desc=description, delay=2, leave=False, disable=not is_shown)
