"""The command ``ksm``. Importing it is cheap: what a command needs is imported when it runs."""

import logging
import os
import sys
import warnings
from collections.abc import Sequence

from ksm_lightning.cli import front
from ksm_lightning.cli.user_error import UserError, one_line, without_types


def main(args: Sequence[str] | None = None) -> None:
    """Run ``ksm``. A failure prints one sentence on standard error and exits with code 2.

    With the environment variable KSM_DEBUG set, an error shows its traceback.

    Args:
        args: Command-line arguments. Default: those of the process.
    """
    given = list(sys.argv[1:] if args is None else args)
    try:
        _run(given)
    except KeyboardInterrupt:  # also while the imports take their seconds
        print("ksm: stopped.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if os.environ.get("KSM_DEBUG"):
            raise
        sentence = one_line(without_types(str(error))) or "no details available"
        if not _is_explained(error):
            sentence = f"{type(error).__name__}: {sentence[:500]} (set KSM_DEBUG=1 for the traceback)"
        print(f"ksm: error: {sentence}", file=sys.stderr)
        sys.exit(2)


def _run(args: list[str]) -> None:
    if (text := front.answer(args)) is not None:
        print(text)
        sys.exit(0)
    from ksm_lightning.cli.packaged_configs import configs, with_found_files

    if args[0] == "configs":
        print(configs(args[1:]))
        return
    args = with_found_files(args)
    from ksm_lightning.cli.own_commands import OWN_COMMANDS, run_own_command

    _silence_lightning()
    if args[0] in OWN_COMMANDS:
        run_own_command(args[0], args[1:])
    else:
        _run_lightning_command(args)


def _is_explained(error: Exception) -> bool:
    """Whether the message of an error was written for users."""
    if isinstance(error, UserError | ValueError | OSError | FloatingPointError):
        return True
    if "lightning" not in sys.modules:
        return False
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    return isinstance(error, MisconfigurationException)


def _run_lightning_command(args: list[str]) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    from ksm_lightning.cli.lightning_cli import KSMCLI, Interrupted

    try:
        KSMCLI(args)
    except Interrupted as interruption:
        rank_zero_only(print)(f"ksm: {interruption}", file=sys.stderr)
        sys.exit(interruption.exit_code)


def _silence_lightning() -> None:
    """Hide Lightning's notices, which ``ksm`` replaces by its own, and warnings that users cannot act on."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
    warnings.filterwarnings("ignore", message="Couldn't infer the batch indices")
    # Scores are equal on all ranks before they are logged.
    warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist=True")
