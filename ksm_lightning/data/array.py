"""Your own arrays from a ``.npy``, ``.npz`` or ``.csv`` file."""

import csv
import math
import os
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ksm_lightning.data.datamodule import Dataset, KSMDataModule
from ksm_lightning.network.preprocessing import Scaling

MemoryMap = Literal["auto", "always", "never"]
_MAX_HEADER = 2**16  # bytes; NumPy reads the header of an array before it checks its length


class ArrayDataModule(KSMDataModule):
    """Points from a ``.npy`` (samples, features), a ``.npz`` with such an array, or a ``.csv`` with one row per point.

    Pickled arrays are refused, because loading them can run code.

    Args:
        path: File with the training points.
        test_path: File with the test points, in the same layout.
        key: Name of the array with the points in a ``.npz``; required if it holds several arrays besides the labels.
        labels: Source of integer labels: the name of an array in the ``.npz``, the name or index of a column of the
            ``.csv``, or the path of a separate ``.npy`` file (training labels only).
        centre: Whether to subtract the mean of each feature.
        scaling: Divide by nothing (none), by the standard deviation of all entries (global), or of each feature
            (feature).
        memory_map: Whether to leave a ``.npy`` on disk and read only the rows of each batch: always, never, or if it
            does not fit into the free memory (auto). A ``.npz`` or ``.csv`` must fit; save larger data as ``.npy``.
        kwargs: Arguments of :class:`KSMDataModule`.
    """

    def __init__(
        self,
        path: str,
        test_path: str | None = None,
        key: str | None = None,
        labels: str | None = None,
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
        self.labels = labels
        self.centre = centre
        self.scaling = scaling
        self.memory_map = memory_map

    def load(self) -> tuple[Dataset, Dataset | None]:
        train = self._read(Path(self.path))
        return train, self._read(Path(self.test_path), is_test=True) if self.test_path else None

    def _read(self, path: Path, *, is_test: bool = False) -> Dataset:
        _check_file(path)
        readers = {".npy": self._read_npy, ".npz": self._read_npz, ".csv": self._read_csv}
        if path.suffix not in readers:
            raise ValueError(f"Cannot read {path}: the data must be a .npy, .npz or .csv file.")
        x, labels = readers[path.suffix](path)
        if labels is None and self.labels and self.labels.endswith(".npy") and not is_test:
            _check_file(Path(self.labels))
            loaded = load_array(Path(self.labels), mmap_mode="r")  # compares the size with that of the file
            labels = np.array(loaded) if isinstance(loaded, np.ndarray) else None
        if labels is not None:
            is_number = labels.dtype.kind in "fiub"
            if not is_number or not np.isfinite(labels).all() or not (labels == np.round(labels)).all():
                found = "some are fractions, NaN or infinite" if is_number else f"they are of dtype {labels.dtype}"
                raise ValueError(f"The labels of {path} must be whole numbers, but {found}.")
        return Dataset(x, labels)

    def _read_npy(self, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        if self.labels and not self.labels.endswith(".npy"):
            raise ValueError(
                f"`labels` must be the path of a .npy file if the points are a .npy file, got {self.labels!r}."
            )
        x = load_array(path, mmap_mode="r")
        assert isinstance(x, np.ndarray)
        is_read = self.memory_map == "never" or (
            self.memory_map == "auto" and _bytes_needed(x.size, x.dtype) <= free_memory()
        )
        return np.array(x) if is_read else x, None

    def _read_npz(self, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        arrays = load_array(path)
        if isinstance(arrays, np.ndarray):
            raise ValueError(f"{path} is a single array, not a .npz archive: rename it to .npy.")
        with arrays:
            names = list(arrays.files)
            labels = self.labels if self.labels and not self.labels.endswith(".npy") else None
            if labels and labels not in names:
                raise ValueError(f"{path} has no array {labels!r} for labels; it has {', '.join(names)}.")
            others = [name for name in names if name != labels]
            key = self.key or (others[0] if len(others) == 1 else "")
            if key not in names:
                found = ", ".join(names) or "no arrays"
                raise ValueError(f"`key` must be the name of the array with the points; {path} has {found}.")
            return _read_member(path, arrays, key), _read_member(path, arrays, labels) if labels else None

    def _read_csv(self, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        table, header = read_csv(path)
        if self.labels is None or self.labels.endswith(".npy"):
            return table, None
        columns = header or [str(i) for i in range(table.shape[1])]
        if self.labels in columns:
            column = columns.index(self.labels)
        elif self.labels.isdigit() and int(self.labels) < table.shape[1]:
            column = int(self.labels)
        else:
            raise ValueError(f"{path} has no column {self.labels!r} for labels; it has {', '.join(columns)}.")
        return np.delete(table, column, axis=1), table[:, column]


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
    needed, free = _bytes_needed(math.prod(shape), dtype), free_memory()
    if needed > free:
        raise ValueError(
            f"{path} is too large: its array {name!r} of shape {shape} needs {needed:,} bytes of memory, and "
            f"{free:,.0f} are free; save it as .npy, which is read in parts."
        )
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


def _bytes_needed(size: int, dtype: np.dtype[Any]) -> int:
    """Memory for an array, its float32 copy and the tensor made from it, which exist at the same time."""
    return size * (dtype.itemsize + 2 * 4)


def _damaged(path: Path, error: Exception) -> str:
    if "pickle" in str(error) or "Python objects" in str(error):
        return f"{path} is refused: it holds pickled objects, which could run code; save a plain numeric array."
    return f"{path} is damaged or not a NumPy file: {error}."


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"There is no data file {path}.")
    if path.stat().st_size == 0:
        raise ValueError(f"The data file {path} is empty.")


def read_csv(path: Path) -> tuple[np.ndarray, list[str] | None]:
    """Values of a CSV file (rows, columns), and its header or None.

    The first line is a header if none of its fields is a number. Columns are separated by tab, semicolon or comma,
    the first of these that the first line contains. Empty lines are skipped.
    """
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        delimiter = next((mark for mark in "\t;," if mark in first), ",")
        reader = csv.reader(file, delimiter=delimiter)
        header: list[str] | None = None
        rows: list[np.ndarray] = []
        width = 0
        for fields in reader:
            if not any(field.strip() for field in fields):
                continue
            if width == 0:
                width = len(fields)
                if not any(map(_is_number, fields)):
                    header = [field.strip() for field in fields]
                    continue
            if len(fields) != width:
                raise ValueError(
                    f"{path}, line {reader.line_num}: the row has {len(fields)} fields, but the first line has {width}."
                )
            try:
                rows.append(np.array([float(field) for field in fields]))
            except ValueError:
                text = next(field for field in fields if not _is_number(field))
                raise ValueError(f"{path}, line {reader.line_num}: {text!r} is not a number.") from None
    return np.stack(rows) if rows else np.empty((0, width)), header


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def free_memory() -> float:
    """Bytes of memory available without swapping; infinite if the system does not report it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * float(line.split()[1])
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return float("inf")
