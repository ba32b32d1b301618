"""The Nystroem approximation with any landmarks."""

import torch
from torch import Tensor

from ksm_lightning.baselines.feature_map import FeatureMap, check_enough
from ksm_lightning.baselines.landmarks import LANDMARK_SELECTORS
from ksm_lightning.kernels import Kernel
from ksm_lightning.network.readout import LandmarkFeatures
from ksm_lightning.network.readout_matrices import nystroem_matrix


class Nystroem(FeatureMap):
    """Features ``f(x, W) (f(W,W)^+)^(1/2)``. The kernel is exact between landmarks and on their span.

    Args:
        kernel: The similarity.
        n_components: Number of landmarks n, and of features.
        landmarks: A selector from :data:`~ksm_lightning.baselines.landmarks.LANDMARK_SELECTORS`: ``uniform``,
            ``kmeans``, ``leverage`` (recursive ridge leverage scores), ``cholesky`` (randomly pivoted Cholesky) or
            ``gradient`` (L-BFGS on the trace of the residual); or the landmarks (n, m), such as a network's W.
        seed: Seed of the selector.

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> y = Nystroem(GaussianKernel(), n_components=3).fit_transform(x)
        >>> torch.allclose(y @ y.mT, GaussianKernel()(x, x), atol=1e-6)
        True
    """

    def __init__(
        self, kernel: Kernel, n_components: int, *, landmarks: str | Tensor = "uniform", seed: int = 0
    ) -> None:
        super().__init__(kernel, n_components, seed=seed)
        is_known = landmarks in LANDMARK_SELECTORS if isinstance(landmarks, str) else isinstance(landmarks, Tensor)
        if not is_known:
            raise ValueError(
                f"`landmarks` must be one of {', '.join(LANDMARK_SELECTORS)}, or a tensor, got {landmarks!r}."
            )
        self.landmarks = landmarks

    def _fit(self, x: Tensor, generator: torch.Generator) -> None:
        if isinstance(self.landmarks, Tensor):
            if self.landmarks.shape != (self.n_components, x.shape[1]):
                raise ValueError(
                    f"`landmarks` must have shape ({self.n_components}, {x.shape[1]}), got "
                    f"{tuple(self.landmarks.shape)}."
                )
            if not bool(self.landmarks.isfinite().all()):
                raise ValueError("`landmarks` must be finite, but contains NaN or infinity.")
            W = self.landmarks.detach().to(x.device)
        else:
            check_enough("The Nystroem approximation", self.n_components, len(x))
            W = LANDMARK_SELECTORS[self.landmarks].select(self.kernel, x, self.n_components, generator)
        self.encoder_ = LandmarkFeatures(self.kernel, W.double(), nystroem_matrix(self.kernel, W))

    @property
    def landmarks_(self) -> Tensor:
        """Landmarks (n, m), in float64."""
        return self.encoder_.W

    def _features(self, x: Tensor) -> Tensor:
        return self.encoder_(x)
