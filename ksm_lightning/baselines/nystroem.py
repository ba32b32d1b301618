"""Nystroem's approximation with landmarks of any origin."""

import torch
from torch import Tensor

from ksm_lightning.baselines.feature_map import FeatureMap, check_enough
from ksm_lightning.baselines.landmarks import LANDMARK_SELECTORS
from ksm_lightning.kernels import Kernel
from ksm_lightning.network.readout import landmark_features, nystroem_matrix


class Nystroem(FeatureMap):
    """Features ``f(x, W) (f(W,W)^+)^(1/2)``: exact between landmarks, and on their span.

    Args:
        kernel: The similarity.
        n_components: Landmarks n, each of which makes a feature.
        landmarks: How they are chosen: ``uniform``, ``kmeans``, ``leverage`` (recursive ridge leverage scores),
            ``cholesky`` (randomly pivoted Cholesky) or ``gradient`` (moved downhill in the trace of the residual); or
            the landmarks themselves (n, m), such as a network's W.
        seed: Seed of the choice.

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
                f"There is no choice of landmarks {landmarks!r}: it is one of {', '.join(LANDMARK_SELECTORS)}, or a tensor."
            )
        self.landmarks = landmarks

    def _fit(self, x: Tensor, generator: torch.Generator) -> None:
        if isinstance(self.landmarks, Tensor):
            if self.landmarks.shape != (self.n_components, x.shape[1]):
                raise ValueError(
                    f"Landmarks must have the shape ({self.n_components}, {x.shape[1]}), got "
                    f"{tuple(self.landmarks.shape)}."
                )
            if not bool(self.landmarks.isfinite().all()):
                raise ValueError("Landmarks must be finite, but some are NaN or infinity.")
            W = self.landmarks.detach().to(x.device)
        else:
            check_enough("Nystroem's approximation", self.n_components, len(x))
            W = LANDMARK_SELECTORS[self.landmarks](self.kernel, x, self.n_components, generator)
        self.landmarks_ = W.double()
        self.matrix_ = nystroem_matrix(self.kernel, self.landmarks_)

    def _features(self, x: Tensor) -> Tensor:
        return landmark_features(self.kernel, x, self.landmarks_, self.matrix_)
