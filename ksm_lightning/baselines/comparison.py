"""All methods on one kernel and one data set: errors against the number of features, for several seeds.

For every number of features all representations are made first, and then scored in one walk over the kernel matrix.
What is finished is in files: a comparison that was interrupted goes on where it stopped.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.baselines import FeatureMap, KernelPCA, NeuralFourier, Nystroem, RandomFourier, SimilarityMatching
from ksm_lightning.baselines.networks import LinearSimilarityMatching, Phases
from ksm_lightning.baselines.tables import METHODS, Row, read_rows, summarise, write_rows, write_summary
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.files import write_array, write_text
from ksm_lightning.kernels import Kernel
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.learning.schedule import make_schedule
from ksm_lightning.network.initialisation import NormalInit
from ksm_lightning.network.readout import Readout

# Readouts of one and the same network.
_READOUTS: dict[str, Readout] = {"ksm": "neural", "ksm_nystroem": "nystroem", "ksm_least_squares": "least_squares"}


def applicable(kernel: Kernel) -> list[str]:
    """The methods that a kernel allows."""
    return [name for name in METHODS if kernel.has_frequencies or "fourier" not in name]


@dataclass
class Comparison:
    """A comparison in a folder: ``errors.csv`` has every run, ``summary.csv`` the seeds together.

    Args:
        kernel: The similarity.
        x: Points (samples, m) that the methods are fitted to.
        folder: Where results go, and where those of an earlier run are found.
        sizes: StepSizes of features n.
        methods: Names out of :data:`METHODS`; all that the kernel allows unless given, but for ``linear``, whose
            features approximate another kernel.
        seeds: Seeds of the methods that depend on chance.
        max_points: The error is that of all pairs of so many random points at most. Kernel PCA is fitted to these, for
            which it is the optimum; every other method to all points.
        updates: Updates of each network's adaptive schedule.
        phases: Phases of rates instead for this package's network, or one of the paper's by name.
        init_scale: Start that network at so many times ``N(0, 1)``; at data points unless given.
        fourier_features: Random features below each neuron of ``neural_fourier``; 1 is the paper's case.
        watch: Called with what is being done, the work done and all work; a fit of n features is n units of it.

    Raises:
        ValueError: If something is impossible, or the folder holds a comparison of something else.
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
    watch: Callable[[str, int, int], object] = lambda text, done, total: None
    rows: list[Row] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        allowed = applicable(self.kernel)
        others = [name for name in allowed if name != "linear"]
        self.methods = others if self.methods is None else list(self.methods)
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(f"There is no method {name!r}: choose out of {', '.join(METHODS)}.")
            if name not in allowed:
                raise ValueError(f"The method {name!r} does not exist for {self.kernel}: leave it out of `methods`.")
        if not self.methods or not self.sizes or not self.seeds:
            raise ValueError("A comparison needs at least one method, one size and one seed.")
        self.sizes = sorted(set(self.sizes))
        self.scored = self.x[random_subset(len(self.x), self.max_points).to(self.x.device)]
        if not 1 <= self.sizes[0] <= self.sizes[-1] <= len(self.scored):
            raise ValueError(
                f"`sizes` must lie between 1 and the number of points compared, {len(self.scored)}, got "
                f"{list(self.sizes)}."
            )
        largest = float(self.kernel.diag(self.scored.double()).max())
        if not largest**2 * len(self.scored) < torch.finfo(self.x.dtype).max:
            raise ValueError(
                f"Similarities up to {largest:.1e} are beyond the range of {self.x.dtype}: scale the data "
                "(--data.scaling=global or feature), or the kernel."
            )
        # What a fit would refuse is refused before there is a folder.
        make_schedule(self.phases, self.updates)
        if self.init_scale is not None:
            NormalInit(self.init_scale)
        if self.fourier_features < 1:
            raise ValueError(f"`fourier_features` must be at least 1, got {self.fourier_features}.")
        self._open()

    # ------------------------------------------------------------------ files

    @property
    def table_path(self) -> Path:
        """The file with every run."""
        return self.folder / "errors.csv"

    def _open(self) -> None:
        """Read what an earlier run has left, after making sure that it was of the same thing."""
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
                    f"The folder {self.folder} holds a comparison {what}: choose another folder, or remove that one."
                )
            self.rows = read_rows(self.table_path) if self.table_path.exists() else []
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"The folder {self.folder} holds other files: choose a new one for the comparison.")
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(identity, indent=1) + "\n")

    def missing(self, n: int) -> list[tuple[str, int]]:
        """Methods and seeds that are still to be scored for a number of features."""
        assert self.methods is not None
        done = {(row.method, row.seed) for row in self.rows if row.n == n}
        wanted = [(name, seed) for name in self.methods if name != "kernel_pca" for seed in self.seeds]
        if "kernel_pca" in self.methods and "kernel_pca" not in {name for name, _ in done}:  # chance has no part in it
            wanted.insert(0, ("kernel_pca", self.seeds[0]))
        return [job for job in wanted if job not in done]

    # ------------------------------------------------------------------ work

    def run(self) -> list[Row]:
        """Do what is missing, size by size; returns all rows."""
        missing = {n: self.missing(n) for n in self.sizes}
        self._done, self._all = 0, sum(n * len(jobs) for n, jobs in missing.items())
        for n, jobs in missing.items():
            if jobs:
                self._run_size(n, jobs)
        # Once more, for an earlier run may have been stopped before it.
        write_summary(self.folder / "summary.csv", summarise(self.rows))
        shutil.rmtree(self.folder / "features", ignore_errors=True)
        return self.rows

    def _run_size(self, n: int, jobs: Sequence[tuple[str, int]]) -> None:
        cache = self.folder / "features" / str(n)
        cache.mkdir(parents=True, exist_ok=True)
        for name, seed in jobs:
            self._text = f"n = {n}, {METHODS[name]}, seed {seed}"
            self.watch(self._text, self._done, self._all)
            if not _cached(cache, name, seed).exists():
                self._make(cache, name, n, seed)
            self._done += n
        self.watch(f"n = {n}, kernel error", self._done, self._all)
        features = {job: np.load(_cached(cache, *job), mmap_mode="c") for job in jobs}
        sound = {job: torch.from_numpy(y).to(self.scored) for job, y in features.items() if y.shape[1] == n}
        errors = dict.fromkeys(jobs, math.nan)
        if sound:
            errors |= dict(zip(sound, kernel_nrmse(self.kernel, self.scored, *sound.values()).tolist(), strict=True))
        for name, seed in jobs:
            seconds = float(np.load(_seconds(cache, name, seed)))
            self.rows.append(Row(name, n, seed, errors[name, seed], seconds))
        write_rows(self.table_path, self.rows)
        write_summary(self.folder / "summary.csv", summarise(self.rows))
        shutil.rmtree(cache)

    def _make(self, cache: Path, name: str, n: int, seed: int) -> None:
        """Fit a method and put the features of the points compared into a file; for a network those of all readouts."""
        started = time.perf_counter()
        features: dict[str, Tensor | None] = {name: None}
        try:
            if name in _READOUTS:
                network = self._network(n, seed).fit(self.x)
                features = {key: network.features(self.scored, readout) for key, readout in _READOUTS.items()}
            else:
                features = {name: self._features(name, n, seed)}
        # The others can still be compared.
        except (FloatingPointError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            features = dict.fromkeys(_READOUTS if name in _READOUTS else [name])
        seconds = time.perf_counter() - started
        for key, y in features.items():
            write_array(_seconds(cache, key, seed), np.asarray(seconds))
            y = self.scored.new_empty(len(self.scored), 0) if y is None else y
            write_array(_cached(cache, key, seed), y.cpu().numpy())

    def _features(self, name: str, n: int, seed: int) -> Tensor:
        if name == "kernel_pca":
            return KernelPCA(self.kernel, n, seed=seed).fit_transform(self.scored)
        return self._map(name, n, seed).fit(self.x).transform(self.scored)

    def _network(self, n: int, seed: int) -> SimilarityMatching:
        return SimilarityMatching(
            self.kernel, n, updates=self.updates, phases=self.phases, init_scale=self.init_scale, seed=seed,
            progress=self._ticker(),
        )  # fmt: skip

    def _map(self, name: str, n: int, seed: int) -> FeatureMap:
        kind, _, choice = name.partition("_")
        if kind == "nystroem":
            return Nystroem(self.kernel, n, landmarks=choice, seed=seed)
        if name == "random_fourier":
            return RandomFourier(self.kernel, n, seed=seed)
        options: dict[str, Any] = {"updates": self.updates, "seed": seed, "progress": self._ticker()}
        if name == "linear":
            return LinearSimilarityMatching(n, **options)
        return NeuralFourier(self.kernel, n, num_features=self.fourier_features * n, **options)

    def _ticker(self) -> Callable[[int], None]:
        done = 0

        def tick(updates: int) -> None:
            nonlocal done
            done += updates
            if done % 100 == 0:
                self.watch(f"{self._text}, update {done:,}", self._done, self._all)

        return tick


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
        raise ValueError(f"{path} is damaged: remove the folder, or choose another one.") from error
    return found if isinstance(found, dict) else {}
