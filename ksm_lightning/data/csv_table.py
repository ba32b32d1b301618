"""Tables in CSV files: separator, header, quotes, and the line of every bad value."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from ksm_lightning.data.table import Table, is_whole
from ksm_lightning.kernels.limits import FEW, ROWS_AT_ONCE

_SEPARATORS = "\t;,|"
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-"}

Line = tuple[int, list[str]]  # number of a line from 1, and its fields


@dataclass
class _Column:
    """What a column holds besides numbers."""

    texts: int = 0
    first_text: tuple[int, str] = (0, "")  # line and field
    missing: list[int] = field(default_factory=list)  # the first line
    num_missing: int = 0


class CsvTable(Table):
    """A CSV file. Raises ValueError for one that is not a table, with the line at fault.

    Columns are separated by tab, semicolon, comma or vertical bar, whichever gives the first line most fields, or by
    spaces if it contains none of them. The first line is a header if none of its fields is a number, if they count the
    columns as pandas does, or if it has a text above numbers; it may start with ``#``. A first column without a name
    in the header names the rows and is left out. Empty lines are skipped.
    """

    def __init__(self, path: Path) -> None:
        self._file = path
        self._encoding = _encoding(path)
        self._separator = self._choose_separator()
        lines = self._lines()
        first, second = (next(lines, (0, []))[1] for _ in range(2))
        self._is_header = _is_header(first, second)
        names = [each.strip() for each in first] if self._is_header else [str(i) for i in range(len(first))]
        self._columns = [_Column() for _ in names]
        self._blocks: list[np.ndarray] = []  # (rows, columns), with NaN for what is not a number
        self._num_rows = 0
        hidden = [0] if self._is_header and len(names) > 1 and not names[0] and all(names[1:-1]) else []
        super().__init__(path, names, has_names=self._is_header, hidden=hidden)
        self._read()
        if len(names) > 1 and names[-1] == "" and self._columns[-1].num_missing == self._num_rows:
            self.hidden |= {len(names) - 1}  # every line ends with a separator

    # ------------------------------------------------------------------ reading

    def _choose_separator(self) -> str:
        first = next((text for text in self._texts() if text.strip() and not text.startswith("#")), "")
        counts = {mark: len(next(csv.reader([first], delimiter=mark), [])) for mark in _SEPARATORS}
        best = max(counts, key=lambda mark: counts[mark])
        if counts[best] == 1:
            return " " if len(first.split()) > 1 and '"' not in first else ","
        return best

    def _texts(self) -> Iterator[str]:
        with self._file.open(encoding=self._encoding, errors="replace", newline="") as file:
            yield from file

    def _lines(self) -> Iterator[Line]:
        """All lines that are not empty. Of comments at the start only the last one, if it can be the header."""
        comment: Line = (0, [])
        is_start = True
        texts = (text.strip() for text in self._texts()) if self._separator == " " else self._texts()
        reader = csv.reader(texts, delimiter=self._separator, skipinitialspace=True)
        try:
            for fields in reader:
                if not any(map(str.strip, fields)):
                    continue
                if is_start and fields[0].startswith("#"):
                    names = [fields[0].lstrip("# "), *fields[1:]]
                    comment = reader.line_num, names if names[0] else names[1:]
                    continue
                if is_start and len(comment[1]) == len(fields) and not any(map(is_number, comment[1])):
                    yield comment
                is_start = False
                yield reader.line_num, fields
        except csv.Error as error:
            raise ValueError(f"{self._file}, line {reader.line_num}: the line cannot be read ({error}).") from error

    def _rows(self) -> Iterator[Line]:
        """The lines below the header, each with the number of fields of the first line."""
        lines, width = self._lines(), len(self._columns)
        for number, fields in islice(lines, int(self._is_header), None):
            if len(fields) != width:
                raise ValueError(
                    f"{self.path}, line {number}: the row has {len(fields)} fields, but the first line has {width}."
                )
            yield number, fields

    def _read(self) -> None:
        rows = self._rows()
        while block := list(islice(rows, ROWS_AT_ONCE)):
            lines = [number for number, _ in block]
            values = np.empty((len(block), len(self._columns)))
            for index, fields in enumerate(zip(*(fields for _, fields in block), strict=True)):
                values[:, index] = self._parse(self._columns[index], fields, lines)
            self._blocks.append(values)
            self._num_rows += len(block)

    def _parse(self, column: _Column, fields: Sequence[str], lines: Sequence[int]) -> np.ndarray:
        try:
            values = np.array([float(each) for each in fields])
        except ValueError:
            values = np.array([float(each) if is_number(each) else np.nan for each in fields])
        for row in np.flatnonzero(np.isnan(values)).tolist():
            if fields[row].strip().lower() in _MISSING:
                column.num_missing += 1
                column.missing = column.missing or [lines[row]]
            else:
                column.texts += 1
                column.first_text = column.first_text if column.first_text[0] else (lines[row], fields[row].strip())
        return values

    # ------------------------------------------------------------------ columns

    def text_of(self, column: int) -> str | None:
        about = self._columns[column]
        is_text = 2 * about.texts > self._num_rows - about.num_missing and not _has_decimal_comma(about.first_text[1])
        return f"text ({about.first_text[1]!r})" if is_text else None

    def numbers(self, columns: Sequence[int]) -> np.ndarray:
        for index in columns:
            self._check(index)
        if not self._blocks:
            return np.empty((0, len(columns)))
        return np.concatenate([block[:, list(columns)] for block in self._blocks])

    def _check(self, index: int) -> None:
        column = self._columns[index]
        line, text = column.first_text
        if column.missing and (not line or column.missing[0] < line):
            raise ValueError(
                f"{self.path}, line {column.missing[0]}, column {self.names[index]!r}: the value is missing; fill it "
                f"or remove the row ({column.num_missing:,} of {self._num_rows:,} values of this column are missing)."
            )
        if line:
            advice = "; write numbers with a decimal point" if _has_decimal_comma(text) else ""
            raise ValueError(
                f"{self.path}, line {line}: {text!r} is not a number in column {self.names[index]!r}{advice}."
            )

    def label_values(self, column: int, *, as_text: bool = False) -> np.ndarray | list[str]:
        about = self._columns[column]
        if about.missing:
            raise ValueError(
                f"{self.path}, line {about.missing[0]}, column {self.names[column]!r}: the label is missing."
            )
        if not as_text and not about.texts:
            return self.numbers([column])[:, 0]
        known: dict[str, str] = {}  # one object per class
        texts = (fields[column].strip() for _, fields in self._rows())
        return [known.setdefault(text, text) for text in texts]

    def is_classes(self, column: int) -> bool:
        """Few whole numbers, beside columns that all have fractions."""
        about = self._columns[column]
        if about.texts or about.missing or not self._num_rows:
            return False
        values = self.numbers([column])[:, 0]
        others = [i for i in range(len(self.names)) if i != column and self.text_of(i) is None]
        return (
            bool(others)
            and is_whole(values)
            and 2 <= len(np.unique(values)) <= min(FEW, self._num_rows // 2)
            and not any(is_whole(np.concatenate([block[:, i] for block in self._blocks])) for i in others)
        )


def is_number(text: str) -> bool:
    """Whether a text is a number in the notation of Python."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _has_decimal_comma(text: str) -> bool:
    return "," in text and is_number(text.replace(",", "."))


def _is_header(first: Sequence[str], second: Sequence[str]) -> bool:
    numbers = [each.strip() for each in first if is_number(each)]
    if not numbers:
        return bool(first)
    texts = [(i, each.strip()) for i, each in enumerate(first) if not is_number(each)]
    counts = [str(i) for i in range(len(numbers))]
    if numbers == counts and texts in ([], [(0, "")]):
        # pandas numbers columns without names, and writes an index without a name in front.
        return len(numbers) >= 3 or bool(texts)
    # Names such as `label,1,2,3`, above numbers only.
    start = int(numbers[0]) if numbers[0].isdigit() else 0
    is_counting = numbers == [str(start + i) for i in range(len(numbers))]
    named = [i for i, text in texts if text]
    below = [second[i] for i in named if i < len(second)]
    return is_counting and bool(below) and all(map(is_number, below))


def _encoding(path: Path) -> str:
    """UTF-16 if the file starts with its mark, as spreadsheets write it, otherwise UTF-8. Binary data is an error."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if b"\0" in start:
        raise ValueError(f"{path} is not a CSV file: it holds binary data.")
    return "utf-8-sig"
