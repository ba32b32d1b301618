"""The features of an estimator, computed when they are needed."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.evaluation.plausibility import warn_if_worse_than_uniform
from ksm_lightning.kernels.limits import FIRST_SAMPLES
from ksm_lightning.learning import Stream
from ksm_lightning.network import KSMNetwork
from ksm_lightning.network.readout import LandmarkFeatures, Readout
from ksm_lightning.sklearn.block_encoder import BlockEncoder, is_precise
from ksm_lightning.sklearn.preimages import PreImages


class LazyEncoder:
    """Features of a network, or of the current network of a stream, computed on first use.

    Learning from a stream without transforming between samples then computes no readout matrices. A network of fewer
    neurons than ``count`` has features of 0 for the others. Features are computed in float64, those of float32 samples
    in float32 if that is precise enough.
    """

    def __init__(
        self, fitted: KSMNetwork | None, stream: Stream, readout: Readout, count: int, sample: Tensor | None = None
    ) -> None:
        self.fitted, self.stream, self.readout, self.count, self.sample = fitted, stream, readout, count, sample

    @cached_property
    def network(self) -> KSMNetwork:
        """The network with the exact L."""
        return self.stream.settled() if self.fitted is None else self.fitted

    @cached_property
    def features(self) -> LandmarkFeatures:
        """Its features."""
        if self.fitted is None:
            found = self.stream.features(self.readout, self.network)
        else:
            found = LandmarkFeatures.of(self.fitted, self.readout, self.sample)
        missing = self.count - found.M.shape[1]
        features = LandmarkFeatures(found.kernel, found.W, torch.nn.functional.pad(found.M, (0, missing)))
        if self.network.bound == "paper":
            warn_if_worse_than_uniform(features, self.stream.reservoir.rows)
        return features

    @cached_property
    def _wide(self) -> BlockEncoder:
        return BlockEncoder(self.features, np.dtype(np.float64))

    @cached_property
    def _narrow(self) -> BlockEncoder | None:
        is_enough = is_precise(self.features, self.stream.reservoir.rows[:FIRST_SAMPLES])
        return BlockEncoder(self.features, np.dtype(np.float32)) if is_enough else None

    def transform(self, X: Any) -> np.ndarray:
        """Features (samples, k) of an array or CSR matrix (samples, m), in its dtype."""
        encoder = (self._narrow or self._wide) if X.dtype == np.float32 else self._wide
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the range
            return encoder(X).astype(X.dtype, copy=False)

    @cached_property
    def preimages(self) -> PreImages:
        """The approximate inverse, fitted to the remembered samples."""
        x = self.stream.reservoir.rows.numpy()
        return PreImages(self.transform(x), x)
