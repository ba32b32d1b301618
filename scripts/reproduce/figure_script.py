"""What the figure scripts share: results in files, pictures drawn from them, claims of the paper with our numbers."""

import argparse
import inspect
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from ksm_lightning import figures
from ksm_lightning.baselines import METHODS
from ksm_lightning.baselines.comparison import Comparison
from ksm_lightning.baselines.tables import Row, Summary, summarise
from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.files import draft_of, write_png
from ksm_lightning.kernels import Kernel

ROOT = Path(__file__).resolve().parents[2]
PICTURES = Path(__file__).parent / "figures"
# The authors' released notebook trains with these; the paper's text says 10,000 and 5,000 after the warm-up.
MNIST_PHASES = [
    {"updates": 1000, "eta_w": 0.01, "eta_q": 0.0, "eta_l": 0.1, "kernel_params": {"alpha": 1}},
    {"updates": 5000, "eta_w": 0.001, "eta_q": 0.0, "eta_l": 0.01},
    {"updates": 5000, "eta_w": 0.0001, "eta_q": 0.0, "eta_l": 0.001},
]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Place:
    """Where a run keeps its results, and how large it is."""

    quick: bool = False
    """A small version of everything, which shows that it works and nothing else."""

    @property
    def folder(self) -> Path:
        """Results, which are not computed twice."""
        return ROOT / "runs" / ("reproduce_quick" if self.quick else "reproduce")

    @property
    def pictures(self) -> Path:
        """Figures; those of a quick run stay out of the repository."""
        return self.folder / "figures" if self.quick else PICTURES


@dataclass(frozen=True)
class Claim:
    """A measurable sentence of the paper beside what was measured here."""

    words: str
    """The paper's, in short."""
    ours: str
    """Our numbers."""
    holds: bool | None
    """None where it holds in part: for some sizes or seeds, or as far as the row says."""
    why: str = ""
    """Where it does not hold, the reason; else what is worth knowing."""


@dataclass(frozen=True)
class Script:
    """One figure of the paper."""

    name: str
    compute: Callable[[Place], Arrays]
    draw: Callable[[Arrays], dict[str, Figure]]
    claims: Callable[[Arrays], list[Claim]]
    minutes: float
    """On two cores, after what other scripts have trained already."""
    needs_mnist: bool = False

    def path(self, place: Place) -> Path:
        """The file with its results."""
        return place.folder / f"{self.name}.npz"

    def results(self, place: Place) -> Arrays:
        """What was computed; it is computed now unless it is in a file."""
        path = self.path(place)
        if not path.exists():
            save(path, self.compute(place))
        return load(path)

    def run(self, place: Place) -> Arrays:
        """Compute what is not in a file yet, then draw; returns the results."""
        arrays = self.results(place)
        for name, figure in self.draw(arrays).items():
            picture = place.pictures / f"{name}.png"
            write_png(picture, figures.render(figure))
            print(f"Figure: {picture}")
        return arrays

    def main(self) -> None:
        """The command line of the script."""
        doc = inspect.getdoc(sys.modules["__main__"]) or ""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--quick", action="store_true", help="a small version; its figures go to runs/")
        parser.add_argument("--again", action="store_true", help="compute again what is in a file already")
        options = parser.parse_args()
        place = Place(options.quick)
        try:
            if options.again:
                self.path(place).unlink(missing_ok=True)
                shutil.rmtree(place.folder / f"{self.name}_pieces", ignore_errors=True)
            arrays = self.run(place)
        except (ValueError, OSError, FloatingPointError) as error:
            sys.exit(f"{self.name}: error: {' '.join(str(error).split())}")
        for claim in self.claims(arrays):
            verdict = {True: "holds", False: "does not hold", None: "holds in part"}[claim.holds]
            print(f"- {claim.words}: {claim.ours} ({verdict})")


def save(path: Path, arrays: Arrays) -> None:
    """Results of a computation, whole or not at all."""
    with draft_of(path) as draft, draft.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path) -> Arrays:
    """What :func:`save` wrote.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged: remove it, and it is computed again.") from error


def mnist_points(place: Place) -> torch.Tensor:
    """Standardised digits (samples, 400), all 70,000; some of them in a quick run."""
    x = CroppedMNISTDataModule().train_points.data
    assert isinstance(x, torch.Tensor)
    return x[:: len(x) // 1500] if place.quick else x


def piece(place: Place, script: str, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """A part of a script's results, in a file of its own: a script that was interrupted goes on where it stopped."""
    path = place.folder / f"{script}_pieces" / f"{name}.npz"
    if not path.exists():
        save(path, {"piece": make()})
    return load(path)["piece"]


def run_comparison(
    place: Place, name: str, kernel: Kernel, x: torch.Tensor, sizes: Sequence[int], **options: Any
) -> Arrays:  # fmt: skip
    """A comparison in a folder of its own, which goes on where it stopped; errors of the seeds as ``name/method/n``."""
    with tqdm(desc=name, unit="n") as bar:

        def on_step(text: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(text, refresh=False)
            bar.update(done - bar.n)

        rows = Comparison(kernel, x, place.folder / name, sizes, on_step=on_step, **options).run()
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(f"{name}/{row.method}/{row.n}", []).append(row.nrmse)
    return {key: np.array(values) for key, values in errors.items()}


def entries_of(arrays: Arrays, name: str) -> dict[str, dict[int, Summary]]:
    """Summaries of a comparison by method and n."""
    rows = [
        Row(method, int(n), seed, float(error), 0.0)
        for key, values in arrays.items()
        for its_name, method, n in ([*key.split("/"), "", ""][:3],)
        if its_name == name
        for seed, error in enumerate(values)
    ]
    found: dict[str, dict[int, Summary]] = {}
    for entry in summarise(rows):
        found.setdefault(entry.method, {})[entry.n] = entry
    return found


def failures(arrays: Arrays, name: str, method: str = "ksm") -> tuple[int, int]:
    """Runs of a comparison that diverged, or ended worse than no features at all, and all runs."""
    errors = np.concatenate([values for key, values in arrays.items() if key.startswith(f"{name}/{method}/")])
    return int((~(errors <= 1)).sum()), len(errors)


def extent_of(found: Sequence[Any], wanted: Sequence[Any]) -> bool | None:
    """Whether a claim holds for all that it is about, for none, or in part."""
    return True if len(found) == len(wanted) else None if found else False


def curves_of(arrays: Arrays, name: str, methods: Sequence[str] = tuple(METHODS)) -> dict[str, figures.Curve]:
    """The same as curves to draw."""
    found = entries_of(arrays, name)
    return {method: figures.curve(list(found[method].values())) for method in methods if method in found}


def many(values: Iterable[float], digits: int) -> str:
    """StepSizes, for people."""
    return ", ".join(f"{value:.{digits}f}" for value in values)


def where(sizes: Sequence[int]) -> str:
    """StepSizes of features, for people."""
    return f"n = {', '.join(map(str, sizes))}" if sizes else "no n"


def percent(value: float) -> str:
    """A share, for people."""
    return f"{100 * value:.1f} %"


def panel_letter(axes: Any, letter: str) -> None:
    """The paper's letter of a panel, before its title."""
    axes.set_title(f"({letter}) {axes.get_title()}")


def image_rows(images: dict[str, np.ndarray], title: str) -> Figure:
    """Vectors as small square images, a block of them for each name, side by side."""
    figure = figures.new_figure(4 * len(images), 3.6, columns=len(images))
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.84, wspace=0.04)
    for place, (name, vectors) in enumerate(images.items(), start=1):
        side = round(vectors.shape[1] ** 0.5)
        axes = figure.add_subplot(1, len(images), place)
        figures.image_grid_panel(axes, vectors, (side, side), name)
    figure.suptitle(title)
    return figure
