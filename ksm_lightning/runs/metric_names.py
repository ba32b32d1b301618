"""The names of all logged metrics, for the module, the callbacks, the command line and the report.

A name is ``group/quantity``, and TensorBoard sorts by it: ``final``, the scores at the end of a run; the stages
``test``, ``train`` and ``val``, with energy and kernel error; and ``weights``, what each update does to W, q and L.
"""

from typing import Literal

from torch import Tensor

from ksm_lightning.learning import Observation

Stage = Literal["val", "test"]

TRAIN_ENERGY = "train/energy"  # of a batch in the loggers; for callbacks, the mean over the epoch
TRAIN_BOUND = "train/bound"  # J(W, q), the energy with the exact L, on a fixed sample


def energy(stage: Stage) -> str:
    """Mean energy of the points of a stage."""
    return f"{stage}/energy"


def kernel_nrmse(stage: Stage, readout: str = "neural") -> str:
    """Kernel error of a readout.

    Example:
        >>> kernel_nrmse("val"), kernel_nrmse("val", "nystroem")
        ('val/kernel_nrmse', 'val/kernel_nrmse_nystroem')
    """
    return f"{stage}/kernel_nrmse" if readout == "neural" else f"{stage}/kernel_nrmse_{readout}"


def probe_accuracy(stage: Stage) -> str:
    """Accuracy of the linear probe on the labels of a stage."""
    return f"{stage}/probe_accuracy"


def kmeans_accuracy(stage: Stage, features: Literal["x", "y"]) -> str:
    """Accuracy of KMeans on the inputs x or on the features y."""
    return f"{stage}/kmeans_accuracy_{features}"


def rate(parameter: str) -> str:
    """Step size of W, q or L."""
    return f"weights/rate_{parameter}"


def of_update(seen: Observation) -> dict[str, Tensor]:
    """The values of one update that are logged: energy, its terms, gradient norms and health."""
    values = {TRAIN_ENERGY: seen.energy.total, "weights/min_abs_q": seen.smallest_gain}
    values["weights/condition_L"] = seen.condition  # a lower bound
    values |= {f"{TRAIN_ENERGY}_{term}": value for term, value in seen.energy._asdict().items()}
    norms = zip("WqL", seen.gradient_norms, strict=True)
    return values | {f"weights/gradient_norm_{name}": norm for name, norm in norms}


def final(metric: str) -> str:
    """Name of a score at the end of a run, such as ``final/energy`` for ``val/energy``."""
    return f"final/{metric.partition('/')[2]}"


FINAL_SCORES = (kernel_nrmse("val"), probe_accuracy("test"), energy("val"))
"""Metrics that are written with the hyper-parameters at the end of a run, under :func:`final`."""
