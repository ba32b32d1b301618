"""Reading a checkpoint without trusting it: nothing that the file names is imported or run."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from ksm_lightning.kernels import make_kernel
from ksm_lightning.schedule import Schedule

_HYPER_PARAMETERS = {
    "num_neurons", "in_features", "kernel", "kernel_params", "ridge", "init", "init_scale", "solver", "phases",
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
    _check(content, path)
    return content


def _check(content: Any, path: Path) -> None:
    keys = ("state_dict", "hyper_parameters")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in keys):
        raise ValueError(f"{path} is no checkpoint of ksm_lightning: it lacks {' and '.join(keys)}.")
    hparams, state = content["hyper_parameters"], content["state_dict"]
    if set(hparams) != _HYPER_PARAMETERS:
        odd = sorted(set(hparams) ^ _HYPER_PARAMETERS)
        raise ValueError(f"{path} was written by another version or model: its {', '.join(odd)} do not fit this one.")
    if not isinstance(hparams["kernel"], str):
        raise ValueError(f"{path} names no kernel.")
    try:
        kernel = make_kernel(hparams["kernel"], **(hparams["kernel_params"] or {}))
        for phase in Schedule(hparams["phases"]).phases:
            kernel.with_params(**phase.kernel_params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"The checkpoint {path} cannot be used: {error}") from error
    n, m = hparams["num_neurons"], hparams["in_features"]
    expected = {"network.W": (n, m), "network.q": (n,), "network.L": (n, n)}
    for name, shape in expected.items():
        found = tuple(state[name].shape) if name in state else None
        if found != shape:
            raise ValueError(f"The checkpoint {path} contradicts itself: {name} should be {shape} and is {found}.")
