"""A checkpoint on disk: written completely or not at all, by all processes of a trainer together."""

import os
from contextlib import nullcontext
from pathlib import Path

import lightning as L

from ksm_lightning.files import draft_of
from ksm_lightning.private_apis import checkpoint_content


def write_checkpoint(trainer: L.Trainer, target: Path, *, copy: Path | None = None, kept: str = "") -> None:
    """Write the state of a trainer to ``target``. Every process must call it.

    The checkpoint is written to another file first and flushed to the disk, and then replaces the old one in one step.

    Args:
        trainer: The trainer.
        target: The file, in a folder of the first process.
        copy: A second name of the same file. Default: none.
        kept: What the error message says about older checkpoints.

    Raises:
        OSError: On every process, if the file cannot be written. An old one is kept.
    """
    content = checkpoint_content(trainer)
    failure = ""
    try:
        with draft_of(target) if trainer.is_global_zero else nullcontext(target) as draft:
            trainer.strategy.save_checkpoint(content, draft)  # some strategies write on the first rank only
            if trainer.is_global_zero:
                with draft.open("rb") as file:
                    os.fsync(file.fileno())
                if copy is not None:
                    copy.unlink(missing_ok=True)
                    os.link(draft, copy)
    except OSError as error:
        failure = f"The checkpoint {target} could not be written ({error.__cause__ or error}){kept and '; '}{kept}."
    failure = trainer.strategy.broadcast(failure)
    if failure:
        raise OSError(failure)
