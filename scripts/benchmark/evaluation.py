#!/usr/bin/env python3
"""How close evaluations come to the machine: the kernel's NRMSE, KMeans and kernel PCA of all digits against a plain
matrix product, the probe against scikit-learn. Writes scripts/benchmark/EVALUATION.md; needs KSM_DATA_DIR.

.venv/bin/python scripts/benchmark/evaluation.py                       about half an hour on two cores
.venv/bin/python scripts/benchmark/evaluation.py --only kernel_pca     one part; the others stay as they are in the file
"""

import argparse
import platform
import resource
import time
import warnings
from pathlib import Path
from threading import Thread

import lightning
import sklearn
import torch
from sklearn.linear_model import LogisticRegression
from tqdm import tqdm

from ksm_lightning.baselines import KernelPCA
from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.evaluation.clustering import kmeans
from ksm_lightning.evaluation.kernel_error import kernel_nrmse, kernel_squared_errors
from ksm_lightning.evaluation.linear_probe import PENALTIES, draw_labelled, fit_softmax
from ksm_lightning.files import write_text
from ksm_lightning.kernels import PowerCosineKernel
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.network.ksm_network import KSMNetwork


def resident() -> float:
    """Resident memory of this process now, in GiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30


class MemoryWatch:
    """How much the resident memory grew at the most while a block ran, in GiB."""

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
        return self.most - self.before


# scikit-learn's tolerance at which its accuracy equals ours for every penalty.
TOLERANCE = 1e-5


def best(function, times: int) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def beside_a_product(work, times: int) -> tuple[float, float, float]:
    """Best seconds of some work, the GiB it took beyond what was there, and GFLOP/s of a plain product beside it."""
    matrix = torch.randn(4096, 4096)
    before = best(lambda: matrix @ matrix, 5)
    with MemoryWatch() as memory:
        seconds = best(work, times)
    return seconds, memory.extra, 2 * 4096**3 / min(before, best(lambda: matrix @ matrix, 5)) / 1e9


def nrmse(x: torch.Tensor, y: torch.Tensor) -> list[str]:
    kernel = PowerCosineKernel(3)
    seconds, memory, plain = beside_a_product(lambda: kernel_squared_errors(kernel, x, [y]), 1)
    samples = len(x)
    # Each symmetric pair counts once, with the products of both similarities.
    rate = samples * (samples + 1) / 2 * 2 * (x.shape[1] + y.shape[1]) / seconds / 1e9
    return [
        f"NRMSE of {samples:,} digits, {y.shape[1]} neurons, power-cosine kernel (alpha 3):",
        "",
        "| | |",
        "| --- | --- |",
        f"| time | {seconds:.1f} s |",
        f"| threads | {torch.get_num_threads()} |",
        f"| arithmetic rate, each pair once | {rate:.0f} GFLOP/s |",
        f"| plain `torch.mm` of 4096 x 4096 in the same run, best of 10 | {plain:.0f} GFLOP/s |",
        f"| ratio | {rate / plain:.2f} (wanted: at least 0.60) |",
        f"| memory beyond inputs and representation | {memory:.2f} GiB (wanted: at most 1) |",
        "",
    ]


def clusters(features: torch.Tensor) -> list[str]:
    starts, iterations, count = 20, 10, 10
    seconds, memory, plain = beside_a_product(
        lambda: kmeans(features, count, starts=starts, max_iterations=iterations), 2
    )
    # Distances and sums are a product each, and the end needs the distances once more.
    rate = 2 * features.numel() * starts * count * (2 * iterations + 1) / seconds / 1e9
    return [
        f"KMeans of {len(features):,} representations, {count} clusters, {starts} starts, {iterations} iterations:",
        "",
        "| | |",
        "| --- | --- |",
        f"| time | {seconds:.1f} s |",
        f"| threads | {torch.get_num_threads()} |",
        f"| arithmetic rate of its products | {rate:.0f} GFLOP/s |",
        f"| plain `torch.mm` of 4096 x 4096 in the same run, best of 10 | {plain:.0f} GFLOP/s |",
        f"| ratio | {rate / plain:.2f} |",
        f"| memory beyond the representations | {memory:.2f} GiB |",
        "",
    ]


def kernel_pca(x: torch.Tensor, n: int = 1024) -> list[str]:
    kernel = PowerCosineKernel(3)
    bar = tqdm(desc="kernel PCA", unit=" tiles")
    found = KernelPCA(kernel, n, progress=bar.update)
    seconds, memory, plain = beside_a_product(lambda: found.fit(x), 1)
    bar.close()
    samples, width = len(x), n + found.oversampling
    products = 2 * found.power_iterations + 2
    # Each pair's similarity once and its two places in the product, for every product.
    flops = products * samples * (samples + 1) / 2 * (2 * x.shape[1] + 4 * width)
    rate = flops / seconds / 1e9
    y = found.embedding_
    error = float(kernel_nrmse(kernel, x, y))
    some = random_subset(samples, 10_000)
    return [
        f"Kernel PCA of {samples:,} digits, {n} features, randomised ({width} directions, {found.power_iterations} "
        f"power iterations, {products} products with a matrix of {samples**2 * 4 / 2**30:.1f} GiB that is never held):",
        "",
        "| | |",
        "| --- | --- |",
        f"| time | {seconds / 60:.1f} min |",
        f"| threads | {torch.get_num_threads()} |",
        f"| arithmetic rate of its products | {rate:.0f} GFLOP/s |",
        f"| plain `torch.mm` of 4096 x 4096 in the same run, best of 10 | {plain:.0f} GFLOP/s |",
        f"| ratio | {rate / plain:.2f} |",
        f"| memory beyond the digits | {memory:.2f} GiB (wanted: at most 6) |",
        f"| largest resident memory of the whole process | {peak():.2f} GiB |",
        f"| NRMSE over all pairs | {error:.4f} |",
        f"| NRMSE over 10,000 of them | {float(kernel_nrmse(kernel, x[some], y[some])):.4f} |",
        "",
    ]


def peak() -> float:
    """Largest resident memory that this process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def probe(features: torch.Tensor, labels: torch.Tensor, held: torch.Tensor, held_labels: torch.Tensor) -> list[str]:
    draws = torch.stack([draw_labelled(labels, 300, seed) for seed in range(5)])
    x, chosen = features[draws], labels[draws]
    found = None

    def ours() -> None:
        nonlocal found
        found = fit_softmax(x, chosen, PENALTIES, 10)

    reference = torch.zeros(5, len(PENALTIES))

    def scikit() -> None:
        for seed in range(5):
            for index, penalty in enumerate(PENALTIES):
                # The bias is a weight like the others in our problem, so it is a constant feature here.
                model = LogisticRegression(
                    C=1 / (penalty * x.shape[1]), tol=TOLERANCE, max_iter=5000, fit_intercept=False
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model.fit(with_one(x[seed]), chosen[seed].numpy())
                fitted.append((seed, index, model))

    fitted: list = []
    mine = best(ours, 1)
    theirs = best(scikit, 1)
    mine = min(mine, best(ours, 2))
    for seed, index, model in fitted:
        reference[seed, index] = model.score(with_one(held), held_labels.numpy())
    accuracy = found.accuracy(held, held_labels).mean(0)
    rows = [
        f"| {penalty:g} | {100 * a:.2f} | {100 * b:.2f} |"
        for penalty, a, b in zip(PENALTIES, accuracy.tolist(), reference.mean(0).tolist(), strict=True)
    ]
    return [
        f"Probe grid: 7 penalties, 5 seeds, 300 labels a class, {x.shape[2]} features ({found.iterations} iterations):",
        "",
        "| | |",
        "| --- | --- |",
        f"| threads | {torch.get_num_threads()} |",
        f"| all 35 fits together | {mine:.1f} s |",
        f"| the same fits by `LogisticRegression` (lbfgs, tolerance {TOLERANCE:g}) | {theirs:.1f} s |",
        f"| ratio | {theirs / mine:.1f} (wanted: at least 5) |",
        "",
        "| penalty | accuracy in % | scikit-learn's |",
        "| --- | --- | --- |",
        *rows,
        "",
        "scikit-learn's default tolerance of 1e-4 ends the smallest penalties early, half a point below;",
        f"{TOLERANCE:g} is what it needs for an equal accuracy.",
        "",
    ]


def with_one(x: torch.Tensor):
    return torch.cat([x, torch.ones(len(x), 1)], dim=1).numpy()


PARTS = ("kernel_pca", "nrmse", "kmeans", "probe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--checkpoint", help="features of this network; of random landmarks unless given")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("EVALUATION.md"))
    parser.add_argument("--points", type=int, default=70_000, help="digits in the error and kernel PCA (default: all)")
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
    write(options.output, found)


def features(checkpoint: str | None, x: torch.Tensor) -> torch.Tensor:
    """Representations of all digits."""
    if checkpoint:
        from ksm_lightning.module import KernelSimilarityMatching

        network = KernelSimilarityMatching.load_from_checkpoint(checkpoint).network
    else:
        network = KSMNetwork(PowerCosineKernel(3), x.shape[1], 800)
    return torch.cat([network(part) for part in x.split(8192)])


def write(path: Path, found: dict[str, list[str]]) -> None:
    """Replace the parts that were measured, keep the others."""
    old = path.read_text() if path.exists() else ""
    sections = []
    for name in PARTS:
        text = "\n".join(found[name]).strip() if name in found else old.partition(f"## {name}\n")[2]
        text = text.partition("\n## ")[0].strip()
        if text:
            sections.append(f"## {name}\n\n{text}\n")
    head = (
        "# Evaluations\n\n"
        f"{platform.processor() or platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}, scikit-learn "
        f"{sklearn.__version__}. Made by `scripts/benchmark/evaluation.py`.\n\n"
    )
    write_text(path, head + "\n".join(sections))
    print("\n".join(sections))


if __name__ == "__main__":
    main()
