"""Updates that are compiled or recorded: the same step, with less time between its operations."""

import warnings
from collections.abc import Callable, Sequence
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
    """Runs a step compiled by torch.compile or recorded as a CUDA graph, one version per kernel and response solver.

    If that is not possible, it warns, restores the weights and runs the plain step from then on.

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
        self._versions: dict[tuple[Kernel, bool], Step] = {}

    def __call__(self, kernel: Kernel, batch: Batch, sizes: StepSizes, tracks: bool, *, is_single: bool) -> None:
        """One step with the version for this kernel and solver, which is made at its first use."""
        version = self._versions.get((kernel, tracks))
        if version is None:
            version = self._compiled() if self.method == "compile" else self._recorded(is_single)
            self._versions[kernel, tracks] = version
        version(batch, sizes, tracks)

    def _restore(self, saved: Sequence[Tensor]) -> None:
        for value, before in zip(self.state(), saved, strict=True):
            value.copy_(before)

    def _give_up(self, saved: Sequence[Tensor], error: Exception) -> None:
        self._restore(saved)
        self.method, self._versions = "none", {}
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"Acceleration is not possible here, updates run without it: {reason}", stacklevel=2)

    def _as_tensors(self, sizes: StepSizes) -> tuple[Tensor, ...]:
        return torch.tensor(sizes, dtype=self.like.dtype).to(self.like.device, non_blocking=True).unbind()

    def _compiled(self) -> Step:
        compiled = torch.compile(self.step, dynamic=False)
        is_first = True

        def step(batch: Batch, sizes: StepSizes, tracks: bool) -> None:
            nonlocal is_first
            saved = [value.clone() for value in self.state()] if is_first else []
            try:
                compiled(batch, StepSizes(*self._as_tensors(sizes)), tracks)
            except Exception as error:
                if not is_first:
                    raise
                self._give_up(saved, error)
                self.step(batch, sizes, tracks)
            is_first = False

        return step

    def _recorded(self, is_single: bool) -> Step:
        """One step as a CUDA graph, whose inputs are copied to where it was recorded."""
        graph: torch.cuda.CUDAGraph | None = None
        inputs: list[Tensor] = []

        def step(batch: Batch, sizes: StepSizes, tracks: bool) -> None:
            nonlocal graph, inputs
            limit = [] if batch.limit is None else [batch.limit]
            given = [*batch.prepared, *limit, *self._as_tensors(sizes)]
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
                    self.step(batch, sizes, tracks)
                    return
                self._restore(saved)
            for own_input, value in zip(inputs, given, strict=True):
                own_input.copy_(value)
            graph.replay()

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
