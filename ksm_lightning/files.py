"""Atomic file writing: a file is written completely or not at all."""

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Temporary path next to ``path``; the file written there replaces ``path`` if the block raises no exception.

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
    """Write a text file."""
    with draft_of(path) as draft:
        draft.write_text(text)


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a ``.npy`` file."""
    with draft_of(path) as draft, draft.open("wb") as file:
        np.save(file, array)


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write an image (height, width, 3) of bytes."""
    from PIL import Image  # most processes never write an image

    with draft_of(path) as draft:
        Image.fromarray(pixels).save(draft, format="PNG")


def write_csv(path: Path, fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table with a header; floats keep all digits, so that reading them gives the same values."""
    with draft_of(path) as draft, draft.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(fields)
        writer.writerows(rows)
