"""scikit-learn transformers: the network for pipelines, grid searches and streams, and frozen extractors."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_array, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from tqdm import tqdm

from ksm_lightning.evaluation.plausibility import width_advice
from ksm_lightning.kernels import AUTO, Kernel, auto_width, kernel_sample, random_subset
from ksm_lightning.kernels.limits import FIRST_SAMPLES
from ksm_lightning.learning import Stream, check_range, sample_size
from ksm_lightning.learning.samples import Samples, in_blocks
from ksm_lightning.network import KSMNetwork
from ksm_lightning.network.readout import check_readout, readout_sample_size
from ksm_lightning.sklearn.component_search import choose_components, train_with
from ksm_lightning.sklearn.encoder import LazyEncoder
from ksm_lightning.sklearn.frozen import DTYPES
from ksm_lightning.sklearn.kernel_choice import PARAMETERS, KernelChoice, choose_kernel, stream_kernel
from ksm_lightning.sklearn.precomputed import as_samples, check_stream, encoder_of, is_precomputed, validate_rows
from ksm_lightning.sklearn.settings import (
    check_parameters,
    check_updates,
    is_error,
    sizes_for,
    training_samples,
)
from ksm_lightning.sklearn.waiting import Waiting


class KSMTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Kernel features ``y`` with ``y_s . y_t`` close to ``f(x_s, x_t)``.

    Unlike :class:`sklearn.kernel_approximation.Nystroem`, which samples its landmarks, this transformer learns them.
    ``fit`` minimises the same bound on all data; ``partial_fit`` and ``ksm fit`` learn online, by local rules.
    ``partial_fit`` takes a stream, down to one sample per call, also after ``fit``.

    Args:
        n_components: Number of features n, or a number between 0 and 1: the smallest n, to within 3 %, whose kernel
            error on held-out samples is below it. ``fit`` then trains several networks. Default: 100.
        kernel: Registered name of the kernel (gaussian, laplacian, cauchy, linear, polynomial, offset_polynomial,
            power_cosine, arc_cosine, or your own), ``rbf`` or ``poly`` as scikit-learn means them, a
            :class:`ksm_lightning.Kernel`, a function, or ``precomputed``. A function of arrays (a, m) and (b, m), with
            ``kernel_params`` as keywords, returns the matrix (a, b). It gets float64 tensors, or NumPy arrays if it
            fails with tensors, or pairs of rows if it fails with arrays, which is slow. Landmarks are learned if torch
            can compute its derivatives, and are otherwise samples chosen by a pivoted Cholesky factorisation. With
            ``precomputed``, ``fit`` takes the similarities (samples, samples), and ``transform`` (new samples,
            samples); landmarks are chosen in the same way, so that the readout is all that is learned, and the order
            of the samples matters.
        sigma: Width of a Gaussian, Laplacian or Cauchy kernel. Default: ``auto``, 0.7 times the median distance of two
            samples. ``partial_fit`` chooses it from the first samples, up to 256 or those of the first call. A kernel
            object keeps its own width.
        alpha: Power of the power-cosine kernel.
        degree: Power of a polynomial kernel.
        order: Order of the arc-cosine kernel.
        gamma: scikit-learn's parameter of ``rbf``, ``exp(-gamma |u - v|^2)``, instead of ``sigma``, and of ``poly``.
            There is none for ``laplacian``, which has the Euclidean distance here and the L1 distance in scikit-learn.
        coef0: Offset of ``poly``, ``(gamma u . v + coef0)^degree``.
        kernel_params: Parameters of a kernel or function of your own; those above may be given here, too.
        n_landmarks: Number of landmarks p, at least ``n_components``. More landmarks than features lower the error;
            ``transform`` takes time in proportion to p. Default: 1.5 times ``n_components`` with the tight bound, or 4
            times if ``precomputed``; the paper's has one landmark per component.
        bound: ``tight`` learns the landmarks of the features with the lowest error. ``paper`` is the paper's network,
            whose ``neural`` features are sparse and tuned to templates; those of ``tight`` are determined up to a
            rotation only.
        readout: ``least_squares`` has the lowest kernel error on a sample of 5,000 or 4 per landmark, with a small
            ridge and ``|y|^2 <= 4 f(x, x)`` everywhere; ``nystroem`` depends on the landmarks alone, if there are as
            many as features; ``neural`` is the network's own representation.
        updates: Largest number of updates in ``fit``. With the tight bound, they are iterations of L-BFGS on up to
            5,000 samples, 25 by default, and end when they gain little. With fewer than 10 of these samples per
            component, landmarks stay at the start, whose features are as good for new samples. Default with the paper's
            bound: 2,000, or 5 per component above 400 components.
        batch_size: Number of samples per update with the paper's bound, and the largest one of a call of
            ``partial_fit`` with the tight one, whose ``fit`` uses none. Default: 64 and 1,024.
        half_life: Number of samples after which ``partial_fit`` has forgotten half of the past, at least
            ``n_landmarks``. Use it for a stream that changes; a shorter one follows faster, but the features are those
            of fewer samples. Default: nothing is forgotten.
        max_components: Largest n if ``n_components`` is a kernel error; a warning says if it is not enough.
        random_state: Seed of the initialisation and the batches.
        verbose: Whether ``fit`` shows a progress bar.

    Attributes:
        components_: Learned landmarks W (p, m), or fewer if there are fewer different samples. With ``precomputed``,
            the numbers (p, 1) of the samples that are landmarks.
        network_: The trained :class:`ksm_lightning.KSMNetwork`, with a neuron less for each feature that is always 0
            because there are fewer different samples than components.
        n_components_: Number of features n.
        kernel_: The kernel, with the width that ``sigma="auto"`` has chosen.
        n_updates_: Number of updates made so far.
        n_samples_seen_: Number of samples seen by ``fit`` and ``partial_fit``.
        n_features_in_: Number of features of the samples, or with ``precomputed`` the number of samples of ``fit``.
        reconstruction_error_: Relative error of :meth:`inverse_transform`.

    Example:
        >>> from sklearn.datasets import make_moons
        >>> from sklearn.linear_model import LogisticRegression
        >>> from sklearn.pipeline import make_pipeline
        >>> X, y = make_moons(300, noise=0.1, random_state=0)
        >>> features = KSMTransformer(16, sigma=0.3, random_state=0)
        >>> bool(make_pipeline(features, LogisticRegression()).fit(X, y).score(X, y) > 0.97)
        True
    """

    def __init__(
        self,
        n_components: int | float = 100,
        *,
        kernel: str | Kernel | Callable[..., Any] = "gaussian",
        sigma: float | str = AUTO,
        alpha: int | None = None,
        degree: int | None = None,
        order: int | None = None,
        gamma: float | None = None,
        coef0: float | None = None,
        kernel_params: Mapping[str, Any] | None = None,
        n_landmarks: int | None = None,
        bound: str = "tight",
        readout: str = "least_squares",
        updates: int | None = None,
        batch_size: int | None = None,
        half_life: float | None = None,
        max_components: int = 1000,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.sigma = sigma
        self.alpha = alpha
        self.degree = degree
        self.order = order
        self.gamma = gamma
        self.coef0 = coef0
        self.kernel_params = kernel_params
        self.n_landmarks = n_landmarks
        self.bound = bound
        self.readout = readout
        self.updates = updates
        self.batch_size = batch_size
        self.half_life = half_life
        self.max_components = max_components
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------------ learning

    def fit(self, X: Any, y: Any = None, sample_weight: ArrayLike | None = None) -> Self:
        """Train a new network on samples (samples, m), an array or a CSR matrix, whose rows become dense when drawn.

        With ``kernel="precomputed"``, X is the matrix (samples, samples) of their similarities, and is not kept.
        Otherwise, the order of the samples does not matter. A ``sample_weight`` (samples,) of 2 equals a repeated
        sample, and one of 0 a sample that is left out: samples are drawn, and Q, L and readout computed, in proportion
        to it.
        """
        X = validate_rows(self, X, reset=True)
        choice, seed = self._check(X), self._draw_seed()
        X = as_samples(choice.kernel, X)
        rows, x = Samples(X, np.arange(X.shape[0])), training_samples(X, sample_weight)
        kernel = choice.with_width(auto_width(x)) if choice.chooses_width else choice.kernel
        for block in in_blocks(rows):
            check_range(kernel, block)
        n = int(self.n_components)
        if is_error(self.n_components):
            limit, most = float(self.n_components), self.max_components
            n = choose_components(kernel, x, lambda n: sizes_for(self, n), self.readout, limit, most, seed)
        if n > X.shape[0]:
            warnings.warn(
                f"`n_components` is {n}, but {X.shape[0]} samples determine no more than {X.shape[0]} features: the "
                "others are 0.",
                stacklevel=2,
            )
        sizes = sizes_for(self, n)
        landmarks, made = sizes.landmarks, 0

        def progress(count: int) -> None:
            nonlocal made
            made += count
            bar.update(count)

        with tqdm(total=sizes.updates, desc="KSMTransformer", unit="update", disable=not self.verbose) as bar:
            network = train_with(kernel, x, sizes, seed, progress)
        if advice := width_advice(kernel, x, n):
            warnings.warn(advice, stacklevel=2)
        known = x[random_subset(len(x), sample_size(landmarks))]
        if network.num_landmarks < landmarks:  # a landmark for every sample
            known = torch.cat([network.W.detach().to(known), known])
        self._stream = Stream.after(
            network, known, made, num_neurons=n, num_landmarks=landmarks, batch_size=sizes.batch_size,
            half_life=self.half_life, seed=seed,
        )  # fmt: skip
        self._stream.seen = self._stream.reservoir.seen = len(rows)
        size = readout_sample_size(network.num_landmarks)
        sample = None if self.readout == "neural" else kernel_sample(network.kernel, x, size)
        encoder = LazyEncoder(network, self._stream, check_readout(self.readout), n, sample)
        self._encoder = encoder_of(encoder, self._stream)
        self.kernel_, self.n_samples_seen_, self.n_components_ = network.kernel, len(rows), n
        self._first_samples: Tensor | None = None
        self._waiting = Waiting(self.get_params(deep=False), known)
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Learn from the next samples (samples, m) of a stream, in order. One sample is enough.

        The network continues from ``fit`` or from earlier calls, with decreasing step sizes. Features always belong to
        the current landmarks, with the exact gains and L for a stored sample of the stream. Changing
        ``n_components``, ``n_landmarks``, ``bound``, ``half_life``, the kernel or its parameters after the first call
        is an error.
        """
        is_first = not hasattr(self, "_stream")
        check_stream(self.kernel if is_first else self.kernel_)
        if not is_first and self._first_samples is None and self._waiting.take(X, vars(self)):
            self.n_samples_seen_ += 1
            if self._waiting.is_full:
                self._learn_waiting()
            return self
        self._learn_waiting()
        X = validate_rows(self, X, reset=is_first)
        x = torch.tensor(X if isinstance(X, np.ndarray) else X.toarray())
        choice = self._check(x)
        check_stream(choice.kernel)
        if is_first and is_error(self.n_components):
            raise ValueError(
                f"A stream needs a number of components: call `fit` first, or set `n_components`, {self.n_components}, "
                "to a whole number."
            )
        n = self.n_components_ if is_error(self.n_components) else int(self.n_components)
        bound, _, landmarks, batch_size, _ = sizes_for(self, n)
        now = (None, None) if is_first else (self.kernel_, self._first_samples)
        kernel, is_new, known = stream_kernel(choice, x, *now)
        stream = self._stream if not is_new else Stream(
            kernel, n, bound=bound, num_landmarks=landmarks, half_life=self.half_life,
            seed=self._draw_seed() if is_first else self._stream.seed,
        )  # fmt: skip
        wanted = {
            "n_components": (stream.num_neurons, n), "n_landmarks": (stream.num_landmarks, landmarks),
            "bound": (stream.bound, bound), "half_life": (stream.half_life, self.half_life),
            "kernel": (str(stream.kernel), str(kernel)),
        }  # fmt: skip
        changed = [f"`{name}` from {old} to {new}" for name, (old, new) in wanted.items() if old != new]
        if changed:
            raise ValueError(f"`partial_fit` cannot change {' and '.join(changed)}: call `fit` to start again.")
        stream.batch_size = batch_size
        if not is_first:
            x = x.to(self._stream.reservoir.rows)
        stream.learn(known.to(x) if is_new else x)
        self._stream, self.kernel_, self.n_components_ = stream, kernel, n
        self._first_samples = known if choice.chooses_width and 0 < len(known) < FIRST_SAMPLES else None
        self._encoder = LazyEncoder(None, stream, check_readout(self.readout), n)
        self.n_samples_seen_ = len(x) + (0 if is_first else self.n_samples_seen_)
        self._waiting = Waiting(self.get_params(deep=False), x)
        return self

    def _learn_waiting(self) -> None:
        """Learn from the samples that wait, one update each."""
        rows = self._waiting.give() if hasattr(self, "_waiting") else []
        if rows:
            self._stream.learn(torch.tensor(np.concatenate(rows)), batch_size=1)
            self._encoder = LazyEncoder(None, self._stream, check_readout(self.readout), self.n_components_)

    def __getstate__(self) -> dict[str, Any]:
        self._learn_waiting()
        state: dict[str, Any] = super().__getstate__()
        return state

    def _check(self, X: Any) -> KernelChoice:
        """Check all parameters and return the kernel of samples (samples, m)."""
        check_parameters(self)
        params = {name: getattr(self, name) for name in PARAMETERS}
        choice = choose_kernel(self.kernel, params, self.kernel_params, X)
        check_updates(self, choice.kernel)
        return choice

    def _draw_seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    # ------------------------------------------------------------------ features

    @property
    def network_(self) -> KSMNetwork:
        """The trained network."""
        self._learn_waiting()
        return self._encoder.network

    @property
    def n_updates_(self) -> int:
        """Number of updates."""
        self._learn_waiting()
        return self._stream.updates

    @property
    def components_(self) -> np.ndarray:
        """Learned landmarks W (p, m), or numbers (p, 1) of samples of a kernel matrix."""
        W: np.ndarray = self.network_.W.detach().numpy().copy()
        return W

    @property
    def _n_features_out(self) -> int:
        return self._encoder.count

    def transform(self, X: Any) -> np.ndarray:
        """Features (samples, n) of samples (samples, m), or of their precomputed similarities, in their dtype.

        They are computed in float64, and those of float32 samples in float32 if that changes them by less than 5e-5.
        """
        check_is_fitted(self)
        self._learn_waiting()
        X = validate_rows(self, X, reset=False)
        features = self._encoder.transform(X)
        if not np.isfinite(features).all():
            raise ValueError(
                f"Features are out of the range of {features.dtype}: scale the samples like the training data."
            )
        return features

    def inverse_transform(self, X: ArrayLike) -> np.ndarray:
        """Samples (samples, m) whose features (samples, n) are close to these.

        A ridge regression from features to samples, fitted to a sample of the training data of 1,000 samples or twice
        as many as landmarks. :attr:`reconstruction_error_` says how far samples are from what it gives back.
        """
        check_is_fitted(self)
        self._learn_waiting()
        y = check_array(X, dtype=DTYPES)
        if y.shape[1] != self._n_features_out:
            raise ValueError(f"Features have {self._n_features_out} columns, got {y.shape[1]}.")
        return self._encoder.preimages(y)

    @property
    def reconstruction_error_(self) -> float:
        """``||x - inverse_transform(transform(x))|| / ||x - mean||`` of training samples that its fit has not seen."""
        self._learn_waiting()
        return self._encoder.preimages.error

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.pairwise = is_precomputed(self.kernel)
        tags.input_tags.sparse = not tags.input_tags.pairwise
        return tags
