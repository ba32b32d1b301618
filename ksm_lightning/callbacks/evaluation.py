"""What the evaluations share: when they run, on which points, and how they are logged."""

from abc import abstractmethod
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from tqdm import tqdm

from ksm_lightning.callbacks.progress_bar import updates_to_do
from ksm_lightning.data import KSMDataModule
from ksm_lightning.module import KernelSimilarityMatching


class Evaluation(Callback):
    """Scores the network at validations and tests, and logs what it finds.

    An evaluation changes nothing: it draws from random streams of its own and leaves the network as it is, so that a
    run with it has the same bits as one without.

    Args:
        min_updates_between: During training, validations are skipped until so many updates have passed since the last
            evaluation; the end of the run never is.

    Raises:
        ValueError: If ``min_updates_between`` is negative.
    """

    in_progress_bar = True

    def __init__(self, min_updates_between: int = 0) -> None:
        if min_updates_between < 0:
            raise ValueError(f"`min_updates_between` must not be negative, got {min_updates_between}.")
        self.min_updates_between = min_updates_between
        self.last_update: int | None = None

    @abstractmethod
    def evaluate(
        self, trainer: L.Trainer, model: KernelSimilarityMatching, data: KSMDataModule, stage: str
    ) -> dict[str, float]:
        """Scores by the name they are logged under; ``stage`` is ``val`` or ``test``. Every rank calls it."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, KSMDataModule) or not isinstance(pl_module, KernelSimilarityMatching):
            raise ValueError(
                f"{type(self).__name__} evaluates KernelSimilarityMatching on a datamodule of ksm_lightning; use "
                "ArrayDataModule for your own data, or the functions of ksm_lightning.evaluation.kernel_error and ksm_lightning.evaluation.linear_probe."
            )

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and self._is_due(trainer):
            self._run(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._run(trainer, pl_module, "test")

    def _is_due(self, trainer: L.Trainer) -> bool:
        if trainer.state.fn != "fit":
            return True
        done, end = trainer.global_step, updates_to_do(trainer)
        is_last = end is not None and done >= end
        return self.last_update is None or done - self.last_update >= self.min_updates_between or is_last

    def _run(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data = getattr(trainer, "datamodule", None)
        assert isinstance(data, KSMDataModule)
        assert isinstance(pl_module, KernelSimilarityMatching)
        self.last_update = trainer.global_step
        for name, value in self.evaluate(trainer, pl_module, data, stage).items():
            pl_module.log(name, value, prog_bar=self.in_progress_bar)


def progress(trainer: L.Trainer, total: int, description: str) -> "tqdm[Any]":
    """A bar that appears when the work turns out to take longer than two seconds."""
    bar = trainer.progress_bar_callback
    is_shown = trainer.is_global_zero and bar is not None and not bar.is_disabled  # type: ignore[attr-defined]
    return tqdm(total=total, desc=description, delay=2, leave=False, disable=not is_shown)
