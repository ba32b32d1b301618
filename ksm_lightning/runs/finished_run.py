"""A finished run, read back from its folder: configuration, checkpoint, data and the curves that were logged."""

import argparse
import logging
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import jsonargparse
import yaml

from ksm_lightning.runs.checkpoint import preprocessing_of, read_checkpoint
from ksm_lightning.data import KSMDataModule

_CONFIG, _CHECKPOINTS = "config.yaml", "checkpoints"
_WANTED = "give one that `ksm fit` made, such as runs/half_moons/version_0"


class Series(NamedTuple):
    """One number as it was logged over the run."""

    steps: list[int]
    """Updates made, ascending."""
    values: list[float]
    """The number after each of them."""


class Run:
    """A folder that ``ksm fit`` made, ``runs/NAME/version_K``.

    Args:
        folder: The run folder.
        checkpoint_path: The checkpoint to read; ``checkpoints/last.ckpt`` of the folder unless given.

    Raises:
        FileNotFoundError: If there is no such folder, or it is not that of a run.
    """

    def __init__(self, folder: str | Path, checkpoint_path: str | Path | None = None) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(f"There is no run folder {folder}: {_WANTED}.")
        if not (self.folder / _CONFIG).is_file():
            raise FileNotFoundError(f"{folder} is no run folder, for it holds no {_CONFIG}: {_WANTED}.")
        self.checkpoint_path = Path(checkpoint_path or self.folder / _CHECKPOINTS / "last.ckpt")

    @classmethod
    def of_checkpoint(cls, path: str | Path) -> Self | None:
        """The run that a checkpoint lies in, as ``RUN/checkpoints/NAME.ckpt``; None where it lies elsewhere."""
        place = Path(path).absolute().parent
        is_in_run = place.name == _CHECKPOINTS and (place.parent / _CONFIG).is_file()
        return cls(place.parent, path) if is_in_run else None

    @cached_property
    def config_text(self) -> str:
        """The configuration as it stands in its file.

        Raises:
            ValueError: If the file is no text.
        """
        try:
            return (self.folder / _CONFIG).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.folder / _CONFIG} is damaged: it is no text.") from error

    @cached_property
    def config(self) -> dict[str, Any]:
        """The whole configuration of the run, defaults included.

        Raises:
            ValueError: If the file is damaged.
        """
        try:
            content = yaml.safe_load(self.config_text)
        except yaml.YAMLError as error:
            raise ValueError(f"{self.folder / _CONFIG} is damaged: it is no valid YAML ({error}).") from error
        if not isinstance(content, dict) or not isinstance(content.get("data"), dict):
            raise ValueError(f"{self.folder / _CONFIG} is damaged: it does not say what the data was.")
        return content

    @cached_property
    def checkpoint(self) -> dict[str, Any]:
        """The checkpoint's content, on the CPU.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is damaged, or of another version.
        """
        return read_checkpoint(self.existing_checkpoint())

    def existing_checkpoint(self) -> Path:
        """The path of the checkpoint.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        if not self.checkpoint_path.is_file():
            raise FileNotFoundError(
                f"There is no checkpoint {self.checkpoint_path}: the run was stopped before its first one, or the file "
                "was moved; name another with --ckpt_path."
            )
        return self.checkpoint_path

    def data(self) -> KSMDataModule:
        """The data of the run, not loaded yet, centred and scaled as in training and with the seed of its batches.

        Raises:
            ValueError: If the configuration does not describe any data.
        """
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(KSMDataModule, "data", fail_untyped=False, required=True)
        try:
            options = parser.parse_object({"data": self.config["data"]})
        except (argparse.ArgumentError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.folder / _CONFIG} does not describe any data: {reason}") from error
        data = parser.instantiate_classes(options).data
        assert isinstance(data, KSMDataModule)
        preprocessing = preprocessing_of(self.checkpoint, str(self.checkpoint_path))
        if preprocessing is not None:
            data.use(preprocessing)
        saved = self.checkpoint.get(type(data).__qualname__)  # Lightning keeps a datamodule's state under this name
        if isinstance(saved, dict) and isinstance(saved.get("seed"), int):
            data.seed = saved["seed"]
        return data

    def scalars(self) -> dict[str, Series]:
        """Everything that was logged for TensorBoard as a number, by its tag; empty where nothing was.

        Where a run went back to a checkpoint and passed an update twice, the last time counts.
        """
        from tensorboard.backend.event_processing import event_accumulator  # takes long to import

        # A run that was killed leaves a last event that is cut off, which is nobody's concern here.
        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        guidance = {event_accumulator.SCALARS: 0, event_accumulator.IMAGES: 1, event_accumulator.HISTOGRAMS: 1}
        events = event_accumulator.EventAccumulator(str(self.folder), size_guidance=guidance).Reload()
        series = {}
        for tag in events.Tags()["scalars"]:
            values = {event.step: event.value for event in events.Scalars(tag)}
            steps = sorted(values)
            series[tag] = Series(steps, [values[step] for step in steps])
        return series
