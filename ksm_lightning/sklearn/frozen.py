"""A trained extractor as a scikit-learn transformer."""

from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import validate_data

DTYPES = (np.float64, np.float32)
"""The dtypes of samples that are kept; others become float64."""


class Extractor(Protocol):
    """Interface of :class:`ksm_lightning.FeatureExtractor` that :class:`FrozenTransformer` needs."""

    @property
    def raw_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def transform(self, data: Any) -> Any: ...


class FrozenTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A trained extractor as a scikit-learn transformer. ``fit`` and ``clone`` do not change its features.

    It takes raw input with one flattened point per row. :meth:`ksm_lightning.FeatureExtractor.to_sklearn` makes it.

    Args:
        extractor: The extractor. Features are computed on its device.
    """

    def __init__(self, extractor: Extractor) -> None:
        self.extractor = extractor

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Check the samples. Nothing is learned."""
        self._check(X, is_fit=True)
        return self

    def transform(self, X: ArrayLike) -> np.ndarray:
        """Features (samples, n) of raw input (samples, m), in the dtype of the input."""
        features: np.ndarray = self.extractor.transform(self._check(X))
        return features

    def _check(self, X: ArrayLike, is_fit: bool = False) -> np.ndarray:
        is_first = is_fit or not hasattr(self, "n_features_in_")
        checked: np.ndarray = validate_data(self, X, dtype=DTYPES, reset=is_first)
        if checked.shape[1] != self.extractor.raw_features:
            raise ValueError(
                f"The extractor takes {self.extractor.raw_features} features per sample, got {checked.shape[1]}."
            )
        return checked

    @property
    def _n_features_out(self) -> int:
        return self.extractor.out_features

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
