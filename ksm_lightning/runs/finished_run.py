"""A finished run, read from its folder: configuration, checkpoint, data and logged curves.

A folder may come from somebody else: nothing that its files name is imported or run.
"""

import argparse
import logging
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import jsonargparse

from ksm_lightning.data import CroppedMNISTDataModule, DatasetDataModule, KSMDataModule
from ksm_lightning.runs.checkpoint import last_checkpoint, preprocessing_of, read_checkpoint
from ksm_lightning.runs.yaml_config import read_config

_CONFIG, _CHECKPOINTS = "config.yaml", "checkpoints"
_ADVICE = "give a folder written by `ksm fit`, such as runs/half_moons/version_0"


class Series(NamedTuple):
    """The logged values of one metric, and the numbers of updates after which they were logged, ascending."""

    steps: list[int]
    values: list[float]


class FinishedRun:
    """A run folder written by ``ksm fit``, ``runs/NAME/version_K``.

    Args:
        folder: The run folder.
        checkpoint_path: The checkpoint to read, or the folder of another run. Default: ``checkpoints/last.ckpt`` in the
            folder.
    """

    def __init__(self, folder: str | Path, checkpoint_path: str | Path | None = None) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(f"There is no run folder {folder}: {_ADVICE}.")
        if not (self.folder / _CONFIG).is_file():
            raise FileNotFoundError(f"{folder} is not a run folder, as it has no {_CONFIG}: {_ADVICE}.")
        chosen = Path(checkpoint_path or self.folder)
        self.checkpoint_path = last_checkpoint(chosen) if chosen.is_dir() else chosen

    @classmethod
    def of_checkpoint(cls, path: str | Path) -> Self | None:
        """The run of a checkpoint ``RUN/checkpoints/NAME.ckpt`` or a run folder; None for a checkpoint elsewhere."""
        path = last_checkpoint(Path(path)) if Path(path).is_dir() else Path(path)
        folder = path.absolute().parent
        is_in_run = folder.name == _CHECKPOINTS and (folder.parent / _CONFIG).is_file()
        return cls(folder.parent, path) if is_in_run else None

    @cached_property
    def config_text(self) -> str:
        """The text of the configuration file."""
        try:
            return (self.folder / _CONFIG).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.folder / _CONFIG} is damaged: it is not text.") from error

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the run, including defaults. Raises ValueError if the file is damaged."""
        path = self.folder / _CONFIG
        try:
            content = read_config(path)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: it {error}.") from error
        data = content.get("data") if isinstance(content, dict) else None
        if not isinstance(content, dict) or not isinstance(data, dict):
            raise ValueError(f"{path} is damaged: its section `data` is missing.")
        if not isinstance(data.get("class_path"), str) or not isinstance(data.get("init_args", {}), dict):
            raise ValueError(f"{path} is damaged: its section `data` needs a class_path, and init_args with names.")
        return content

    @cached_property
    def checkpoint(self) -> dict[str, Any]:
        """The checkpoint's content, on the CPU, see :func:`~ksm_lightning.runs.checkpoint.read_checkpoint`."""
        return read_checkpoint(self.existing_checkpoint())

    def existing_checkpoint(self) -> Path:
        """The path of the checkpoint. Raises FileNotFoundError if the file does not exist."""
        if not self.checkpoint_path.is_file():
            raise FileNotFoundError(
                f"There is no checkpoint {self.checkpoint_path}: the run was stopped before its first one, or the file "
                "was moved; choose another with --ckpt_path."
            )
        return self.checkpoint_path

    def data(self, data: KSMDataModule | None = None) -> KSMDataModule:
        """The data of the run, not loaded yet, with the preprocessing and the batch seed of the training.

        Args:
            data: A datamodule to use instead of the one that the configuration describes, which must be one of this
                package, or of a module that is imported already.
        """
        if data is None:
            data = self._make_data()
            if isinstance(data, CroppedMNISTDataModule | DatasetDataModule):
                data.download = False  # a run folder does not choose what is downloaded, and where files are written
        preprocessing = preprocessing_of(self.checkpoint, f"The checkpoint {self.checkpoint_path}")
        if preprocessing is not None:
            data.use(preprocessing)
        saved = self.checkpoint.get(type(data).__qualname__)  # Lightning saves a datamodule's state under this key
        if isinstance(saved, dict) and isinstance(saved.get("seed"), int):
            data.seed = saved["seed"]
        return data

    def _make_data(self) -> KSMDataModule:
        section = self.config["data"]
        name, arguments = section["class_path"], section.get("init_args", {})
        made = imported_datamodule(name)
        if made is None:
            raise ValueError(
                f"{self.folder / _CONFIG} does not describe any data: {name} is not a datamodule of ksm_lightning, and "
                f"nothing that a run folder names is imported; if you trust that class, give it with --data={name}."
            )
        try:
            if not _is_own(made):
                # As they are: jsonargparse would import what an argument names.
                return made(**arguments, **section.get("dict_kwargs", {}))
            if _names_class(arguments):
                raise ValueError(
                    "an argument of its data names a class, and nothing that a run folder names is imported."
                )
            parser = jsonargparse.ArgumentParser(exit_on_error=False)
            parser.add_class_arguments(made, "data", fail_untyped=False)
            return made(**parser.parse_object({"data": arguments}).data.as_dict())
        except (argparse.ArgumentError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.folder / _CONFIG} does not describe any data: {reason}") from error

    def scalars(self) -> dict[str, Series]:
        """All logged scalars by their tag. If a rollback repeated an update, the last value counts."""
        from tensorboard.backend.event_processing import event_accumulator  # slow to import

        # Hides the warning about the incomplete last event of a killed run.
        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        guidance = {event_accumulator.SCALARS: 0, event_accumulator.IMAGES: 1, event_accumulator.HISTOGRAMS: 1}
        events = event_accumulator.EventAccumulator(str(self.folder), size_guidance=guidance).Reload()
        series = {}
        for tag in events.Tags()["scalars"]:
            values = {event.step: event.value for event in events.Scalars(tag)}
            steps = sorted(values)
            series[tag] = Series(steps, [values[step] for step in steps])
        return series


def imported_datamodule(class_path: str) -> type[KSMDataModule] | None:
    """The datamodule with this path, such as ``ksm_lightning.DigitsDataModule``; None if it is not imported already.

    Example:
        >>> imported_datamodule("ksm_lightning.HalfMoonsDataModule").__name__
        'HalfMoonsDataModule'
        >>> imported_datamodule("os.system") is imported_datamodule("my_module.MyDataModule") is None
        True
    """
    module, _, name = class_path.rpartition(".")
    exported = vars(sys.modules[module]).get(name) if module in sys.modules else None
    for each in _subclasses(KSMDataModule):  # type: ignore[type-abstract]
        is_of_package = _is_own(each) and module.partition(".")[0] in ("", "ksm_lightning")
        if each.__name__ == name and (is_of_package or module == each.__module__ or exported is each):
            return each
    return None


def _names_class(value: Any) -> bool:
    """Whether jsonargparse would import a class for a value of the type Any."""
    if isinstance(value, dict):
        return "class_path" in value or any(map(_names_class, value.values()))
    return isinstance(value, list) and any(map(_names_class, value))


def own_datamodule(class_path: str) -> type[KSMDataModule] | None:
    """The datamodule of this package with this path; None if it is another class."""
    found = imported_datamodule(class_path)
    return found if found is not None and _is_own(found) else None


def _subclasses(base: type[KSMDataModule]) -> Iterator[type[KSMDataModule]]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


def _is_own(datamodule: type[KSMDataModule]) -> bool:
    return datamodule.__module__.partition(".")[0] == "ksm_lightning"
