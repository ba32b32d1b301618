"""Networks that learn online by local rules, as feature maps: this package's own, and the two it descends from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ksm_lightning.baselines.feature_map import FeatureMap
from ksm_lightning.baselines.fourier import RandomFourier
from ksm_lightning.kernels import Kernel, LinearKernel
from ksm_lightning.learning.schedule import PaperPhases, Phase, make_schedule
from ksm_lightning.learning.train import train
from ksm_lightning.network import functional
from ksm_lightning.network.initialisation import NormalInit
from ksm_lightning.network.readout import Readout, check_readout, landmark_features, readout_matrix

Phases = Sequence[Phase | Mapping[str, Any]] | PaperPhases


class SimilarityMatching(FeatureMap):
    """The paper's network: landmarks, gains and lateral weights learned from one batch after the other.

    Args:
        kernel: The similarity.
        n_components: Neurons n.
        readout: ``neural``, the network's own responses, or ``nystroem`` or ``least_squares`` of its landmarks.
        updates: Length of the adaptive schedule; 5,000 unless given.
        phases: Phases of rates instead, or the name of one of the paper's.
        init_scale: Start W at so many times ``N(0, 1)``; at data points unless given.
        batch_size: Points a batch.
        progress: Called with the number of updates made since the last call.
        seed: Seed of start and batches.

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
        updates: int | None = None,
        phases: Phases | None = None,
        init_scale: float | None = None,
        batch_size: int = 64,
        progress: Callable[[int], object] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(kernel, n_components, seed=seed)
        self.readout = check_readout(readout)
        make_schedule(phases, updates)  # refuses what is impossible now, and not only in `fit`
        self.updates = updates
        self.phases = phases
        self.init_scale = init_scale
        self.batch_size = batch_size
        self.progress = progress

    def _fit(self, x: Tensor, generator: torch.Generator) -> None:
        self.network_ = train(
            self.kernel, x, self.n_components, make_schedule(self.phases, self.updates),
            init=None if self.init_scale is None else NormalInit(self.init_scale),
            batch_size=self.batch_size, seed=self.seed, progress=self.progress,
        )  # fmt: skip
        factor = functional.factorise(self.network_.L, self.network_.ridge)  # NaN where no response exists
        if not all(bool(value.isfinite().all()) for value in (*self.network_.parameters(), factor)):
            raise FloatingPointError(
                f"The network of {self.n_components} neurons diverged: leave out `phases`, whose rates are too large "
                "here, or lower them."
            )
        self._sample = x
        self._matrices: dict[str, Tensor] = {}

    @torch.no_grad()
    def features(self, x: Tensor, readout: str) -> Tensor:
        """Features (samples, n) by any readout of the fitted network, in the dtype of the points.

        Raises:
            ValueError: If there was no :meth:`fit`, or there is no such readout.
        """
        name = check_readout(readout)
        return self._in_blocks(x, lambda part: self._read(part, name))

    def _read(self, x: Tensor, readout: Readout) -> Tensor:
        network = self.network_
        if readout == "neural":
            y: Tensor = network(x.to(network.W))
            return y
        if readout not in self._matrices:
            self._matrices[readout] = readout_matrix(network, readout, self._sample)
        return landmark_features(network.kernel, x, network.W.detach().double(), self._matrices[readout])

    def _features(self, x: Tensor) -> Tensor:
        return self._read(x, self.readout)


class LinearSimilarityMatching(SimilarityMatching):
    """Similarity matching of inner products ``x_s . x_t`` (Pehlevan, Sengupta and Chklovskii, 2018), the ancestor.

    Args:
        n_components: Neurons n.
        kwargs: As for :class:`SimilarityMatching`.
    """

    def __init__(self, n_components: int, **kwargs: Any) -> None:
        super().__init__(LinearKernel(), n_components, **kwargs)


class NeuralFourier(FeatureMap):
    """Random Fourier features, then a linear similarity-matching network (Bahroun, Hunsicker and Soltoggio, 2017).

    The paper evaluates the random features alone, as the best that the network can do with as many features as neurons.
    With more features than neurons it does better: it learns the principal components of the features.

    Args:
        kernel: A kernel that has random Fourier features.
        n_components: Neurons n.
        num_features: Random features below them; as many as neurons unless given.
        seed: Seed of features, start and batches.
        kwargs: ``updates``, ``phases``, ``init_scale``, ``batch_size`` and ``progress`` of :class:`SimilarityMatching`.
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
