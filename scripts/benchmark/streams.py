#!/usr/bin/env python3
"""Kernel features of streams: `KSMTransformer.partial_fit` against MiniBatchKMeans with Nystroem features.

Writes scripts/benchmark/STREAMS.md. The folder KSM_DATA_DIR holds tabular/covertype.npz with the array x; without it
the part covertype is skipped.

.venv/bin/python scripts/benchmark/streams.py                     about 10 minutes on one core
.venv/bin/python scripts/benchmark/streams.py --only drift        one part; the other is kept
.venv/bin/python scripts/benchmark/streams.py --quick             few seeds and rows, as a check of the code
"""

import argparse
import copy
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import sklearn
import torch
from results import machine, table, write_sections
from sklearn.cluster import MiniBatchKMeans
from tqdm import tqdm

from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import GaussianKernel, Kernel
from ksm_lightning.network.readout import READOUTS
from ksm_lightning.network.readout_matrices import nystroem_matrix
from ksm_lightning.sklearn import KSMTransformer

BATCH, HELD_OUT = 1000, 3000
DRIFT_BATCH, MEMORIES = 64, (None, 500, 1000, 2000)
Transform = Callable[[np.ndarray], np.ndarray]


def error(kernel: Kernel, transform: Transform, x: np.ndarray) -> float:
    """Kernel NRMSE of features on the points x (samples, m)."""
    return float(kernel_nrmse(kernel, torch.tensor(x), torch.tensor(transform(x)))[0])


class ClusterFeatures:
    """Nystroem features of the centres of MiniBatchKMeans."""

    def __init__(self, kernel: Kernel, n: int, seed: int) -> None:
        self.kernel, self.clusters = kernel, MiniBatchKMeans(n, random_state=seed, n_init=1)
        self.waiting = np.empty((0, 0))

    def partial_fit(self, x: np.ndarray) -> None:
        """Learn from a batch; the first one must have as many points as centres."""
        x = np.concatenate([self.waiting, x]) if len(self.waiting) else x
        if len(x) < self.clusters.n_clusters:
            self.waiting = x
            return
        self.waiting = np.empty((0, 0))
        self.clusters.partial_fit(x)

    def transform(self, x: np.ndarray) -> np.ndarray:
        """Features (samples, n) of points (samples, m)."""
        W = torch.tensor(self.clusters.cluster_centers_).double()
        features: np.ndarray = (self.kernel(torch.tensor(x), W) @ nystroem_matrix(self.kernel, W)).numpy()
        return features


# ---------------------------------------------------------------------- Covertype


def covertype(quick: bool) -> list[str]:
    """46,000 rows of Covertype, 128 components, in the original order and shuffled."""
    path = Path(os.environ.get("KSM_DATA_DIR", "")) / "tabular" / "covertype.npz"
    if not path.is_file():
        return ["KSM_DATA_DIR names no folder with tabular/covertype.npz."]
    with np.load(path) as arrays:
        data = arrays["x"].astype(np.float64)
    data = (data - data.mean(0)) / data.std(0)
    rows, seeds, n = (3000, 1, 16) if quick else (46_000, 20, 128)
    kernel = GaussianKernel((data.shape[1] / 2) ** 0.5)
    lines = []
    for order in ("original", "shuffled"):
        found: dict[str, list[tuple[float, float, float]]] = {}
        for seed in tqdm(range(seeds), desc=order):
            random = np.random.default_rng(seed)
            x = data[:rows] if order == "original" else data[random.permutation(len(data))[:rows]]
            for name, transform, seconds in learned(kernel, n, x, seed):
                score = error(kernel, transform, x[random.permutation(len(x))[:HELD_OUT]])
                longest = float((transform(x) ** 2).sum(1).max())  # f(x, x) is 1
                found.setdefault(name, []).append((score, longest, seconds))
        for name, results in found.items():
            errors, longest, seconds = zip(*results, strict=True)
            lines.append(
                (order, name, f"{median(errors):.4f}", f"{max(errors):.4f}", f"{max(longest):.3f}",
                 f"{median(seconds):.1f}")
            )  # fmt: skip
    return [
        f"{rows:,} rows of Covertype, columns standardised, {n} components, Gaussian kernel of width sqrt(m / 2), "
        f"batches of {BATCH:,} rows, {seeds} seeds. Kernel NRMSE on {HELD_OUT:,} rows of the stream, and the largest "
        "`|y|^2 / f(x, x)` of all rows.",
        "",
        *table(["order", "features", "median error", "largest error", "largest response", "s"], lines),
    ]


def learned(kernel: Kernel, n: int, x: np.ndarray, seed: int) -> Iterator[tuple[str, Transform, float]]:
    """Names, transforms and seconds of all features after the stream x (samples, m)."""
    batches = [x[start : start + BATCH] for start in range(0, len(x), BATCH)]
    for bound in ("tight", "paper"):
        made, started = KSMTransformer(n, kernel=kernel, bound=bound, random_state=seed), time.perf_counter()
        for batch in batches[:-1]:
            made.partial_fit(batch)
        seconds = time.perf_counter() - started
        for readout in READOUTS:
            ended = copy.deepcopy(made).set_params(readout=readout).partial_fit(batches[-1])
            yield f"{bound}, {readout}", ended.transform, seconds
    clusters, started = ClusterFeatures(kernel, n, seed), time.perf_counter()
    for batch in batches:
        clusters.partial_fit(batch)
    yield "MiniBatchKMeans + Nystroem", clusters.transform, time.perf_counter() - started


# ---------------------------------------------------------------------- streams that change


def drift(quick: bool) -> list[str]:
    """Normal points whose mean moves, or jumps, and the error at its current position."""
    batches, seeds, n, m = (40, 1, 16, 2) if quick else (600, 5, 32, 4)
    paths = {
        "moves by 10 in all": np.linspace(0, 10, batches),
        "jumps by 8 at half time, 20 batches later": np.repeat([0.0, 8.0], [batches // 2, min(20, batches // 2)]),
    }
    lines = []
    for path, means in paths.items():
        results: dict[str, list[float]] = {}
        for seed in tqdm(range(seeds), desc=path):
            for name, found in followed(means, n, m, seed).items():
                results.setdefault(name, []).append(found)
        lines += [(path, name, f"{median(found):.3f}", f"{max(found):.3f}") for name, found in results.items()]
    return [
        f"Normal points in {m} dimensions with standard deviation 1, whose mean moves along one axis; batches of "
        f"{DRIFT_BATCH} points, {batches} of them; Gaussian kernel of width 1, {n} components, {seeds} seeds. Kernel "
        "NRMSE at the last position of the mean. The fits know the last 2,000 points, or all since the jump.",
        "",
        *table(["the mean", "features", "median error", "largest error"], lines),
    ]


def followed(means: np.ndarray, n: int, m: int, seed: int) -> dict[str, float]:
    """Errors after a stream with these means of its batches."""
    random, kernel, axis = np.random.default_rng(seed), GaussianKernel(1.0), np.eye(m)[0]
    batches = [random.normal(size=(DRIFT_BATCH, m)) + mean * axis for mean in means]
    fresh = random.normal(size=(1500, m)) + means[-1] * axis
    streams = {
        f"half-life {memory or 'None'}": KSMTransformer(n, kernel=kernel, half_life=memory, random_state=seed)
        for memory in MEMORIES
    }
    everything = {**streams, "MiniBatchKMeans + Nystroem": ClusterFeatures(kernel, n, seed)}
    for batch in batches:
        for stream in everything.values():
            stream.partial_fit(batch)
    errors = {name: error(kernel, stream.transform, fresh) for name, stream in everything.items()}
    since = np.concatenate(batches[int(np.argmax(means == means[-1])) :] if means[-2] == means[-1] else batches)
    known = since[-2000:]
    return errors | {
        "fit": error(kernel, KSMTransformer(n, kernel=kernel, random_state=seed).fit(known).transform, fresh)
    }


PARTS = {"covertype": ("Covertype", covertype), "drift": ("Streams that change", drift)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure. Default: both")
    parser.add_argument("--quick", action="store_true", help="few seeds and rows, as a check of the code")
    parser.add_argument("--output", type=Path, help="result file. Default: STREAMS.md here; quick: none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    output = options.output or (None if options.quick else Path(__file__).parent / "STREAMS.md")
    head = (
        f"# Streams\n\n{machine('one thread', scikit_learn=sklearn.__version__)}. Written by "
        "`scripts/benchmark/streams.py`. `KSMTransformer` with its defaults where nothing else is said."
    )
    for name in options.only:
        section = PARTS[name][1](options.quick)
        print("\n".join(section))
        if output is not None:
            write_sections(output, head, {key: title for key, (title, _) in PARTS.items()}, {name: section})


if __name__ == "__main__":
    main()
