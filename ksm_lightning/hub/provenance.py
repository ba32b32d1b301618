"""How an extractor was trained, as plain values for its model card."""

from pathlib import Path
from typing import Any

from ksm_lightning.runs.conditions import conditions_of
from ksm_lightning.runs.finished_run import FinishedRun
from ksm_lightning.runs.metric_names import kernel_nrmse

READOUTS = ("neural", "nystroem", "least_squares")


def provenance_of(content: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """What a checkpoint and its run folder, if it is in one, tell about the training.

    No path is included: a description is published, and a path may be private.

    Args:
        content: The content of the checkpoint, see :func:`~ksm_lightning.runs.checkpoint.read_checkpoint`.
        path: The checkpoint.

    Returns:
        ``neurons``, ``bound``, ``updates``, ``batch_size`` (of all processes), ``seed``, ``centre``,
        ``scaling``, ``points``, ``features``, ``data`` (a name) and ``kernel_nrmse`` (errors by readout); None for
        what is not known.
    """
    hparams, conditions = content["hyper_parameters"], conditions_of(content)
    data = conditions.data
    run = FinishedRun.of_checkpoint(path)
    return {
        "neurons": hparams["num_neurons"],
        "bound": hparams["bound"],
        "updates": content["global_step"],
        "batch_size": conditions.global_batch,
        "seed": conditions.seed,
        "centre": conditions.centre,
        "scaling": conditions.scaling,
        "points": None if data is None else data.num_points,
        "features": None if data is None else data.num_features,
        "data": None if run is None else _data_name(run),
        "kernel_nrmse": {} if run is None else _errors(run, content["global_step"]),
    }


def _data_name(run: FinishedRun) -> str | None:
    """The datamodule of a run, with the name of its file or dataset."""
    try:
        section = run.config["data"]
    except ValueError:  # a damaged configuration says nothing
        return None
    arguments = section.get("init_args") or {}
    source = arguments.get("path") or arguments.get("dataset")
    name = section["class_path"].rpartition(".")[2]
    if not isinstance(source, str):
        return str(name)
    is_path = "path" in arguments or Path(source).exists() or Path(source).is_absolute()
    return f"{name}, {Path(source).name if is_path else source}"


def _errors(run: FinishedRun, update: int) -> dict[str, float]:
    """The kernel errors that were logged for the weights of this update, by readout."""
    logged = run.scalars()
    series = {readout: logged.get(kernel_nrmse("val", readout)) for readout in READOUTS}
    return {
        readout: float(each.values[each.steps.index(update)])
        for readout, each in series.items()
        if each is not None and update in each.steps
    }
