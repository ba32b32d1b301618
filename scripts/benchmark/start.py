#!/usr/bin/env python3
"""Time and memory of the start of a run, stage by stage: pivots, Lloyd, search for idle landmarks, first scale and L.

Writes scripts/benchmark/STARTS.md.

.venv/bin/python scripts/benchmark/start.py                    about 5 minutes on two free cores, 8 GB of memory
.venv/bin/python scripts/benchmark/start.py --neurons 2000     one size; the others are kept
.venv/bin/python scripts/benchmark/start.py --quick            300 neurons, as a check; writes no results
"""

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from results import machine, table, write_sections
from torch import Tensor

from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, candidate_count, learner
from ksm_lightning.learning.training import start_at
from ksm_lightning.network import KSMNetwork, initialisation

SIZES, FEATURES = (2000, 5000, 10_000), 50
# Functions that make up a start. A stage does not contain another one.
STAGES: dict[str, tuple[Any, str]] = {
    "pivots": (initialisation, "pivoted_cholesky"),
    "Lloyd": (initialisation, "lloyd"),
    "idle landmarks": (learner, "relocate"),
    "first scale and L": (learner, "balance"),
}


def points(count: int) -> Tensor:
    """Points (count, 50) near a curved surface of 8 dimensions, with noise."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(count, 8, generator=generator)
    bent = torch.tanh(latent @ torch.randn(8, FEATURES, generator=generator) / 2)
    return bent + 0.1 * torch.randn(count, FEATURES, generator=generator)


@contextmanager
def timed(times: dict[str, tuple[float, float]]) -> Iterator[None]:
    """Add up wall-clock and processor seconds of the stages."""

    def wrap(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return function(*args, **options)
            finally:
                before = times.get(stage, (0.0, 0.0))
                times[stage] = before[0] + time.perf_counter() - wall, before[1] + time.process_time() - cpu
                print(f"  {stage}: {times[stage][0]:.1f} s, {times[stage][1]:.1f} s of processor time", flush=True)

        return call

    replaced = [(owner, name, getattr(owner, name)) for owner, name in STAGES.values()]
    for stage, (owner, name) in STAGES.items():
        setattr(owner, name, wrap(stage, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in replaced:
            setattr(owner, name, function)


def measure(n: int) -> list[str]:
    """The row of the table for n neurons."""
    x = points(candidate_count(n, FEATURES))
    kernel = GaussianKernel(0.5 * float(torch.cdist(x[:500], x[500:1000]).median()))
    times: dict[str, tuple[float, float]] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    with timed(times):
        init = start_at(x, kernel, is_natural=True)
        network = KSMNetwork(kernel, FEATURES, n, init=init, generator=torch.Generator().manual_seed(0))
        Learner(network, AdaptiveSchedule(), chooses_ridge=True).start(x)
    total = time.perf_counter() - wall, time.process_time() - cpu
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    shown = [times.get(stage, (0.0, 0.0)) for stage in STAGES] + [total]
    return [f"{n:,}", f"{len(x):,}", *(f"{w:.1f} / {c:.1f}" for w, c in shown), f"{gigabytes:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neurons", type=int, choices=SIZES, help="measure one size only")
    parser.add_argument("--quick", action="store_true", help="300 neurons, as a check; writes no results")
    options = parser.parse_args()
    sizes = (300,) if options.quick else (options.neurons,) if options.neurons else SIZES
    heads = ["n", "candidates", *STAGES, "whole start", "peak GB of the process"]
    measured = {str(n): table(heads, [measure(n)]) for n in sizes}
    if options.quick:
        print("\n".join(measured[str(sizes[0])]))
        return
    threads = f"{torch.get_num_threads()} threads"
    heading = (
        f"# Time of the start\n\n{machine(f'{os.cpu_count()} cores', threads)}. Written by "
        f"`scripts/benchmark/start.py`: a Gaussian kernel on points with {FEATURES} features, float32, the paper's "
        "bound. Each cell is seconds on the clock / seconds of processor time of all threads. Other work on "
        "the machine lengthens the first; half of the second is a lower bound of the time on two free cores."
    )
    titles = {str(n): f"n = {n:,}" for n in SIZES}
    write_sections(Path(__file__).parent / "STARTS.md", heading, titles, measured)


if __name__ == "__main__":
    main()
