"""Comparisons of methods in the figure scripts: run, stored as arrays, and read back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from figure_script import Arrays, Workspace, many
from tqdm import tqdm

from ksm_lightning import figures
from ksm_lightning.baselines import METHODS, Comparison
from ksm_lightning.baselines.tables import Row, Summary, summarise
from ksm_lightning.kernels import Kernel

Entries = dict[str, dict[int, Summary]]
"""Summaries by method and number of features."""


def run_comparison(
    workspace: Workspace, name: str, kernel: Kernel, x: torch.Tensor, sizes: Sequence[int], **options: Any
) -> Arrays:
    """Run a comparison in its own folder; returns the errors of all seeds as ``name/method/n``."""
    with tqdm(desc=name, unit="n") as bar:

        def on_step(text: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(text, refresh=False)
            bar.update(done - bar.n)

        rows = Comparison(kernel, x, workspace.folder / name, sizes, on_step=on_step, **options).run()
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(f"{name}/{row.method}/{row.n}", []).append(row.nrmse)
    return {key: np.array(values) for key, values in errors.items()}


def entries_of(arrays: Arrays, name: str) -> Entries:
    """Summaries of a comparison."""
    rows = [
        Row(method, int(n), seed, float(error), 0.0)
        for key, values in arrays.items()
        for its_name, method, n in ([*key.split("/"), "", ""][:3],)
        if its_name == name
        for seed, error in enumerate(values)
    ]
    found: Entries = {}
    for entry in summarise(rows):
        found.setdefault(entry.method, {})[entry.n] = entry
    return found


def where(sizes: Sequence[int]) -> str:
    """Numbers of features as text."""
    return f"n = {', '.join(map(str, sizes))}" if sizes else "no n"


def means_of(entries: Entries, method: str, sizes: Sequence[int], digits: int) -> str:
    """Mean errors of a method as text."""
    return many((entries[method][n].mean for n in sizes), digits)


def curves_of(arrays: Arrays, name: str) -> dict[str, figures.Curve]:
    """Curves of a comparison by method."""
    found = entries_of(arrays, name)
    return {method: figures.curve(list(found[method].values())) for method in METHODS if method in found}


def failures(arrays: Arrays, name: str, method: str = "ksm") -> tuple[int, int]:
    """Number of runs that diverged or ended worse than without any features, and number of all runs."""
    errors = np.concatenate([values for key, values in arrays.items() if key.startswith(f"{name}/{method}/")])
    return int((~(errors <= 1)).sum()), len(errors)
