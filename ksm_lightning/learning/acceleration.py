"""Updates that are compiled or recorded: the same step, with less time between its operations."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, Prepared
from ksm_lightning.learning.rules import StepSize

Acceleration = Literal["none", "compile", "cuda_graph"]


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
    """Runs a step compiled by torch.compile or recorded as a CUDA graph.

    There is one version per kernel, response solver, and shape and device of the batch. A graph refers to memory, so
    all graphs are dropped when a tensor of the state has moved. If acceleration is not possible, it warns, restores
    the weights and runs the plain step from then on.

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
        self._versions: dict[Any, Step] = {}
        self._addresses: list[tuple[torch.device, int]] = []
        self._rates: tuple[Tensor, ...] = ()
        self._ridge_error = torch.empty(0)

    def begin(self, rates: Iterable[Sequence[StepSize]]) -> None:
        """Begin a block: upload the step sizes (W, q, L) of all its updates at once, from pinned memory to a GPU."""
        if self.method == "none":
            return
        W, gains, L, *_ = self.state()  # the others move with L, see ResponseSolver.prepare
        addresses = [(value.device, value.data_ptr()) for value in (W, gains, L)]
        if addresses != self._addresses:
            self.drop()
            self._addresses = addresses
        table = torch.tensor(list(rates), dtype=self.like.dtype)  # (updates, 3)
        device = self.like.device
        if device.type == "cuda":
            table = table.pin_memory()
        self._rates = table.to(device, non_blocking=True).unbind()
        self._ridge_error = table.new_zeros((), device=device)

    def drop(self) -> None:
        """Drop all versions, and the memory on the device that recorded ones hold."""
        self._versions, self._addresses, self._rates = {}, [], ()

    def __call__(
        self, kernel: Kernel, batch: Batch, index: int, sizes: StepSizes, tracks: bool, *, is_single: bool
    ) -> None:
        """The update with this index in the block, by the version that fits, which is made at its first use."""
        key = (kernel, tracks, *((part.shape, part.dtype, part.device) for part in batch.prepared))
        version = self._versions.get(key)
        if version is None:
            version = self._compiled() if self.method == "compile" else self._recorded(is_single)
            self._versions[key] = version
        # `fill_` passes the number to the kernel as an argument: nothing is copied from the host.
        W, q, L = self._rates[index].unbind()
        own = StepSizes(W, q, L, self._ridge_error.fill_(float(sizes.ridge_error)))
        if not version(batch, own, tracks):
            self.step(batch, sizes, tracks)

    def _restore(self, saved: Sequence[Tensor]) -> None:
        for value, before in zip(self.state(), saved, strict=True):
            value.copy_(before)

    def _give_up(self, saved: Sequence[Tensor], error: Exception) -> None:
        self._restore(saved)
        self.method = "none"
        self.drop()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"Acceleration is not possible here, updates run without it: {reason}", stacklevel=2)

    def _compiled(self) -> Step:
        """A compiled step; it returns False if compilation failed and nothing was done."""
        compiled = torch.compile(self.step, dynamic=False)
        is_first = True

        def step(batch: Batch, sizes: StepSizes, tracks: bool) -> bool:
            nonlocal is_first
            saved = [value.clone() for value in self.state()] if is_first else []
            try:
                compiled(batch, sizes, tracks)
            except Exception as error:
                if not is_first:
                    raise
                self._give_up(saved, error)
                return False
            is_first = False
            return True

        return step

    def _recorded(self, is_single: bool) -> Step:
        """One step as a CUDA graph, whose inputs are copied to where it was recorded; False if it cannot be."""
        graph: torch.cuda.CUDAGraph | None = None
        inputs: list[Tensor] = []

        def step(batch: Batch, sizes: StepSizes, tracks: bool) -> bool:
            nonlocal graph, inputs
            limit = [] if batch.limit is None else [batch.limit]
            given: list[Any] = [*batch.prepared, *limit, *sizes]
            if graph is None:
                saved = [value.clone() for value in self.state()]
                inputs = [value.clone() for value in given]
                count = len(batch.prepared)
                own = Batch(tuple(inputs[:count]), inputs[count] if limit else None)
                own_sizes = StepSizes(*inputs[-len(sizes) :])
                try:
                    if not is_single or not torch.cuda.is_available():
                        raise RuntimeError("a CUDA graph needs a CUDA device and a single process.")
                    graph = _record(lambda: self.step(own, own_sizes, tracks))
                except RuntimeError as error:
                    self._give_up(saved, error)
                    return False
                self._restore(saved)
            for own_input, value in zip(inputs, given, strict=True):
                own_input.copy_(value)
            graph.replay()
            return True

        return step


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
