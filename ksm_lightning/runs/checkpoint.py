"""Reading a checkpoint without trusting it: nothing that the file names is imported or run."""

import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from ksm_lightning.kernels import make_kernel
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.learning.schedule import PhaseSchedule, make_schedule

FORMAT = 2
"""Number of the checkpoint's format; it changes whenever older files would be misread."""
_HYPER_PARAMETERS = {
    "num_neurons", "in_features", "kernel", "kernel_params", "ridge", "init", "init_scale", "solver", "updates",
    "phases", "consolidate", "inverse", "acceleration",
}  # fmt: skip


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content on the CPU, after checking that a model can be made of it.

    Args:
        path: A ``.ckpt`` file that ``ksm fit`` or ``Trainer.save_checkpoint`` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, holds more than tensors and plain values, was not written by this package, names a
            kernel that is not registered, or contradicts itself.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint {path}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks on odd pickles before it refuses them
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"The checkpoint {path} is refused: it is damaged, or holds objects that could run code when loaded."
        ) from error
    except Exception as error:  # a damaged file can fail in any way
        raise ValueError(f"The checkpoint {path} is damaged or incomplete: use an older one of the run.") from error
    check_content(content, str(path))
    return content


def check_content(content: Any, path: str) -> None:
    """Refuse what is no whole checkpoint of this version; ``path`` is what the sentence calls it.

    Raises:
        ValueError: If it is not.
    """
    keys = ("state_dict", "hyper_parameters")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in keys):
        raise ValueError(f"{path} is no checkpoint of ksm_lightning: it lacks {' and '.join(keys)}.")
    hparams, state = content["hyper_parameters"], content["state_dict"]
    about = content.get("ksm_lightning")
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else None
        raise ValueError(
            f"{path} was written by another version of ksm_lightning: its format is {found}, and this version reads "
            f"{FORMAT}."
        )
    if set(hparams) != _HYPER_PARAMETERS:
        odd = sorted(set(hparams) ^ _HYPER_PARAMETERS)
        raise ValueError(f"{path} was written by another version or model: its {', '.join(odd)} do not fit this one.")
    if not isinstance(hparams["kernel"], str):
        raise ValueError(f"{path} names no kernel.")
    try:
        kernel = make_kernel(hparams["kernel"], **(hparams["kernel_params"] or {}))
        schedule = make_schedule(hparams["phases"], hparams["updates"])
        for phase in schedule.phases if isinstance(schedule, PhaseSchedule) else ():
            kernel.with_params(**phase.kernel_params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"The checkpoint {path} cannot be used: {error}") from error
    factor, ridge, update = about.get("rate_factor"), hparams["ridge"], content.get("global_step")
    if not (isinstance(factor, float) and 0 < factor <= 1 and isinstance(ridge, float | int) and ridge > 0):
        raise ValueError(f"{path} contradicts itself: its rate_factor is {factor} and its ridge {ridge}.")
    if not isinstance(update, int) or update < 0:
        raise ValueError(f"{path} does not say how many updates it has seen.")
    n, m = hparams["num_neurons"], hparams["in_features"]
    preprocessing = preprocessing_of(content, path)
    if preprocessing is not None and preprocessing.in_features != m:
        raise ValueError(
            f"The checkpoint {path} contradicts itself: its preprocessing is of {preprocessing.in_features} features, "
            f"and the network takes {m}."
        )
    _check_tracked(about.get("tracked"), (n, n), path)
    expected = {"network.W": (n, m), "network.q": (n,), "network.L": (n, n)}
    for name, shape in expected.items():
        found = tuple(state[name].shape) if isinstance(state.get(name), torch.Tensor) else None
        if found != shape:
            raise ValueError(f"The checkpoint {path} contradicts itself: {name} should be {shape} and is {found}.")


def preprocessing_of(content: dict[str, Any], path: str = "The checkpoint") -> Preprocessing | None:
    """What was done to the training data before the network saw it; None where that was not this package's business.

    Raises:
        ValueError: If what the checkpoint says of it is damaged.
    """
    state = content["ksm_lightning"].get("preprocessing", {})
    if state is None:
        return None
    try:
        return Preprocessing.from_state(state)
    except ValueError as error:
        raise ValueError(f"The checkpoint {path} is damaged: {error}") from error


def network_of(content: dict[str, Any]) -> KSMNetwork:
    """The trained network of a checkpoint that was read, with the kernel of the phase it was saved in; on the CPU."""
    hparams, state = content["hyper_parameters"], content["state_dict"]
    kernel = make_kernel(hparams["kernel"], **hparams["kernel_params"])
    schedule = make_schedule(hparams["phases"], hparams["updates"])
    kernel = kernel.with_params(**schedule.kernel_params(content["global_step"]))
    W = state["network.W"]
    # Whoever loads a network does not want to find other random numbers afterwards.
    own = torch.Generator()
    network = KSMNetwork(
        kernel, W.shape[1], W.shape[0], hparams["ridge"], solver=hparams["solver"], generator=own
    ).to(W.dtype)  # fmt: skip
    prefix = "network."  # whatever else a user's own module keeps is not the network's
    weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    network.load_state_dict(weights)
    return network


def _check_tracked(tracked: Any, shape: tuple[int, int], path: str) -> None:
    """Refuse what is not the state of a tracked inverse; an empty one says that nothing is tracked."""
    if tracked == {}:
        return
    numbers = [tracked.get(name) for name in ("ridge", "drift", "age")] if isinstance(tracked, dict) else [None]
    is_whole = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    inverse = tracked.get("inverse") if isinstance(tracked, dict) else None
    if not is_whole or not isinstance(inverse, torch.Tensor) or inverse.shape != shape:
        raise ValueError(f"The checkpoint {path} contradicts itself: its tracked inverse does not fit the network.")
