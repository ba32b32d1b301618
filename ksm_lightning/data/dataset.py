"""Points from a dataset: of Hugging Face, by object, folder or name, or any map-style dataset of PyTorch."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from ksm_lightning.data.array import name_list
from ksm_lightning.data.datamodule import Dataset, KSMDataModule
from ksm_lightning.data.row_table import ImageFormat, ImageMode, RowTable
from ksm_lightning.data.table import Selection, Table, coded_labels, listed
from ksm_lightning.network.preprocessing import Scaling

_DEFAULTS = {"split": "train", "test_split": "test"}


class DatasetDataModule(KSMDataModule):
    """Points from a Hugging Face dataset (with the extra ``datasets``) or any map-style PyTorch dataset.

    All rows are read once, and their numbers are kept in memory. A row may be a dictionary, a tuple ``(x, label)`` or x
    alone, with numbers, lists, arrays, tensors or PIL images, which are flattened. Reading the dataset again must give
    the same rows, so leave out random transforms: a continued run recognises its data by their values.

    Args:
        dataset: The training data: a dataset object, a dictionary of its splits, a folder written by ``save_to_disk``,
            a folder of Parquet, JSON, CSV or image files, or the name of a dataset on the Hugging Face Hub.
        test: The test data, in the same forms. Default: the test split of ``dataset``.
        split: Name of the split to train on, if the dataset has splits.
        test_split: Name of the split with the test points, or ``none``. Default: ``test``, if it exists.
        subset: Name of a configuration of a dataset on the Hub.
        revision: Branch, tag or commit of a dataset on the Hub.
        download: Whether to download a dataset of the Hub that is not in the cache.
        columns: Names of the input columns, in this order. Default: the only column of images, otherwise all columns
            except the labels; the first value of a tuple.
        labels: Name of the label column, which holds whole numbers or texts, or ``none``. Default: the only column of
            the type ``ClassLabel``; the second value of a tuple. Other columns that look like labels are refused.
        ignore: Names of columns to leave out.
        image_size: Height and width to which PIL images are resized. Default: all images have the same size.
        image_mode: ``L`` makes PIL images grey, ``RGB`` gives them three channels.
        centre: Whether to subtract the mean of each feature.
        scaling: Divide by nothing (none), by the standard deviation of all entries (global), or of each feature
            (feature).
        kwargs: Arguments of :class:`KSMDataModule`.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> points = TensorDataset(torch.rand(50, 1, 4, 4), torch.arange(50) % 3)
        >>> data = DatasetDataModule(points)
        >>> data.train_points.data.shape, data.train_labels[:4].tolist(), data.preprocessing.image_shape
        (torch.Size([50, 16]), [0, 1, 2, 0], (4, 4))
    """

    def __init__(
        self,
        dataset: str | Any,
        test: str | Any = None,
        split: str = _DEFAULTS["split"],
        test_split: str | None = None,
        subset: str | None = None,
        revision: str | None = None,
        download: bool = True,
        columns: str | list[str] | None = None,
        labels: str | None = None,
        ignore: str | list[str] | None = None,
        image_size: list[int] | None = None,
        image_mode: ImageMode = "keep",
        centre: bool = False,
        scaling: Scaling = "none",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dataset = dataset
        self.test = test
        self.split = split
        self.test_split = test_split
        self.subset = subset
        self.revision = revision
        self.download = download
        self.columns = name_list(columns)
        self.labels = labels
        self.ignore = name_list(ignore)
        self.images = ImageFormat.of(image_size, image_mode)
        self.centre = centre
        self.scaling = scaling

    def load(self) -> tuple[Dataset, Dataset | None]:
        splits = self._opened(self.dataset)
        found = self._choose(splits, self.split, "split", self.dataset)
        table = self._table(found, f"the split {self.split} of ", self.dataset)
        chosen = table.select(self.labels, self.columns, self.ignore or ())
        x, labels = table.read(chosen)
        self.image_shape = table.image_shape
        self.label_names = classes = None if chosen.labels is None else table.class_names(chosen.labels)
        if labels is not None:
            labels, names = coded_labels(labels, classes, table.path)
            self.label_names = names or classes
        found = self._test_split(splits)
        if found is None:
            return Dataset(x, labels), None
        test = self._table(found, "the test data of ", self.test if self.test is not None else self.dataset)
        return Dataset(x, labels), self._read_test(test, test.select_like(table, chosen), classes)

    def _read_test(self, table: Table, chosen: Selection, classes: tuple[str, ...] | None) -> Dataset:
        """The test points; ``classes`` are the names of training labels that are numbers in the dataset."""
        x, labels = table.read(chosen, as_text=self.label_names is not None and classes is None)
        if labels is None or chosen.labels is None:
            return Dataset(x)
        others = table.class_names(chosen.labels)
        if others is not None and others != self.label_names:
            known = listed(self.label_names or ())
            raise ValueError(f"{table.path} has the classes {listed(others)}, but the training data {known}.")
        return Dataset(x, coded_labels(labels, self.label_names, table.path, is_test=True)[0])

    def _opened(self, source: Any) -> Any:
        """A dataset object or its splits by name."""
        if not isinstance(source, str):
            return source
        from ksm_lightning.data.hugging_face import load_splits  # an extra

        return load_splits(source, self.subset, self.revision, download=self.download)

    def _choose(self, splits: Any, name: str, argument: str, whole: Any) -> Any:
        if not isinstance(splits, Mapping):
            if name != _DEFAULTS[argument]:
                raise ValueError(f"{_shown(whole)} has no splits, but `{argument}` is {name!r}: remove it.")
            return splits
        if name not in splits:
            raise ValueError(
                f"{_shown(whole)} has no split {name!r}: set `{argument}` to one of {listed(list(splits))}."
            )
        return splits[name]

    def _test_split(self, splits: Any) -> Any:
        """The dataset with the test points, or None."""
        if self.test is not None:
            return self._choose(
                self._opened(self.test), self.test_split or _DEFAULTS["test_split"], "test_split", self.test
            )
        if self.test_split is None and isinstance(splits, Mapping):
            return splits.get(_DEFAULTS["test_split"])
        if self.test_split in (None, "none"):
            return None
        return self._choose(splits, self.test_split, "test_split", self.dataset)

    def _table(self, dataset: Any, part: str, whole: Any) -> Table:
        source = _shown(dataset) if dataset is whole else part + _shown(whole)
        is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        if isinstance(dataset, str | bytes | int | float) or is_stream or not hasattr(dataset, "__len__"):
            raise ValueError(f"A dataset with a length and rows by number is wanted, got {source}.")
        if len(dataset) == 0:
            raise ValueError(f"The training or test data is empty: {source} has no rows.")
        is_hugging_face = type(dataset).__module__.partition(".")[0] == "datasets"
        if is_hugging_face and dataset.format["type"] != "custom":  # that is, without a transform
            from ksm_lightning.data.hugging_face import HuggingFaceTable

            return HuggingFaceTable(dataset, source, self.images)
        return RowTable(dataset, source, self.images)


def _shown(dataset: Any) -> str:
    """A dataset in a message: its name, or its class."""
    return dataset if isinstance(dataset, str) else f"the {type(dataset).__name__}"
