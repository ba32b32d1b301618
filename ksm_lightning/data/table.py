"""Tables with named columns: which columns are inputs, which one holds the labels, and labels as whole numbers."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ksm_lightning.kernels.limits import FEW

NO_LABELS = "none"
"""Value of ``labels`` that says that a table has no labels: every column is an input."""

_LABEL_WORD = r"(labels?|targets?|class(es)?)"
_LABEL_NAME = re.compile(rf"y|{_LABEL_WORD}|.*[ _.-]{_LABEL_WORD}|{_LABEL_WORD}[ _.-](id|index|name|no|nr)", re.I)


class Selection(NamedTuple):
    """Numbers of the input columns of a table, in the order of the features, and of the label column or None."""

    inputs: list[int]
    labels: int | None


class Table(ABC):
    """A file with one row per point and one column per quantity.

    Attributes:
        path: The file or dataset, for messages.
        image_shape: Height and width of a point if points are images.
        names: Names of the columns; their numbers from 0 if the file has no names.
        has_names: Whether the file names its columns.
        hidden: Numbers of columns that only name or count the rows.
    """

    def __init__(
        self, path: object, names: Sequence[str], *, has_names: bool = True, hidden: Sequence[int] = ()
    ) -> None:
        self.path = path
        self.names = list(names)
        self.has_names = has_names
        self.hidden = frozenset(hidden)

    image_shape: tuple[int, int] | None = None

    @abstractmethod
    def text_of(self, column: int) -> str | None:
        """What a column holds instead of numbers, such as ``text ('setosa')``; None for a column of numbers."""

    @abstractmethod
    def numbers(self, columns: Sequence[int]) -> np.ndarray:
        """Values (rows, features) of columns of numbers. Raises ValueError with the row and column of a bad value."""

    @abstractmethod
    def label_values(self, column: int, *, as_text: bool = False) -> np.ndarray | list[str]:
        """Values (rows,) of the label column: numbers, or texts if one of them is not a number or ``as_text``."""

    def class_names(self, column: int) -> tuple[str, ...] | None:
        """Names of the classes 0, 1, ... of a column of whole numbers, if the table has them. Default: no."""
        return None

    def read(self, chosen: Selection, *, as_text: bool = False) -> tuple[np.ndarray, np.ndarray | list[str] | None]:
        """Inputs (rows, features) and labels, or None, of the selected columns; see :meth:`label_values`."""
        labels = None if chosen.labels is None else self.label_values(chosen.labels, as_text=as_text)
        return self.numbers(chosen.inputs), labels

    def is_classes(self, column: int) -> bool:
        """Whether a column without a name looks like labels by its values. Default: no."""
        return False

    def index_of(self, name: str, option: str) -> int:
        """Number of the column that an option names: by its name, or by its number from 0, negative from the end."""
        if (found := self.names.count(name)) > 1:
            raise ValueError(f"{self.path} has {found} columns {name!r}: give the number of one of them in `{option}`.")
        if found:
            return self.names.index(name)
        if re.fullmatch(r"-?\d+", name) and -len(self.names) <= int(name) < len(self.names):
            return int(name) % len(self.names)
        visible = [each for i, each in enumerate(self.names) if i not in self.hidden]
        purpose = " for labels" if option == "labels" else f", which `{option}` names"
        raise ValueError(f"{self.path} has no column {name!r}{purpose}; it has {listed(visible)}.")

    def indices_of(self, names: Sequence[str], option: str) -> list[int]:
        """Numbers of several columns. One text with commas is a list, as it is on the command line."""
        if len(names) == 1 and names[0] not in self.names:
            names = [name.strip() for name in names[0].split(",")]
        return [self.index_of(name, option) for name in names]

    def select(
        self, labels: str | None = None, columns: Sequence[str] | None = None, ignore: Sequence[str] = ()
    ) -> Selection:
        """The columns to use. Nothing that looks like labels becomes an input unless an option says so.

        Args:
            labels: Name or number of the label column, or ``none``. Default: not decided, so that a column that looks
                like labels is an error.
            columns: Input columns, in this order. Default: all others.
            ignore: Columns to leave out.

        Raises:
            ValueError: If a column does not exist, an input is not a number, or a column looks like labels.
        """
        has_labels = labels is not None and (labels != NO_LABELS or NO_LABELS in self.names)
        label = self.index_of(str(labels), "labels") if has_labels else None
        dropped = {*self.indices_of(ignore, "ignore")} if ignore else set()
        if columns is None:
            inputs = [i for i in range(len(self.names)) if i != label and i not in dropped | self.hidden]
        else:
            inputs = self.indices_of(columns, "columns")
        if twice := [i for i in inputs if i == label or i in dropped]:
            other = "labels" if twice[0] == label else "ignore"
            raise ValueError(f"`columns` and `{other}` both name the column {self.names[twice[0]]!r} of {self.path}.")
        if not inputs:
            raise ValueError(f"No input column of {self.path} is left: it has {listed(self.names)}.")
        self._refuse_texts(inputs, asks=labels is None)
        if labels is None and columns is None:
            self.refuse_labels(inputs)
        return Selection(inputs, label)

    def _refuse_texts(self, inputs: list[int], *, asks: bool) -> None:
        texts = {self.names[i]: text for i in inputs if (text := self.text_of(i)) is not None}
        if not texts:
            return
        found = listed([f"{name!r} holds {text}" for name, text in texts.items()])
        *others, last = texts
        if not asks:
            advice = f"encode as numbers what is an input, and leave out the rest with {option('ignore', *texts)}."
        elif not others:
            advice = (
                f"set {option('labels', last)} if these are the labels, or {option('ignore', last)} to leave it out."
            )
        else:
            advice = (
                f"set `labels` to the column with the labels, such as {option('labels', last)}, and leave out the "
                f"others, such as {option('ignore', *others)}."
            )
        raise ValueError(f"Inputs must be numbers, but in {self.path} {found}: {advice}")

    def refuse_labels(self, inputs: Sequence[int]) -> None:
        """Raise a ValueError that asks about those of the columns that look like labels."""
        suspects = [self.names[i] for i in inputs if self._may_be_labels(i)]
        if not suspects or len(inputs) == 1:
            return
        which = f"The column {suspects[0]!r}" if len(suspects) == 1 else f"Each of the columns {listed(suspects)}"
        raise ValueError(
            f"{which} of {self.path} may hold labels, which must not be inputs: set {option('labels', suspects[-1])} "
            f"if it does, or {option('labels', NO_LABELS)} if it does not."
        )

    def _may_be_labels(self, column: int) -> bool:
        if not self.has_names:
            return column == len(self.names) - 1 and self.is_classes(column)
        name = self.names[column].strip()
        if not _LABEL_NAME.fullmatch(name):
            return False
        # Points in the plane have the coordinates x and y.
        is_coordinate = name.lower() == "y" and "x" in [each.strip().lower() for each in self.names]
        return not is_coordinate or is_whole(self.numbers([column])[:, 0])

    def select_like(self, other: "Table", selection: Selection) -> Selection:
        """The columns that another table's selection names: by name if both have names, otherwise by number.

        The label column may be missing in a table with names: new points often have no labels.
        """
        if not (self.has_names and other.has_names):
            if len(self.names) != len(other.names):
                raise ValueError(
                    f"{self.path} has {len(self.names)} columns and {other.path} {len(other.names)}: give both the "
                    "same columns."
                )
            chosen = selection
        else:
            missing = [other.names[i] for i in selection.inputs if other.names[i] not in self.names]
            if missing:
                raise ValueError(f"{self.path} lacks the columns {listed(missing)} of {other.path}.")
            inputs = [self.index_of(other.names[i], "columns") for i in selection.inputs]
            label = None if selection.labels is None else other.names[selection.labels]
            chosen = Selection(inputs, self.names.index(label) if label in self.names else None)
        self._refuse_texts(chosen.inputs, asks=False)
        return chosen


def option(name: str, *values: str) -> str:
    """An option as text, in Python and on the command line.

    Example:
        >>> option("labels", "species"), option("ignore", "id", "city")
        ('labels=species (--data.labels=species)', "ignore=[id,city] (--data.ignore='[id,city]')")
    """
    value = values[0] if len(values) == 1 else f"[{','.join(values)}]"
    shown = value if re.fullmatch(r"[\w.-]+", value) else f"'{value}'"
    return f"{name}={value} (--data.{name}={shown})"


def listed(names: Sequence[str]) -> str:
    """Names separated by commas, the first 20 of many.

    Example:
        >>> listed(["a", "b"]), listed([str(i) for i in range(300)])
        ('a, b', '0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 280 more')
    """
    rest = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + rest


def is_whole(values: np.ndarray) -> bool:
    """Whether all numbers are finite and whole."""
    return bool(np.isfinite(values).all() and (values == np.round(values)).all())


def coded_labels(
    values: np.ndarray | Sequence[str], classes: Sequence[str] | None, source: object, *, is_test: bool = False
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Labels as whole numbers, and the names of the classes 0, 1, ... if the labels are texts.

    Args:
        values: Whole numbers or texts (rows,).
        classes: Names of the classes of the training labels, for the labels of the test points. Default: those that
            occur, in alphabetical order.
        source: Where the labels come from, for messages.
        is_test: Whether these are labels of test points, which are numbers if ``classes`` is None.

    Raises:
        ValueError: If a label is a fraction, NaN or infinite, or does not occur in the training data.

    Example:
        >>> coded_labels(["cat", "ant", "cat"], None, "x.csv")
        (array([1, 0, 1]), ('ant', 'cat'))
    """
    array = np.asarray(values)
    if array.dtype.kind in "fiub":
        if not is_whole(array):
            raise ValueError(
                f"The labels of {source} must be whole numbers or texts, but some are fractions, NaN or infinite."
            )
        return array, None
    if array.dtype.kind not in "US":
        raise ValueError(f"The labels of {source} must be whole numbers or texts, but they are of dtype {array.dtype}.")
    if is_test and classes is None:
        raise ValueError(f"The labels of {source} are texts, but those of the training data are numbers.")
    texts = [each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in values]
    names = tuple(sorted(set(texts))) if classes is None else tuple(classes)
    codes = {name: code for code, name in enumerate(names)}
    if unknown := sorted(set(texts) - set(codes)):
        raise ValueError(
            f"{source} has the labels {listed([repr(each) for each in unknown])}, which the training data lacks: it "
            f"has {listed(names)}."
        )
    return np.array([codes[text] for text in texts], dtype=np.int64), names
