"""``--ckpt_path``: a run folder or a checkpoint, and the options of its run for commands without ``--config``."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ksm_lightning.cli.user_error import UserError
from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.runs.checkpoint import find_checkpoint
from ksm_lightning.runs.finished_run import FinishedRun, own_datamodule

# Sections of a run's configuration that an evaluation takes over. All of their values are plain.
_SECTIONS = ("seed_everything", "kernel_error", "probe", "kmeans")
_EVALUATIONS = ("validate", "test", "predict")


class RunOptions(NamedTuple):
    """The options of a run, as the value of ``--config``, and the file that they come from."""

    text: str
    path: Path


def checkpoint_of(given: str) -> str:
    """The checkpoint file that ``--ckpt_path`` means.

    Raises:
        UserError: If it is one of Lightning's words, which depend on what ran before.
        FileNotFoundError: If there is no such checkpoint.
    """
    is_word = given in ("last", "best", "hpc") or given.partition(":")[0] == "registry"
    if is_word and not Path(given).exists():
        found = sorted(Path("runs").glob("*/version_*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
        newest = f"{found[-1].parents[1]}, the newest here" if found else "runs/half_moons/version_0"
        raise UserError(
            f"--ckpt_path={given} is a word of Lightning that ksm does not know: give a checkpoint or a run folder, "
            f"such as --ckpt_path={newest}."
        )
    return str(find_checkpoint(given))


def options_of_run(args: Sequence[str]) -> RunOptions | None:
    """Data, evaluations and seed of the run of ``--ckpt_path``, for an evaluation without ``--config``.

    Only plain values and datamodules of this package are taken over: nothing that a run folder names is imported.
    Returns None for other commands, or if the checkpoint is not in a run folder.
    """
    if not args or args[0] not in _EVALUATIONS:
        return None
    given = [value for option, value in pairwise([*args, ""]) if option == "--ckpt_path"]
    given += [arg.partition("=")[2] for arg in args if arg.startswith("--ckpt_path=")]
    run = FinishedRun.of_checkpoint(checkpoint_of(given[-1])) if given and given[-1] else None
    if run is None:
        return None
    path = run.folder / "config.yaml"
    options: dict[str, Any] = {name: run.config[name] for name in _SECTIONS if run.config.get(name) is not None}
    if args[0] == "predict":
        options = {name: value for name, value in options.items() if name == "seed_everything"}
    if not any(arg.partition("=")[0] == "--data" for arg in args):
        section = run.config["data"]
        datamodule = own_datamodule(section["class_path"])
        if datamodule is None:
            raise UserError(
                f"{path} names the data {section['class_path']}, which is not of ksm_lightning, and nothing that a "
                f"run folder names is imported: if you trust the file, give it with --config={path}."
            )
        arguments = dict(section.get("init_args", {}))
        if issubclass(datamodule, CroppedMNISTDataModule):
            arguments["download"] = False  # a run folder does not choose where files are written
        options["data"] = {"class_path": f"{datamodule.__module__}.{datamodule.__qualname__}", "init_args": arguments}
    try:
        return RunOptions(json.dumps(options), path)
    except TypeError as error:  # YAML has dates and other values that no option takes
        raise UserError(f"{path} is damaged: {error}.") from error
