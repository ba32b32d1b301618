"""The network as a scikit-learn transformer, for pipelines, grid searches and streams."""

import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from tqdm import tqdm

from ksm_lightning.kernels import Kernel, make_kernel
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.learning import train as learning
from ksm_lightning.learning.stream import Stream, train_on_few
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.network.readout import READOUT_SAMPLE, Readout, check_readout, landmark_features, readout_matrix

_BLOCK = 4096
_DTYPES = (np.float64, np.float32)
# Different samples are then less similar, on average, than this part of what they are to themselves. On half moons with
# a width that is ten times too small it is 0.002, with the best one 0.1.
_BLIND = 3e-4


class KSMTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Kernel features ``y`` with ``y_s . y_t`` near ``f(x_s, x_t)``, learned by local rules from one batch at a time.

    Where :class:`sklearn.kernel_approximation.Nystroem` samples its landmarks, this learns them. ``fit`` trains on all
    data; ``partial_fit`` learns from a stream, one sample at a time if need be, and can follow ``fit``.

    Args:
        n_components: Features n.
        kernel: Registered name of the kernel (gaussian, laplacian, cauchy, linear, polynomial, power_cosine,
            arc_cosine, or your own), or a :class:`ksm_lightning.Kernel`.
        kernel_params: The kernel's numbers, such as ``{"sigma": 0.3}``; its own defaults unless given.
        readout: ``neural`` is the paper's representation; ``nystroem`` and ``least_squares`` make features with a lower
            kernel error of the same landmarks.
        updates: Updates of ``fit``; 2,000 unless given, and more for more than 400 components.
        batch_size: Samples an update.
        random_state: Seed of start and batches.
        verbose: Whether ``fit`` shows a progress bar.

    Attributes:
        components_: Learned landmarks W (n, m).
        network_: The trained :class:`ksm_lightning.KSMNetwork`.
        kernel_: The kernel.
        n_updates_: Updates made.
        n_samples_seen_: Samples seen by ``fit`` and ``partial_fit``.
        n_features_in_: Features of the samples.

    Example:
        >>> from sklearn.datasets import make_moons
        >>> from sklearn.linear_model import LogisticRegression
        >>> from sklearn.pipeline import make_pipeline
        >>> X, y = make_moons(300, noise=0.1, random_state=0)
        >>> features = KSMTransformer(16, kernel_params={"sigma": 0.3}, updates=300, random_state=0)
        >>> bool(make_pipeline(features, LogisticRegression()).fit(X, y).score(X, y) > 0.97)
        True
    """

    def __init__(
        self,
        n_components: int = 100,
        *,
        kernel: str | Kernel = "gaussian",
        kernel_params: Mapping[str, float] | None = None,
        readout: str = "neural",
        updates: int | None = None,
        batch_size: int = 64,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.kernel_params = kernel_params
        self.readout = readout
        self.updates = updates
        self.batch_size = batch_size
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------------ learning

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Learn from samples (samples, m), from the beginning.

        Raises:
            ValueError: If a parameter is impossible, or the samples cannot be used.
        """
        x = torch.tensor(validate_data(self, X, dtype=_DTYPES))
        kernel, seed = self._check(), self._draw_seed()
        learning.check_range(kernel, x)
        updates = max(2000, 5 * self.n_components) if self.updates is None else self.updates
        with tqdm(total=updates, desc="KSMTransformer", unit="update", disable=not self.verbose) as bar:
            network = train_on_few(
                kernel, x, self.n_components, updates, batch_size=self.batch_size, seed=seed, progress=bar.update
            )
        _warn_if_blind(kernel, x[random_subset(len(x), 500)])
        self._stream = Stream.after(network, x, updates, batch_size=self.batch_size, seed=seed)
        sample = x[random_subset(len(x), READOUT_SAMPLE)] if self.readout == "least_squares" else None
        self._reader = _Reader(network, check_readout(self.readout), sample)
        self.kernel_ = network.kernel
        self.n_samples_seen_ = len(x)
        self.n_updates_ = updates
        return self

    def partial_fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Learn from more samples (samples, m) of a stream, in their order; a single one is enough.

        After ``fit``, or after any number of earlier calls, the network goes on learning with ever smaller steps. The
        features are always those of the landmarks as they are now, with the exact L for the samples remembered.

        Raises:
            ValueError: If a parameter is impossible or, after the first call, another one; or the samples cannot be
                used.
        """
        is_first = not hasattr(self, "_stream")
        x = torch.tensor(validate_data(self, X, dtype=_DTYPES, reset=is_first))
        kernel = self._check()
        stream = Stream(kernel, self.n_components, seed=self._draw_seed()) if is_first else self._stream
        if stream.num_neurons != self.n_components or str(stream.kernel) != str(kernel):
            raise ValueError(
                f"The stream has {stream.num_neurons} components with {stream.kernel}, and now {self.n_components} "
                f"with {kernel} are asked for: `fit` begins anew, `partial_fit` cannot."
            )
        stream.batch_size = self.batch_size
        stream.learn(x if is_first else x.to(stream.network.W))
        self._stream, self.kernel_ = stream, kernel
        self._reader = _Reader(stream, check_readout(self.readout), stream.reservoir.rows)
        self.n_samples_seen_ = len(x) + (0 if is_first else self.n_samples_seen_)
        self.n_updates_ = stream.updates
        return self

    def _check(self) -> Kernel:
        """The kernel, after a look at all parameters."""
        for name in ("n_components", "batch_size", *(("updates",) if self.updates is not None else ())):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}.")
        check_readout(self.readout)
        params = dict(self.kernel_params or {})
        if isinstance(self.kernel, Kernel):
            return self.kernel.with_params(**params)
        if not isinstance(self.kernel, str):
            raise ValueError(f"`kernel` must be a registered name or a ksm_lightning.Kernel, got {self.kernel!r}.")
        return make_kernel(self.kernel, **params)

    def _draw_seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    # ------------------------------------------------------------------ features

    @property
    def network_(self) -> KSMNetwork:
        """The trained network."""
        return self._reader.network

    @property
    def components_(self) -> np.ndarray:
        """Learned landmarks W (n, m)."""
        W: np.ndarray = self.network_.W.detach().numpy().copy()
        return W

    @property
    def _n_features_out(self) -> int:
        return self.network_.num_neurons

    def transform(self, X: ArrayLike) -> np.ndarray:
        """Features (samples, n) of samples (samples, m); computed in float64, in the dtype of the samples.

        Raises:
            NotFittedError: If there was no ``fit`` or ``partial_fit``.
            ValueError: If the samples cannot be used.
        """
        check_is_fitted(self)
        x = torch.tensor(validate_data(self, X, dtype=_DTYPES, reset=False))
        features = torch.cat([self._reader(part).to(x) for part in torch.split(x, _BLOCK)])
        if not bool(features.isfinite().all()):
            raise ValueError(f"Features are out of the range of {x.dtype}: are the samples like those of the training?")
        found: np.ndarray = features.numpy()
        return found

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _warn_if_blind(kernel: Kernel, x: Tensor) -> None:
    """Say so when every sample (samples, m) is similar to itself alone: no features can tell more than that."""
    if len(x) < 2:
        return
    F = kernel(x, x)
    others = (F.abs().sum() - F.diagonal().abs().sum()) / (len(x) - 1)
    if others < _BLIND * F.diagonal().abs().sum() and kernel.is_radial:
        warnings.warn(
            f"{kernel} sees almost no similarity between different samples: its width is too small for this data. Set "
            "`kernel_params={'sigma': ...}` to about the distance between neighbours, or scale the data.",
            stacklevel=3,
        )


class _Reader:
    """Features in float64 of a network, or of what a stream has learned; computed when they are first asked for.

    A stream that is never looked at between two samples need not compute matrices for each of them.
    """

    def __init__(self, source: KSMNetwork | Stream, readout: Readout, sample: Tensor | None) -> None:
        self.source, self.readout, self.sample = source, readout, sample

    @cached_property
    def network(self) -> KSMNetwork:
        """The network that is read."""
        return self.source.settled() if isinstance(self.source, Stream) else self.source

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """Landmarks (n, m) and readout (n, n)."""
        return self.network.W.detach().double(), readout_matrix(self.network, self.readout, self.sample)

    def __call__(self, x: Tensor) -> Tensor:
        return landmark_features(self.network.kernel, x, *self.matrices)


class Extractor(Protocol):
    """What :class:`FrozenTransformer` asks of a feature extractor."""

    @property
    def raw_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def transform(self, data: Any) -> Any: ...


class FrozenTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A trained extractor as a scikit-learn transformer: ``fit`` leaves it as it is, and so does ``clone``.

    It takes rows of raw input; images are flattened. What :meth:`ksm_lightning.FeatureExtractor.to_sklearn` makes.

    Args:
        extractor: The extractor; features are computed on its device.
    """

    def __init__(self, extractor: Extractor) -> None:
        self.extractor = extractor

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Nothing is learned; the samples are checked."""
        self._check(X, is_fit=True)
        return self

    def transform(self, X: ArrayLike) -> np.ndarray:
        """Features (samples, n) of rows of raw input, in their dtype.

        Raises:
            ValueError: If the samples cannot be used.
        """
        features: np.ndarray = self.extractor.transform(self._check(X))
        return features

    def _check(self, X: ArrayLike, is_fit: bool = False) -> np.ndarray:
        is_first = is_fit or not hasattr(self, "n_features_in_")
        checked: np.ndarray = validate_data(self, X, dtype=_DTYPES, reset=is_first)
        if checked.shape[1] != self.extractor.raw_features:
            raise ValueError(
                f"The extractor takes {self.extractor.raw_features} features a sample, got {checked.shape[1]}."
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
