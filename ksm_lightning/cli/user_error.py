"""Mistakes that the user can correct, each described in one sentence."""

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can correct, described in one sentence."""


def one_line(text: str) -> str:
    """A text without line breaks and repeated spaces."""
    return " ".join(text.split())


def without_types(message: str) -> str:
    """The complaint of a class about its arguments, without the list of types in which jsonargparse wraps it."""
    complaint = re.search(r"Subtypes: .*?Errors:\s+- (.*?)\s+- Expected a <class 'NoneType'>", message, re.DOTALL)
    return message if complaint is None else complaint[1]


def did_you_mean(word: str, known: Iterable[str], most: int = 3) -> str:
    """The known words that are nearest to a misspelt one, as the end of a sentence; empty if none is near.

    Example:
        >>> did_you_mean("fti", ["fit", "test", "predict"])
        ', did you mean fit?'
        >>> did_you_mean("nothing", ["fit", "test"])
        ''
    """
    near = difflib.get_close_matches(word, list(known), n=most, cutoff=0.6)
    return f", did you mean {' or '.join(near)}?" if near else ""
