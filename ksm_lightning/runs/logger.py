"""Run folders that never overwrite each other."""

import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from tensorboard.compat.proto.summary_pb2 import Summary

from ksm_lightning.private_apis import add_event
from ksm_lightning.runs import metric_names as names
from ksm_lightning.runs.processes import PATIENCE


class RunLogger(TensorBoardLogger):
    """A TensorBoard logger that creates its own folder, ``save_dir/name/version_K``.

    Creating a folder is atomic: two runs that start at the same time get different numbers.

    Args:
        save_dir: Folder of all runs.
        name: Name of the experiment, a folder below ``save_dir``.
        version: Number or name of this run, which must be new. Default: the next free number.
    """

    def __init__(self, save_dir: str = "runs", name: str = "ksm", version: int | str | None = None) -> None:
        super().__init__(save_dir, name=name, version=version, default_hp_metric=False)
        self._wanted = version
        self._claimed: int | str | None = None

    @property
    def is_claimed(self) -> bool:
        """Whether this process has created the folder."""
        return self._claimed is not None

    @property
    def version(self) -> int | str:
        """Number or name of the run. The first rank creates the folder when it reads this for the first time."""
        root = Path(self.root_dir)
        if getattr(rank_zero_only, "rank", 0) != 0:  # writes nothing, and gets the folder by `trainer.log_dir`
            return _next_version(root) if self._wanted is None else self._wanted
        if self._claimed is None:
            self._claimed = _claim(root, self._wanted)
        return self._claimed

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log all metrics of a step as one event; one event per metric would cost as much as several updates."""
        try:
            values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        except (TypeError, ValueError) as error:
            raise ValueError(f"TensorBoard's scalars are numbers, got {metrics!r}.") from error
        add_event(self.experiment, Summary(value=values), step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is pending and close the file. A writer that hangs, such as on a lost disk, is left behind."""
        failures: list[Exception] = []
        finalize = super().finalize

        def close() -> None:
            try:
                finalize(status)
            except Exception as error:
                failures.append(error)

        writing = threading.Thread(target=close, daemon=True)
        writing.start()
        writing.join(PATIENCE)
        if writing.is_alive():
            rank_zero_warn(f"TensorBoard could not write its last events to {self.log_dir}; the file may end early.")
        if failures:
            raise failures[0]


# What tells runs apart comes first among the columns of TensorBoard's hparams tab.
_FIRST_COLUMNS = ("kernel", "kernel_params", "num_neurons", "bound", "num_landmarks", "updates", "phases")


def log_final_scores(
    loggers: Iterable[Logger], hparams: Mapping[str, Any], metrics: Mapping[str, Any], update: int
) -> None:
    """Log the final scores among the metrics at the last update, with hyper-parameters for TensorBoard's hparams tab.

    Hyper-parameters that are not set are left out.
    """
    scores = {names.final(name): float(metrics[name]) for name in names.FINAL_SCORES if name in metrics}
    columns = {name: hparams[name] for name in (*_FIRST_COLUMNS, *hparams) if hparams.get(name) is not None}
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and scores:
            logger.log_hyperparams(columns, scores, update)


def _claim(root: Path, wanted: int | str | None) -> int | str:
    """Create a run folder below ``root``; returns its version."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        version = _next_version(root) if wanted is None else wanted
        folder = root / (version if isinstance(version, str) else f"version_{version}")
        try:
            os.mkdir(folder)
        except FileExistsError:
            if wanted is None:
                continue  # another run has just taken this number
            raise FileExistsError(f"The run folder {folder} exists already: choose another name or version.") from None
        return version


def _next_version(root: Path) -> int:
    """One more than the largest number in use."""
    found = [re.fullmatch(r"version_(\d+)", path.name) for path in root.glob("version_*")]
    return max((int(match[1]) + 1 for match in found if match), default=0)
