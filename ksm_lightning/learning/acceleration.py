"""Updates compiled by torch: the same step, with less time between its operations."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, Prepared
from ksm_lightning.learning.rules import StepSize
from ksm_lightning.private_apis import keep_address

Acceleration = Literal["auto", "none", "native", "compile"]


class StepSizes(NamedTuple):
    """The numbers that differ from update to update: L's is the fraction of the way to C."""

    W: StepSize
    q: StepSize
    L: StepSize
    ridge_error: StepSize


class Batch(NamedTuple):
    """One batch of a block, prepared by the kernel, and the largest length of each response (batch, 1)."""

    prepared: Prepared
    limit: Tensor | None


Step = Callable[[Batch, StepSizes, bool], object]


class Accelerator:
    """Runs a step compiled by torch.compile, which records it as a CUDA graph on a CUDA device.

    There is one version per kernel, response solver, and shape and device of the batch. Step sizes are tensors in them,
    so that other numbers do not compile again. If the first call of a version fails, it warns, restores the weights and
    makes no update from then on.

    Args:
        step: The plain step, which changes the state in place. Its last argument is whether the inverse is tracked.
        state: Returns the tensors that the step changes.
        like: A tensor of the device and dtype of the step.
    """

    def __init__(self, step: Step, state: Callable[[], list[Tensor]], like: Tensor) -> None:
        self.step, self.state, self.like = step, state, like
        self.is_possible = True
        self._versions: dict[Any, Step] = {}

    def begin(self, sizes: np.ndarray) -> None:
        """Begin a block: upload the step sizes (updates, 3) of all its updates at once, from pinned memory to a GPU."""
        table, device = torch.tensor(sizes, dtype=self.like.dtype), self.like.device
        table = table.pin_memory() if device.type == "cuda" else table
        self._sizes = [row.unbind() for row in table.to(device, non_blocking=True)]  # W, q and L by update
        self._ridge_error = table.new_zeros((), device=device)

    def __call__(self, kernel: Kernel, batch: Batch, index: int, ridge_error: float, tracks: bool) -> bool:
        """Make the update of this index of the block; returns False if that is not possible, and nothing was done."""
        if not self.is_possible:
            return False
        # `fill_` passes the number to the kernel as an argument: nothing is copied from the host.
        W, q, L = self._sizes[index]
        sizes = StepSizes(W, q, L, self._ridge_error.fill_(ridge_error))
        key = (kernel, tracks, *((part.shape, part.dtype, part.device) for part in batch.prepared))
        version = self._versions.get(key)
        if version is not None:
            version(batch, sizes, tracks)
            return True
        self._versions[key] = version = self._compiled()
        saved = [value.clone() for value in self.state()]
        try:
            version(batch, sizes, tracks)
        except Exception as error:
            for value, before in zip(self.state(), saved, strict=True):
                value.copy_(before)
            self.is_possible = False
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"Acceleration is not possible here, updates run without it: {reason}", stacklevel=2)
        return self.is_possible

    def _compiled(self) -> Step:
        for value in self.state():
            keep_address(value)
        mode = "reduce-overhead" if self.like.device.type == "cuda" else None  # None: torch's default
        return torch.compile(self.step, dynamic=False, mode=mode)
