"""Networks that learn online with local rules, as feature maps: this package's network and two predecessors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ksm_lightning.baselines.feature_map import FeatureMap
from ksm_lightning.baselines.fourier import RandomFourier
from ksm_lightning.kernels import Kernel, LinearKernel
from ksm_lightning.learning import PaperPhases, Phase, make_schedule, train
from ksm_lightning.network import NETWORKS, Bound, check_bound, functional
from ksm_lightning.network.initialisation import NormalInit
from ksm_lightning.network.readout import LandmarkFeatures, Readout, check_readout

Phases = Sequence[Phase | Mapping[str, Any]] | PaperPhases


class SimilarityMatching(FeatureMap):
    """The paper's network: landmarks, gains and lateral weights, learned batch by batch.

    Args:
        kernel: The similarity.
        n_components: Number of neurons n.
        readout: ``neural`` for the network's responses, or ``nystroem`` or ``least_squares`` of its landmarks.
        bound: ``paper``, or ``tight``, whose responses are determined up to a rotation only.
        num_landmarks: Number of landmarks of the tight bound, at least n. Default: n.
        updates: Number of updates of the adaptive schedule. Default: 5,000; 25 to 200 with the tight bound.
        phases: Phases of the paper's rule instead, or the name of a paper schedule.
        init_scale: Initialise W with ``init_scale * N(0, 1)``. Default: at data points.
        batch_size: Points per batch. Default: 64; 1,024 with the tight bound.
        progress: Called with the number of updates since the last call.
        seed: Seed of the initialisation and the batches.

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> y = SimilarityMatching(GaussianKernel(), n_components=4, updates=50).fit_transform(torch.randn(100, 2))
        >>> y.shape
        torch.Size([100, 4])
    """

    def __init__(
        self,
        kernel: Kernel,
        n_components: int,
        *,
        readout: Readout = "neural",
        bound: Bound = "paper",
        num_landmarks: int | None = None,
        updates: int | None = None,
        phases: Phases | None = None,
        init_scale: float | None = None,
        batch_size: int | None = None,
        progress: Callable[[int], object] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(kernel, n_components, seed=seed)
        self.readout = check_readout(readout)
        NETWORKS[check_bound(bound)].check_sizes(n_components, num_landmarks)  # raises an error now instead of in `fit`
        make_schedule(phases, updates, bound)
        self.bound = bound
        self.num_landmarks = num_landmarks
        self.updates = updates
        self.phases = phases
        self.init_scale = init_scale
        self.batch_size = batch_size
        self.progress = progress

    def _fit(self, x: Tensor, generator: torch.Generator) -> None:
        self.network_ = train(
            self.kernel, x, self.n_components, make_schedule(self.phases, self.updates, self.bound), bound=self.bound,
            num_landmarks=self.num_landmarks, init=None if self.init_scale is None else NormalInit(self.init_scale),
            batch_size=self.batch_size, seed=self.seed, progress=self.progress,
        )  # fmt: skip
        factor = functional.factorise(self.network_.L, self.network_.ridge)  # NaN if not positive definite
        if not all(bool(value.isfinite().all()) for value in (*self.network_.parameters(), factor)):
            raise FloatingPointError(
                f"The network of {self.n_components} neurons diverged: leave out `phases`, or lower its rates."
            )
        self._sample = x
        self._encoders: dict[str, LandmarkFeatures] = {}

    @torch.no_grad()
    def features(self, x: Tensor, readout: str) -> Tensor:
        """Features (samples, n) of the fitted network for any readout, in the dtype of the points."""
        name = check_readout(readout)
        return self._in_blocks(x, lambda part: self._encode(part, name))

    def _encode(self, x: Tensor, readout: Readout) -> Tensor:
        if readout == "neural":
            return self.network_.forward(x.to(self.network_.W))
        if readout not in self._encoders:
            self._encoders[readout] = LandmarkFeatures.of(self.network_, readout, self._sample)
        return self._encoders[readout](x)

    def _features(self, x: Tensor) -> Tensor:
        return self._encode(x, self.readout)


class LinearSimilarityMatching(SimilarityMatching):
    """Similarity matching of inner products ``x_s . x_t`` (Pehlevan, Sengupta and Chklovskii, 2018).

    Args:
        n_components: Number of neurons n.
        kwargs: Options of :class:`SimilarityMatching`.
    """

    def __init__(self, n_components: int, **kwargs: Any) -> None:
        super().__init__(LinearKernel(), n_components, **kwargs)


class NeuralFourier(FeatureMap):
    """A linear similarity matching network on random Fourier features (Bahroun, Hunsicker and Soltoggio, 2017).

    With as many features as neurons, the network is at best as good as the random features; the KSM paper evaluates
    these. With more features than neurons, it learns their principal components and has a smaller error.

    Args:
        kernel: A kernel that has random Fourier features.
        n_components: Number of neurons n.
        num_features: Number of random features. Default: the number of neurons.
        seed: Seed of the features, the initialisation and the batches.
        kwargs: Options of :class:`SimilarityMatching`, except ``readout``.
    """

    def __init__(
        self, kernel: Kernel, n_components: int, *, num_features: int | None = None, seed: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(kernel, n_components, seed=seed)
        self.num_features = n_components if num_features is None else num_features
        self.fourier = RandomFourier(kernel, self.num_features, seed=seed)
        self.matching = LinearSimilarityMatching(n_components, seed=seed, **kwargs)

    def _fit(self, x: Tensor, generator: torch.Generator) -> None:
        self.matching.fit(self.fourier.fit_transform(x))

    def _features(self, x: Tensor) -> Tensor:
        return self.matching.transform(self.fourier.transform(x))
