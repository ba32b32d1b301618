"""The registry of methods, read by the comparison, its tables, the figures and the report.

To add a method, write a :class:`FeatureMap` and add one :class:`Method` to :data:`METHODS`. Nystroem methods come from
:data:`ksm_lightning.baselines.landmarks.LANDMARK_SELECTORS` and need no entry here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ksm_lightning.baselines.feature_map import FeatureMap
from ksm_lightning.baselines.fourier import RandomFourier
from ksm_lightning.baselines.kernel_pca import KernelPCA
from ksm_lightning.baselines.landmarks import LANDMARK_SELECTORS
from ksm_lightning.baselines.networks import LinearSimilarityMatching, NeuralFourier, Phases, SimilarityMatching
from ksm_lightning.baselines.nystroem import Nystroem
from ksm_lightning.kernels import Kernel
from ksm_lightning.network.readout import Readout


@dataclass(frozen=True)
class NetworkOptions:
    """Options of the methods that train a network.

    Args:
        updates: Number of updates of the adaptive schedule. Default: 5,000.
        phases: Phases of the paper's rule instead, for the kernel similarity matching network only.
        init_scale: Initialise that network's W with ``init_scale * N(0, 1)``. Default: at data points.
        fourier_features: Random features per neuron of ``neural_fourier``.
        progress: Called with the number of updates since the last call.
    """

    updates: int | None = None
    phases: Phases | None = None
    init_scale: float | None = None
    fourier_features: int = 1
    progress: Callable[[int], object] | None = None


class LineStyle(NamedTuple):
    """How Matplotlib draws a method."""

    color: str
    line: str
    marker: str


@dataclass(frozen=True)
class Method:
    """One method of the comparison.

    Args:
        name: Name in options and files.
        label: Name in tables and figures.
        style: Line style in figures.
        make: Creates the feature map from (kernel, n, seed, options).
        readout: Set for the readouts of the kernel similarity matching network, which share one training.
        is_optimum: True for kernel PCA: fitted to the scored points themselves, and independent of the seed.
        needs_frequencies: Whether the kernel must have random Fourier features.
        is_default: Whether a comparison includes the method by default.
    """

    name: str
    label: str
    style: LineStyle
    make: Callable[[Kernel, int, int, NetworkOptions], FeatureMap]
    readout: Readout | None = None
    is_optimum: bool = False
    needs_frequencies: bool = False
    is_default: bool = True

    def supports(self, kernel: Kernel) -> bool:
        """Whether the method exists for this kernel."""
        return kernel.has_frequencies or not self.needs_frequencies


def _nystroem(selector: str) -> Method:
    _, label, color, marker = LANDMARK_SELECTORS[selector]
    return Method(
        f"nystroem_{selector}",
        f"Nystroem, {label}",
        LineStyle(color, "-", marker),
        lambda kernel, n, seed, options: Nystroem(kernel, n, landmarks=selector, seed=seed),
    )


def _network(name: str, label: str, style: LineStyle, readout: Readout) -> Method:
    def make(kernel: Kernel, n: int, seed: int, options: NetworkOptions) -> FeatureMap:
        return SimilarityMatching(
            kernel, n, readout=readout, updates=options.updates, phases=options.phases, init_scale=options.init_scale,
            progress=options.progress, seed=seed,
        )  # fmt: skip

    return Method(name, label, style, make, readout=readout)


def _make_neural_fourier(kernel: Kernel, n: int, seed: int, options: NetworkOptions) -> FeatureMap:
    features = options.fourier_features * n
    return NeuralFourier(
        kernel, n, num_features=features, updates=options.updates, seed=seed, progress=options.progress
    )


# This package's network is red, the optimum black.
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "kernel_pca",
            "kernel PCA (optimum)",
            LineStyle("black", "-", "o"),
            lambda kernel, n, seed, options: KernelPCA(kernel, n, seed=seed),
            is_optimum=True,
        ),
        *map(_nystroem, LANDMARK_SELECTORS),
        Method(
            "random_fourier",
            "random Fourier",
            LineStyle("#e08a00", "-", "x"),
            lambda kernel, n, seed, options: RandomFourier(kernel, n, seed=seed),
            needs_frequencies=True,
        ),
        Method(
            "neural_fourier",
            "neural Fourier",
            LineStyle("#e08a00", ":", "+"),
            _make_neural_fourier,
            needs_frequencies=True,
        ),
        Method(
            "linear",
            "linear similarity matching",
            LineStyle("#7a5230", "-", "*"),
            lambda kernel, n, seed, options: LinearSimilarityMatching(
                n, updates=options.updates, seed=seed, progress=options.progress
            ),
            is_default=False,  # its features approximate another kernel
        ),
        _network("ksm", "network", LineStyle("#d81f2a", "--", "o"), "neural"),
        _network("ksm_nystroem", "Nystroem on the network's W", LineStyle("#d81f2a", "-", "s"), "nystroem"),
        _network(
            "ksm_least_squares", "least squares on the network's W", LineStyle("#f08a90", "-", "d"), "least_squares"
        ),
    )
}
"""All methods by name, in the order of the tables."""

READOUT_METHODS: dict[str, Method] = {
    method.readout: method for method in METHODS.values() if method.readout is not None
}
"""The methods that are readouts of the kernel similarity matching network, by readout."""
