"""Options of a run that continues another: unset ones come from the checkpoint, contradicting ones are refused."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from lightning.fabric.utilities.seed import max_seed_value
from lightning.pytorch.utilities import rank_zero_only

from ksm_lightning.cli.user_error import UserError
from ksm_lightning.kernels import AUTO
from ksm_lightning.learning.hyperparameters import HyperParameters
from ksm_lightning.runs.conditions import conditions_of
from ksm_lightning.runs.requeue import checkpoint_of_requeued_job

# How W started: a continued run cannot change it.
_START = ("init", "init_scale")


def continued_job(command: str, options: Mapping[str, Any]) -> str | None:
    """The checkpoint of a requeued SLURM job that ``ksm fit`` continues from, as if it was given; None without one."""
    path = checkpoint_of_requeued_job(options["trainer"]["default_root_dir"]) if command == "fit" else None
    if path is None:
        return None
    say = rank_zero_only(print)
    say(f"Continuing from {path}, the state of a requeued SLURM job; delete the file to start a new run.")
    return str(path)


def refuse_other_network(given: Mapping[str, Any], saved: Mapping[str, Any], path: str) -> None:
    """Raise UserError if an option of the model in ``given`` contradicts the hyper-parameters of the checkpoint."""
    for name in (*HyperParameters.fixed_names(), *_START):
        if not _agrees(given.get(name), saved[name]):
            _refuse(path, name, saved[name], given[name])


def use_conditions(options: dict[str, Any], given: Mapping[str, Any], content: dict[str, Any], path: str) -> None:
    """Set the seed, the scaling of the data and the batch size to those of a checkpoint, unless they are given.

    Args:
        options: All options of ``ksm fit``, which change in place, so that ``config.yaml`` records what is in force.
        given: The options that the user has set.
        content: The content of the checkpoint.
        path: The checkpoint.

    Raises:
        UserError: If the given seed or scaling is another one: it would have no effect.
    """
    saved = conditions_of(content, f"The checkpoint {path}")
    seed = given.get("seed_everything")
    if seed is None or seed is False:
        options["seed_everything"] = saved.seed if saved.seed <= max_seed_value else False
    elif seed is True or seed != saved.seed:
        _refuse(path, "seed_everything", saved.seed, seed)
    arguments = options["data"].get("init_args") or {}
    chosen = (given.get("data") or {}).get("init_args") or {}
    for name in ("centre", "scaling", "batch_size"):
        value = getattr(saved, name)
        if value is None or name not in arguments:  # some datamodules always scale in the same way
            continue
        if name not in chosen or (name == "batch_size" and chosen[name] == "auto"):
            arguments[name] = value
        elif name != "batch_size" and chosen[name] != value:
            _refuse(path, f"data.{name}", value, chosen[name])
    state = content.get(str(options["data"]["class_path"]).rpartition(".")[2])
    batches = state.get("seed") if isinstance(state, dict) else None
    is_seeded = options["seed_everything"] is not False and options["seed_everything"] == batches
    if "seed" in arguments and chosen.get("seed") is None and not is_seeded:
        arguments["seed"] = batches


def _refuse(path: str, name: str, saved: Any, given: Any) -> NoReturn:
    remove = "remove --ckpt_path"
    if re.fullmatch(r"hpc_ckpt_\d+\.ckpt", Path(path).name):
        remove = "delete that file, the state of a requeued SLURM job,"
    raise UserError(
        f"The checkpoint {path} has {name}={saved}, but {given} was given: remove the option to continue that run, or "
        f"{remove} to start a new one."
    )


def _agrees(given: Any, saved: Any) -> bool:
    """Whether an option, or the given part of it, equals the saved one. An unset one agrees, and so does ``auto``."""
    if given is None:
        return True
    if isinstance(given, Mapping) and isinstance(saved, Mapping):
        return all(name in saved and (value == AUTO or _agrees(value, saved[name])) for name, value in given.items())
    return bool(given == saved)
