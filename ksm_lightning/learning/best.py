"""The best landmarks so far: more updates must never make them worse."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ksm_lightning.learning.collectives import Collectives, SingleProcess, numbers_of_first
from ksm_lightning.learning.exact import solve_inner
from ksm_lightning.network import KSMNetwork, TightNetwork, functional
from ksm_lightning.network.landmark_error import LandmarkError

# Landmarks whose error is below this fraction of that of the responses do not limit them.
_SMALL = 0.05
# The paper's bound: landmarks whose error is at most this many times that of the best weights are not worse.
_MARGIN = 1.02


class Snapshot(NamedTuple):
    """A copy of the weights: W (p, m), the gains q (n,) or Q (n, p), and L (n, n)."""

    W: Tensor
    q: Tensor
    L: Tensor

    @classmethod
    def of(cls, network: KSMNetwork) -> "Snapshot":
        """A copy of a network's weights on their device."""
        return cls(*(parameter.detach().clone() for parameter in (network.W, network.gains, network.L)))

    @torch.no_grad()
    def restore(self, network: KSMNetwork) -> None:
        """Copy the weights back."""
        for parameter, value in zip((network.W, network.gains, network.L), self, strict=True):
            parameter.copy_(value)


class BestWeights:
    """Keeps the weights that had the lowest error on a fixed sample.

    Under minibatch noise landmarks can drift away from a good solution, and the energy of a batch is too noisy to show
    it. The learner measures the error at every search for idle landmarks and returns to the best weights at the end. A
    run that follows its landmarks also returns to them meanwhile, see :meth:`~.learner.Learner.learn`.

    For the tight bound the error is that of the Nystroem features of W, which its responses reach. For the paper's
    bound it is the geometric mean of that error and the error of the responses with their exact L: a start at KMeans
    centres can have the best landmarks, but responses learn their gains later. While the bound falls, the two can be
    traded for each other: weights whose landmarks are not worse are left alone.

    Args:
        collectives: The processes that train together, of which the first decides. Default: there is one.
        is_by_landmarks: Whether the error of the landmarks alone counts. With the tight bound it always does.
    """

    def __init__(self, collectives: Collectives | None = None, is_by_landmarks: bool = False) -> None:
        self.collectives: Collectives = collectives or SingleProcess()
        self.is_by_landmarks = is_by_landmarks
        self.best: Snapshot | None = None
        self.lowest: float | None = None
        self.error: LandmarkError | None = None
        self.of_landmarks: float | None = None  # of the landmarks that were measured last

    @property
    def is_waiting(self) -> bool:
        """Whether weights of a checkpoint wait for a sample, without which they cannot be compared."""
        return self.best is not None and self.error is None

    def watch(self, network: KSMNetwork, x: Tensor) -> LandmarkError | None:
        """Measure on this sample (samples, m) from now on, and weights kept before again; returns the error.

        An empty sample measures nothing.
        """
        if len(x) == 0:
            return None
        self.error = LandmarkError(network.kernel, x)
        if self.best is not None:  # a checkpoint's are on the CPU
            self.best = Snapshot(*(value.to(network.W) for value in self.best))
        self.lowest = None if self.best is None else self._measure(network, self.best)
        return self.error

    def begin(self, network: KSMNetwork, x: Tensor) -> None:
        """Measure on this sample (samples, m) from now on; the weights of the start count unless there are others."""
        is_waiting = self.is_waiting
        self.watch(network, x)
        if not is_waiting:
            self.compare(network)

    def compare(self, network: KSMNetwork) -> float | None:
        """Keep the network's weights if they are the best so far; returns their error, None without a sample."""
        if self.error is None:
            return None
        now = Snapshot.of(network)
        error = self._measure(network, now)
        if self.lowest is None or error < self.lowest:
            self.best, self.lowest = now, error
        return error

    def return_if_worse(self, network: KSMNetwork, tolerance: float) -> bool:
        """Return to the best weights if the error is finite and more than ``tolerance`` times theirs; whether it was.

        For runs that follow their landmarks.
        """
        error = self.compare(network)
        if error is None or self.best is None or self.lowest is None or not tolerance * self.lowest < error < math.inf:
            return False
        self.best.restore(network)
        self.of_landmarks = self.lowest
        return True

    def _measure(self, network: KSMNetwork, weights: Snapshot) -> float:
        """The error of weights, and of their landmarks, on the first process."""
        error, self.of_landmarks = numbers_of_first(self.collectives, self._errors(network, weights))
        return error

    def _errors(self, network: KSMNetwork, weights: Snapshot) -> tuple[float, float]:
        error, kernel, W = self.error, network.kernel, weights.W.double()
        assert error is not None
        if not all(bool(value.isfinite().all()) for value in weights):
            return math.inf, math.inf  # the divergence guard reports it
        of_landmarks = error(W, network.num_neurons)
        if self._counts_landmarks(network) or not math.isfinite(of_landmarks):
            return of_landmarks, of_landmarks
        b = weights.q.double() * kernel(error.x, W)  # (samples, n)
        L = solve_inner(b.mT @ b / len(b), kernel.diag(W), weights.q, network.ridge).L
        of_responses = error.of_features(functional.responses(b, L, network.ridge))
        return math.sqrt(max(of_landmarks, _SMALL * of_responses) * of_responses), of_landmarks

    def _counts_landmarks(self, network: KSMNetwork) -> bool:
        """Whether the error of the landmarks is all that counts."""
        return self.is_by_landmarks or isinstance(network, TightNetwork)

    def restore(self, network: KSMNetwork) -> bool:
        """Return the network to the best weights, if it has drifted away from them; whether it had."""
        error = self.compare(network)
        if self.error is None or error is None or self.best is None or self.lowest is None or error <= self.lowest:
            return False
        if not self._counts_landmarks(network):
            now, best = numbers_of_first(self.collectives, self._errors_of_landmarks(network, self.best))
            if now <= _MARGIN * best:
                return False
        self.best.restore(network)
        return True

    def _errors_of_landmarks(self, network: KSMNetwork, best: Snapshot) -> list[float]:
        """The errors of the network's landmarks and of the best ones."""
        assert self.error is not None
        return [self.error(network.W), self.error(best.W)]

    def state_dict(self) -> dict[str, Any]:
        """The best weights, for a checkpoint; empty if there are none."""
        return {} if self.best is None else dict(self.best._asdict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.best = Snapshot(**{name: value.clone() for name, value in state.items()}) if state else None
        self.lowest = self.error = None
