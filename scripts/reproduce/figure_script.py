"""What the figure scripts share: stored results, figures drawn from them, and statements of the paper."""

import argparse
import inspect
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from ksm_lightning import figures
from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.files import draft_of, write_png
from ksm_lightning.learning import PaperPhases, Phase
from ksm_lightning.learning.schedule import NAMED_PHASES

ROOT = Path(__file__).resolve().parents[2]
PICTURES = Path(__file__).parent / "figures"
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Workspace:
    """Where results are stored, and whether they are small."""

    is_quick: bool = False
    """Whether everything is computed in a small version, as a check of the code."""

    @property
    def folder(self) -> Path:
        """Folder of the stored results."""
        return ROOT / "runs" / ("reproduce_quick" if self.is_quick else "reproduce")

    @property
    def pictures(self) -> Path:
        """Folder of the figures. Those of a quick run stay outside the repository."""
        return self.folder / "figures" if self.is_quick else PICTURES


@dataclass(frozen=True)
class Claim:
    """A measurable statement of the paper and what was measured here."""

    statement: str
    """The statement, shortened."""
    measured: str
    """Our numbers."""
    holds: bool | None
    """None if it holds in part: for some sizes or seeds, or as far as the row says."""
    remark: str = ""
    """The reason why it does not hold, or other information."""


@dataclass(frozen=True)
class Script:
    """One figure of the paper."""

    name: str
    compute: Callable[[Workspace], Arrays]
    draw: Callable[[Arrays], dict[str, Figure]]
    claims: Callable[[Arrays], list[Claim]]
    minutes: float
    """Time on two cores, given the networks that other scripts have trained."""
    needs_mnist: bool = False

    def path(self, workspace: Workspace) -> Path:
        """The file of its results."""
        return workspace.folder / f"{self.name}.npz"

    def results(self, workspace: Workspace) -> Arrays:
        """The stored results. They are computed first if they are missing."""
        path = self.path(workspace)
        if not path.exists():
            save(path, self.compute(workspace))
        return load(path)

    def run(self, workspace: Workspace) -> Arrays:
        """Compute missing results and draw the figures; returns the results."""
        arrays = self.results(workspace)
        for name, figure in self.draw(arrays).items():
            picture = workspace.pictures / f"{name}.png"
            write_png(picture, figures.render(figure))
            print(f"Figure: {picture}")
        return arrays

    def main(self) -> None:
        """Run the command line of the script."""
        doc = inspect.getdoc(sys.modules["__main__"]) or ""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--quick", action="store_true", help="a small version; its figures are written to runs/")
        parser.add_argument("--again", action="store_true", help="recompute stored results")
        options = parser.parse_args()
        workspace = Workspace(options.quick)
        try:
            if options.again:
                self.path(workspace).unlink(missing_ok=True)
                shutil.rmtree(workspace.folder / f"{self.name}_pieces", ignore_errors=True)
            arrays = self.run(workspace)
        except (ValueError, OSError, FloatingPointError) as error:
            sys.exit(f"{self.name}: error: {' '.join(str(error).split())}")
        for claim in self.claims(arrays):
            verdict = {True: "holds", False: "does not hold", None: "holds in part"}[claim.holds]
            print(f"- {claim.statement}: {claim.measured} ({verdict})")


# ---------------------------------------------------------------------- stored results


def save(path: Path, arrays: Arrays) -> None:
    """Write results to a file, completely or not at all."""
    with draft_of(path) as draft, draft.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path) -> Arrays:
    """Read results that :func:`save` wrote.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged: delete it to compute it again.") from error


def piece(workspace: Workspace, script: str, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """A part of a script's results in its own file, so that an interrupted script continues where it stopped."""
    path = workspace.folder / f"{script}_pieces" / f"{name}.npz"
    if not path.exists():
        save(path, {"piece": make()})
    return load(path)["piece"]


# ---------------------------------------------------------------------- data and schedules


def mnist_points(workspace: Workspace) -> torch.Tensor:
    """All 70,000 standardised digits (samples, 400), or about 1,500 of them in a quick run."""
    x = CroppedMNISTDataModule().train_points.data
    assert isinstance(x, torch.Tensor)
    return x[:: len(x) // 1500] if workspace.is_quick else x


def named_phases(workspace: Workspace, name: PaperPhases) -> list[Phase]:
    """Phases by name; a quick run has 200 updates per phase."""
    return [replace(phase, updates=200) if workspace.is_quick else phase for phase in NAMED_PHASES[name]]


# ---------------------------------------------------------------------- texts and panels


def extent_of(found: Sequence[Any], wanted: Sequence[Any]) -> bool | None:
    """True if a statement holds for all cases, None for some, False for none."""
    return True if len(found) == len(wanted) else None if found else False


def many(values: Iterable[float], digits: int) -> str:
    """Numbers with a fixed number of digits, separated by commas."""
    return ", ".join(f"{value:.{digits}f}" for value in values)


def percent(value: float) -> str:
    """A fraction in percent."""
    return f"{100 * value:.1f} %"


def panel_letter(axes: Any, letter: str) -> None:
    """Put the paper's letter of a panel before its title."""
    axes.set_title(f"({letter}) {axes.get_title()}")


def image_rows(images: dict[str, np.ndarray], title: str) -> Figure:
    """Vectors as small square images, one block per name, side by side."""
    figure = figures.new_figure(4 * len(images), 3.6, columns=len(images))
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.84, wspace=0.04)
    for index, (name, vectors) in enumerate(images.items(), start=1):
        side = round(vectors.shape[1] ** 0.5)
        axes = figure.add_subplot(1, len(images), index)
        figures.image_grid_panel(axes, vectors, (side, side), name)
    figure.suptitle(title)
    return figure
