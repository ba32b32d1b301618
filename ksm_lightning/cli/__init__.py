"""The command ``ksm``."""

from ksm_lightning.cli.lightning_cli import main

__all__ = ["main"]
