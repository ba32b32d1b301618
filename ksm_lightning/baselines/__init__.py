"""Other ways to approximate a kernel by features, all with the same ``fit`` and ``transform``."""

from ksm_lightning.baselines.feature_map import FeatureMap
from ksm_lightning.baselines.fourier import RandomFourier
from ksm_lightning.baselines.kernel_pca import KernelPCA
from ksm_lightning.baselines.landmarks import LANDMARK_SELECTORS
from ksm_lightning.baselines.networks import LinearSimilarityMatching, NeuralFourier, SimilarityMatching
from ksm_lightning.baselines.nystroem import Nystroem

LANDMARK_SELECTOR_NAMES = tuple(LANDMARK_SELECTORS)

__all__ = [
    "LANDMARK_SELECTOR_NAMES",
    "FeatureMap",
    "KernelPCA",
    "LinearSimilarityMatching",
    "NeuralFourier",
    "Nystroem",
    "RandomFourier",
    "SimilarityMatching",
]
