"""Datasets that are read row by row: tuples, dictionaries or single values of numbers, arrays, tensors and images."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.data.memory import check_memory
from ksm_lightning.data.table import NO_LABELS, Selection, Table, option

ImageMode = Literal["keep", "L", "RGB"]


class ImageFormat(NamedTuple):
    """How images become arrays: their size (height, width) and mode. Default: as they are."""

    size: tuple[int, int] | None = None
    mode: ImageMode = "keep"

    @classmethod
    def of(cls, size: Sequence[int] | None, mode: str) -> "ImageFormat":
        """Raises ValueError if the size is not two positive numbers, or the mode is unknown."""
        if mode not in get_args(ImageMode):
            raise ValueError(f"`image_mode` must be one of {', '.join(get_args(ImageMode))}, got {mode!r}.")
        if size is None:
            return cls(None, mode)  # type: ignore[arg-type]  # checked
        if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
            raise ValueError(f"`image_size` must be a height and a width in pixels, such as [28, 28], got {size}.")
        return cls((size[0], size[1]), mode)  # type: ignore[arg-type]

    def array(self, image: Any) -> np.ndarray:
        """Pixels (height, width) or (height, width, channels) of a PIL image; palettes become RGB."""
        if self.mode != "keep":
            image = image.convert(self.mode)
        elif image.mode in ("1", "P", "CMYK", "YCbCr", "LAB", "HSV"):
            image = image.convert("L" if image.mode == "1" else "RGB")
        if self.size is not None:
            image = image.resize(self.size[::-1], resample=2)  # bilinear, averaging when it makes images smaller
        return np.asarray(image)


def array_of(value: Any, images: ImageFormat) -> np.ndarray:
    """A value of a row as an array of numbers. Raises ValueError with the reason if it does not hold numbers."""
    if value is None:
        raise ValueError("the value is missing")
    array: np.ndarray
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        array = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    elif is_image(value):
        array = images.array(value)
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError("its lists have different lengths") from error
    if array.dtype.kind not in "fiub":
        raise ValueError(f"numbers, arrays or images are wanted, got {type(value).__name__}")
    return array.astype(np.uint8) if array.dtype.kind == "b" else array


def is_image(value: Any) -> bool:
    """Whether a value is an image of PIL."""
    return hasattr(value, "convert") and hasattr(value, "getbands")


def image_shape_of(value: Any, array: np.ndarray) -> tuple[int, int] | None:
    """Height and width of an image with one channel: a PIL image, or an array (1, height, width); otherwise None."""
    is_grey = is_image(value) and array.ndim == 2
    if is_grey or (array.ndim == 3 and array.shape[0] == 1):
        return int(array.shape[-2]), int(array.shape[-1])
    return None


def stack_rows(
    count: int, source: object, read: Callable[[int], tuple[list[Any], Any]], images: ImageFormat
) -> tuple[np.ndarray, list[Any], tuple[int, int] | None]:
    """Inputs (rows, features), labels, and the image shape of rows that are read one after the other.

    Args:
        count: Number of rows, at least 1.
        source: The dataset, for messages.
        read: Returns the input values and the label of a row.
        images: How images become arrays.

    Raises:
        ValueError: If a row cannot be read or used, with its number and the reason.
    """
    x, labels = np.empty((0, 0)), []
    shapes: list[tuple[int, ...]] = []
    image_shape: tuple[int, int] | None = None
    for index in range(count):
        try:
            values, label = read(index)
            arrays = [array_of(value, images) for value in values]
            found = [array.shape for array in arrays]
            shapes = shapes or found
            if found != shapes:
                advice = "; set `image_size` and `image_mode`" if any(map(is_image, values)) else ""
                raise ValueError(f"its shape is {_shown(found)} and that of row 0 {_shown(shapes)}{advice}")
        except Exception as error:  # a dataset runs code of its own
            reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
            raise ValueError(f"Row {index:,} (counted from 0) of {source} cannot be used: {reason}.") from error
        row = np.concatenate([array.ravel() for array in arrays])
        if index == 0:
            check_memory((count, len(row)), row.dtype, str(source))
            x = np.empty((count, len(row)), row.dtype)
            image_shape = image_shape_of(values[0], arrays[0]) if len(arrays) == 1 else None
        elif not np.can_cast(row.dtype, x.dtype):
            x = x.astype(np.result_type(row.dtype, x.dtype))
        x[index] = row
        labels.append(label)
    return x, labels, image_shape


def _shown(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes))


class RowTable(Table):
    """A map-style dataset of PyTorch, or of any library, as a table: it has a length and rows by index.

    A row is a dictionary with names; a tuple ``(x, label)``, of which the rest is ignored; or ``x`` alone.
    """

    def __init__(self, dataset: Any, source: str, images: ImageFormat) -> None:
        self._dataset = dataset
        self._images = images
        try:
            first = dataset[0]
        except Exception as error:
            reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
            raise ValueError(f"Row 0 (counted from 0) of {source} cannot be used: {reason}.") from error
        self._first = first
        self._is_tuple = isinstance(first, tuple)
        self._has_keys = isinstance(first, Mapping)
        names = (
            list(map(str, first)) if self._has_keys else [str(i) for i in range(len(first) if self._is_tuple else 1)]
        )
        super().__init__(source, names, has_names=self._has_keys)

    def select(
        self, labels: str | None = None, columns: Sequence[str] | None = None, ignore: Sequence[str] = ()
    ) -> Selection:
        if not self.has_names and columns is None and not ignore and labels in (None, NO_LABELS):
            return Selection([0], 1 if labels is None and len(self.names) > 1 else None)
        return super().select(labels, columns, ignore)

    def select_like(self, other: Table, selection: Selection) -> Selection:
        if self.has_names or other.has_names:
            return super().select_like(other, selection)
        return selection if selection.labels in range(len(self.names)) else Selection(selection.inputs, None)

    def text_of(self, column: int) -> str | None:
        try:
            array_of(self._value(self._first, column), self._images)
        except ValueError as error:
            return f"what is not numbers ({error})"
        return None

    def _value(self, row: Any, column: int) -> Any:
        if self._has_keys:
            return row[self.names[column]]
        return row[column] if self._is_tuple else row

    def _row(self, index: int, chosen: Selection) -> tuple[list[Any], Any]:
        row = self._dataset[index]
        label = None if chosen.labels is None else label_of(self._value(row, chosen.labels))
        return [self._value(row, column) for column in chosen.inputs], label

    def read(self, chosen: Selection, *, as_text: bool = False) -> tuple[np.ndarray, np.ndarray | list[str] | None]:
        x, labels, self.image_shape = stack_rows(
            len(self._dataset), self.path, lambda index: self._row(index, chosen), self._images
        )
        if chosen.labels is None:
            return x, None
        has_texts = as_text or any(isinstance(label, str) for label in labels)
        return x, [str(label) for label in labels] if has_texts else np.array(labels)

    def numbers(self, columns: Sequence[int]) -> np.ndarray:
        return self.read(Selection(list(columns), None))[0]

    def label_values(self, column: int, *, as_text: bool = False) -> np.ndarray | list[str]:
        labels = self.read(Selection([column], column), as_text=as_text)[1]
        assert labels is not None
        return labels


def label_of(value: Any) -> int | str:
    """A label as a whole number or a text. Raises ValueError for anything else, such as the target of a regression."""
    if isinstance(value, str):
        return value
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    if array.size != 1 or array.dtype.kind not in "fiub" or array.item() != array.item() // 1:
        shown = f"{value!r}" if array.size <= 1 else f"an array of shape {array.shape}"
        raise ValueError(
            f"its label must be a whole number or a text, got {shown}; train without labels by "
            f"{option('labels', NO_LABELS)}"
        )
    return int(array.item())
