#!/usr/bin/env python3
"""Kernel features of real data: `KSMTransformer` compared with Nystroem features of uniform and KMeans landmarks.

Writes scripts/benchmark/FEATURES.md. Every finished cell (data set, kernel, n) is stored in runs/features, so an
interrupted run continues where it stopped. The folder KSM_DATA_DIR holds MNIST/raw, FashionMNIST/raw and
tabular/{covertype,electricity,california_housing}.npz with the array x; missing data sets are skipped.

.venv/bin/python scripts/benchmark/features.py                    about 3 hours on one core
.venv/bin/python scripts/benchmark/features.py --only errors      one part; the others are kept
.venv/bin/python scripts/benchmark/features.py --processes 2      two cells at a time, one thread each
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import sklearn
import torch
from results import machine, table, write_sections
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm import tqdm

from ksm_lightning.baselines import Nystroem
from ksm_lightning.baselines.landmarks import kmeans_centres
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.files import write_text
from ksm_lightning.kernels import Kernel, make_kernel, random_subset
from ksm_lightning.network.readout import READOUT_SAMPLE, READOUTS, LandmarkFeatures, least_squares_matrix
from ksm_lightning.sklearn import KSMTransformer

ROOT = Path(__file__).resolve().parents[2]
FIT_ROWS, HELD_OUT_ROWS = 20_000, 3000
TOLERANCE = 1.02  # an error that grows by more than this factor with more updates counts as worse

ROUNDING = 1e-9  # smaller errors are rounding: n features represent the kernel exactly

Record = dict[str, Any]


class Cell(NamedTuple):
    """One entry of the board."""

    data: str
    kernel: str
    n: int

    def __str__(self) -> str:
        return f"{self.data}, {self.kernel}, n = {self.n:,}"


# ---------------------------------------------------------------------- data and kernels


def tabular(file: str, folder: Path) -> np.ndarray:
    """Columns of a table, each with mean 0 and standard deviation 1."""
    with np.load(folder / "tabular" / file) as arrays:
        x = arrays["x"].astype(np.float64)
    return (x - x.mean(0)) / x.std(0)


def images(name: str, crop: int, folder: Path) -> np.ndarray:
    """Training images without their borders, divided by the standard deviation of all pixels."""
    from torchvision import datasets  # a slow import

    pixels = getattr(datasets, name)(str(folder), download=False).data.numpy()
    x = pixels[:, crop : 28 - crop, crop : 28 - crop].reshape(len(pixels), -1)
    return x / x.std(dtype=np.float64)


DATA: dict[str, Callable[[Path], np.ndarray]] = {
    "digits": lambda folder: load_digits().data,
    "Electricity": partial(tabular, "electricity.npz"),
    "California housing": partial(tabular, "california_housing.npz"),
    "Covertype": partial(tabular, "covertype.npz"),
    "MNIST": partial(images, "MNIST", 4),
    "Fashion-MNIST": partial(images, "FashionMNIST", 0),
}
# Name and width of a kernel; widths are in units of the median distance between two points.
KERNELS: dict[str, tuple[str, float | None]] = {
    "Gaussian 0.25": ("gaussian", 0.25),
    "Gaussian 0.5": ("gaussian", 0.5),
    "Gaussian 1": ("gaussian", 1.0),
    "Laplacian 1": ("laplacian", 1.0),
    "power cosine 3": ("power_cosine", None),
}


@cache
def points(data: str) -> tuple[Tensor, Tensor]:
    """Random rows to fit in float32 and other rows to score in float64. 80 % of a small data set is for the fit."""
    x = DATA[data](Path(os.environ.get("KSM_DATA_DIR") or Path.home() / ".cache" / "ksm_lightning"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).numpy()
    count = FIT_ROWS if len(x) >= FIT_ROWS + HELD_OUT_ROWS else int(0.8 * len(x))
    fitted, held_out = x[order[:count]], x[order[count : count + HELD_OUT_ROWS]]
    return torch.tensor(fitted, dtype=torch.float32), torch.tensor(held_out, dtype=torch.float64)


@cache
def is_available(data: str) -> bool:
    """Whether a data set can be loaded; prints one line if it cannot."""
    try:
        points(data)
    except (OSError, RuntimeError) as error:
        print(f"{data} is skipped; check KSM_DATA_DIR ({' '.join(str(error).split())})", file=sys.stderr)
        return False
    return True


def kernel_of(cell: Cell) -> Kernel:
    """The kernel with its width in input units."""
    name, width = KERNELS[cell.kernel]
    if width is None:
        return make_kernel(name, alpha=3)
    x = points(cell.data)[0]
    distances = torch.nn.functional.pdist(x[random_subset(len(x), 2000)].double())
    return make_kernel(name, sigma=width * float(distances.median()))


# ---------------------------------------------------------------------- methods

Method = Callable[[Tensor], Tensor]


def sample_of(x: Tensor) -> Tensor:
    """The rows that readouts are fitted to, the same as those of `KSMTransformer`."""
    return x[random_subset(len(x), READOUT_SAMPLE)]


def ours(kernel: Kernel, x: Tensor, n: int, **options: Any) -> KSMTransformer:
    """A fitted `KSMTransformer`, with its readout computed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is almost 0 between")  # 0.25 is narrow on purpose
        transformer = KSMTransformer(n, kernel=kernel, random_state=0, **options).fit(x.numpy())
    transformer.transform(x[:1].numpy())
    return transformer


def kmeans_least_squares(kernel: Kernel, x: Tensor, n: int) -> Method:
    """KMeans centres with the least-squares readout."""
    W = kmeans_centres(kernel, x, n, torch.Generator().manual_seed(0)).double()
    return LandmarkFeatures(kernel, W, least_squares_matrix(kernel, W, sample_of(x)))


def features_of(transformer: KSMTransformer, held_out: Tensor) -> Tensor:
    return torch.from_numpy(transformer.transform(held_out.numpy()))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Result and wall-clock time of one call."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def scores(kernel: Kernel, held_out: Tensor, features: Mapping[str, Tensor]) -> Record:
    """Kernel NRMSE of each method."""
    return dict(zip(features, kernel_nrmse(kernel, held_out, *features.values()).tolist(), strict=True))


# ---------------------------------------------------------------------- the cells of each part


def errors(cell: Cell, is_quick: bool) -> Record:
    """Errors of all methods and the seconds of two."""
    (x, held_out), kernel, n = points(cell.data), kernel_of(cell), cell.n
    few = {"updates": 20} if is_quick else {}
    default, seconds = timed(lambda: ours(kernel, x, n, **few))
    other, other_seconds = timed(lambda: kmeans_least_squares(kernel, x, n))
    features = {
        "ours": features_of(default, held_out),
        "uniform": Nystroem(kernel, n, landmarks="uniform", seed=0).fit(x).transform(held_out),
        "kmeans": other(held_out),
    }
    # The readout does not change the fit, and the neural one takes no time.
    equal = ours(kernel, x, n, n_landmarks=n, readout="neural", **few).network_
    paper = ours(kernel, x, n, bound="paper", readout="neural", **few).network_
    for label, network, readouts in (("equal", equal, READOUTS[1:]), ("paper", paper, READOUTS)):
        for readout in readouts:
            features[f"{label}_{readout}"] = LandmarkFeatures.of(network, readout, sample_of(x))(held_out)
    return scores(kernel, held_out, features) | {"seconds": seconds, "kmeans_seconds": other_seconds}


def updates(cell: Cell, is_quick: bool) -> Record:
    """Errors after few and after four times as many updates."""
    (x, held_out), kernel = points(cell.data), kernel_of(cell)
    features = {}
    for bound in ("tight", "paper"):
        for name, count in (("few", 20), ("many", 80)) if is_quick else (("few", 2000), ("many", 8000)):
            found = ours(kernel, x, cell.n, bound=bound, updates=count, batch_size=64)
            W = found.network_.W.detach().double()
            features[f"{bound}_nystroem_{name}"] = Nystroem(kernel, len(W), landmarks=W).fit(x).transform(held_out)
            features[f"{bound}_default_{name}"] = features_of(found, held_out)
            if bound == "paper":
                features[f"paper_neural_{name}"] = LandmarkFeatures.of(found.network_, "neural")(held_out)
    return scores(kernel, held_out, features)


def seconds(cell: Cell, is_quick: bool) -> Record:
    """Shortest of two fits, or the time of one fit of a large n; the methods run in turn."""
    (x, held_out), kernel, n = points(cell.data), kernel_of(cell), cell.n
    times: dict[str, list[float]] = {"ours": [], "kmeans": []}
    for _ in range(2 if n < 1024 else 1):
        default, duration = timed(lambda: ours(kernel, x, n))
        times["ours"].append(duration)
        other, duration = timed(lambda: kmeans_least_squares(kernel, x, n))
        times["kmeans"].append(duration)
    features = {"ours": features_of(default, held_out), "kmeans": other(held_out)}
    return scores(kernel, held_out, features) | {f"{name}_seconds": min(found) for name, found in times.items()}


def board(sizes: Sequence[int]) -> list[Cell]:
    """Cells of all data sets and kernels, small n first; n is at most half the rows of the fit."""
    cells = [Cell(data, kernel, n) for n in sizes for data in DATA for kernel in KERNELS]
    available = {data for data in dict.fromkeys(cell.data for cell in cells) if is_available(data)}
    return [cell for cell in cells if cell.data in available and 2 * cell.n <= len(points(cell.data)[0])]


# ---------------------------------------------------------------------- texts

ERROR_LABELS = {
    "ours": "default",
    "equal_least_squares": "n landmarks",
    "equal_nystroem": "n landmarks, nystroem",
    "paper_least_squares": "paper",
    "paper_nystroem": "paper, nystroem",
    "paper_neural": "paper, neural",
}
REFERENCES = {"uniform": "uniform Nystroem", "kmeans": "KMeans + LS"}
UPDATE_LABELS = {
    "tight_nystroem": "tight, Nystroem on W",
    "tight_default": "tight, default readout",
    "paper_nystroem": "paper, Nystroem on W",
    "paper_default": "paper, default readout",
    "paper_neural": "paper, neural",
}


def digits(value: float) -> str:
    """A number with 3 significant digits."""
    return f"{value:#.3g}".rstrip(".") if 1e-4 < abs(value) < 1000 else f"{value:.2e}"


def named(ratios: Mapping[Cell, float]) -> str:
    """Cells and their ratios, the largest first."""
    ordered = sorted(ratios, key=lambda cell: -ratios[cell])
    return "; ".join(f"{cell} ({ratios[cell]:.3f})" for cell in ordered) or "none"


def ratios_of(found: Mapping[Cell, Record], error: str, reference: str) -> dict[Cell, float]:
    """Ratios of two errors, without the cells where both are rounding."""
    pairs = {cell: (record[error], record[reference]) for cell, record in found.items()}
    return {cell: pair[0] / pair[1] for cell, pair in pairs.items() if not max(pair) < ROUNDING}


def head_of(cell: Cell) -> tuple[str, ...]:
    return cell.data, cell.kernel, f"{cell.n:,}"


def errors_text(found: Mapping[Cell, Record], cells: int) -> list[str]:
    sizes = sorted({cell.n for cell in found})
    groups = {f"n = {n}": {cell: record for cell, record in found.items() if cell.n == n} for n in sizes}
    summary, losses = [], []
    for method, label in ERROR_LABELS.items():
        for group, members in {**(groups if method == "ours" else {}), "all": found}.items():
            row = [label, group]
            for reference, name in REFERENCES.items():
                ratios = ratios_of(members, method, reference)
                lost = {cell: ratio for cell, ratio in ratios.items() if not ratio < 1}
                row += [f"{len(ratios) - len(lost)} of {len(ratios)}", f"{median(ratios.values()):.3f}"]
                if method == "ours" and group == "all":
                    losses.append(f"Cells where the default is not below {name}: {named(lost)}.")
            summary.append(row)
    columns = {"ours": "default", **REFERENCES, **ERROR_LABELS}
    rows = [
        (*head_of(cell), *(digits(record[name]) for name in (*columns, "seconds", "kmeans_seconds")))
        for cell, record in found.items()
    ]
    return [
        f"{len(found)} of {cells} cells. Kernel NRMSE on held-out points. `KSMTransformer` with its defaults, with as "
        "many landmarks as components, and with `bound='paper'`; readout least_squares unless another is named. KMeans "
        "centres have the least-squares readout. Seconds are those of a fit with its readout. Two errors below "
        f"{ROUNDING:g} are not compared.",
        "",
        *table(["", "", "below uniform", "median ratio", "below KMeans + LS", "median ratio"], summary),
        "",
        *(line for loss in losses for line in (loss, "")),
        *table(["data", "kernel", "n", *columns.values(), "s", "s, KMeans + LS"], rows),
    ]


def updates_text(found: Mapping[Cell, Record], cells: int) -> list[str]:
    ratios = {name: ratios_of(found, f"{name}_many", f"{name}_few") for name in UPDATE_LABELS}
    summary, losses = [], []
    for name, label in UPDATE_LABELS.items():
        worse = {cell: ratio for cell, ratio in ratios[name].items() if not ratio <= TOLERANCE}
        values = ratios[name].values()
        summary.append((label, f"{median(values):.3f}", f"{max(values):.3f}", str(len(worse))))
        if worse:
            losses += [f"{label}, above {TOLERANCE}: {named(worse)}.", ""]
    rows = [
        (
            *head_of(cell),
            *(
                f"{digits(record[f'{name}_few'])}, {digits(record[f'{name}_many'])} ({ratios[name].get(cell, 1.0):.3f})"
                for name in UPDATE_LABELS
            ),
        )
        for cell, record in found.items()
    ]
    return [
        f"{len(found)} of {cells} cells. Kernel NRMSE on held-out points after 2,000 and 8,000 updates with batches of "
        "64 points, and the ratio of the two. Nystroem on W has one feature per landmark.",
        "",
        *table(["", "median ratio", "largest ratio", f"cells above {TOLERANCE}"], summary),
        "",
        *losses,
        *table(["data", "kernel", "n", *UPDATE_LABELS.values()], rows),
    ]


def seconds_text(found: Mapping[Cell, Record], cells: int) -> list[str]:
    columns = {"ours_seconds": "s", "kmeans_seconds": "s, KMeans + LS", "ours": "NRMSE", "kmeans": "NRMSE, KMeans + LS"}
    rows = [
        (
            *head_of(cell),
            *(digits(record[name]) for name in columns),
            digits(record["kmeans_seconds"] / record["ours_seconds"]),
        )
        for cell, record in found.items()
    ]
    faster = [cell for cell, record in found.items() if record["ours_seconds"] < record["kmeans_seconds"]]
    return [
        f"{len(found)} of {cells} cells. A fit with its readout, the best of two in turn (n = 1,024: one). The default "
        f"`KSMTransformer` takes less time in {len(faster)} of {len(found)}.",
        "",
        *table(["data", "kernel", "n", *columns.values(), "speed-up"], rows),
    ]


# ---------------------------------------------------------------------- running and storing


class Part(NamedTuple):
    """One section of the result file."""

    title: str
    cells: Callable[[], list[Cell]]
    quick_cells: list[Cell]
    compute: Callable[[Cell, bool], Record]
    text: Callable[[Mapping[Cell, Record], int], list[str]]


QUICK = [Cell("digits", kernel, 32) for kernel in ("Gaussian 0.5", "power cosine 3")]
PARTS = {
    "errors": Part("Errors", lambda: board((32, 128, 512)), QUICK, errors, errors_text),
    "updates": Part("More updates", lambda: board((32, 128)), QUICK, updates, updates_text),
    "seconds": Part(
        "Seconds",
        lambda: [Cell("Covertype", "Gaussian 0.5", n) for n in (128, 512, 1024) if is_available("Covertype")],
        QUICK[:1],
        seconds,
        seconds_text,
    ),
}


def stored(path: Path) -> dict[Cell, Record]:
    """Finished cells of an earlier run."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {Cell(*(record.pop(name) for name in Cell._fields)): record for record in records}


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def computed(work: Callable[[Cell], Record], cells: Sequence[Cell], processes: int) -> Iterator[tuple[Cell, Record]]:
    """Cells and their records as they are finished. A cell that fails is reported and left out."""
    if processes == 1:
        tasks: Iterator[tuple[Cell, Callable[[], Record]]] = ((cell, partial(work, cell)) for cell in cells)
        with one_thread():
            yield from succeeded(tasks)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(work, cell): cell for cell in cells}
        yield from succeeded((futures[future], future.result) for future in as_completed(futures))


def succeeded(tasks: Iterator[tuple[Cell, Callable[[], Record]]]) -> Iterator[tuple[Cell, Record]]:
    for cell, task in tasks:
        try:
            record = task()
        except (ValueError, RuntimeError, FloatingPointError) as error:
            print(f"{cell} failed: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            yield cell, record


def run(name: str, folder: Path, processes: int, is_quick: bool, is_again: bool) -> Iterator[list[str]]:
    """Compute the missing cells of a part. Yields its section first with the stored cells, then after each new one."""
    part, path = PARTS[name], folder / f"{name}.jsonl"
    cells = part.quick_cells if is_quick else part.cells()
    found = {} if is_again else stored(path)
    missing = [cell for cell in cells if cell not in found]
    if len(missing) < len(cells):
        yield part.text({cell: found[cell] for cell in cells if cell in found}, len(cells))
    new = computed(partial(part.compute, is_quick=is_quick), missing, 1 if name == "seconds" else processes)
    for cell, record in tqdm(new, desc=name, total=len(missing), unit="cell"):
        found[cell] = record
        write_text(path, "".join(f"{json.dumps(key._asdict() | value)}\n" for key, value in found.items()))
        yield part.text({cell: found[cell] for cell in cells if cell in found}, len(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure. Default: all")
    parser.add_argument("--processes", type=int, default=1, help="cells at a time; seconds are always measured alone")
    parser.add_argument("--quick", action="store_true", help="digits, n = 32 and few updates, as a check of the code")
    parser.add_argument("--again", action="store_true", help="recompute stored cells")
    parser.add_argument("--folder", type=Path, help="stored cells. Default: runs/features, quick: runs/features_quick")
    parser.add_argument("--output", type=Path, help="result file. Default: FEATURES.md here, quick: in the folder")
    options = parser.parse_args()
    folder = options.folder or ROOT / "runs" / ("features_quick" if options.quick else "features")
    output = options.output or (folder if options.quick else Path(__file__).parent) / "FEATURES.md"
    versions = machine("one thread", scikit_learn=sklearn.__version__)
    head = (
        f"# Kernel features of real data\n\n{versions}. Written by `scripts/benchmark/features.py`.\n\n"
        "20,000 random rows to fit and 3,000 other rows to score; 80 % of digits and of California housing to fit. "
        "Columns of tables are standardised, images divided by the standard deviation of all pixels. Widths of kernels "
        "are in units of the median distance between two points. Seed 0."
    )
    for name in options.only:
        for section in run(name, folder, options.processes, options.quick, options.again):
            write_sections(output, head, {key: part.title for key, part in PARTS.items()}, {name: section})
    if output.exists():
        print(output.read_text())


if __name__ == "__main__":
    main()
