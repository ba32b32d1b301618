"""Configuration files, read as plain values: nothing that a file names is imported or run."""

from pathlib import Path
from typing import Any

import yaml

# Values of a file with all aliases written out.
_MAX_VALUES = 100_000


def read_config(path: Path) -> Any:
    """The content of a YAML file as dictionaries, lists and plain values.

    Raises:
        ValueError: If it is not text or not YAML, or is nested too deeply, or aliases repeat its parts too often. The
            message says what the file is, for use after its name.
    """
    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.safe_load(file)
        count = _count(content, _MAX_VALUES)
    except UnicodeDecodeError as error:
        raise ValueError("is not text") from error
    except RecursionError as error:
        raise ValueError("is not valid YAML: it is nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError, AttributeError) as error:
        # PyYAML raises errors of other types for impossible numbers, dates and tags.
        raise ValueError(f"is not valid YAML: {' '.join(str(error).split())}") from error
    if count > _MAX_VALUES:
        raise ValueError(f"has more than {_MAX_VALUES:,} values, with its aliases written out")
    return content


def _count(content: Any, limit: int) -> int:
    """Number of values in nested containers, counted up to the limit. Raises RecursionError if they are too deep."""
    if not isinstance(content, dict | list):
        return 1
    count = 1
    for item in content.values() if isinstance(content, dict) else content:
        count += _count(item, limit - count)
        if count > limit:
            break
    return count
