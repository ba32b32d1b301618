"""Checkpoints in panels: every process writes the rows that it owns, and any number of processes can read them.

``last.ckpt`` is then an index: a checkpoint without the rows, whose section ``ksm_lightning`` has ``panels``: the
``files``, each with its ``name`` in the folder ``panels`` beside the checkpoint, its ``rows`` and a ``digest``. A file
holds a mapping of tensors: ``W``, ``q`` and ``L``, and if it exists ``inverse.inverse`` of the learner. The format of
``torch.distributed.checkpoint`` is not used, because its index is unpickled without restrictions, and nothing that a
checkpoint names is run here.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ksm_lightning.runs.digest import digest_of

FOLDER = "panels"
"""Folder of the panels, beside the checkpoints."""
_OF_LEARNER = {"inverse": ("inverse",)}
_PREFIX = "network."


def take_rows(content: dict[str, Any], learner: dict[str, Any]) -> dict[str, Tensor]:
    """Remove the tensors with one row per neuron from a checkpoint and the learner's state; returns them by name."""
    state = content["state_dict"]
    rows: dict[str, Tensor] = {name: state.pop(_PREFIX + name) for name in ("W", "q", "L")}
    for part, names in _OF_LEARNER.items():
        rows |= {f"{part}.{name}": learner[part].pop(name) for name in names if name in learner[part]}
    return {name: value.detach().cpu().contiguous() for name, value in rows.items()}


def put_rows(content: dict[str, Any], rows: dict[str, Tensor]) -> None:
    """Undo :func:`take_rows` in the content of a checkpoint."""
    learner = content["ksm_lightning"]["learner"]
    for name, value in rows.items():
        part, _, own = name.rpartition(".")
        if part:
            learner[part][own] = value
        else:
            content["state_dict"][_PREFIX + own] = value


def restrict_rows(content: dict[str, Any], rows: slice) -> None:
    """Keep some rows only, in the content of a checkpoint with all neurons."""
    found = take_rows(content, content["ksm_lightning"]["learner"])
    put_rows(content, {name: value[rows].clone() for name, value in found.items()})


class PanelName(NamedTuple):
    """The names of the files of a checkpoint. One that replaces another has another ``token``."""

    checkpoint: str
    token: str

    def of(self, rank: int, size: int) -> str:
        """Name of the file of a rank."""
        return f"{self.checkpoint}.{self.token}.rank-{rank}-of-{size}.pt"

    def index_of(self, rows: Sequence[slice], digests: Sequence[str]) -> dict[str, Any]:
        """The index of the files of all ranks, from their rows and digests."""
        size = len(rows)
        files = [
            {"name": self.of(rank, size), "rows": [own.start, own.stop], "digest": digest}
            for rank, (own, digest) in enumerate(zip(rows, digests, strict=True))
        ]
        return {"files": files}


def has_panels(content: dict[str, Any]) -> bool:
    """Whether a checkpoint is an index of panels."""
    return "panels" in content["ksm_lightning"]


def read_rows(content: dict[str, Any], folder: Path, rows: slice | None = None) -> None:
    """Put rows of the panels, by default all of them, into the content of a checkpoint. The index is removed.

    Args:
        content: The content of a checkpoint for which :func:`has_panels`.
        folder: Folder of the checkpoint.
        rows: The neurons whose rows are read. Only files that have some of them are opened.

    Raises:
        ValueError: If a file is missing or damaged, or the files do not have all rows.
    """
    parts: dict[str, list[Tensor]] = {}
    n = content["hyper_parameters"]["num_neurons"]
    rows, done = slice(0, n) if rows is None else rows, 0
    for start, stop, path, digest in _files(content, folder):
        first, last = max(start, rows.start), min(stop, rows.stop)
        if start != done:
            raise ValueError(f"The panels of the checkpoint in {folder} do not have the rows {done} to {start}.")
        done = stop
        if first >= last:
            continue
        tensors = _read(path, digest)
        for name, value in tensors.items():
            if len(value) != stop - start:
                raise ValueError(f"The panel {path} is damaged: {name} should have {stop - start} rows.")
            parts.setdefault(name, []).append(value[first - start : last - start])
    if done != n or len({len(part) for part in parts.values()}) != 1:
        raise ValueError(f"The panels of the checkpoint in {folder} do not have the rows of all {n} neurons.")
    del content["ksm_lightning"]["panels"]
    put_rows(content, {name: torch.cat(part) for name, part in parts.items()})


def _files(content: dict[str, Any], folder: Path) -> list[tuple[int, int, Path, str]]:
    """First and last row, path and digest of each file. The digest of the checkpoint covers them."""
    try:
        return [
            (int(each["rows"][0]), int(each["rows"][1]), folder / FOLDER / Path(each["name"]).name, each["digest"])
            for each in content["ksm_lightning"]["panels"]["files"]
        ]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"The index of the panels of a checkpoint in {folder} is damaged.") from error


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"The panel {path} of the checkpoint is missing: keep the folder {FOLDER} beside it.")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        is_whole = isinstance(tensors, dict) and digest_of(tensors) == digest
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"The panel {path} is damaged, or belongs to another checkpoint: use an older one of the run.")
    return dict(tensors)
