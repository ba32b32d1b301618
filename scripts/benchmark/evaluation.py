#!/usr/bin/env python3
"""Speed of the evaluations of 70,000 digits: kernel NRMSE, KMeans, kernel PCA and linear probe.

The first three are compared with a plain matrix product, the probe with scikit-learn. Writes
scripts/benchmark/EVALUATION.md; needs KSM_DATA_DIR.

.venv/bin/python scripts/benchmark/evaluation.py                       about half an hour on two cores
.venv/bin/python scripts/benchmark/evaluation.py --only kernel_pca     one part; the others are kept
"""

import argparse
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import lightning
import numpy as np
import sklearn
import torch
from results import best_of, machine, table, write_sections
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from tqdm import tqdm

from ksm_lightning.baselines import KernelPCA
from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.evaluation.clustering import kmeans
from ksm_lightning.evaluation.kernel_error import kernel_nrmse, kernel_squared_errors
from ksm_lightning.evaluation.linear_probe import PENALTIES, Classifiers, draw_labelled, fit_softmax
from ksm_lightning.kernels import PowerCosineKernel, random_subset
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network import KSMNetwork
from ksm_lightning.network.readout import encode_in_blocks

# scikit-learn's tolerance at which its accuracy equals ours for every penalty.
TOLERANCE = 1e-5


def resident() -> float:
    """Resident memory of this process in GiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30


def peak() -> float:
    """Largest resident memory of this process so far in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class MemoryWatch:
    """Measures by how many GiB the resident memory grows while a block runs."""

    def __enter__(self) -> "MemoryWatch":
        self.before = self.most = resident()
        self.is_running = True
        self.thread = Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.is_running:
            self.most = max(self.most, resident())
            time.sleep(0.005)

    def __exit__(self, *args: object) -> None:
        self.is_running = False
        self.thread.join()

    @property
    def extra(self) -> float:
        """The largest growth in GiB."""
        return self.most - self.before


class Speed:
    """Best time of some work, its extra memory, and the rate of a plain product measured before and after it.

    Args:
        work: What to measure.
        times: Number of calls; the best counts.
        operations: Floating-point operations of one call.
    """

    def __init__(self, work: Callable[[], object], times: int, operations: float) -> None:
        matrix = torch.randn(4096, 4096)
        before = best_of(lambda: matrix @ matrix, 5)
        with MemoryWatch() as memory:
            self.seconds = best_of(work, times)
        self.extra_memory = memory.extra
        self.plain = 2 * 4096**3 / min(before, best_of(lambda: matrix @ matrix, 5)) / 1e9
        self.rate = operations / self.seconds / 1e9

    def table(
        self, *more: tuple[str, str], time: str = "", rate: str = "of its products", ratio: str = "", memory: str = ""
    ) -> list[str]:
        """Lines of a table: time, rate, rate of the plain product, their ratio, memory, and more rows."""
        rows = [
            ("time", time or f"{self.seconds:.1f} s"),
            ("threads", str(torch.get_num_threads())),
            (f"arithmetic rate {rate}", f"{self.rate:.0f} GFLOP/s"),
            ("plain `torch.mm` of 4096 x 4096 in the same run, best of 10", f"{self.plain:.0f} GFLOP/s"),
            ("ratio", f"{self.rate / self.plain:.2f}{ratio}"),
            ("additional memory", f"{self.extra_memory:.2f} GiB{memory}"),
            *more,
        ]
        return table(["", ""], rows)


def nrmse(x: Tensor, y: Tensor) -> list[str]:
    """The section about the kernel error."""
    samples = len(x)
    # Each symmetric pair counts once, with the products of both similarities.
    operations = samples * (samples + 1) / 2 * 2 * (x.shape[1] + y.shape[1])
    speed = Speed(lambda: kernel_squared_errors(PowerCosineKernel(3), x, [y]), 1, operations)
    return [
        f"NRMSE of {samples:,} digits, {y.shape[1]} neurons, power-cosine kernel (alpha 3):",
        "",
        *speed.table(rate="(each pair once)", ratio=" (target: at least 0.60)", memory=" (target: at most 1)"),
    ]


def clusters(y: Tensor) -> list[str]:
    """The section about KMeans."""
    starts, iterations, count = 20, 10, 10
    # Distances and sums are one product each, and the end needs the distances once more.
    operations = 2 * y.numel() * starts * count * (2 * iterations + 1)
    speed = Speed(lambda: kmeans(y, count, starts=starts, max_iterations=iterations), 2, operations)
    return [
        f"KMeans of {len(y):,} representations, {count} clusters, {starts} starts, {iterations} iterations:",
        "",
        *speed.table(),
    ]


def kernel_pca(x: Tensor, n: int = 1024) -> list[str]:
    """The section about kernel PCA."""
    kernel = PowerCosineKernel(3)
    bar = tqdm(desc="kernel PCA", unit=" tiles")
    found = KernelPCA(kernel, n, progress=bar.update)
    samples, width = len(x), n + found.oversampling
    products = 2 * found.power_iterations + 2
    # For every product: the similarity of each pair once, and its two entries in the product.
    operations = products * samples * (samples + 1) / 2 * (2 * x.shape[1] + 4 * width)
    speed = Speed(lambda: found.fit(x), 1, operations)
    bar.close()
    y = found.embedding_.to(x)
    error = float(kernel_nrmse(kernel, x, y))
    some = random_subset(samples, 10_000)
    rows = [
        ("largest resident memory of the process", f"{peak():.2f} GiB"),
        ("NRMSE over all pairs", f"{error:.4f}"),
        ("NRMSE over 10,000 of the digits", f"{float(kernel_nrmse(kernel, x[some], y[some])):.4f}"),
    ]
    return [
        f"Kernel PCA of {samples:,} digits, {n} features, randomised: {width} directions, {found.power_iterations} "
        f"power iterations, {products} products with a matrix of {samples**2 * 4 / 2**30:.1f} GiB, which is never "
        "stored:",
        "",
        *speed.table(*rows, time=f"{speed.seconds / 60:.1f} min", memory=" (target: at most 6)"),
    ]


def probe(features: Tensor, labels: Tensor, held: Tensor, held_labels: Tensor) -> list[str]:
    """The section about the linear probe."""
    draws = torch.stack([draw_labelled(labels, 300, seed) for seed in range(5)])
    x, chosen = features[draws], labels[draws]
    found: list[Classifiers] = []
    fitted: list[tuple[int, int, LogisticRegression]] = []

    def ours() -> None:
        found.append(fit_softmax(x, chosen, PENALTIES, 10))

    def scikit() -> None:
        for seed in range(5):
            for index, penalty in enumerate(PENALTIES):
                # In our problem the bias is a weight like the others, so it is a constant feature here.
                model = LogisticRegression(
                    C=1 / (penalty * x.shape[1]), tol=TOLERANCE, max_iter=5000, fit_intercept=False
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model.fit(with_one(x[seed]), chosen[seed].numpy())
                fitted.append((seed, index, model))

    mine = best_of(ours, 1)
    theirs = best_of(scikit, 1)
    mine = min(mine, best_of(ours, 2))
    reference = torch.zeros(5, len(PENALTIES))
    for seed, index, model in fitted:
        reference[seed, index] = model.score(with_one(held), held_labels.numpy())
    accuracy = found[-1].accuracy(held, held_labels).mean(0)
    times = [
        ("threads", str(torch.get_num_threads())),
        ("all 35 fits together", f"{mine:.1f} s"),
        (f"the same fits with `LogisticRegression` (lbfgs, tolerance {TOLERANCE:g})", f"{theirs:.1f} s"),
        ("ratio", f"{theirs / mine:.1f} (target: at least 5)"),
    ]
    scores = [
        (f"{penalty:g}", f"{100 * a:.2f}", f"{100 * b:.2f}")
        for penalty, a, b in zip(PENALTIES, accuracy.tolist(), reference.mean(0).tolist(), strict=True)
    ]
    return [
        f"Probe grid: 7 penalties, 5 seeds, 300 labels per class, {x.shape[2]} features ({found[-1].iterations} "
        "iterations):",
        "",
        *table(["", ""], times),
        "",
        *table(["penalty", "accuracy in %", "scikit-learn"], scores),
        "",
        "With its default tolerance of 1e-4, scikit-learn stops early for the smallest penalties and loses half a "
        f"point. It needs {TOLERANCE:g} for an equal accuracy.",
    ]


def with_one(x: Tensor) -> np.ndarray:
    """Features with a constant one."""
    return torch.cat([x, torch.ones(len(x), 1)], dim=1).numpy()


def features(checkpoint: str | None, x: Tensor) -> Tensor:
    """Representations of all digits."""
    if checkpoint:
        network = KernelSimilarityMatching.load_from_checkpoint(checkpoint).network
    else:
        network = KSMNetwork(PowerCosineKernel(3), x.shape[1], 800)
    return encode_in_blocks(network, x)


PARTS = ("kernel_pca", "nrmse", "kmeans", "probe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure. Default: all")
    parser.add_argument("--checkpoint", help="a trained network for the features. Default: random landmarks")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("EVALUATION.md"), help="result file")
    parser.add_argument("--points", type=int, default=70_000, help="digits in NRMSE and kernel PCA. Default: all")
    options = parser.parse_args()
    data = CroppedMNISTDataModule()
    x, labels = data.train_points.data, data.train_labels
    found = {}
    if "kernel_pca" in options.only:  # first, while the process holds nothing else
        found["kernel_pca"] = kernel_pca(x[: options.points])
    if set(options.only) - {"kernel_pca"}:
        y = features(options.checkpoint, x)
        if "nrmse" in options.only:
            found["nrmse"] = nrmse(x[: options.points], y[: options.points])
        if "kmeans" in options.only:
            found["kmeans"] = clusters(y)
        if "probe" in options.only:
            found["probe"] = probe(y[:50_000], labels[:50_000], y[50_000:60_000], labels[50_000:60_000])
    versions = machine(lightning=lightning.__version__, scikit_learn=sklearn.__version__)
    head = f"# Evaluations\n\n{versions}. Written by `scripts/benchmark/evaluation.py`."
    write_sections(options.output, head, {name: name for name in PARTS}, found)
    print(options.output.read_text())


if __name__ == "__main__":
    main()
