#!/usr/bin/env python3
"""Use of trained networks: extraction compared with scikit-learn's Nystroem, accuracy of pipelines, streams.

Writes scripts/benchmark/REUSE.md.

.venv/bin/python scripts/benchmark/reuse.py                       about 20 minutes on two cores
.venv/bin/python scripts/benchmark/reuse.py --only extraction     one part; the others are kept
"""

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
import sklearn
import torch
from results import machine, seconds_of, table, write_sections
from sklearn.datasets import load_digits, make_moons
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from tqdm import tqdm

from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.extractor import FeatureExtractor
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import AdaptiveSchedule, train
from ksm_lightning.network import KSMNetwork
from ksm_lightning.network.readout import READOUTS
from ksm_lightning.sklearn import KSMTransformer


def extraction(rounds: int = 7) -> list[str]:
    """The section about extraction."""
    n, samples = 800, 10_000
    random = np.random.RandomState(0).randn(samples, 400)
    theirs = Nystroem(gamma=0.5 / 20.0**2, n_components=n, random_state=0).fit(random)
    network = KSMNetwork(GaussianKernel(20.0), 400, n).double()
    network.load_state_dict(
        {
            "W": torch.tensor(theirs.components_),
            "q": torch.ones(n, dtype=torch.float64),
            "L": torch.eye(n, dtype=torch.float64),
        }
    )
    found = theirs.transform(random[:500])
    mine = FeatureExtractor.from_network(network, "nystroem", dtype=torch.float64).transform(random[:500])
    difference = np.abs(found @ found.T - mine @ mine.T).max()
    pixels = load_digits().data
    trained = train(GaussianKernel(24.0), torch.tensor(pixels), n, AdaptiveSchedule(500))
    return [
        f"{samples:,} points, n = {n}, Gaussian kernel; candidates run in turn, and the best of {rounds} rounds counts "
        "(target: a speed-up of at least 1.0). By default an extractor computes in float32 if that changes no feature "
        "by more than 3e-6 of the largest, otherwise in float64; the default dtype is marked.",
        "",
        "Random points with 400 features and the landmarks that scikit-learn drew. Similarities of the `nystroem` "
        f"features of both libraries differ by at most {difference:.0e}.",
        "",
        *race(network, random, 20.0, rounds),
        "",
        "Digits of 64 pixels, and a network trained on them with 500 updates. Here rounding in float32 changes "
        "features by about 1e-4 of the largest, in either library.",
        "",
        *race(trained, np.tile(pixels, (6, 1))[:samples], 24.0, rounds),
    ]


def race(network: KSMNetwork, x: np.ndarray, sigma: float, rounds: int) -> list[str]:
    """Extraction in both dtypes compared with scikit-learn, for input in both dtypes."""
    defaults = {name: FeatureExtractor.from_network(network, name).W.dtype for name in ("neural", "nystroem")}
    rows = []
    for kind in (np.float64, np.float32):
        data = x.astype(kind)
        reference = "scikit-learn's `Nystroem.transform`"
        drawn = Nystroem(gamma=0.5 / sigma**2, n_components=network.num_neurons, random_state=0).fit(data)
        candidates = {reference: drawn.transform}
        for name, default in defaults.items():
            for dtype in (torch.float32, torch.float64):
                mark = " (default)" if dtype == default else ""
                label = f"`FeatureExtractor.transform`, {name}, {str(dtype)[6:]}{mark}"
                candidates[label] = FeatureExtractor.from_network(network, name, dtype=dtype).transform
        seconds = dict.fromkeys(candidates, float("inf"))
        for _ in range(rounds):
            for name, transform in candidates.items():
                transform(data[:2000])  # the threads of the previous candidate are still spinning
                seconds[name] = min(seconds[name], seconds_of(partial(transform, data)))
        rows += [
            (np.dtype(kind).name, name, f"{1000 * value:.0f}", f"{seconds[reference] / value:.2f}")
            for name, value in seconds.items()
        ]
    return table(["input", "", "ms", "speed-up"], rows)


def half_moons() -> list[str]:
    """The section about half moons. Times include creating the pipeline, fitting it and scoring 1,600 new points."""
    (x, labels), (fresh, truth) = (make_moons(1600, noise=0.1, random_state=seed) for seed in (0, 1))
    rows = []
    for sigma in (1.0, 0.3):
        F = rbf_kernel(x, gamma=0.5 / sigma**2)
        values, vectors = np.linalg.eigh(F)
        kept = values > 1e-10 * values[-1]
        onto = vectors[:, kept] / np.sqrt(values[kept])
        linear = LogisticRegression(max_iter=5000).fit(F @ onto, labels)
        exact = linear.score(rbf_kernel(fresh, x, gamma=0.5 / sigma**2) @ onto, truth)
        for readout in READOUTS:
            seconds, scores = [], []
            for seed in range(5):
                started = time.perf_counter()
                features = KSMTransformer(
                    n_components=16, kernel_params={"sigma": sigma}, bound="paper", readout=readout, random_state=seed
                )
                scores.append(make_pipeline(features, LogisticRegression()).fit(x, labels).score(fresh, truth))
                seconds.append(time.perf_counter() - started)
            score = f"{100 * np.mean(scores):.2f} ({100 * min(scores):.2f} to {100 * max(scores):.2f})"
            time_range = f"{min(seconds):.2f} to {max(seconds):.2f}"
            rows.append((f"{sigma:g}", readout, score, f"{100 * exact:.2f}", time_range))
    return [
        "`Pipeline(KSMTransformer(n_components=16), LogisticRegression())` on 1,600 half moons, accuracy on 1,600 new "
        "ones, 5 seeds. Exact features span the whole kernel matrix (target: within 1 point, at most 3 s).",
        "",
        *table(["sigma", "readout", "accuracy in %", "exact kernel features", "seconds"], rows),
    ]


def digits() -> list[str]:
    """The section about digits: raw pixels, default classifier. A sigma of 24 is four deviations of the pixels."""
    x, labels = load_digits(return_X_y=True)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    rows = []
    cases = [(n, sigma) for n in (50, 100, 200) for sigma in (16.0, 24.0, 36.0)]
    for n, sigma in tqdm(cases, desc="digits", unit="case"):
        scores = []
        for name in ("Nystroem", *READOUTS):
            accuracies = []
            for seed in range(3):
                features = (
                    Nystroem(gamma=0.5 / sigma**2, n_components=n, random_state=seed)
                    if name == "Nystroem"
                    else KSMTransformer(
                        n, kernel_params={"sigma": sigma}, bound="paper", readout=name, random_state=seed
                    )
                )
                pipeline = make_pipeline(features, LogisticRegression(max_iter=2000))
                accuracies.append(cross_val_score(pipeline, x, labels, cv=folds).mean())
            scores.append(f"{100 * np.mean(accuracies):.2f} ± {100 * np.std(accuracies):.2f}")
        rows.append((str(n), f"{sigma:g}", *scores))
    return [
        "Accuracy in % of logistic regression on features of scikit-learn's digits (raw pixels) with a Gaussian "
        "kernel: five folds, mean and standard deviation over 3 seeds.",
        "",
        *table(["n", "sigma", "`Nystroem`", *(f"`KSMTransformer`, {name}" for name in READOUTS)], rows),
    ]


def stream() -> list[str]:
    """The section about streams."""
    x, _ = make_moons(1600, noise=0.1, random_state=0)
    kernel, points = GaussianKernel(0.3), torch.tensor(x)
    order = np.random.RandomState(0).randint(len(x), size=16_000)
    rows = []
    for n in (16, 64):
        transformer = KSMTransformer(n, kernel_params={"sigma": 0.3}, bound="paper", readout="neural", random_state=0)
        started, seen = time.perf_counter(), 0
        for target in (100, 1000, 4000, 16_000):
            for index in order[seen:target]:
                transformer.partial_fit(x[index : index + 1])
            seen = target
            error = float(kernel_nrmse(kernel, points, torch.tensor(transformer.transform(x)))[0])
            milliseconds = 1000 * (time.perf_counter() - started) / seen
            rows.append((str(n), f"{target:,}", f"{error:.3f}", f"{milliseconds:.2f}"))
    return [
        "`KSMTransformer.partial_fit` with one sample at a time on half moons, sigma 0.3. The kernel NRMSE is that of "
        "the network's own responses (`fit` reaches 0.176 with 16 neurons and 0.140 with 64).",
        "",
        *table(["n", "samples", "NRMSE", "ms per sample"], rows),
    ]


PARTS = {"extraction": extraction, "half_moons": half_moons, "digits": digits, "stream": stream}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure. Default: all")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("REUSE.md"), help="result file")
    options = parser.parse_args()
    versions = machine(f"{torch.get_num_threads()} threads", scikit_learn=sklearn.__version__)
    head = f"# Use of trained networks\n\n{versions}. Written by `scripts/benchmark/reuse.py`."
    for name in options.only:
        write_sections(options.output, head, {part: part for part in PARTS}, {name: PARTS[name]()})
    print(options.output.read_text())


if __name__ == "__main__":
    main()
