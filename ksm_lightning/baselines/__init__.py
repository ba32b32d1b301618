"""Other methods that approximate a kernel by features, all with ``fit`` and ``transform``, and their comparison."""

from ksm_lightning.baselines.comparison import Comparison
from ksm_lightning.baselines.feature_map import FeatureMap
from ksm_lightning.baselines.fourier import RandomFourier
from ksm_lightning.baselines.kernel_pca import KernelPCA
from ksm_lightning.baselines.landmarks import LANDMARK_SELECTORS
from ksm_lightning.baselines.methods import METHODS
from ksm_lightning.baselines.networks import LinearSimilarityMatching, NeuralFourier, SimilarityMatching
from ksm_lightning.baselines.nystroem import Nystroem

__all__ = [
    "LANDMARK_SELECTORS", "METHODS", "Comparison", "FeatureMap", "KernelPCA", "LinearSimilarityMatching",
    "NeuralFourier", "Nystroem", "RandomFourier", "SimilarityMatching",
]  # fmt: skip
