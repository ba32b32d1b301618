"""Errors of all methods on one kernel and one data set, for several numbers of features and several seeds.

For each number of features, all representations are computed first and then scored in one pass over the kernel matrix.
Finished work is stored in files, so that an interrupted comparison continues where it stopped. One process at a time
writes to a folder.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.baselines.methods import METHODS, READOUT_METHODS, NetworkOptions
from ksm_lightning.baselines.networks import Phases, SimilarityMatching
from ksm_lightning.baselines.tables import Row, read_rows, summarise, write_rows, write_summary
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.files import claimed, write_array, write_text
from ksm_lightning.kernels import Kernel
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.learning.schedule import make_schedule
from ksm_lightning.learning.units import check_range
from ksm_lightning.network.initialisation import NormalInit

OnStep = Callable[[str, int, int], object]
"""Called at the start of each step with a description, the work done so far and the total work."""


@dataclass
class Comparison:
    """A comparison stored in a folder: every run in ``errors.csv``, summaries over seeds in ``summary.csv``.

    Args:
        kernel: The similarity.
        x: Points (samples, m) that the methods are fitted to.
        folder: Folder of the results. Results of an earlier run of the same comparison are reused.
        sizes: Numbers of features n.
        methods: Names from :data:`~ksm_lightning.baselines.methods.METHODS`. Default: all that the kernel supports,
            except ``linear``, whose features approximate another kernel.
        seeds: Seeds of the random methods.
        max_points: Maximum number of random points to score; the error is over all their pairs. Kernel PCA is fitted
            to these points, for which it is optimal, and every other method to all points.
        updates: Number of updates of the adaptive schedule of the paper's network and its predecessors. Default: 5,000.
        phases: Phases of the paper's rule for this package's network, or the name of a paper schedule.
        init_scale: Initialise that network's W with ``init_scale * N(0, 1)``. Default: at data points.
        fourier_features: Random features per neuron of ``neural_fourier``; the paper uses 1.
        on_step: Called at the start of each step with a description, the work done and the total work. Fitting n
            features counts as n units of work.

    Raises:
        ValueError: If an argument is invalid, or the folder holds a different comparison.
        BlockingIOError: If another process is writing to the folder.
    """

    kernel: Kernel
    x: Tensor
    folder: Path
    sizes: Sequence[int]
    methods: Sequence[str] | None = None
    seeds: Sequence[int] = (0, 1, 2)
    max_points: int = 10_000
    updates: int | None = None
    phases: Phases | None = None
    init_scale: float | None = None
    fourier_features: int = 1
    on_step: OnStep = lambda text, done, total: None
    rows: list[Row] = field(init=False, default_factory=list)
    _is_claimed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.methods is None:
            self.methods = [name for name, one in METHODS.items() if one.is_default and one.supports(self.kernel)]
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(f"Unknown method {name!r} in `methods`: choose from {', '.join(METHODS)}.")
            if not METHODS[name].supports(self.kernel):
                raise ValueError(f"{self.kernel} does not support the method {name!r}: remove it from `methods`.")
        if not self.methods or not self.sizes or not self.seeds:
            raise ValueError("A comparison needs at least one method, one size and one seed.")
        self.sizes = sorted(set(self.sizes))
        self.scored = self.x[random_subset(len(self.x), self.max_points).to(self.x.device)]
        if not 1 <= self.sizes[0] <= self.sizes[-1] <= len(self.scored):
            raise ValueError(
                f"`sizes` must be between 1 and {len(self.scored)} (the scored points), got {list(self.sizes)}."
            )
        largest = float(self.kernel.diag(self.scored.double()).max())
        if not largest**2 * len(self.scored) < torch.finfo(self.x.dtype).max:
            raise ValueError(
                f"Similarities up to {largest:.1e} exceed the range of {self.x.dtype}: scale the data "
                "(--data.scaling=global or feature) or the kernel."
            )
        check_range(self.kernel, self.scored)
        # Errors that a fit would raise are raised before the folder is created.
        make_schedule(self.phases, self.updates)
        if self.init_scale is not None:
            NormalInit(self.init_scale)
        if self.fourier_features < 1:
            raise ValueError(f"`fourier_features` must be at least 1, got {self.fourier_features}.")
        with self.claimed():
            pass  # errors of the folder come now, not at `run`

    # ------------------------------------------------------------------ files

    @property
    def table_path(self) -> Path:
        """Path of the table of all runs."""
        return self.folder / "errors.csv"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Reserve the folder for this process, and read what others have written to it before; may be nested."""
        if self._is_claimed:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with claimed(self.folder, "wait for its end, or choose another folder."):
            self._open()
            self._is_claimed = True
            try:
                yield
            finally:
                self._is_claimed = False

    def _open(self) -> None:
        """Start a new folder, or read the results of an earlier run after checking that it was the same comparison."""
        identity = {
            "kernel": repr(self.kernel),
            "points": list(self.x.shape),
            "data": hashlib.sha256(np.ascontiguousarray(self.x.cpu().numpy()).tobytes()).hexdigest()[:16],
            "max_points": self.max_points,
            "updates": self.updates,
            "phases": self.phases if isinstance(self.phases, str) else _plain(self.phases),
            "init_scale": self.init_scale,
            "fourier_features": self.fourier_features,
        }
        path = self.folder / "comparison.json"
        if path.exists():
            found = _read_identity(path)
            differing = [name for name in identity if found.get(name) != identity[name]]
            if differing:
                name = differing[0]
                what = "of other data" if name == "data" else f"with {name}={found.get(name)}, not {identity[name]}"
                raise ValueError(
                    f"The folder {self.folder} holds a comparison {what}: choose another folder or remove this one."
                )
            self.rows = read_rows(self.table_path) if self.table_path.exists() else []
        elif any(not path.name.startswith(".") for path in self.folder.iterdir()):
            raise ValueError(f"The folder {self.folder} holds other files: choose a new folder for the comparison.")
        else:
            write_text(path, json.dumps(identity, indent=1) + "\n")

    def missing(self, n: int) -> list[tuple[str, int]]:
        """Methods and seeds without a result for n features."""
        assert self.methods is not None
        done = {(row.method, row.seed) for row in self.rows if row.n == n}
        known = {name for name, _ in done}
        optima = [name for name in self.methods if METHODS[name].is_optimum]
        wanted = [(name, self.seeds[0]) for name in optima if name not in known]  # independent of the seed
        wanted += [(name, seed) for name in self.methods if name not in optima for seed in self.seeds]
        return [job for job in wanted if job not in done]

    # ------------------------------------------------------------------ work

    def run(self) -> list[Row]:
        """Compute the missing results, size by size, and return all rows."""
        with self.claimed():
            return self._run()

    def _run(self) -> list[Row]:
        missing = {n: self.missing(n) for n in self.sizes}
        self._done, self._all = 0, sum(n * len(jobs) for n, jobs in missing.items())
        for n, jobs in missing.items():
            if jobs:
                self._run_size(n, jobs)
        # Also when nothing was missing: an earlier run may have stopped before it wrote the summary.
        write_summary(self.folder / "summary.csv", summarise(self.rows))
        shutil.rmtree(self.folder / "features", ignore_errors=True)
        return self.rows

    def _run_size(self, n: int, jobs: Sequence[tuple[str, int]]) -> None:
        cache = self.folder / "features" / str(n)
        cache.mkdir(parents=True, exist_ok=True)
        for name, seed in jobs:
            self._text = f"n = {n}, {METHODS[name].label}, seed {seed}"
            self.on_step(self._text, self._done, self._all)
            if not (_cached(cache, name, seed).exists() and _seconds(cache, name, seed).exists()):
                self._cache_features(cache, name, n, seed)
            self._done += n
        self.on_step(f"n = {n}, kernel error", self._done, self._all)
        features = {job: np.load(_cached(cache, *job), mmap_mode="c") for job in jobs}
        finite = {job: torch.from_numpy(y).to(self.scored) for job, y in features.items() if y.shape[1] == n}
        errors = dict.fromkeys(jobs, math.nan)
        if finite:
            errors |= dict(zip(finite, kernel_nrmse(self.kernel, self.scored, *finite.values()).tolist(), strict=True))
        for name, seed in jobs:
            self.rows.append(Row(name, n, seed, errors[name, seed], float(np.load(_seconds(cache, name, seed)))))
        write_rows(self.table_path, self.rows)
        write_summary(self.folder / "summary.csv", summarise(self.rows))
        shutil.rmtree(cache)

    def _cache_features(self, cache: Path, name: str, n: int, seed: int) -> None:
        """Fit a method and write the features of the scored points to a file; for a network, of all its readouts."""
        started = time.perf_counter()
        method = METHODS[name]
        readouts = {one.name: readout for readout, one in READOUT_METHODS.items()}
        features: dict[str, Tensor | None] = dict.fromkeys(readouts if method.readout is not None else [name])
        options = NetworkOptions(
            self.updates, self.phases, self.init_scale, self.fourier_features, self._report_updates()
        )
        feature_map = method.make(self.kernel, n, seed, options)
        try:
            if method.is_optimum:
                features[name] = feature_map.fit_transform(self.scored)
            elif isinstance(feature_map, SimilarityMatching) and method.readout is not None:
                feature_map.fit(self.x)
                features = {key: feature_map.features(self.scored, readout) for key, readout in readouts.items()}
            else:
                features[name] = feature_map.fit(self.x).transform(self.scored)
        except (FloatingPointError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            pass  # the method diverged; the others can still be compared
        seconds = time.perf_counter() - started
        for key, y in features.items():
            write_array(_seconds(cache, key, seed), np.asarray(seconds))
            y = self.scored.new_empty(len(self.scored), 0) if y is None else y
            write_array(_cached(cache, key, seed), y.cpu().numpy())

    def _report_updates(self) -> Callable[[int], None]:
        done = 0

        def progress(updates: int) -> None:
            nonlocal done
            done += updates
            if done % 100 == 0:
                self.on_step(f"{self._text}, update {done:,}", self._done, self._all)

        return progress


def _cached(cache: Path, method: str, seed: int) -> Path:
    return cache / f"{method}-{seed}.npy"


def _seconds(cache: Path, method: str, seed: int) -> Path:
    return cache / f"{method}-{seed}.seconds.npy"


def _plain(phases: Any) -> Any:
    return None if phases is None else [phase if isinstance(phase, dict) else vars(phase) for phase in phases]


def _read_identity(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: remove the folder or choose another one.") from error
    return found if isinstance(found, dict) else {}
