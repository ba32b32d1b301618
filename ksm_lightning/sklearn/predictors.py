"""Kernel features and a linear model in one estimator: a classifier and a regressor."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from ksm_lightning.evaluation.linear_probe import PENALTIES, fit_softmax
from ksm_lightning.evaluation.ridge import RIDGES, LinearMaps, fit_ridge
from ksm_lightning.kernels import AUTO, Kernel, auto_width, random_subset
from ksm_lightning.kernels.limits import EXACT_UP_TO, FLOAT32_ROUNDING, ROUNDING
from ksm_lightning.network.readout_matrices import READOUT_SAMPLE
from ksm_lightning.sklearn.frozen import DTYPES
from ksm_lightning.sklearn.held_out import (
    LabelledSamples,
    canonical_samples,
    choose_width,
    has_enough,
    held_out_losses,
    held_out_parts,
    total_variance,
)
from ksm_lightning.sklearn.precomputed import is_precomputed
from ksm_lightning.sklearn.settings import check_weights, is_error
from ksm_lightning.sklearn.transformer import KSMTransformer

# Widths to choose from, as multiples of the transformer's `sigma="auto"`.
_WIDTHS = tuple(2 ** (power / 2) for power in range(-3, 6))
# Numbers (samples x features x classes) up to which the final softmax regression is exact to rounding in float64.
_MANY = 20_000_000


class _KernelPredictor(BaseEstimator):  # type: ignore[misc]
    """Kernel features, and a linear model of them that a subclass fits."""

    def __init__(
        self,
        n_components: int | float = 100,
        *,
        kernel: str | Kernel | Callable[..., Any] = "gaussian",
        sigma: float | str = AUTO,
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
        max_components: int = 1000,
        penalty: float | str = AUTO,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.sigma = sigma
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
        self.max_components = max_components
        self.penalty = penalty
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------------ what a subclass implements

    def _fit_maps(
        self, z: Tensor, y: Tensor, penalties: Sequence[float], weights: Tensor, is_final: bool
    ) -> LinearMaps:
        """Linear maps of features (parts, samples, n) with weights (parts, samples), one per penalty."""
        raise NotImplementedError

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Losses (parts, samples) of outputs (parts, samples, outputs)."""
        raise NotImplementedError

    # ------------------------------------------------------------------ fit

    def _fit(
        self, samples: LabelledSamples, targets: Tensor, labels: Tensor | None, penalties: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fit the features and the linear model. Returns its weights (n, outputs) and bias (outputs,), in float64.

        Args:
            samples: All samples.
            targets: Targets (samples, outputs) of the ridge regression that ranks the widths.
            labels: Class numbers (samples,) that held-out parts have equal shares of.
            penalties: Penalties to choose from, in units of the features.
        """
        if self.penalty != AUTO and not _is_positive(self.penalty):
            raise ValueError(f"`penalty` must be 'auto' or a positive number, got {self.penalty!r}.")
        if is_precomputed(self.kernel):
            raise ValueError(
                "kernel='precomputed' is for KSMTransformer: put it and a linear model into a pipeline, for example "
                "make_pipeline(KSMTransformer(kernel='precomputed'), LogisticRegression())."
            )
        params = self.get_params(deep=False)
        del params["penalty"]
        transformer = KSMTransformer(**params)
        choice = transformer._check(samples.x)
        n = int(self.max_components if is_error(self.n_components) else self.n_components)
        if self.n_landmarks is None and not is_error(self.n_components):
            transformer.n_landmarks = n
        chosen = random_subset(len(samples.x), READOUT_SAMPLE)
        some = samples.take(chosen)
        held_out = held_out_parts(len(chosen), None if labels is None else labels[chosen])
        holds_out = has_enough(len(chosen))
        if choice.chooses_width and holds_out:
            middle = auto_width(samples.x)
            widths = [float(f"{factor * middle:.4g}") for factor in _WIDTHS]
            judged = some._replace(y=targets[chosen])
            transformer.sigma = choose_width(choice.with_width, widths, judged, held_out, n)
            transformer.kernel_params = {
                name: value for name, value in (self.kernel_params or {}).items() if name != "sigma"
            }
        is_weighted = bool((samples.weights != samples.weights[0]).any())
        rows = samples.x.numpy()
        with warnings.catch_warnings():
            # A linear model ignores features that are 0.
            warnings.filterwarnings("ignore", message=".* samples determine no more than")
            if transformer.sigma != self.sigma:  # held-out samples say that it is right
                warnings.filterwarnings("ignore", message=".* is too (narrow|wide)")
            transformer.fit(rows, sample_weight=samples.weights.numpy() if is_weighted else None)
        z = torch.from_numpy(transformer.transform(rows))
        unit = total_variance(z, samples.weights) * float(samples.weights.mean())
        self.penalty_ = float(self.penalty) if self.penalty != AUTO else unit * penalties[len(penalties) // 2]
        if self.penalty == AUTO and holds_out:
            candidates = [unit * penalty for penalty in penalties]
            is_costly = labels is not None and len(chosen) >= EXACT_UP_TO
            losses = held_out_losses(
                z[chosen], some.weights, held_out[:1] if is_costly else held_out,
                lambda parts, weights: self._fit_maps(parts, some.y, candidates, weights, is_final=False),
                lambda outputs: self._losses(outputs, some.y),
            )  # fmt: skip
            self.penalty_ = candidates[int(losses.argmin())]
        maps = self._fit_maps(z[None], samples.y, [self.penalty_], samples.weights[None], is_final=True)
        self.transformer_ = transformer
        return maps.W[0, 0].double().numpy(), maps.b[0, 0].double().numpy()

    def _outputs(self, X: ArrayLike) -> np.ndarray:
        """Outputs ``y coef^T + intercept`` of samples (samples, m)."""
        check_is_fitted(self, "transformer_")
        x = validate_data(self, X, dtype=DTYPES, reset=False)
        outputs: np.ndarray = self.transformer_.transform(x) @ self.coef_.T + self.intercept_
        return outputs


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value) and bool(value > 0)


class KSMClassifier(ClassifierMixin, _KernelPredictor):  # type: ignore[misc]
    """Softmax regression on the features of :class:`KSMTransformer`, with width and penalty chosen on held-out samples.

    It minimises ``sum_s w_s (-log p(class_s | x_s)) + penalty/2 |coef|^2``, the loss of
    :class:`sklearn.linear_model.LogisticRegression` with ``C = 1 / penalty``.

    With ``sigma="auto"`` the width is the one of 9, from 0.25 to 4 times the median distance of two samples, at which
    ridge regression on random landmarks has the lowest held-out error; with ``penalty="auto"`` the penalty is the one
    with the lowest held-out loss. Both are chosen by 5-fold cross-validation in up to 10,000 samples; the penalty
    of 2,000 samples or more on one of the folds. The model is then fitted to all samples. The result does not depend
    on their order.

    Args:
        n_components, kernel, sigma, degree, order, gamma, coef0, kernel_params, n_landmarks, bound, readout, updates,
            batch_size, max_components, random_state, verbose: Parameters of :class:`KSMTransformer`; ``sigma="auto"``
            is chosen as above, and ``kernel="precomputed"`` is for the transformer only. Default of ``n_landmarks``:
            ``n_components``; more lower the kernel error, but not that of the linear model. The ``alpha`` of the
            power-cosine kernel is given in ``kernel_params``: in scikit-learn it is the penalty.
        penalty: Penalty of the weights, positive. Default: ``auto``.

    Attributes:
        classes_: The classes.
        transformer_: The fitted :class:`KSMTransformer`; its ``kernel_`` has the width.
        penalty_: The penalty.
        coef_: Weights (classes, n), or (1, n) for two classes.
        intercept_: Biases (classes,), or (1,).
        n_features_in_: Number of features of the samples.

    Example:
        >>> from sklearn.datasets import make_moons
        >>> X, y = make_moons(300, noise=0.1, random_state=0)
        >>> model = KSMClassifier(16, random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.99)
        True
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit features and classifier to samples (samples, m) and their classes (samples,), numbers or strings.

        Args:
            X: Samples (samples, m).
            y: Classes (samples,).
            sample_weight: Weights (samples,), at least 0. A weight of 2 is the same as a repeated sample.
        """
        x, labels = validate_data(self, X, y, dtype=DTYPES)
        check_classification_targets(labels)
        weights = check_weights(sample_weight, len(x))
        self.classes_, numbers = np.unique(labels[weights > 0], return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"KSMClassifier needs samples of at least 2 classes, got 1 class: {self.classes_[0]}.")
        samples = canonical_samples(x[weights > 0], numbers, weights[weights > 0])
        targets = torch.nn.functional.one_hot(samples.y, len(self.classes_)).double()
        W, b = self._fit(samples, targets, samples.y, PENALTIES)
        # Two classes have one logit, the difference.
        self.coef_ = W.T if len(b) > 2 else (W[:, 1:] - W[:, :1]).T
        self.intercept_ = b if len(b) > 2 else b[1:] - b[:1]
        return self

    def _fit_maps(
        self, z: Tensor, y: Tensor, penalties: Sequence[float], weights: Tensor, is_final: bool
    ) -> LinearMaps:
        classes, total = len(self.classes_), float(weights.sum(1).mean())
        # |W|^2 of two classes is half the square of the one vector of weights that is their difference.
        factor = (2 if classes == 2 else 1) / total
        is_exact = is_final and z.numel() * classes <= _MANY
        found = fit_softmax(
            z.double() if is_exact else z, y.expand(len(z), -1), [factor * penalty for penalty in penalties], classes,
            weights=weights, is_bias_penalised=False, tolerance=ROUNDING if is_exact else FLOAT32_ROUNDING,
        )  # fmt: skip
        return LinearMaps(found.W, found.b)

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        labels = y.expand(len(outputs), -1)
        return torch.nn.functional.cross_entropy(outputs.mT, labels, reduction="none")

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """Logits (samples, classes); for two classes (samples,), positive for ``classes_[1]``."""
        logits = self._outputs(X)
        return logits if len(self.classes_) > 2 else logits[:, 0]

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities of the classes (samples, classes)."""
        logits = self.decision_function(X)
        if logits.ndim == 2:
            return np.asarray(softmax(logits, axis=1))
        return np.stack([expit(-logits), expit(logits)], axis=1)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class of each sample (samples,)."""
        logits = self.decision_function(X)
        numbers = logits.argmax(1) if logits.ndim == 2 else (logits > 0).astype(np.int64)
        predicted: np.ndarray = self.classes_[numbers]
        return predicted


class KSMRegressor(RegressorMixin, _KernelPredictor):  # type: ignore[misc]
    """Ridge regression on the features of :class:`KSMTransformer`, with width and penalty chosen on held-out samples.

    It minimises ``sum_s w_s |y_s - prediction_s|^2 + penalty |coef|^2``, the loss of
    :class:`sklearn.linear_model.Ridge` with ``alpha = penalty``. Landmarks and choices are those of
    :class:`KSMClassifier`; several outputs share the width and the penalty, and count by their coefficient of
    determination.

    Args:
        n_components, kernel, sigma, degree, order, gamma, coef0, kernel_params, n_landmarks, bound, readout, updates,
            batch_size, max_components, random_state, verbose: Parameters of :class:`KSMTransformer`, as in
            :class:`KSMClassifier`.
        penalty: Penalty of the weights, positive. Default: ``auto``.

    Attributes:
        transformer_: The fitted :class:`KSMTransformer`; its ``kernel_`` has the width.
        penalty_: The penalty.
        coef_: Weights (outputs, n), or (n,) if y has one dimension.
        intercept_: Biases (outputs,), or a number.
        n_features_in_: Number of features of the samples.

    Example:
        >>> X = np.linspace(-3, 3, 200)[:, None]
        >>> model = KSMRegressor(16, random_state=0).fit(X, np.sin(2 * X[:, 0]))
        >>> bool(model.score(X, np.sin(2 * X[:, 0])) > 0.999)
        True
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit features and regression to samples (samples, m) and targets (samples,) or (samples, outputs).

        Args:
            X: Samples (samples, m).
            y: Targets (samples,) or (samples, outputs).
            sample_weight: Weights (samples,), at least 0. A weight of 2 is the same as a repeated sample.
        """
        if y is not None and np.asarray(y).dtype.kind in "US":
            raise ValueError("The targets must be numbers, but they are text: use KSMClassifier for classes.")
        x, targets = validate_data(self, X, y, dtype=DTYPES, multi_output=True, y_numeric=True)
        columns = np.asarray(targets, dtype=np.float64).reshape(len(x), -1)
        samples = canonical_samples(x, columns, check_weights(sample_weight, len(x)))
        share = (samples.weights / samples.weights.sum())[:, None]
        mean = (samples.y * share).sum(0)
        deviation = ((samples.y - mean).square() * share).sum(0).sqrt()
        deviation = torch.where(deviation > 0, deviation, 1.0)
        scaled = samples._replace(y=(samples.y - mean) / deviation)
        W, b = self._fit(scaled, scaled.y, None, RIDGES)
        coef, intercept = (W * deviation.numpy()).T, b * deviation.numpy() + mean.numpy()
        is_single = targets.ndim == 1
        self.coef_: np.ndarray = coef[0] if is_single else coef
        self.intercept_: np.ndarray | float = float(intercept[0]) if is_single else intercept
        return self

    def _fit_maps(
        self, z: Tensor, y: Tensor, penalties: Sequence[float], weights: Tensor, is_final: bool
    ) -> LinearMaps:
        total = float(weights.sum(1).mean())
        z = z.double()
        return fit_ridge(z, y.expand(len(z), *y.shape), [penalty / total for penalty in penalties], weights=weights)

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).square().mean(-1)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Predictions (samples,) or (samples, outputs), like the targets of ``fit``."""
        return self._outputs(X)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
