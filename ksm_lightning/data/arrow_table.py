"""Tables in Parquet, Feather and Arrow files, and columns of Arrow as arrays. Needs the extra ``arrow``."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ksm_lightning.data.memory import check_memory
from ksm_lightning.data.table import Table
from ksm_lightning.extras import import_extra
from ksm_lightning.kernels.limits import ROWS_AT_ONCE

_PURPOSE = "Parquet, Feather and Arrow files"
pa = import_extra("pyarrow", "arrow", _PURPOSE)
pc = import_extra("pyarrow.compute", "arrow", _PURPOSE)


class BadValue(Exception):
    """A value that cannot be used: its row in the array, and a reason."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


class ArrowTable(Table):
    """A Parquet, Feather or Arrow file. Raises ValueError for a damaged one.

    Only the columns in use are read, a batch of rows at a time. Lists of numbers of the same length are as many
    features. The index that pandas writes is left out.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._schema, self._num_rows, self._batches = _open(path)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ValueError(damaged(path, error)) from error
        names = self._schema.names
        hidden = [i for i, name in enumerate(names) if name.startswith("__index_level_")]
        super().__init__(path, names, hidden=hidden)

    def text_of(self, column: int) -> str | None:
        kind = self._schema.field(column).type
        return None if number_type(kind) is not None else f"values of the type {kind}"

    def numbers(self, columns: Sequence[int]) -> np.ndarray:
        fields = {self._schema.field(i).name: self._schema.field(i).type for i in columns}
        if len(fields) < len(columns):
            raise ValueError(f"{self.path} has several columns of the same name: rename them.")
        return read_numbers(self._guarded(list(fields)), fields, self._num_rows, str(self.path))

    def label_values(self, column: int, *, as_text: bool = False) -> np.ndarray | list[str]:
        return read_labels(self._guarded([self.names[column]]), self.names[column], str(self.path), as_text=as_text)

    def _guarded(self, names: list[str]) -> Iterator[Any]:
        try:
            yield from self._batches(names)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(damaged(self.path, error)) from error


def damaged(path: object, error: Exception) -> str:
    """A sentence about a file that Arrow cannot read."""
    return (
        f"{path} is damaged or not a Parquet, Feather or Arrow file: {' '.join(str(error).split())[:200].rstrip('.')}."
    )


def _open(path: Path) -> tuple[Any, int, Callable[[list[str]], Iterator[Any]]]:
    """Schema, number of rows, and a function that reads some columns in batches."""
    if path.suffix.lower() == ".parquet":
        file = import_extra("pyarrow.parquet", "arrow", _PURPOSE).ParquetFile(path)
        return (
            file.schema_arrow,
            file.metadata.num_rows,
            lambda names: file.iter_batches(batch_size=ROWS_AT_ONCE, columns=names),
        )

    with pa.memory_map(str(path)) as file:
        schema = _reader(file).schema
    count = sum(batch.num_rows for batch in _ipc_batches(path, [0]))
    return schema, count, lambda names: _ipc_batches(path, [schema.get_field_index(name) for name in names])


def _ipc_batches(path: Path, fields: list[int]) -> Iterator[Any]:
    """Batches of rows with these columns only, mapped from the file."""
    with pa.memory_map(str(path)) as file:
        reader = _reader(file, pa.ipc.IpcReadOptions(included_fields=fields))
        if isinstance(reader, pa.RecordBatchStreamReader):
            yield from reader
        else:
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)


def _reader(file: Any, options: Any = None) -> Any:
    """A reader of Arrow's file format, which is Feather's, or of its stream format."""
    try:
        return pa.ipc.open_file(file, options=options)
    except pa.ArrowInvalid:
        file.seek(0)
        return pa.ipc.open_stream(file, options=options)


# ---------------------------------------------------------------------- columns


def number_type(kind: Any) -> np.dtype[Any] | None:
    """dtype for the numbers of a column of this Arrow type, or of lists of it; None if it does not hold numbers.

    Example:
        >>> number_type(pa.list_(pa.float32())), number_type(pa.bool_()), number_type(pa.string())
        (dtype('float32'), dtype('uint8'), None)
    """
    if isinstance(kind, pa.BaseExtensionType):
        return number_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or is_list(kind):
        return number_type(kind.value_type)
    if pa.types.is_boolean(kind):
        return np.dtype(np.uint8)
    if pa.types.is_decimal(kind):
        return np.dtype(np.float64)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    return None


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is a list, of fixed size or not."""
    return any(check(kind) for check in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def block_of(array: Any) -> np.ndarray:
    """Numbers (rows, features) of an Arrow array of numbers or of lists of the same length.

    Raises:
        BadValue: If a value is missing, or lists have different lengths.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count:
        raise BadValue(int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0]), "the value is missing")
    if pa.types.is_dictionary(array.type):
        return block_of(array.dictionary_decode())
    if is_list(array.type):
        if not len(array):
            return np.empty((0, 0))
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        if (other := np.flatnonzero(lengths != lengths[0])).size:
            raise BadValue(int(other[0]), f"the list has {lengths[other[0]]} values and another one {lengths[0]}")
        try:
            values = block_of(array.flatten())
        except BadValue as error:
            raise BadValue(error.row // int(lengths[0]), str(error)) from error
        return values.reshape(len(array), -1) if len(values) else np.empty((len(array), 0))
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    values = np.asarray(array.to_numpy(zero_copy_only=False))
    if values.dtype.kind == "f" and (missing := np.flatnonzero(np.isnan(values))).size:
        raise BadValue(int(missing[0]), "the value is missing (NaN)")
    return values[:, None]


def read_numbers(batches: Iterator[Any], fields: dict[str, Any], num_rows: int, source: str) -> np.ndarray:
    """All rows (samples, features) of some columns, one after the other, in the smallest common dtype.

    Args:
        batches: Batches of rows, tables or record batches of Arrow, with at least these columns.
        fields: Arrow types of the columns by their names, in the order of the features.
        num_rows: Number of rows of all batches.
        source: The file or dataset, for messages.

    Raises:
        ValueError: For a missing value, lists of different lengths, or more numbers than the memory can hold.
    """
    dtype = np.result_type(*(number_type(kind) for kind in fields.values()))
    x, start = np.empty((0, len(fields)), dtype), 0
    widths: dict[str, int] = {}
    for batch in batches:
        blocks = []
        for name in fields:
            try:
                block = block_of(batch.column(name))
                if len(block) and block.shape[1] != widths.setdefault(name, block.shape[1]):
                    raise BadValue(0, f"the list has {block.shape[1]} values and another one {widths[name]}")
            except BadValue as error:
                row = f"row {start + error.row:,} (counted from 0)"
                raise ValueError(f"{source}, {row}, column {name!r}: {error}; fill it or remove the row.") from error
            blocks.append(block)
        if not len(blocks[0]):
            continue
        if start == 0:
            width = sum(widths.values())
            check_memory((num_rows, width), dtype, source)
            x = np.empty((num_rows, width), dtype)
        stop = start + len(blocks[0])
        if stop <= num_rows:
            x[start:stop] = np.hstack(blocks)
        start = stop
    if start != num_rows:
        raise ValueError(f"{source} is damaged: it has {start:,} rows, and its header says {num_rows:,}.")
    return x


def read_labels(batches: Iterator[Any], name: str, source: str, *, as_text: bool = False) -> np.ndarray | list[str]:
    """Labels (rows,) of a column: numbers, or texts if it holds texts or ``as_text``. None of them may be missing."""
    numbers: list[np.ndarray] = []
    texts: list[str] = []
    count, known = 0, dict[str, str]()
    for batch in batches:
        column = batch.column(name)
        try:
            if number_type(column.type) is not None and not is_list(column.type) and not as_text:
                numbers.append(block_of(column)[:, 0].copy())  # not a view of the file
            elif column.null_count:
                raise BadValue(int(np.flatnonzero(column.is_null())[0]), "the label is missing")
            else:
                texts += [known.setdefault(text, text) for text in map(str, column.to_pylist())]
        except BadValue as error:
            raise ValueError(
                f"{source}, row {count + error.row:,} (counted from 0), column {name!r}: the label is missing."
            ) from error
        count += len(column)
    return texts if texts else np.concatenate([np.empty(0, np.int64), *numbers])
