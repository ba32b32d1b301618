"""The width of a kernel chosen from data: ``sigma="auto"``."""

import warnings
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ksm_lightning.kernels.limits import TILE
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.kernels.registry import kernel_parameters

Auto = Literal["auto"]
AUTO: Auto = "auto"
"""The value of ``sigma`` that stands for :func:`auto_width` of the training data."""
# A width as a multiple of the median distance.
_OF_MEDIAN = 0.7


class Rows(Protocol):
    """What a width needs of data (samples, m): a tensor, or an object that gives tensors of its rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, chosen: Tensor) -> Tensor: ...


@torch.no_grad()
def typical_width(x: Rows) -> float | None:
    """0.7 times the median distance of two points of a sample of x (samples, m); None if all of them are equal.

    The sample has at most 1,000 points and depends on the data only, so that the result is reproducible and the memory
    bounded. If more than half of the distances are 0, the mean of the others takes the place of the median.
    """
    sample = x[random_subset(len(x), TILE)].double()
    sample = sample - sample[:1]
    # The largest difference as unit: squares of very large or small values would be out of range.
    unit = float(sample.abs().max()) if sample.numel() else 0.0
    if not unit > 0:
        return None
    distances = torch.nn.functional.pdist(sample / unit)
    typical = distances.median()
    if not typical > 0:
        typical = distances[distances > 0].mean()
    # Four digits: the rest depends on the order of additions, and would differ between machines.
    return float(f"{_OF_MEDIAN * unit * float(typical):.4g}")


def auto_width(x: Rows) -> float:
    """The width that ``sigma="auto"`` stands for, see :func:`typical_width`; 1 with a warning if all points are equal.

    Args:
        x: The data (samples, m).

    Example:
        >>> auto_width(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        3.5
    """
    width = typical_width(x)
    if width is None:
        warnings.warn(
            f"`sigma` cannot be chosen from {len(x):,} samples that are all equal, so it is 1: give a number.",
            stacklevel=3,
        )
    return 1.0 if width is None else width


def chooses_width(name: str, params: Mapping[str, Any] | None) -> bool:
    """Whether the ``sigma`` of a registered kernel is to be chosen from data: it is ``auto``, or it has none yet.

    Example:
        >>> chooses_width("gaussian", None), chooses_width("gaussian", {"sigma": 2.0}), chooses_width("linear", None)
        (True, False, False)
    """
    return "sigma" in kernel_parameters(name) and (params or {}).get("sigma", AUTO) == AUTO


def with_width(name: str, params: Mapping[str, Any] | None, sigma: float) -> dict[str, Any]:
    """The parameters of a registered kernel, with ``sigma`` as its width if that is to be chosen from data."""
    return {**(params or {}), "sigma": sigma} if chooses_width(name, params) else dict(params or {})
