"""Base class of all methods: ``fit`` on points, then ``transform`` points to features."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.kernels.limits import ROWS_AT_ONCE


class FeatureMap(ABC):
    """A map from points to features y with ``y_s . y_t`` close to ``f(x_s, x_t)``.

    As in scikit-learn, the constructor only stores its arguments, :meth:`fit` returns ``self`` and learned attributes
    end in ``_``. Everything is computed on the device of the points.

    Args:
        kernel: The similarity to approximate.
        n_components: Number of features n.
        seed: Seed of a separate random stream. The same seed and points give the same features.
    """

    def __init__(self, kernel: Kernel, n_components: int, *, seed: int = 0) -> None:
        if not isinstance(kernel, Kernel):
            raise ValueError(f"`kernel` must be a Kernel, such as make_kernel('gaussian', sigma=1.0), got {kernel!r}.")
        self.kernel = kernel
        self.n_components = n_components
        self.seed = seed
        self._in_features: int | None = None

    @property
    def in_features_(self) -> int:
        """Number of input features m of the points passed to :meth:`fit`; a ValueError before it."""
        if self._in_features is None:
            raise ValueError(f"This {type(self).__name__} is not fitted: call `fit` with points first.")
        return self._in_features

    @torch.no_grad()
    def fit(self, x: Tensor) -> Self:
        """Learn from points (samples, m)."""
        if self.n_components < 1:
            raise ValueError(f"`n_components` must be at least 1, got {self.n_components}.")
        self._check_points(x)
        if x.numel() == 0:
            raise ValueError(f"{type(self).__name__} needs points to be fitted to, got the shape {tuple(x.shape)}.")
        if not bool(x.isfinite().all()):
            raise ValueError(f"{type(self).__name__} cannot be fitted to points that hold NaN or infinity.")
        self._in_features = None  # a failed fit leaves the map unfitted
        with full_precision(x.device):
            self._fit(x, torch.Generator().manual_seed(self.seed))
        self._in_features = x.shape[1]
        return self

    @torch.no_grad()
    def transform(self, x: Tensor) -> Tensor:
        """Features (samples, n) of points (samples, m), in the dtype of the points."""
        return self._in_blocks(x, self._features)

    def _in_blocks(self, x: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """Check the points, then apply ``encode`` block by block; the result has the dtype of the points."""
        self._check_points(x)
        if x.shape[1] != self.in_features_:
            raise ValueError(
                f"{type(self).__name__} was fitted to points of {self.in_features_} features, got shape "
                f"{tuple(x.shape)}."
            )
        with full_precision(x.device):
            return torch.cat([encode(part).to(x.dtype) for part in torch.split(x, ROWS_AT_ONCE)])

    def _check_points(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"{type(self).__name__} takes torch tensors, got {type(x).__name__}: use torch.as_tensor.")
        if x.dim() != 2 or not x.is_floating_point():
            raise ValueError(
                f"{type(self).__name__} takes floating-point numbers of shape (samples, features), got {x.dtype} of "
                f"shape {tuple(x.shape)}."
            )

    def fit_transform(self, x: Tensor) -> Tensor:
        """:meth:`fit`, then the features of the same points."""
        return self.fit(x).transform(x)

    @abstractmethod
    def _fit(self, x: Tensor, generator: torch.Generator) -> None:
        """Learn from validated points; ``generator`` is on the CPU."""

    @abstractmethod
    def _features(self, x: Tensor) -> Tensor:
        """Features (samples, n) of a block of points."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kernel}, n_components={self.n_components})"


def check_enough(method: str, n_components: int, samples: int) -> None:
    """Raise a ValueError if there are fewer points than features."""
    if n_components > samples:
        raise ValueError(f"{method} of {n_components} features needs at least {n_components} points, got {samples}.")
