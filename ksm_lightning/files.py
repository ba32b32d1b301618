"""Files that appear at their place whole, or not at all."""

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; what was written takes the place of ``path`` when the block ends well.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "new" / "numbers.txt"
        >>> with draft_of(path) as draft:
        ...     _ = draft.write_text("1 2 3")
        >>> path.read_text(), draft.exists()
        ('1 2 3', False)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A text file."""
    with draft_of(path) as draft:
        draft.write_text(text)


def write_array(path: Path, array: np.ndarray) -> None:
    """A ``.npy`` file."""
    with draft_of(path) as draft, draft.open("wb") as file:
        np.save(file, array)


def write_png(path: Path, pixels: np.ndarray) -> None:
    """A picture (height, width, 3) of bytes."""
    from PIL import Image  # here because most processes never draw

    with draft_of(path) as draft:
        Image.fromarray(pixels).save(draft, format="PNG")


def write_csv(path: Path, fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table with a line of names; floating-point numbers with all digits, so that they are read as they were."""
    with draft_of(path) as draft, draft.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(fields)
        writer.writerows(rows)
