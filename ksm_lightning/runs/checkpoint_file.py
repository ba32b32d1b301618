"""A checkpoint on disk: written completely or not at all, by all processes of a trainer together."""

import os
import secrets
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from ksm_lightning.files import draft_of, draft_path
from ksm_lightning.private_apis import checkpoint_content
from ksm_lightning.runs.panels import FOLDER, PanelName

if TYPE_CHECKING:
    from ksm_lightning.runs.neuron_parallel import NeuronParallelModule  # it imports what writes checkpoints


def write_checkpoint(trainer: L.Trainer, target: Path, *, copy: Path | None = None, kept: str = "") -> None:
    """Write the state of a trainer to ``target``. Every process must call it.

    The checkpoint is written to another file first and flushed to the disk, and then replaces the old one in one step.
    Processes that share the neurons write their rows before, to new files in ``panels/`` that the checkpoint names.

    Args:
        trainer: The trainer.
        target: The file, in a folder of the first process.
        copy: A second name of the same file. Default: none.
        kept: What the error message says about older checkpoints.

    Raises:
        OSError: On every process, if a file cannot be written. An old checkpoint is kept.
    """
    module: Any = trainer.lightning_module
    panels = None
    if getattr(module, "shares_neurons", False):
        token = trainer.strategy.broadcast(secrets.token_hex(4))
        panels = _Panels(trainer, module, target.parent / FOLDER, PanelName((copy or target).name, token))
        panels.write()
    else:
        content = checkpoint_content(trainer)
    failure = "" if panels is None else panels.failure
    if not failure:
        try:
            with draft_of(target) if trainer.is_global_zero else nullcontext(target) as draft:
                # Some strategies write on the first rank only.
                trainer.strategy.save_checkpoint(content if panels is None else panels.content, draft)
                if trainer.is_global_zero:
                    _flush(draft)
                    if copy is not None:
                        copy.unlink(missing_ok=True)
                        os.link(draft, copy)
        except OSError as error:
            failure = str(error.__cause__ or error)
        failure = trainer.strategy.broadcast(failure)
    if panels is not None:
        panels.tidy(target.name, has_failed=bool(failure))
    if failure:
        raise OSError(f"The checkpoint {target} could not be written ({failure}){kept and '; '}{kept}.")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


class _Panels:
    """The files in which processes that share the neurons write their rows."""

    def __init__(self, trainer: L.Trainer, module: "NeuronParallelModule", folder: Path, name: PanelName) -> None:
        self.trainer, self.module, self.folder, self.name = trainer, module, folder, name
        self.path = folder / name.of(trainer.global_rank, trainer.world_size)
        self.failure = ""
        with module.writing_panels(name) as panel:
            self.content = checkpoint_content(trainer)
            self.rows = dict(panel)

    def write(self) -> None:
        """Write the rows of this process; every process learns of a failure of any."""
        own = ""
        try:
            with draft_of(self.path) as draft:
                torch.save(self.rows, draft)
                _flush(draft)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            own = str(error.__cause__ or error)
        self.failure = self.module.first_of_all(own)
        if not self.failure and self.trainer.is_global_zero:
            size = self.trainer.world_size
            names = [self.name.of(rank, size) for rank in range(size)]
            if missing := [name for name in names if not (self.folder / name).is_file()]:
                self.failure = f"the first process does not see {missing[0]}; all must share {self.folder}"
        self.failure = self.trainer.strategy.broadcast(self.failure)

    def tidy(self, target: str, has_failed: bool) -> None:
        """Remove what this checkpoint has replaced or, if it could not be written, its own files."""
        if has_failed:
            self.path.unlink(missing_ok=True)
        elif self.trainer.is_global_zero:
            for pattern in (f"{target}.*.pt", draft_path(Path(target), "*").name):
                for path in self.folder.glob(pattern):
                    if self.name.token not in path.name:
                        path.unlink(missing_ok=True)
