"""Kernel features as scikit-learn transformers."""

from ksm_lightning.sklearn.frozen import FrozenTransformer
from ksm_lightning.sklearn.transformer import KSMTransformer

__all__ = ["FrozenTransformer", "KSMTransformer"]
