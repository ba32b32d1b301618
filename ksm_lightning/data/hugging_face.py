"""Datasets of Hugging Face: loaded by name or from a folder, and read as tables. Needs the extra ``datasets``."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ksm_lightning.data.arrow_table import number_type, read_labels, read_numbers
from ksm_lightning.data.row_table import ImageFormat, stack_rows
from ksm_lightning.data.table import NO_LABELS, Selection, Table, listed, option
from ksm_lightning.extras import import_extra
from ksm_lightning.kernels.limits import ROWS_AT_ONCE

_WANTED = (
    "give a folder written by `save_to_disk`, a folder of Parquet, JSON, CSV or image files, or the name of a dataset "
    "on the Hugging Face Hub"
)


def load_splits(name: str, subset: str | None = None, revision: str | None = None, *, download: bool = True) -> Any:
    """A dataset, or its splits by name, from a folder on disk or from the Hub. Nothing in it is run.

    Args:
        name: The folder, or the name of a dataset on the Hub.
        subset: Name of its configuration. Default: the only one.
        revision: Branch, tag or commit of a dataset on the Hub. Default: the latest one.
        download: Whether to download a dataset of the Hub; otherwise it must be in the cache.

    Raises:
        FileNotFoundError: If it does not exist, or cannot be read or downloaded.
        ValueError: If it is a file.
    """
    datasets = import_extra("datasets", "datasets", "Datasets of Hugging Face")
    folder = Path(name)
    if folder.is_file():
        raise ValueError(f"{name} is a file: read a table with ArrayDataModule, or {_WANTED}.")
    if not download and "://" in name:
        raise FileNotFoundError(f"The dataset {name} is not on this machine: {_WANTED}.")
    verbosity, is_offline = datasets.logging.get_verbosity(), datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = is_offline or not download
    datasets.logging.set_verbosity(logging.CRITICAL)  # errors are reported below
    try:
        if folder.is_dir() and any((folder / each).is_file() for each in ("dataset_dict.json", "state.json")):
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, subset, revision=revision)
    except Exception as error:  # of many libraries, and of the network
        cause = error.__cause__ or error  # the library wraps the errors of its readers in one without a reason
        reason = " ".join(str(cause).split())[:200].rstrip(".") or type(cause).__name__
        raise FileNotFoundError(f"The dataset {name} could not be loaded ({reason}): {_WANTED}.") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = is_offline
        datasets.logging.set_verbosity(verbosity)


class HuggingFaceTable(Table):
    """A dataset of Hugging Face as a table.

    Columns of numbers and lists are read in parts, as Arrow stores them; images one by one. If ``columns`` does not say
    otherwise, the only column of images is the input, and the only column of the type ``ClassLabel`` holds the labels.
    """

    def __init__(self, dataset: Any, source: str, images: ImageFormat) -> None:
        self._dataset = dataset
        self._images = images
        self._types = {field.name: field.type for field in dataset.features.arrow_schema}
        super().__init__(source, dataset.column_names)

    def _of_type(self, name: str) -> list[str]:
        """Columns with a feature of this class of the library."""
        return [column for column, feature in self._dataset.features.items() if type(feature).__name__ == name]

    def class_names(self, column: int) -> tuple[str, ...] | None:
        names = getattr(self._dataset.features[self.names[column]], "names", None)
        return None if names is None else tuple(names)

    def select(
        self, labels: str | None = None, columns: Sequence[str] | None = None, ignore: Sequence[str] = ()
    ) -> Selection:
        classes, images = self._of_type("ClassLabel"), self._of_type("Image")
        if labels is None and len(classes) > 1 and not ignore and columns is None:
            raise ValueError(
                f"{self.path} has several columns of labels, {listed(classes)}: choose one with "
                f"{option('labels', classes[0])}, or train without labels by {option('labels', NO_LABELS)}."
            )
        if labels is None and len(classes) == 1 and classes[0] not in [*(columns or ()), *ignore]:
            labels = classes[0]
        if columns is None and len(images) == 1 and not ignore:
            if labels is None:
                self.refuse_labels(range(len(self.names)))
            columns = images
        return super().select(labels, columns, ignore)

    def text_of(self, column: int) -> str | None:
        name = self.names[column]
        if name in self._of_type("Image") or number_type(self._types[name]) is not None:
            return None
        return f"values of the type {self._types[name]}"

    def read(self, chosen: Selection, *, as_text: bool = False) -> tuple[np.ndarray, np.ndarray | list[str] | None]:
        x, labels = super().read(chosen, as_text=as_text)
        if chosen.labels is None or self.class_names(chosen.labels) is None or isinstance(labels, list):
            return x, labels
        assert labels is not None
        unknown = np.flatnonzero(labels < 0)  # -1 in the test splits of competitions
        if 0 < len(unknown) < len(labels):
            raise ValueError(
                f"{self.path}, row {unknown[0]:,} (counted from 0), column {self.names[chosen.labels]!r}: the label is "
                "missing."
            )
        return x, None if len(unknown) else labels

    def numbers(self, columns: Sequence[int]) -> np.ndarray:
        names = [self.names[column] for column in columns]
        pictures = [name for name in names if name in self._of_type("Image")]
        if not pictures:
            return self._plain_numbers(names)
        parts = {name: self._pixels(name) for name in pictures}
        if len(parts) > 1 or len(names) > 1:
            self.image_shape = None
        parts |= {name: self._plain_numbers([name]) for name in names if name not in parts}
        return parts[names[0]] if len(names) == 1 else np.hstack([parts[name] for name in names])

    def _plain_numbers(self, names: list[str]) -> np.ndarray:
        fields = {name: self._types[name] for name in names}
        return read_numbers(self._batches(names), fields, len(self._dataset), str(self.path))

    def _pixels(self, name: str) -> np.ndarray:
        column = self._dataset.select_columns([name]).with_format(None)
        x, _, self.image_shape = stack_rows(
            len(column), f"{self.path}, column {name!r},", lambda index: ([column[index][name]], None), self._images
        )
        return x

    def label_values(self, column: int, *, as_text: bool = False) -> np.ndarray | list[str]:
        name = self.names[column]
        return read_labels(self._batches([name]), name, str(self.path), as_text=as_text)

    def _batches(self, names: list[str]) -> Iterator[Any]:
        yield from self._dataset.select_columns(names).with_format("arrow").iter(batch_size=ROWS_AT_ONCE)
