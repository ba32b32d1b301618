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
    """Options of the methods that train a network; see :class:`~ksm_lightning.baselines.comparison.Comparison`."""

    updates: int | None = None
    phases: Phases | None = None
    init_scale: float | None = None
    fourier_features: int = 1
    progress: Callable[[int], object] | None = None  # called with the number of updates since the last call


Make = Callable[[Kernel, int, int, NetworkOptions], FeatureMap]
"""Creates a feature map from (kernel, n, seed, options)."""


class LineStyle(NamedTuple):
    """How Matplotlib draws a method."""

    color: str
    line: str
    marker: str


@dataclass(frozen=True)
class Method:
    """One method of the comparison."""

    name: str  # in options and files
    label: str  # in tables and figures
    style: LineStyle
    make: Make
    readout: Readout | None = None  # of the paper's network; its readouts share one training
    is_optimum: bool = False  # True for kernel PCA: fitted to the scored points, and independent of the seed
    needs_frequencies: bool = False  # whether the kernel must have random Fourier features
    is_default: bool = True  # whether a comparison includes the method by default

    def supports(self, kernel: Kernel) -> bool:
        """Whether the method exists for this kernel."""
        return kernel.has_frequencies or not self.needs_frequencies


def _nystroem(selector: str) -> Method:
    _, label, color, marker = LANDMARK_SELECTORS[selector]

    def make(kernel: Kernel, n: int, seed: int, options: NetworkOptions) -> FeatureMap:
        return Nystroem(kernel, n, landmarks=selector, seed=seed)

    return Method(f"nystroem_{selector}", f"Nystroem, {label}", LineStyle(color, "-", marker), make)


def _network(name: str, label: str, style: LineStyle, readout: Readout) -> Method:
    def make(kernel: Kernel, n: int, seed: int, options: NetworkOptions) -> FeatureMap:
        return SimilarityMatching(
            kernel, n, readout=readout, updates=options.updates, phases=options.phases, init_scale=options.init_scale,
            progress=options.progress, seed=seed,
        )  # fmt: skip

    return Method(name, label, style, make, readout)


def _tight(name: str, label: str, style: LineStyle, readout: Readout, landmarks_per_feature: int) -> Method:
    def make(kernel: Kernel, n: int, seed: int, options: NetworkOptions) -> FeatureMap:
        return SimilarityMatching(
            kernel, n, bound="tight", num_landmarks=landmarks_per_feature * n, readout=readout,
            progress=options.progress, seed=seed,
        )  # fmt: skip

    return Method(name, label, style, make)


def _linear(kernel: Kernel, n: int, seed: int, options: NetworkOptions) -> FeatureMap:
    return LinearSimilarityMatching(n, updates=options.updates, seed=seed, progress=options.progress)


def _neural_fourier(kernel: Kernel, n: int, seed: int, options: NetworkOptions) -> FeatureMap:
    features, updates = options.fourier_features * n, options.updates
    return NeuralFourier(kernel, n, num_features=features, updates=updates, seed=seed, progress=options.progress)


def _fourier(kernel: Kernel, n: int, seed: int, options: NetworkOptions) -> FeatureMap:
    return RandomFourier(kernel, n, seed=seed)


def _kernel_pca(kernel: Kernel, n: int, seed: int, options: NetworkOptions) -> FeatureMap:
    return KernelPCA(kernel, n, seed=seed)


_ALL = (
    Method("kernel_pca", "kernel PCA (optimum)", LineStyle("black", "-", "o"), _kernel_pca, is_optimum=True),
    *map(_nystroem, LANDMARK_SELECTORS),
    Method("random_fourier", "random Fourier", LineStyle("#e08a00", "-", "x"), _fourier, needs_frequencies=True),
    Method("neural_fourier", "neural Fourier", LineStyle("#e08a00", ":", "+"), _neural_fourier, needs_frequencies=True),
    # Not a default, because it approximates another kernel.
    Method("linear", "linear similarity matching", LineStyle("#7a5230", "-", "*"), _linear, is_default=False),
    _network("ksm", "network", LineStyle("#d81f2a", "--", "o"), "neural"),
    _network("ksm_nystroem", "Nystroem on the network's W", LineStyle("#d81f2a", "-", "s"), "nystroem"),
    _network("ksm_least_squares", "least squares on the network's W", LineStyle("#f08a90", "-", "d"), "least_squares"),
    _tight("ksm_tight", "tight network", LineStyle("#7b1fa2", "--", "o"), "neural", 1),
    _tight("ksm_compressed", "ours: n features of 2n landmarks", LineStyle("#7b1fa2", "-", "s"), "least_squares", 2),
)
METHODS: dict[str, Method] = {method.name: method for method in _ALL}
"""All methods by name, in the order of the tables."""
READOUT_METHODS: dict[str, Method] = {method.readout: method for method in _ALL if method.readout is not None}
"""The readouts of the kernel similarity matching network."""
