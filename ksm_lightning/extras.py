"""Packages that only some users need, imported with a sentence about how to install them."""

from importlib import import_module
from typing import Any


class MissingExtraError(ModuleNotFoundError, ValueError):
    """A package is missing that an optional extra installs."""


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """The module of an optional package.

    Args:
        module: Its name, such as ``pyarrow.compute``.
        extra: The extra of this package that installs it.
        purpose: What needs it, in the plural, for the message.

    Raises:
        MissingExtraError: If the package is not installed.

    Example:
        >>> import_extra("no_such_package", "fast", "Fast updates")
        Traceback (most recent call last):
        ...
        ksm_lightning.extras.MissingExtraError: Fast updates need the package no_such_package: run pip install \
'ksm-lightning[fast]'.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"{purpose} need the package {package}: run pip install 'ksm-lightning[{extra}]'."
        ) from error
