"""A user's own arrays: ``.npy``, ``.npz`` or ``.csv``."""

import csv
import os
from pathlib import Path
from typing import Literal

import numpy as np

from ksm_lightning.data.datamodule import Dataset, KSMDataModule
from ksm_lightning.data.points import Scaling, Standardisation

MemoryMap = Literal["auto", "always", "never"]


class ArrayDataModule(KSMDataModule):
    """Points from a file: ``.npy`` (samples, features), ``.npz`` with such an array, or ``.csv`` with a row a point.

    Pickled arrays are refused: a data file never runs code.

    Args:
        path: The file with the training points.
        test_path: A file with test points, laid out in the same way.
        key: Name of the array in a ``.npz``; needed when it holds several besides the labels.
        labels: Where whole-number labels are: the name of an array in the ``.npz``, the name or number of a column
            of the ``.csv``, or a ``.npy`` file of its own (training labels only).
        centre: Whether to remove the mean of each feature.
        scaling: Divide by nothing, by the standard deviation of all entries (global), or of each feature.
        memory_map: Leave a ``.npy`` in its file and read only what a batch needs: always, never, or when it would not
            fit into the memory that is free (auto). A ``.npz`` or ``.csv`` must fit; save a larger one as ``.npy``.
        batch_size: Points a batch, on each device.
        updates_per_epoch: Updates from one validation to the next; to the method itself an epoch means nothing.
        eval_batch_size: Points a block in validation, test and prediction.
        seed: Seed of the batches; the seed of the run (``seed_everything``) unless given. A checkpoint keeps it.
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
        batch_size: int = 64,
        updates_per_epoch: int = 1000,
        eval_batch_size: int = 4096,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, updates_per_epoch, eval_batch_size, seed)
        if memory_map not in ("auto", "always", "never"):
            raise ValueError(f"`memory_map` must be 'auto', 'always' or 'never', got {memory_map!r}.")
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

    def standardise(self, x: np.ndarray) -> Standardisation:
        return Standardisation.measure(x, centre=self.centre, scaling=self.scaling)

    def _read(self, path: Path, *, is_test: bool = False) -> Dataset:
        if not path.is_file():
            raise FileNotFoundError(f"There is no data file {path}.")
        if path.stat().st_size == 0:
            raise ValueError(f"The data file {path} is empty.")
        readers = {".npy": self._read_npy, ".npz": self._read_npz, ".csv": self._read_csv}
        if path.suffix not in readers:
            raise ValueError(f"Cannot read {path}: the data must be a .npy, .npz or .csv file.")
        x, labels = readers[path.suffix](path)
        if labels is None and self.labels and self.labels.endswith(".npy") and not is_test:
            loaded = load_array(Path(self.labels))
            labels = loaded if isinstance(loaded, np.ndarray) else None
        if labels is not None:
            is_whole = labels.dtype.kind in "iub" or (
                labels.dtype.kind == "f" and bool((labels == np.round(labels)).all())
            )
            if not is_whole or not np.isfinite(labels).all():
                raise ValueError(f"The labels of {path} must be whole numbers.")
        return Dataset(x, labels)

    def _read_npy(self, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        if self.labels and not self.labels.endswith(".npy"):
            raise ValueError(f"A .npy file has no array {self.labels!r}: give the labels a .npy file of their own.")
        x = load_array(path, mmap_mode="r")
        assert isinstance(x, np.ndarray)
        # The file, its float32 copy and the tensor made of it are in memory together for a moment.
        needed = x.nbytes + 2 * 4 * x.size
        if self.memory_map == "never" or (self.memory_map == "auto" and needed <= free_memory()):
            return np.array(x), None
        return x, None

    def _read_npz(self, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        arrays = load_array(path)
        if isinstance(arrays, np.ndarray):
            raise ValueError(f"{path} is a single array: name it .npy.")
        with arrays:
            names = list(arrays.files)
            labels = self.labels if self.labels and not self.labels.endswith(".npy") else None
            if labels and labels not in names:
                raise ValueError(f"{path} has no array {labels!r} for labels; it has {', '.join(names)}.")
            others = [name for name in names if name != labels]
            key = self.key or (others[0] if len(others) == 1 else "")
            if key not in names:
                found = ", ".join(names) or "no array at all"
                raise ValueError(f"Say which array of {path} holds the points with `key`; it has {found}.")
            try:
                return arrays[key], arrays[labels] if labels else None
            except Exception as error:  # a damaged archive fails in ways of its own
                raise ValueError(_damaged(path, error)) from error

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
    """``numpy.load`` that never unpickles and says in one sentence what is wrong with a file."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no data file {path}.")
    try:
        loaded: np.ndarray | np.lib.npyio.NpzFile = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except Exception as error:  # numpy, zipfile and zlib each raise their own kinds on a damaged file
        raise ValueError(_damaged(path, error)) from error
    return loaded


def _damaged(path: Path, error: Exception) -> str:
    if "pickle" in str(error) or "Python objects" in str(error):
        return f"{path} is refused: it is no plain array but holds pickled objects, which could run code."
    return f"{path} is damaged or no NumPy file: {error}."


def read_csv(path: Path) -> tuple[np.ndarray, list[str] | None]:
    """StepSizes of a CSV (rows, columns) and its header, if the first line holds no number at all.

    Comma, semicolon or tab separate the columns, whichever the first line has; empty lines are passed over.

    Raises:
        ValueError: If a field is no number, a row has another length, or there is no row.
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
                    f"{path}, line {reader.line_num}: {len(fields)} fields where the first line has {width}."
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
    """Bytes of memory that could be had without swapping; infinite where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * float(line.split()[1])
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return float("inf")
