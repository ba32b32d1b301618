"""Run folders that never overwrite each other."""

import os
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary


class RunLogger(TensorBoardLogger):
    """A TensorBoard logger whose folder, ``save_dir/name/version_K``, is made by the one run that owns it.

    Making a folder is atomic: of two runs that start together each gets its own number.

    Args:
        save_dir: Where all runs go.
        name: Name of the experiment, a folder below ``save_dir``.
        version: Number or name of this run, which must be new; the next free number unless given.
    """

    def __init__(self, save_dir: str = "runs", name: str = "ksm", version: int | str | None = None) -> None:
        super().__init__(save_dir, name=name, version=version, default_hp_metric=False)
        self.is_claimed = False

    @property
    def version(self) -> int | str:
        if self.is_claimed or _rank() != 0:
            return super().version
        wanted = self._version
        if wanted is not None:
            _claim(Path(self.root_dir), wanted)
        while self._version is None:
            candidate = self._get_next_version()
            try:
                _claim(Path(self.root_dir), candidate)
            except FileExistsError:
                continue  # another run was faster: take the next number
            self._version = candidate
        self.is_claimed = True
        return super().version

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """All numbers of a step as one event: one event for each would cost as much as several updates.

        Raises:
            ValueError: If a value is not a number.
        """
        try:
            values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        except (TypeError, ValueError) as error:
            raise ValueError(f"TensorBoard's scalars are numbers, got {metrics!r}.") from error
        # Reading `experiment` opens the file.
        self.experiment._get_file_writer().add_summary(Summary(value=values), step)


def _rank() -> int:
    return int(getattr(rank_zero_only, "rank", 0))


def _claim(root: Path, version: int | str) -> None:
    folder = root / (version if isinstance(version, str) else f"version_{version}")
    root.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(folder)
    except FileExistsError:
        raise FileExistsError(f"The run folder {folder} exists already: choose another name or version.") from None
