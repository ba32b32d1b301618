"""Everything that the page of a run shows, measured anew from its checkpoint and data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.baselines import KernelPCA, Nystroem
from ksm_lightning.baselines.kernel_pca import Solver
from ksm_lightning.callbacks.run_figures import figure_data
from ksm_lightning.data import KSMDataModule
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.evaluation.linear_probe import Probe, linear_probe
from ksm_lightning.kernels import Kernel
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.learning.train import sample_size
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.functional import align_signs, linearised_responses
from ksm_lightning.network.readout import READOUTS, make_encoder
from ksm_lightning.report.diagnosis import Errors, Evidence, Finding, diagnose
from ksm_lightning.report.health import Health, compare_points, examine
from ksm_lightning.report.pictures import PAIRED, Picture, draw_curves, draw_network, draw_ranking
from ksm_lightning.runs.finished_run import Run, Series

# Kernel PCA decomposes the whole matrix up to so many points, 20 s of one core; beyond that it is randomised.
_EXACT_UP_TO = 4000
# Points that Nystroem chooses its landmarks from: KMeans on more takes minutes at n = 800.
_FIT_POINTS = 10_000
_SEEDS = range(3)
_DRAWN_POINTS, _DRAWN_PAIRS, _COMPARED_POINTS = 1600, 500, 1000
_LABELS_PER_CLASS = (1, 10, 100, 1000)
# Draws of labelled samples; a thousand of a class differ little from another thousand, and take long.
_DRAWS, _DRAWS_OF_MANY, _MANY = 5, 1, 1000
_NAMES = {"neural": "ksm", "nystroem": "ksm_nystroem", "least_squares": "ksm_least_squares"}

Reader = Callable[[Tensor], Tensor]
Watch = Callable[[str], object]
SECTIONS = 6
"""How often :func:`measure` says what it is about to do."""


class Probes(NamedTuple):
    """Accuracies of linear probes."""

    labels_per_class: list[int]
    found: dict[str, list[Probe]]
    """One for each number of labels, by what was probed: x, or the name of a readout."""
    is_test_learned: bool
    """Whether the representation has seen the test points in training, without their labels."""
    has_test_points: bool
    """Whether there are test points at all; else the points that selected the penalty are reported on."""

    @property
    def typical(self) -> int:
        """The place of 100 labels a class, or of the most there are."""
        return max(place for place, labels in enumerate(self.labels_per_class) if labels <= 100)


@dataclass(frozen=True)
class Report:
    """What the page shows.

    Args:
        run: The run.
        model: Its network.
        data_name: What the data is called.
        points: Training points.
        scored: Points that errors are taken over.
        findings: The diagnosis.
        errors: The kernel's NRMSE by method, one for each seed; empty where the network is not finite.
        probes: Accuracies of linear probes; None without labels.
        pictures: All pictures, by the section that they belong to.
    """

    run: Run
    model: KernelSimilarityMatching
    data_name: str
    points: int
    scored: int
    findings: list[Finding]
    errors: dict[str, list[float]] = field(default_factory=dict)
    probes: Probes | None = None
    pictures: dict[str, list[Picture]] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """Updates that were made."""
        return int(self.run.checkpoint["global_step"])


def load(run: Run, device: str) -> tuple[KernelSimilarityMatching, KSMDataModule]:
    """The network of a run on a device, and its data.

    Raises:
        FileNotFoundError: If the checkpoint or the data is gone.
        ValueError: If a file is damaged, or data and network do not fit.
    """
    model = KernelSimilarityMatching.load_from_checkpoint(run.existing_checkpoint(), device)
    data = run.data()
    try:
        data.prepare_data()
        data.setup()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"The data of the run is gone: {str(error).rstrip('.')}. Put it back; a relative path starts at the folder "
            "that `ksm` is called in."
        ) from error
    model.network.check_input(data.train_points.slice(0, 1))
    return model, data


def measure(
    run: Run,
    model: KernelSimilarityMatching,
    data: KSMDataModule,
    max_points: int,
    watch: Watch = lambda text: None,
) -> Report:
    """Measure a run.

    Args:
        run: The run.
        model: Its network, on the device to compute on.
        data: Its data, loaded.
        max_points: Points that errors are taken over, at most; kernel PCA takes the cube of their number.
        watch: Told what is about to be done.
    """
    watch("network")
    points = data.train_points
    x = points.take(random_subset(len(points), max_points)).to(model.network.W)
    y = model(x)
    curves = run.scalars()
    health = examine(model.network, x[: sample_size(model.network.num_neurons)], y)
    errors: dict[str, list[float]] = {}
    probes, pictures = None, {"curves": draw_curves(curves, model.schedule.phase_ends)}
    if health.is_finite:
        readers: dict[str, Reader] = {
            name: make_encoder(model.network, name, _like(x, data.readout_sample(name))) for name in READOUTS
        }
        watch("errors of other methods")
        pool = points.take(random_subset(len(points), _FIT_POINTS, seed=1)).to(x)
        errors = compare_methods(model.network.kernel, x, pool, {name: read(x) for name, read in readers.items()})
        watch("linear probes")
        probes = probe(data, readers, x)
        watch("pictures")
        drawn = figure_data(model, x[_spread(len(x), _DRAWN_POINTS)])
        if data.image_shape is not None:  # filters of many pixels are noise unless many points are seen
            drawn["linearised"] = _linearised(model, pool)
        drawn_readers = {name: readers[name] for name in PAIRED}
        pairs = figure_pairs(model.network.kernel, x[_spread(len(x), _DRAWN_PAIRS)], drawn_readers)
        pictures |= draw_network(drawn, pairs, model.network.kernel, data.image_shape)
        pictures["comparison"] = draw_ranking(errors)
    watch("diagnosis")
    findings = diagnose(_evidence(run, model, health, errors, curves.get("train/energy"), x))
    watch("page")
    name = type(data).__name__.removesuffix("DataModule")
    return Report(run, model, name, len(points), len(x), findings, errors, probes, pictures)


def _like(x: Tensor, sample: Tensor | None) -> Tensor | None:
    return None if sample is None else sample.to(x)


def _spread(count: int, most: int) -> slice:
    """At most ``most`` of ``count`` points, evenly spread."""
    return slice(None, None, -(-count // most))


def _linearised(model: KernelSimilarityMatching, x: Tensor) -> np.ndarray:
    y = model.features(x)
    if model.network.kernel.is_odd:
        y = align_signs(model.network.W.detach(), y)[1]
    return linearised_responses(x, y).cpu().numpy()


def figure_pairs(kernel: Kernel, x: Tensor, readers: Mapping[str, Reader]) -> dict[str, np.ndarray]:
    """Similarities (samples, samples) of points: of the inputs as ``f``, and of each readout by its name."""
    features = {name: read(x) for name, read in readers.items()}
    similarities = {"f": kernel(x, x), **{name: y @ y.mT for name, y in features.items()}}
    return {name: value.cpu().numpy() for name, value in similarities.items()}


def compare_methods(kernel: Kernel, x: Tensor, pool: Tensor, features: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The kernel's NRMSE of the network's readouts and of other methods with as many features, one for each seed.

    Args:
        kernel: The similarity.
        x: Points (samples, m) that all are scored on; kernel PCA is fitted to them, and so is the optimum for them.
        pool: Points (samples, m) that Nystroem chooses its landmarks from.
        features: Features (samples, n) of ``x`` by the name of the readout.
    """
    n = next(iter(features.values())).shape[1]
    solver: Solver = "exact" if len(x) <= _EXACT_UP_TO else "randomised"
    scored = [(_NAMES[name], y) for name, y in features.items()]
    # With more neurons than points every point is a feature, and nothing is left to be wrong.
    scored.append(("kernel_pca", KernelPCA(kernel, min(n, len(x)), solver=solver).fit_transform(x)))
    for landmarks in ("uniform", "kmeans"):
        for seed in _SEEDS:
            method = Nystroem(kernel, min(n, len(pool)), landmarks=landmarks, seed=seed)
            scored.append((f"nystroem_{landmarks}", method.fit(pool).transform(x)))
    errors: dict[str, list[float]] = {}
    for (name, _), error in zip(scored, kernel_nrmse(kernel, x, *(y for _, y in scored)).tolist(), strict=True):
        errors.setdefault(name, []).append(error)
    return errors


def probe(data: KSMDataModule, readers: Mapping[str, Reader], like: Tensor) -> Probes | None:
    """Linear probes on the inputs and on every readout, with few and many labels a class; None without labels.

    Args:
        data: The data, loaded.
        readers: Functions from inputs to features, by the name of the readout.
        like: A tensor of the device and dtype to compute in.
    """
    sets = data.probe_sets()
    if sets is None:
        return None
    train, validation, test = ((sets[name][0].to(like), sets[name][1]) for name in ("train", "validation", "test"))
    smallest = int(torch.unique(train[1], return_counts=True)[1].min())
    most = min(smallest, _LABELS_PER_CLASS[-1])
    counts = sorted({*(count for count in _LABELS_PER_CLASS if count <= most), most})
    encoders: dict[str, Reader] = {"x": lambda x: x, **readers}
    found = {
        name: [
            linear_probe(
                train, validation, test, per_class=count, encode=encode,
                seeds=range(_DRAWS if count < _MANY else _DRAWS_OF_MANY),
            )
            for count in counts
        ]
        for name, encode in encoders.items()
    }  # fmt: skip
    has_test_points = data.test_points is not None and data.test_labels is not None
    return Probes(counts, found, bool(getattr(data, "include_test", False)), has_test_points)


def _evidence(
    run: Run,
    model: KernelSimilarityMatching,
    health: Health,
    errors: Mapping[str, Sequence[float]],
    energy: Series | None,
    x: Tensor,
) -> Evidence:
    network, schedule = model.network, model.schedule
    start = max((end for end in schedule.phase_ends if end < run.checkpoint["global_step"]), default=0)
    mean = {name: sum(values) / len(values) for name, values in errors.items()}
    return Evidence(
        num_neurons=network.num_neurons,
        ridge=network.ridge,
        health=health,
        similarity=compare_points(network.kernel, x[_spread(len(x), _COMPARED_POINTS)]),
        errors=Errors(mean["ksm"], mean["ksm_nystroem"], mean["nystroem_uniform"]) if mean else None,
        energies=[value for step, value in zip(*energy, strict=True) if step > start] if energy else (),
        updates=run.checkpoint["global_step"],
        planned=schedule.total_updates,
        is_adaptive=schedule.is_natural,
        starts_at_data=model.hparams["init"] == "data",
        rate_factor=run.checkpoint["ksm_lightning"]["rate_factor"],
        sigma=network.kernel.params().get("sigma"),
    )
