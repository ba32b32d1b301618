"""Your own points from a file: a NumPy array, a CSV table, or a Parquet, Feather or Arrow table."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ksm_lightning.data.csv_table import CsvTable
from ksm_lightning.data.datamodule import Dataset, KSMDataModule
from ksm_lightning.data.memory import check_memory, fits_memory
from ksm_lightning.data.table import NO_LABELS, Table, coded_labels
from ksm_lightning.network.preprocessing import Scaling

MemoryMap = Literal["auto", "always", "never"]
_MAX_HEADER = 2**16  # bytes; NumPy reads the header of an array before it checks its length
_CSV, _ARROW = (".csv", ".tsv"), (".parquet", ".feather", ".arrow")


class ArrayDataModule(KSMDataModule):
    """Points from a ``.npy`` (samples, features), a ``.npz`` with such an array, or a table with one row per point.

    Tables are ``.csv`` or ``.tsv``, and with the extra ``arrow`` also ``.parquet``, ``.feather`` or ``.arrow``, where a
    column may hold lists of numbers. A column that looks like labels is refused until ``labels`` says what it is.
    Pickled arrays are refused, because loading them can run code.

    Args:
        path: File with the training points.
        test_path: File with the test points, in the same layout. A table with names may lack the label column.
        key: Name of the array with the points in a ``.npz``; required if it holds several arrays besides the labels.
        labels: Source of the labels, which are whole numbers or texts: the name of an array in the ``.npz``, the name
            or number of a column of a table, or the path of a separate ``.npy`` file (training labels only). ``none``
            says that all columns of a table are inputs. Texts are numbered in alphabetical order, see ``label_names``.
        columns: Names or numbers of the input columns of a table, in this order. Default: all others.
        ignore: Names or numbers of columns of a table to leave out.
        centre: Whether to subtract the mean of each feature.
        scaling: Divide by nothing (none), by the standard deviation of all entries (global), or of each feature
            (feature).
        memory_map: Whether to leave a ``.npy`` on disk and read only the rows of each batch: always, never, or if it
            does not fit into the free memory (auto). Other files must fit; save larger data as ``.npy``.
        kwargs: Arguments of :class:`KSMDataModule`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "flowers.csv"
        >>> _ = path.write_text("length,width,species\\n5.1,3.5,setosa\\n6.7,3.1,virginica\\n")
        >>> data = ArrayDataModule(str(path), labels="species")
        >>> data.train_points.data.shape, data.train_labels.tolist(), data.label_names
        (torch.Size([2, 2]), [0, 1], ('setosa', 'virginica'))
    """

    def __init__(
        self,
        path: str,
        test_path: str | None = None,
        key: str | None = None,
        labels: str | int | None = None,
        columns: str | list[str] | None = None,
        ignore: str | list[str] | None = None,
        centre: bool = False,
        scaling: Scaling = "none",
        memory_map: MemoryMap = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if memory_map not in get_args(MemoryMap):
            raise ValueError(f"`memory_map` must be one of {', '.join(get_args(MemoryMap))}, got {memory_map!r}.")
        self.path = path
        self.test_path = test_path
        self.key = key
        self.labels = None if labels is None else str(labels)
        self.columns = name_list(columns)
        self.ignore = name_list(ignore)
        self.centre = centre
        self.scaling = scaling
        self.memory_map = memory_map

    def load(self) -> tuple[Dataset, Dataset | None]:
        train, test = Path(self.path), None if self.test_path is None else Path(self.test_path)
        if is_table(train):
            return self._load_tables(train, test)
        if self.columns or self.ignore:
            raise ValueError(f"`columns` and `ignore` name columns of a table, and {train} has none: remove them.")
        x, labels = self._read_arrays(train)
        data = self._labelled(x, self._separate_labels() if labels is None else labels, train)
        if test is None:
            return data, None
        return data, self._labelled(*self._read_arrays(test), test, is_test=True)

    def _labelled(
        self, x: np.ndarray, labels: np.ndarray | Sequence[str] | None, path: Path, *, is_test: bool = False
    ) -> Dataset:
        """Points with their labels as whole numbers. Those of the test points have the numbers of the training's."""
        if labels is None:
            self.label_names = self.label_names if is_test else None
            return Dataset(x)
        numbers, names = coded_labels(labels, self.label_names if is_test else None, path, is_test=is_test)
        if is_test and names is None and self.label_names is not None:
            raise ValueError(f"The labels of {path} are numbers, but those of the training data are texts.")
        self.label_names = names
        return Dataset(x, numbers)

    # ------------------------------------------------------------------ tables

    def _load_tables(self, path: Path, test_path: Path | None) -> tuple[Dataset, Dataset | None]:
        is_separate = self.labels is not None and self.labels.endswith(".npy")
        table = open_table(path)
        chosen = table.select(NO_LABELS if is_separate else self.labels, self.columns, self.ignore or ())
        x, labels = table.read(chosen)
        train = self._labelled(x, self._separate_labels() if is_separate else labels, path)
        if test_path is None:
            return train, None
        if not is_table(test_path):
            raise ValueError(f"{test_path} must be a table with the columns of {path}.")
        test = open_table(test_path)
        x, labels = test.read(test.select_like(table, chosen), as_text=self.label_names is not None)
        return train, self._labelled(x, labels, test_path, is_test=True)

    # ------------------------------------------------------------------ arrays

    def _array_name(self) -> str | None:
        """The name of the array with the labels; None without labels, or if they have a file of their own."""
        is_name = self.labels and self.labels != NO_LABELS and not self.labels.endswith(".npy")
        return self.labels if is_name else None

    def _separate_labels(self) -> np.ndarray | None:
        """The labels of a ``.npy`` file of their own."""
        if not self.labels or not self.labels.endswith(".npy"):
            return None
        check_file(Path(self.labels))
        loaded = load_array(Path(self.labels), mmap_mode="r")  # compares the size with that of the file
        return np.array(loaded) if isinstance(loaded, np.ndarray) else None

    def _read_arrays(self, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        check_file(path)
        readers = {".npy": self._read_npy, ".npz": self._read_npz}
        if path.suffix not in readers:
            known = ", ".join([*readers, *_CSV, *_ARROW])
            raise ValueError(f"Cannot read {path}: the data must be a file of one of the types {known}.")
        return readers[path.suffix](path)

    def _read_npy(self, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        if self._array_name() is not None:
            raise ValueError(
                f"`labels` must be the path of a .npy file if the points are a .npy file, got {self.labels!r}."
            )
        x = load_array(path, mmap_mode="r")
        assert isinstance(x, np.ndarray)
        is_read = self.memory_map == "never" or (self.memory_map == "auto" and fits_memory(x.size, x.dtype))
        return np.array(x) if is_read else x, None

    def _read_npz(self, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        arrays = load_array(path)
        if isinstance(arrays, np.ndarray):
            raise ValueError(f"{path} is a single array, not a .npz archive: rename it to .npy.")
        with arrays:
            names = list(arrays.files)
            labels = self._array_name()
            if labels and labels not in names:
                raise ValueError(f"{path} has no array {labels!r} for labels; it has {', '.join(names)}.")
            others = [name for name in names if name != labels]
            key = self.key or (others[0] if len(others) == 1 else "")
            if key not in names:
                found = ", ".join(names) or "no arrays"
                raise ValueError(f"`key` must be the name of the array with the points; {path} has {found}.")
            return _read_member(path, arrays, key), _read_member(path, arrays, labels) if labels else None


def is_table(path: Path) -> bool:
    """Whether a file is a table, by its suffix."""
    return path.suffix.lower() in _CSV + _ARROW


def open_table(path: Path) -> Table:
    """The table of a file. Raises ModuleNotFoundError if its format needs an extra that is not installed."""
    check_file(path)
    if path.suffix.lower() in _CSV:
        return CsvTable(path)
    from ksm_lightning.data.arrow_table import ArrowTable  # an extra

    return ArrowTable(path)


def name_list(names: str | Sequence[str] | None) -> list[str] | None:
    """Names of columns as a list; a text is one name, or several with commas between them.

    Example:
        >>> name_list("a"), name_list(["a", 3]), name_list(None)
        (['a'], ['a', '3'], None)
    """
    if names is None:
        return None
    return [names] if isinstance(names, str) else [str(name) for name in names]


def load_array(path: Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray | np.lib.npyio.NpzFile:
    """``numpy.load`` without unpickling. Raises ValueError for damaged files and other formats."""
    try:
        loaded: np.ndarray | np.lib.npyio.NpzFile = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except Exception as error:  # numpy, zipfile and zlib raise errors of many types for a damaged file
        raise ValueError(_damaged(path, error)) from error
    return loaded


def _read_member(path: Path, arrays: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    """An array of an archive. Its size is checked before it is read: a small file may expand to any size."""
    try:
        header = _array_header(arrays, name)
    except Exception as error:  # a damaged archive raises errors of many types
        raise ValueError(_damaged(path, error)) from error
    if header is None:
        raise ValueError(f"{name!r} in {path} is not an array: write the file with numpy.savez.")
    shape, dtype = header
    check_memory(shape, dtype, str(path), f"its array {name!r}")
    try:
        array: np.ndarray = arrays[name]
    except Exception as error:
        raise ValueError(_damaged(path, error)) from error
    return array


def _array_header(arrays: np.lib.npyio.NpzFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    """Shape and dtype of an array in an archive; None if the member is not an array."""
    assert arrays.zip is not None
    member = name if name in arrays.zip.namelist() else f"{name}.npy"
    with arrays.zip.open(member) as file:
        start = file.read(12)
    if not start.startswith(np.lib.format.MAGIC_PREFIX):
        return None
    length = int.from_bytes(start[8:10] if start[6] == 1 else start[8:12], "little")
    if length > _MAX_HEADER:
        raise ValueError(f"the header of the array {name!r} has {length:,} bytes")
    with arrays.zip.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        else:  # for names of fields that are not Latin-1
            raise ValueError(f"the array {name!r} is not numeric")
        # NumPy reads as much as the header says, and the archive compares its checksum at the end of a member only.
        size = file.tell() + math.prod(shape) * dtype.itemsize
        if not dtype.hasobject and size < arrays.zip.getinfo(member).file_size:
            raise ValueError(f"the array {name!r} is larger than its header says")
    return shape, dtype


def _damaged(path: Path, error: Exception) -> str:
    if "pickle" in str(error) or "Python objects" in str(error):
        return f"{path} is refused: it holds pickled objects, which could run code; save a plain numeric array."
    return f"{path} is damaged or not a NumPy file: {error}."


def check_file(path: Path) -> None:
    """Raise an error about a data file that does not exist or is empty."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no data file {path}.")
    if path.stat().st_size == 0:
        raise ValueError(f"The data file {path} is empty.")
