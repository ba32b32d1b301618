"""What the benchmarks on real data share: data sets, kernels, and cells that are computed once and stored.

The folder KSM_DATA_DIR holds MNIST/raw, FashionMNIST/raw and, in tabular/, covertype.npz, electricity.npz and
california_housing.npz with arrays x and y; missing data sets are skipped. The other data sets are scikit-learn's own.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor
from tqdm import tqdm

from ksm_lightning.baselines.landmarks import kmeans_centres
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.files import write_text
from ksm_lightning.kernels import Kernel, make_kernel, random_subset
from ksm_lightning.network.readout import LandmarkFeatures
from ksm_lightning.network.readout_matrices import least_squares_matrix
from ksm_lightning.sklearn import KSMTransformer

Record = dict[str, Any]
Arrays = tuple[np.ndarray, np.ndarray]


class Cell(NamedTuple):
    """One entry of a board."""

    data: str
    kernel: str
    n: int

    def __str__(self) -> str:
        return f"{self.data}, {self.kernel}, n = {self.n:,}"


# ---------------------------------------------------------------------- data and kernels


def standardised(x: np.ndarray) -> np.ndarray:
    """Columns with mean 0 and standard deviation 1; a constant column becomes 0."""
    x = x.astype(np.float64)
    deviation = x.std(0)
    return (x - x.mean(0)) / np.where(deviation > 0, deviation, 1)


def tabular(file: str, folder: Path) -> Arrays:
    with np.load(folder / "tabular" / file) as arrays:
        return standardised(arrays["x"]), arrays["y"]


def images(name: str, crop: int, folder: Path) -> Arrays:
    """Training images without their borders, divided by the standard deviation of all pixels."""
    from torchvision import datasets as vision  # a slow import

    found = getattr(vision, name)(str(folder), download=False)
    pixels = found.data.numpy()
    x = pixels[:, crop : 28 - crop, crop : 28 - crop].reshape(len(pixels), -1)
    return x / x.std(dtype=np.float64), found.targets.numpy()


def small(name: str, folder: Path) -> Arrays:
    """A table of scikit-learn."""
    found = getattr(datasets, f"load_{name}")()
    return standardised(found.data), found.target


def digits(folder: Path) -> Arrays:
    found = datasets.load_digits()
    return found.data, found.target


DATA: dict[str, Callable[[Path], Arrays]] = {
    "digits": digits,
    "Electricity": partial(tabular, "electricity.npz"),
    "California housing": partial(tabular, "california_housing.npz"),
    "Covertype": partial(tabular, "covertype.npz"),
    "MNIST": partial(images, "MNIST", 4),
    "Fashion-MNIST": partial(images, "FashionMNIST", 0),
    "breast cancer": partial(small, "breast_cancer"),
    "wine": partial(small, "wine"),
    "iris": partial(small, "iris"),
    "diabetes": partial(small, "diabetes"),
}
LARGER = tuple(DATA)[:6]
REGRESSION = ("California housing", "diabetes")
RIVAL_SAMPLE = 10_000
# Name and width of a kernel; widths are in units of the median distance between two points.
KERNELS: dict[str, tuple[str, float | None]] = {
    "Gaussian 0.25": ("gaussian", 0.25),
    "Gaussian 0.5": ("gaussian", 0.5),
    "Gaussian 1": ("gaussian", 1.0),
    "Laplacian 1": ("laplacian", 1.0),
    "power cosine 3": ("power_cosine", None),
}


class Rows(NamedTuple):
    """Rows of a data set (rows, m) with their labels or target values (rows,)."""

    x: Tensor
    y: Tensor


@cache
def split_rows(data: str, fit_rows: int, held_out_rows: int, seed: int = 0) -> tuple[Rows, Rows]:
    """Random rows to fit in float32, and other rows to score in float64. 80 % of a small data set is for the fit."""
    x, y = DATA[data](Path(os.environ.get("KSM_DATA_DIR") or Path.home() / ".cache" / "ksm_lightning"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).numpy()
    count = fit_rows if len(x) >= fit_rows + held_out_rows else int(0.8 * len(x))
    fitted, held_out = order[:count], order[count : count + held_out_rows]
    if data not in REGRESSION:
        y = np.unique(y, return_inverse=True)[1]
    labels = torch.tensor(y)
    return (
        Rows(torch.tensor(x[fitted], dtype=torch.float32), labels[fitted]),
        Rows(torch.tensor(x[held_out], dtype=torch.float64), labels[held_out]),
    )


@cache
def is_available(data: str) -> bool:
    """Whether a data set can be loaded; prints one line if it cannot."""
    try:
        split_rows(data, 1000, 1000)
    except (OSError, RuntimeError) as error:
        print(f"{data} is skipped; check KSM_DATA_DIR ({' '.join(str(error).split())})", file=sys.stderr)
        return False
    return True


def median_distance(x: Tensor) -> float:
    distances = torch.nn.functional.pdist(x[random_subset(len(x), 2000)].double())
    return float(distances.median())


def kernel_for(name: str, x: Tensor) -> Kernel:
    """One of :data:`KERNELS`, with its width in units of the points x (rows, m)."""
    kernel, width = KERNELS[name]
    return make_kernel(kernel, alpha=3) if width is None else make_kernel(kernel, sigma=width * median_distance(x))


def cells_of(names: Sequence[str], sizes: Sequence[int], rows: Callable[[str], int]) -> list[Cell]:
    """Cells of available data sets and all kernels, small n first; n is at most half the rows of the fit."""
    available = [data for data in names if is_available(data)]
    cells = [Cell(data, kernel, n) for n in sizes for data in available for kernel in KERNELS]
    return [cell for cell in cells if 2 * cell.n <= rows(cell.data)]


# ---------------------------------------------------------------------- methods


def sample_of(x: Tensor) -> Tensor:
    """The rows that readouts of other landmarks are fitted to, twice as many as those of `KSMTransformer`."""
    return x[random_subset(len(x), RIVAL_SAMPLE)]


def ours(kernel: Kernel, x: Tensor, n: int, **options: Any) -> KSMTransformer:
    """A fitted `KSMTransformer`, with its readout computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # narrow kernels and the paper's network are measured on purpose
        transformer = KSMTransformer(n, kernel=kernel, random_state=0, **options).fit(x.numpy())
        transformer.transform(x[:1].numpy())
    return transformer


def kmeans_least_squares(kernel: Kernel, x: Tensor, n: int) -> LandmarkFeatures:
    """KMeans centres with the least-squares readout."""
    W = kmeans_centres(kernel, x, n, torch.Generator().manual_seed(0)).double()
    return LandmarkFeatures(kernel, W, least_squares_matrix(kernel, W, sample_of(x)))


def features_of(transformer: KSMTransformer, x: Tensor) -> Tensor:
    return torch.from_numpy(transformer.transform(x.numpy()))


def scores(kernel: Kernel, held_out: Tensor, features: Mapping[str, Tensor]) -> Record:
    """Kernel NRMSE of each method."""
    return dict(zip(features, kernel_nrmse(kernel, held_out, *features.values()).tolist(), strict=True))


# ---------------------------------------------------------------------- running and storing


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


def run_cells(
    name: str, work: Callable[[Cell], Record], cells: Sequence[Cell], path: Path, processes: int, is_again: bool
) -> Iterator[dict[Cell, Record]]:
    """Compute the cells that are not stored in ``path`` yet. Yields what is finished, at first and after each cell."""
    found = {} if is_again else stored(path)
    missing = [cell for cell in cells if cell not in found]
    if len(missing) < len(cells):
        yield {cell: found[cell] for cell in cells if cell in found}
    for cell, record in tqdm(computed(work, missing, processes), desc=name, total=len(missing), unit="cell"):
        found[cell] = record
        write_text(path, "".join(f"{json.dumps(key._asdict() | value)}\n" for key, value in found.items()))
        yield {cell: found[cell] for cell in cells if cell in found}


# ---------------------------------------------------------------------- texts

ROUNDING = 1e-9  # smaller errors are rounding: n features represent the kernel exactly


def short(value: float) -> str:
    """A number with 3 significant digits."""
    return f"{value:#.3g}".rstrip(".") if 1e-4 < abs(value) < 1000 else f"{value:.2e}"


def named(ratios: Mapping[Cell, float]) -> str:
    """Cells and their ratios, the largest first."""
    ordered = sorted(ratios, key=lambda cell: -ratios[cell])
    return "; ".join(f"{cell} ({ratios[cell]:.3f})" for cell in ordered) or "none"


def ratios_of(found: Mapping[Cell, Record], error: str, reference: str) -> dict[Cell, float]:
    """Ratios of two errors, without the cells where both are rounding, or where one was not measured."""
    pairs = {
        cell: (record[error], record[reference]) for cell, record in found.items() if {error, reference} <= {*record}
    }
    return {cell: pair[0] / pair[1] for cell, pair in pairs.items() if not max(pair) < ROUNDING}


def head_of(cell: Cell) -> tuple[str, ...]:
    return cell.data, cell.kernel, f"{cell.n:,}"
