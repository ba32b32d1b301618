"""What a checkpoint contains, and how it is read: nothing that a file names is imported or run.

A checkpoint is a Lightning checkpoint with tensors and plain values only:

==================== ==================================================================================================
``state_dict``       ``network.W`` (p, m), ``network.q`` (n,) or, for the tight bound, ``network.Q`` (n, p), and
                     ``network.L`` (n, n)
``hyper_parameters`` one value for each of ``HyperParameters.names()``
``global_step``      updates done; the schedule and the batches are functions of it
``ksm_lightning``    ``format``, the number :data:`FORMAT`; ``learner``, the ``rate_factor``, the tracked ``inverse``
                     (its ``inverse``, ``ridge``, ``drift`` and ``age``; empty if none is tracked) and the average of
                     the tight ``rule`` (``square`` and ``steps``, or empty); ``preprocessing``, the ``mean``,
                     ``scale``, ``image_shape`` and ``crop`` of the training data, or None; ``run``, whether it
                     ``needs_finish`` after its last update, and sum and number of the energies observed in its epoch;
                     ``training``, the :class:`~ksm_lightning.runs.conditions.TrainingConditions`;
                     ``covers``, the keys of the checkpoint that the ``digest`` was computed of, which are
                     all that existed when :func:`seal` was called;
                     ``panels``, only if processes shared the neurons: the index of the files that hold the weights
                     (:mod:`ksm_lightning.runs.panels`)
other keys           Lightning's own: loops, callbacks, optimizer groups, and under the name of the datamodule's class
                     its state, the seed of the batches
==================== ==================================================================================================
"""

import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from ksm_lightning.learning.hyperparameters import HyperParameters
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.runs.digest import digest_of
from ksm_lightning.runs.panels import has_panels, read_rows

FORMAT = 5
"""Number of the format; it changes whenever older files would be misread."""

# What a resumed run uses; the digest must cover it.
_COVERED = {
    "state_dict", "hyper_parameters", "global_step", "epoch", "loops", "callbacks", "optimizer_states", "lr_schedulers"
}  # fmt: skip
# Options that older checkpoints of this format do not have: they mean the default.
_ADDED = {"parallel"}
# Lightning replaces the first by its own version when it loads a file, and keeps the version of the file as the second.
_VERSION, _WRITTEN_BY = "pytorch-lightning_version", "legacy_pytorch-lightning_version"


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint file that a path means: the file itself, or ``checkpoints/last.ckpt`` of a run folder.

    Raises:
        FileNotFoundError: If the file does not exist, or the folder is not that of a run.
    """
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"There is no checkpoint {path}.")
    found = last_checkpoint(path)
    if found.is_file():
        return found
    runs = [each.parents[1] for each in path.glob("*/checkpoints/last.ckpt")]
    hint = max(runs, key=lambda run: run.stat().st_mtime) if runs else "runs/half_moons/version_0"
    raise FileNotFoundError(f"{path} is a folder without checkpoints/last.ckpt: give that of a run, such as {hint}.")


def last_checkpoint(folder: Path) -> Path:
    """The file of the last checkpoint of a run folder."""
    return folder / "checkpoints" / "last.ckpt"


def read_checkpoint(path: str | Path, *, with_panels: bool = True) -> dict[str, Any]:
    """The content of a checkpoint on the CPU, after checking that a model can be made from it.

    Args:
        path: A ``.ckpt`` file written by ``ksm fit`` or ``Trainer.save_checkpoint``, or a run folder, which stands for
            its last checkpoint.
        with_panels: Whether to read the weights if they are in panels (:mod:`ksm_lightning.runs.panels`), all of them.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is damaged, holds more than tensors and plain values, was not written by this version of the
            package, names a kernel that is not registered, contradicts itself, or does not match its digest.
    """
    path = find_checkpoint(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about unusual pickles before it refuses them
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"The checkpoint {path} is refused: it is damaged, or holds objects that could run code when loaded."
        ) from error
    except Exception as error:  # a damaged file can fail in any way
        raise ValueError(f"The checkpoint {path} is damaged or incomplete: use an older one of the run.") from error
    check_content(content, f"The checkpoint {path}")
    if with_panels and has_panels(content):
        read_rows(content, path.parent)
        _check_values(content, f"The checkpoint {path}")
        seal(content)
    return content


def seal(content: dict[str, Any]) -> None:
    """Add the digest of everything that a checkpoint holds now. Keys that are added later are not covered.

    A LightningModule that derives from this package's and changes what is already in the checkpoint must do so before
    it calls ``super().on_save_checkpoint``; it may add keys of its own afterwards.
    """
    section = content["ksm_lightning"]
    section["covers"] = sorted(key for key in content if isinstance(key, str))
    section["digest"] = _digest(content)


def _digest(content: dict[str, Any]) -> str:
    """The digest of the covered keys; raises KeyError if one of them is missing."""
    section = content["ksm_lightning"]
    covered = {key: content[key] for key in section["covers"]}
    covered["ksm_lightning"] = {name: value for name, value in section.items() if name != "digest"}
    if _VERSION in covered:
        covered[_VERSION] = content.get(_WRITTEN_BY, content[_VERSION])
    return digest_of(covered)


def _check_digest(content: dict[str, Any], path: str) -> None:
    section = content["ksm_lightning"]
    covers = section.get("covers")
    is_listed = isinstance(covers, list) and all(isinstance(key, str) for key in covers)
    if not is_listed or not (_COVERED & set(content)) <= set(covers) or not isinstance(section.get("digest"), str):
        raise ValueError(f"{path} is refused: it has no digest, so it is damaged or was edited.")
    try:
        is_whole = _digest(content) == section["digest"]
    except Exception:  # a damaged file can fail in any way
        is_whole = False
    if not is_whole:
        raise ValueError(f"{path} is damaged: its content does not match its digest; use an older one of the run.")


def check_content(content: Any, path: str) -> None:
    """Raise ValueError if this is not the whole content of a checkpoint of this version; ``path`` names it."""
    keys = ("state_dict", "hyper_parameters")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in keys):
        raise ValueError(f"{path} is not a checkpoint of ksm_lightning: it needs {' and '.join(keys)}.")
    about = content.get("ksm_lightning")
    version = about.get("format") if isinstance(about, dict) else None
    if not isinstance(about, dict) or version != FORMAT:
        raise ValueError(
            f"{path} was written by another version of ksm_lightning: its format is {version}, and this version reads "
            f"{FORMAT}."
        )
    _check_digest(content, path)
    _check_values(content, path)


def _check_values(content: dict[str, Any], path: str) -> None:
    """Raise ValueError if a part is missing or does not fit the others."""
    about = content["ksm_lightning"]
    if not isinstance(about.get("training"), dict):
        raise ValueError(f"{path} does not contain the conditions of its training.")
    hparams = _hyper_parameters(content, path)
    update = content.get("global_step")
    if not isinstance(update, int) or update < 0:
        raise ValueError(f"{path} does not contain its number of updates.")
    n, p, m = hparams.num_neurons, hparams.num_landmarks, hparams.in_features
    gains: dict[str, tuple[Any, ...]] = {"q": (n,)} if hparams.bound == "paper" else {"Q": (n, p)}
    shapes = {"W": (p, m), **gains, "L": (n, n)}
    preprocessing = preprocessing_of(content, path)
    if preprocessing is not None and preprocessing.in_features != m:
        raise ValueError(
            f"{path} contradicts itself: its preprocessing has {preprocessing.in_features} features, "
            f"and the network has {m}."
        )
    if has_panels(content):
        return  # the weights are in other files
    _check_learner(about.get("learner"), list(shapes.values()), path)
    for name, shape in shapes.items():
        value = content["state_dict"].get(f"network.{name}")
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if found != shape:
            raise ValueError(f"{path} contradicts itself: network.{name} should be {shape} and is {found}.")


def preprocessing_of(content: dict[str, Any], path: str = "The checkpoint") -> Preprocessing | None:
    """The preprocessing of the training data; None if the data did not come from a datamodule of this package."""
    state = content["ksm_lightning"].get("preprocessing", {})
    if state is None:
        return None
    try:
        return Preprocessing.from_state(state)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def network_of(content: dict[str, Any]) -> KSMNetwork:
    """The trained network of a checkpoint, on the CPU, with the kernel of the phase in which it was saved."""
    hparams = HyperParameters(**content["hyper_parameters"])
    prefix = "network."  # a module of the user may hold more
    state = content["state_dict"].items()
    weights = {name.removeprefix(prefix): value for name, value in state if name.startswith(prefix)}
    # A generator of its own: loading a network must not change the global random state.
    network = hparams.make_network(weights["W"].shape[1], generator=torch.Generator()).to(weights["W"].dtype)
    network.kernel = network.kernel.with_params(**hparams.make_schedule().kernel_params(content["global_step"]))
    network.load_state_dict(weights)
    return network


def _hyper_parameters(content: dict[str, Any], path: str) -> HyperParameters:
    saved = content["hyper_parameters"]
    differing = sorted((set(saved) ^ set(HyperParameters.names())) - _ADDED)
    if differing:
        raise ValueError(f"{path} was written by another version or model: it differs in {', '.join(differing)}.")
    try:
        hparams = HyperParameters(**saved)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    if hparams.ridge is None or hparams.in_features is None or hparams.chooses_width:  # known after the first update
        raise ValueError(
            f"{path} contradicts itself: its ridge is {hparams.ridge}, its in_features {hparams.in_features} and "
            f"its kernel_params {hparams.kernel_params}."
        )
    return hparams


def _check_learner(state: Any, shapes: list[tuple[Any, ...]], path: str) -> None:
    """Check the state of a :class:`~ksm_lightning.learning.Learner` whose W, gains and L have these shapes."""
    learner = state if isinstance(state, dict) else {}
    factor = learner.get("rate_factor")
    if not isinstance(factor, float) or not 0 < factor <= 1:
        raise ValueError(f"{path} contradicts itself: its rate_factor is {factor}.")
    W, _, L = shapes
    parts: dict[str, tuple[str, dict[str, tuple[Any, ...]], tuple[str, ...]]] = {
        "inverse": ("tracked inverse", {"inverse": L}, ("ridge", "drift", "age")),
        "rule": ("state of the rule", {"square": W[:1]}, ("steps",)),
    }
    for part, (meaning, tensors, numbers) in parts.items():
        found = learner.get(part)
        if found == {}:
            continue
        found = found if isinstance(found, dict) else {}
        values = [found.get(name) for name in numbers]
        fits = all(getattr(found.get(name), "shape", None) == shape for name, shape in tensors.items())
        if not fits or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            raise ValueError(f"{path} contradicts itself: its {meaning} does not fit the network.")
