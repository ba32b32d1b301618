"""Measurements for the report of a run, computed from its checkpoint and data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.baselines.comparison import OnStep
from ksm_lightning.baselines.kernel_pca import KernelPCA
from ksm_lightning.baselines.methods import METHODS, READOUT_METHODS, NetworkOptions
from ksm_lightning.data import KSMDataModule
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.evaluation.linear_probe import Probe, linear_probe
from ksm_lightning.evaluation.plausibility import compare_points
from ksm_lightning.evaluation.portrait import portrait_arrays
from ksm_lightning.kernels import Kernel
from ksm_lightning.kernels.limits import TILE
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.learning import sample_size
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.functional import linearised_responses
from ksm_lightning.network.readout import READOUTS, Encoder, make_encoder
from ksm_lightning.network.readout_matrices import READOUT_SAMPLE
from ksm_lightning.report.diagnosis import Errors, Evidence, Finding, diagnose
from ksm_lightning.report.health import Health, examine
from ksm_lightning.report.pictures import PAIRED, Picture, draw_curves, draw_network, draw_ranking
from ksm_lightning.runs import metric_names
from ksm_lightning.runs.finished_run import FinishedRun, Series

# Seeds of other methods, and of draws of labelled samples.
_SEEDS = range(3)
_LABELS_PER_CLASS = (1, 10, 100, 1000)
_OTHER_METHODS = ("nystroem_uniform", "nystroem_kmeans")
_STEPS = ("network", "errors of other methods", "linear probes", "pictures", "diagnosis", "page")


class Probes(NamedTuple):
    """Accuracies of linear probes."""

    labels_per_class: list[int]
    found: dict[str, list[Probe]]  # one per number of labels, by probed features: `x` or the name of a readout
    is_test_learned: bool  # whether the network was also trained on the test points, without their labels
    has_test_points: bool  # if False, the accuracy is that of the validation labels

    @property
    def typical(self) -> int:
        """Index of 100 labels per class, or of the largest number below."""
        return max(index for index, labels in enumerate(self.labels_per_class) if labels <= 100)


@dataclass(frozen=True)
class Report:
    """The content of the page."""

    run: FinishedRun
    model: KernelSimilarityMatching
    data_name: str
    points: int  # number of training points
    scored: int  # number of points in the kernel errors
    findings: list[Finding]
    errors: dict[str, list[float]] = field(default_factory=dict)  # by method, one per seed; empty if not finite
    probes: Probes | None = None  # None without labels
    pictures: dict[str, list[Picture]] = field(default_factory=dict)  # by section of the page
    num_features: int | None = None  # of the readouts other than neural; None if it is the number of neurons

    @property
    def updates(self) -> int:
        """Number of updates made."""
        return int(self.run.checkpoint["global_step"])


def load(
    run: FinishedRun, device: str, data: KSMDataModule | None = None
) -> tuple[KernelSimilarityMatching, KSMDataModule]:
    """Load the network of a run on a device, and its data or the given one. Missing or damaged files are errors."""
    model = KernelSimilarityMatching.load_from_checkpoint(run.existing_checkpoint(), device)
    data = run.data(data)
    try:
        data.prepare_data()
        data.setup()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"The data of the run is missing: {str(error).rstrip('.')}. Restore the file; relative paths start at the "
            "current folder."
        ) from error
    model.network.check_input(data.train_points.slice(0, 1))
    return model, data


def measure(
    run: FinishedRun,
    model: KernelSimilarityMatching,
    data: KSMDataModule,
    max_points: int,
    on_step: OnStep = lambda text, done, total: None,
    num_features: int | None = None,
) -> Report:
    """Measure a run.

    Args:
        run: The run.
        model: Its module, on the device to compute on.
        data: Its data, loaded.
        max_points: Maximum number of points in the kernel errors. The time of kernel PCA grows with its cube.
        on_step: Called at the start of each step with a description, the steps done and the number of steps.
        num_features: Number of features of the readouts other than neural. Default: the number of neurons, which the
            other methods always have.
    """

    def start(step: str) -> None:
        on_step(step, _STEPS.index(step), len(_STEPS))

    start("network")
    points = data.train_points
    x = points.take(random_subset(len(points), max_points)).to(model.network.W)
    y = model(x)
    curves = run.scalars()
    health = examine(model.network, x[: sample_size(model.network.num_landmarks)], y)
    if num_features == model.network.num_neurons:
        num_features = None
    errors: dict[str, list[float]] = {}
    with_n_features: dict[str, list[float]] = {}
    probes, pictures = None, {"curves": draw_curves(curves, model.schedule.phase_ends)}
    if health.is_finite:
        samples = {name: _like(x, data.readout_sample(name)) for name in READOUTS}
        encoders: dict[str, Encoder] = {
            name: make_encoder(model.network, name, sample, None if name == "neural" else num_features)
            for name, sample in samples.items()
        }
        start("errors of other methods")
        pool = points.take(random_subset(len(points), READOUT_SAMPLE, seed=1)).to(x)
        errors = compare_methods(model.network.kernel, x, pool, {name: encode(x) for name, encode in encoders.items()})
        with_n_features = dict(errors)
        if num_features is not None:
            y_nystroem = make_encoder(model.network, "nystroem", samples["nystroem"])(x)
            with_n_features["ksm_nystroem"] = [kernel_nrmse(model.network.kernel, x, y_nystroem).item()]
        start("linear probes")
        probes = probe(data, encoders, x)
        start("pictures")
        arrays = portrait_arrays(model.network, x[_spread(len(x), TILE)])
        if data.image_shape is not None:  # filters of many pixels need many points
            arrays["linearised"] = _linearised(model, pool)
        paired = {name: encoders[name] for name in PAIRED}
        pairs = paired_similarities(model.network.kernel, x[_spread(len(x), TILE)], paired)
        pictures |= draw_network(arrays, pairs, model.network.kernel, data.image_shape)
        pictures["comparison"] = draw_ranking(errors)
    start("diagnosis")
    findings = diagnose(_evidence(run, model, health, with_n_features, curves.get(metric_names.TRAIN_ENERGY), x))
    start("page")
    name = type(data).__name__.removesuffix("DataModule")
    return Report(run, model, name, len(points), len(x), findings, errors, probes, pictures, num_features)


def _like(x: Tensor, sample: Tensor | None) -> Tensor | None:
    return None if sample is None else sample.to(x)


def _spread(count: int, most: int) -> slice:
    """A slice of at most ``most`` of ``count`` points, evenly spaced."""
    return slice(None, None, -(-count // most))


def _linearised(model: KernelSimilarityMatching, x: Tensor) -> np.ndarray:
    _, y = model.network.align_signs(model.features(x))
    return linearised_responses(x, y).cpu().numpy()


def paired_similarities(kernel: Kernel, x: Tensor, encoders: Mapping[str, Encoder]) -> dict[str, np.ndarray]:
    """Similarities (samples, samples) of points: of the inputs as ``f``, and of each readout by its name."""
    features = {name: encode(x) for name, encode in encoders.items()}
    similarities = {"f": kernel(x, x), **{name: y @ y.mT for name, y in features.items()}}
    return {name: value.cpu().numpy() for name, value in similarities.items()}


def compare_methods(kernel: Kernel, x: Tensor, pool: Tensor, features: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Kernel errors of the network's readouts and of other methods with n features, one per seed.

    Args:
        kernel: The similarity.
        x: Points (samples, m) to score. Kernel PCA is fitted to them, for which it is optimal.
        pool: Points (samples, m) that Nystroem selects landmarks from.
        features: Features (samples, n) of ``x`` by readout. The number of the first, n, is that of the other methods.
    """
    n = next(iter(features.values())).shape[1]
    scored = [(READOUT_METHODS[readout].name, y) for readout, y in features.items()]
    # With more neurons than points, one feature per point is exact.
    scored.append(("kernel_pca", KernelPCA(kernel, min(n, len(x))).fit_transform(x)))
    for name in _OTHER_METHODS:
        for seed in _SEEDS:
            method = METHODS[name].make(kernel, min(n, len(pool)), seed, NetworkOptions())
            scored.append((name, method.fit(pool).transform(x)))
    errors: dict[str, list[float]] = {}
    for (name, _), error in zip(scored, kernel_nrmse(kernel, x, *(y for _, y in scored)).tolist(), strict=True):
        errors.setdefault(name, []).append(error)
    return errors


def probe(data: KSMDataModule, encoders: Mapping[str, Encoder], like: Tensor) -> Probes | None:
    """Linear probes of the inputs and of every readout for several numbers of labels; None without labels.

    Args:
        data: The data, loaded.
        encoders: Functions from inputs to features, by readout.
        like: A tensor with the device and dtype to compute in.
    """
    sets = data.probe_sets()
    if sets is None:
        return None
    train, validation, test = ((sets[name][0].to(like), sets[name][1]) for name in ("train", "validation", "test"))
    smallest = int(torch.unique(train[1], return_counts=True)[1].min())
    most = min(smallest, _LABELS_PER_CLASS[-1])
    counts = sorted({*(count for count in _LABELS_PER_CLASS if count <= most), most})
    probed: dict[str, Encoder] = {"x": lambda x: x, **encoders}
    found = {
        name: [linear_probe(train, validation, test, per_class=count, encode=encode, seeds=_SEEDS) for count in counts]
        for name, encode in probed.items()
    }
    has_test_points = data.test_points is not None and data.test_labels is not None
    return Probes(counts, found, bool(getattr(data, "include_test", False)), has_test_points)


def _evidence(
    run: FinishedRun,
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
        similarity=compare_points(network.kernel, x[_spread(len(x), TILE)]),
        errors=Errors(mean["ksm"], mean["ksm_nystroem"], mean["nystroem_uniform"]) if mean else None,
        energies=[value for step, value in zip(*energy, strict=True) if step > start] if energy else (),
        updates=run.checkpoint["global_step"],
        planned=schedule.total_updates,
        is_adaptive=schedule.is_natural,
        starts_at_data=model.hparams["init"] == "data",
        rate_factor=model.learner.rate_factor,
        sigma=network.kernel.params().get("sigma"),
        is_tight=network.bound == "tight",
    )
