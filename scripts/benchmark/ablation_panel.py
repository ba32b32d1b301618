"""The panel of the ablation: small trainings, streams and fits, each with its errors, seconds and whether it is finite.

Everything runs as torch operations in one thread, also what small networks otherwise do in machine code, which contains
copies of the constants that an ablation changes.
"""

import copy
import math
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from board import OTHER_SPLIT, rows_of
from real_data import DATA, KERNELS, Cell, Record, ours, scores, split_rows
from real_data import kernel_for as board_kernel
from streams import error as stream_error
from torch import Tensor

from ksm_lightning import AdaptiveSchedule, HalfMoonsDataModule, NormalInit
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import GaussianKernel, Kernel, make_kernel
from ksm_lightning.learning import TightSchedule, train
from ksm_lightning.network.readout import READOUTS, LandmarkFeatures, read_out
from ksm_lightning.sklearn import KSMTransformer, settings

FIRST_SEED = 0
LONGEST = "longest response"


class Run(NamedTuple):
    """One entry of the panel. Runs with the same configuration differ in their seed."""

    part: str
    bound: str
    configuration: str
    seed: int
    work: Callable[[int], Record]  # errors by name, from a seed
    readout: Callable[[], Record] | None = None  # the same for variants of readouts alone, with one fit for all

    def measure(self, is_readout: bool) -> Record:
        """Errors, seconds of the processor, and whether everything is finite; an exception counts as not finite."""
        started = time.process_time()
        try:
            found = self.readout() if is_readout and self.readout else self.work(FIRST_SEED + self.seed)
        except (ValueError, RuntimeError, FloatingPointError, ZeroDivisionError) as error:
            return {"finite": False, "reason": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
        seconds = found.pop("seconds", time.process_time() - started)
        is_finite, reason = found.pop("finite", True), {"reason": found.pop("reason", "not finite")}
        is_finite = is_finite and all(map(math.isfinite, found.values()))
        return {"finite": is_finite, "seconds": seconds, **(found if is_finite else reason)}


def training(kernel: Kernel, x: Tensor, n: int, seed: int, scored: Tensor | None = None, **options: Any) -> Record:
    """The record of a training: errors of responses and of Nystroem's features on its points, or on those to score."""
    started = time.process_time()
    network = train(kernel, x, n, seed=seed, **options)
    seconds = time.process_time() - started
    if not all(bool(each.isfinite().all()) for each in network.parameters()):
        return {"finite": False}
    sample, scored, readouts = x[:4000], x[:4000] if scored is None else scored, ("neural", "nystroem")
    features = [read_out(network, readout, scored, sample=sample, num_features=n) for readout in readouts]
    errors = kernel_nrmse(kernel, scored, *features).tolist()
    return dict(zip(readouts, errors, strict=True)) | {"seconds": seconds}


# ---------------------------------------------------------------------- half moons and stress


@cache
def moons() -> Tensor:
    data = HalfMoonsDataModule().train_points.data
    assert isinstance(data, Tensor)
    return data


MOONS: dict[str, dict[str, Any]] = {
    "paper, n = 16": {"n": 16},
    "paper, n = 32": {"n": 32},
    "paper, n = 16, for landmarks": {"n": 16, "keeps_landmarks": True},
    "tight, n = 16, p = 24": {"n": 16, "num_landmarks": 24, "bound": "tight"},
}


def half_moons(name: str, updates: int, seed: int) -> Record:
    schedule = AdaptiveSchedule(updates) if name.startswith("paper") else TightSchedule(updates // 5)
    return training(GaussianKernel(0.3), moons(), schedule=schedule, seed=seed, **MOONS[name])


def stress(n: int, start: str, updates: int, seed: int) -> Record:
    """A run of the grid of scripts/stress/half_moons.py, in small units of x for even seeds and large ones for odd."""
    scale = (0.01, 100.0)[seed % 2]
    init = None if start == "data" else NormalInit(1.0)
    schedule = AdaptiveSchedule(updates)
    return training(
        GaussianKernel(0.3 * scale), scale * moons(), n, seed, schedule=schedule, init=init, consolidate_at_end=False
    )


# ---------------------------------------------------------------------- streams


@cache
def covertype() -> np.ndarray:
    """All rows, standardised, in their order."""
    return DATA["Covertype"](Path(os.environ.get("KSM_DATA_DIR", "")))[0]


@cache
def shuffled_covertype() -> np.ndarray:
    return covertype()[np.random.default_rng(0).permutation(len(covertype()))[:100_000]]


def followed(stream: KSMTransformer, batches: list[np.ndarray], rows: np.ndarray, others: np.ndarray | None) -> Record:
    """Errors of all readouts on these rows at the end of a stream, and the longest response to other rows."""
    started = time.process_time()
    for batch in batches[:-1]:
        stream.partial_fit(batch)
    record = {"seconds": time.process_time() - started}
    for readout in READOUTS:
        ended = copy.deepcopy(stream).set_params(readout=readout).partial_fit(batches[-1])
        record[readout] = stream_error(stream.kernel, ended.transform, rows)
        if others is not None:  # f(x, x) is 1
            record[LONGEST] = max(record.get(LONGEST, 0.0), float((ended.transform(others) ** 2).sum(1).max()))
    return record


def covertype_stream(bound: str, order: str, rows: int, n: int, seed: int) -> Record:
    """The first rows in their order, or others at random; 20,000 more rows show how long responses can become."""
    x = covertype()[:rows] if order == "original" else shuffled_covertype()[seed * rows % 60_000 :][:rows]
    kernel = GaussianKernel((x.shape[1] / 2) ** 0.5)
    stream = KSMTransformer(n, kernel=kernel, bound=bound, random_state=seed)
    return followed(stream, np.split(x, rows // 500), x[:: max(1, rows // 2000)], shuffled_covertype()[-20_000:])


def drift(bound: str, path: str, batches: int, seed: int) -> Record:
    """Normal points whose mean moves by 10 in all, or jumped by 8 20 batches ago: errors at its last position."""
    means = np.linspace(0, 10, batches) if path == "moves" else np.repeat([0.0, 8.0], [batches - 20, 20])
    random, axis = np.random.default_rng(seed), np.eye(4)[0]
    stream = KSMTransformer(32, kernel=GaussianKernel(1.0), bound=bound, half_life=500, random_state=seed)
    x = [random.normal(size=(64, 4)) + mean * axis for mean in means]
    return followed(stream, x, random.normal(size=(1500, 4)) + means[-1] * axis, None)


# ---------------------------------------------------------------------- MNIST


def mnist(bound: str, n: int, updates: int, seed: int) -> Record:
    x = split_rows("MNIST", 10_000, 2000)[0].x
    options: dict[str, Any] = {"schedule": AdaptiveSchedule(updates)}
    if bound == "tight":
        options = {"schedule": TightSchedule(updates), "bound": bound, "num_landmarks": n * 3 // 2}
    return training(make_kernel("power_cosine", alpha=3), x, n, seed, **options)


# ---------------------------------------------------------------------- other kernels and data

# Narrow and heavy-tailed kernels, outliers, and batches so small that directions of landmarks are noise.
KERNEL_CELLS = (
    Cell("California housing", "Gaussian 0.25", 32),
    Cell("California housing", "power cosine 3", 32),
    Cell("Covertype", "Gaussian 1", 32),
    Cell("digits", "Laplacian 1", 32),
)
KERNEL_RUNS: dict[str, dict[str, Any]] = {
    "paper": {"schedule": AdaptiveSchedule(600)},
    "tight": {"schedule": TightSchedule(60), "batch_size": 256},
    "tight, small batches": {"schedule": TightSchedule(600), "batch_size": 32},
}


def other_kernel(cell: Cell, name: str, seed: int) -> Record:
    """Errors on rows that are not learned from."""
    (x, _), (held_out, _) = split_rows(cell.data, 4000, 1500)
    options = KERNEL_RUNS[name] | ({} if name == "paper" else {"bound": "tight", "num_landmarks": cell.n * 3 // 2})
    return training(board_kernel(cell.kernel, x), x, cell.n, seed, scored=held_out.float(), **options)


def random_fit(seed: int) -> Record:
    """A fit of the stress test of random data; errors that are as low as rounding count as equal."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "stress"))
    from numerics import work

    sys.path.pop()
    found = work({"seed": seed})
    error = {"error": max(found["error"], 1e-4)} if math.isfinite(found.get("error", math.nan)) else {}
    is_sound = found["outcome"] not in ("above", "non-finite", "raw error")
    return error | {"finite": is_sound, "reason": found.get("message", found["outcome"])[:200]}


# ---------------------------------------------------------------------- the board


@cache
def fitted(cell: Cell, split: int) -> tuple[KSMTransformer, float]:
    """The default transformer of a cell without changes, which variants of readouts share, and seconds of its fit."""
    x = rows_of(cell.data, split)[0].x
    transformer, started = (
        KSMTransformer(cell.n, kernel=board_kernel(cell.kernel, x), random_state=0),
        time.process_time(),
    )
    return transformer.fit(x.numpy()), time.process_time() - started


def board(cell: Cell, split: int) -> Record:
    (x, _), (held_out, _) = rows_of(cell.data, split)
    kernel, started = board_kernel(cell.kernel, x), time.process_time()
    transformer = ours(kernel, x, cell.n)
    seconds = time.process_time() - started
    features = torch.from_numpy(transformer.transform(held_out.numpy()))
    return scores(kernel, held_out, {"least_squares": features}) | {"seconds": seconds}


def board_readout(cell: Cell, split: int) -> Record:
    """The same, with the readout alone computed again."""
    (x, _), (held_out, _) = rows_of(cell.data, split)
    transformer, seconds = fitted(cell, split)
    network, started = transformer.network_, time.process_time()
    sample = settings.readout_sample(network.kernel, settings.training_samples(x.numpy(), None), network.W.detach())
    features = LandmarkFeatures.of(network, "least_squares", sample)(held_out)
    seconds += time.process_time() - started
    return scores(network.kernel, held_out, {"least_squares": features}) | {"seconds": seconds}


# Data sets with enough rows; with 512 features those that are cheap.
BOARD = {32: tuple(DATA), 128: (*tuple(DATA)[:7], "diabetes"), 512: tuple(DATA)[:5]}
BOARD_CELLS = {0: {32: 16, 128: 16, 512: 8}, OTHER_SPLIT: {32: 8, 128: 8, 512: 4}}


def board_cells() -> list[tuple[Cell, int]]:
    """Cells of the board and the first seed of their rows: every combination of data and kernel comes up in turn."""
    cells, kernels, used = [], tuple(KERNELS), dict.fromkeys(BOARD, 0)
    for split, counts in BOARD_CELLS.items():
        for n, count in counts.items():
            for index in range(used[n], used[n] + count):
                data = BOARD[n]
                kernel = kernels[(index + index // len(data)) % len(kernels)]
                cells.append((Cell(data[index % len(data)], kernel, n), split))
            used[n] += count
    return sorted(cells, key=lambda found: found[0].n)


# ---------------------------------------------------------------------- the panel


def panel(is_quick: bool) -> list[Run]:
    """All runs, part by part; a quick panel has one short run of each configuration."""
    runs: list[Run] = []

    def add(part: str, bound: str, name: str, seeds: int, work: Callable[..., Record], *args: Any) -> None:
        def run(seed: int) -> Record:
            return work(*args, seed)

        runs.extend(Run(part, bound, name, seed, run) for seed in range(1 if is_quick else seeds))

    for name in MOONS:
        add("half moons", name.partition(",")[0], name, 5, half_moons, name, 100 if is_quick else 2000)
    for n, seeds in {8: 14, 16: 11, 64: 5}.items():
        for start in ("data", "normal"):
            add("stress", "paper", f"n = {n}, {start}", seeds, stress, n, start, 50 if is_quick else 200)
    for bound in ("tight", "paper"):
        for order in ("original", "shuffled"):
            size = (2000, 16) if is_quick else (8000, 64)
            add("streams", bound, f"{bound}, Covertype, {order}", 2, covertype_stream, bound, order, *size)
        for path in ("moves", "jumps"):
            add("streams", bound, f"{bound}, mean {path}", 2, drift, bound, path, 30 if is_quick else 120)
    for cell in KERNEL_CELLS[:1] if is_quick else KERNEL_CELLS:
        for name in KERNEL_RUNS:  # errors of the paper's responses differ most between seeds
            bound = name.partition(",")[0]
            add("kernels", bound, f"{name}: {cell}", 8 if bound == "paper" else 2, other_kernel, cell, name)
    add("random fits", "any", "random fits", 100, random_fit)
    for bound, n, updates in (("paper", 50, 20), ("tight", 20, 5)) if is_quick else (
        ("paper", 800, 400), ("tight", 200, 60),
    ):  # fmt: skip
        add("mnist", bound, f"{bound}, n = {n}", 1, mnist, bound, n, updates)
    for cell, split in board_cells()[:2] if is_quick else board_cells():
        name = f"{cell}{', other rows' if split else ''}"

        def whole(seed: int, cell: Cell = cell, split: int = split) -> Record:
            return board(cell, split)

        def again(cell: Cell = cell, split: int = split) -> Record:
            return board_readout(cell, split)

        runs.append(Run("board", "tight", name, 0, whole, again))
    return runs


PARTS = ("half moons", "stress", "streams", "kernels", "random fits", "mnist", "board")
