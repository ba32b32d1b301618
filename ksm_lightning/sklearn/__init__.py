"""Kernel features as scikit-learn transformers, and a classifier and a regressor on them."""

from ksm_lightning.sklearn.frozen import FrozenTransformer
from ksm_lightning.sklearn.predictors import KSMClassifier, KSMRegressor
from ksm_lightning.sklearn.transformer import KSMTransformer

__all__ = ["FrozenTransformer", "KSMClassifier", "KSMRegressor", "KSMTransformer"]
