"""Updates that are compiled or recorded: the same step, with less time between its operations."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, Prepared
from ksm_lightning.learning.rules import StepSize

Acceleration = Literal["auto", "none", "native", "compile", "cuda_graph"]
# Number of updates that are recorded together: a graph is started once for all of them.
_TOGETHER = 8


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
Version = Callable[[Sequence[Batch], Sequence[StepSizes], bool], bool]


class Accelerator:
    """Runs a step compiled by torch.compile or recorded as a CUDA graph.

    There is one version per kernel, response solver, and shape and device of the batch. A graph holds 8 updates, and
    another one a single update, for what is left over. It refers to memory, so all graphs are dropped when a tensor of
    the state has moved. If acceleration is not possible, it warns, restores the weights and runs the plain step from
    then on.

    Args:
        step: The plain step, which changes the state in place. Its last argument is whether the inverse is tracked.
        state: Returns the tensors that the step changes.
        method: ``none``, ``compile`` or ``cuda_graph``.
        like: A tensor of the device and dtype of the step.
    """

    def __init__(self, step: Step, state: Callable[[], list[Tensor]], method: Acceleration, like: Tensor) -> None:
        self.step = step
        self.state = state
        self.method = method
        self.like = like
        self._versions: dict[Any, Version] = {}
        self._addresses: list[tuple[torch.device, int]] = []
        self._rates: tuple[Tensor, ...] = ()
        self._ridge_errors: tuple[Tensor, ...] = ()

    @property
    def most_at_once(self) -> int:
        """Number of updates that are run together."""
        return _TOGETHER if self.method == "cuda_graph" else 1

    def begin(self, sizes: np.ndarray) -> None:
        """Begin a block: upload the step sizes (updates, 3) of all its updates at once, from pinned memory to a GPU."""
        if self.method == "none":
            return
        W, gains, L, *_ = self.state()  # the others move with L, see ResponseSolver.prepare
        addresses = [(value.device, value.data_ptr()) for value in (W, gains, L)]
        if addresses != self._addresses:
            self.drop()
            self._addresses = addresses
        table = torch.tensor(sizes, dtype=self.like.dtype)  # (updates, 3)
        device = self.like.device
        if device.type == "cuda":
            table = table.pin_memory()
        self._rates = table.to(device, non_blocking=True).unbind()
        self._ridge_errors = table.new_zeros(_TOGETHER, device=device).unbind()

    def drop(self) -> None:
        """Drop all versions, and the memory on the device that recorded ones hold."""
        self._versions, self._addresses, self._rates = {}, [], ()

    def __call__(
        self, kernel: Kernel, batches: Sequence[Batch], index: int, sizes: Sequence[StepSizes], tracks: bool, *,
        is_single: bool,
    ) -> int:  # fmt: skip
        """Run the updates from this index of the block on, by the version that fits; returns how many were made.

        All of them if they are as many as a version holds, otherwise one.
        """
        count = len(batches) if len(batches) == self.most_at_once else 1
        key = (kernel, tracks, count, *((part.shape, part.dtype, part.device) for part in batches[0].prepared))
        version = self._versions.get(key)
        if version is None:
            version = self._compiled() if self.method == "compile" else self._recorded(is_single)
            self._versions[key] = version
        own = []
        for step, given in enumerate(sizes[:count]):
            # `fill_` passes the number to the kernel as an argument: nothing is copied from the host.
            error = self._ridge_errors[step].fill_(float(given.ridge_error))
            W, q, L = self._rates[index + step].unbind()
            own.append(StepSizes(W, q, L, error))
        if not version(batches[:count], own, tracks):
            for batch, given in zip(batches[:count], sizes[:count], strict=True):
                self.step(batch, given, tracks)
        return count

    def _restore(self, saved: Sequence[Tensor]) -> None:
        for value, before in zip(self.state(), saved, strict=True):
            value.copy_(before)

    def _give_up(self, saved: Sequence[Tensor], error: Exception) -> None:
        self._restore(saved)
        self.method = "none"
        self.drop()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"Acceleration is not possible here, updates run without it: {reason}", stacklevel=2)

    def _compiled(self) -> Version:
        """A compiled step; it returns False if compilation failed and nothing was done."""
        compiled = torch.compile(self.step, dynamic=False)
        is_first = True

        def version(batches: Sequence[Batch], sizes: Sequence[StepSizes], tracks: bool) -> bool:
            nonlocal is_first
            saved = [value.clone() for value in self.state()] if is_first else []
            try:
                compiled(batches[0], sizes[0], tracks)
            except Exception as error:
                if not is_first:
                    raise
                self._give_up(saved, error)
                return False
            is_first = False
            return True

        return version

    def _recorded(self, is_single: bool) -> Version:
        """Steps as one CUDA graph, whose inputs are copied to where it was recorded; False if they cannot be."""
        graph: torch.cuda.CUDAGraph | None = None
        inputs: list[list[Tensor]] = []

        def version(batches: Sequence[Batch], sizes: Sequence[StepSizes], tracks: bool) -> bool:
            nonlocal graph, inputs
            given = [_tensors(*each) for each in zip(batches, sizes, strict=True)]
            if graph is None:
                saved = [value.clone() for value in self.state()]
                inputs = [[value.clone() for value in each] for each in given]
                own = [_step_of(each, len(batches[0].prepared)) for each in inputs]

                def work() -> None:
                    for batch, step_sizes in own:
                        self.step(batch, step_sizes, tracks)

                try:
                    if not is_single or not torch.cuda.is_available():
                        raise RuntimeError("a CUDA graph needs a CUDA device and a single process.")
                    graph = _record(work)
                except RuntimeError as error:
                    self._give_up(saved, error)
                    return False
                self._restore(saved)
            for own_inputs, values in zip(inputs, given, strict=True):
                for own_input, value in zip(own_inputs, values, strict=True):
                    own_input.copy_(value)
            graph.replay()
            return True

        return version


def _tensors(batch: Batch, sizes: StepSizes) -> list[Any]:
    """The inputs of a step in one list, see :func:`_step_of`."""
    return [*sizes, *batch.prepared, *([] if batch.limit is None else [batch.limit])]


def _step_of(tensors: Sequence[Tensor], num_prepared: int) -> tuple[Batch, StepSizes]:
    sizes, rest = tensors[: len(StepSizes._fields)], tensors[len(StepSizes._fields) :]
    limit = rest[num_prepared] if len(rest) > num_prepared else None
    return Batch(tuple(rest[:num_prepared]), limit), StepSizes(*sizes)


def _record(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of some work, after the three warm-up runs that CUDA libraries need."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
