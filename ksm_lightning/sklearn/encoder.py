"""The features of an estimator, computed when they are needed."""

from functools import cached_property

import torch
from torch import Tensor

from ksm_lightning.evaluation.plausibility import warn_if_worse_than_uniform
from ksm_lightning.learning import Stream
from ksm_lightning.network import KSMNetwork
from ksm_lightning.network.readout import LandmarkFeatures, Readout


class LazyEncoder:
    """Float64 features of a network, or of the current network of a stream, computed on first use.

    Learning from a stream without transforming between samples then computes no readout matrices. A network of fewer
    neurons than ``count`` has features of 0 for the others.
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
