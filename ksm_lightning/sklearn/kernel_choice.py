"""The kernel that an estimator's parameters describe, in the names of this package or of scikit-learn."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels import AUTO, Kernel, OffsetPolynomialKernel, kernel_names, kernel_parameters, make_kernel
from ksm_lightning.kernels.width import typical_width
from ksm_lightning.sklearn.callable_kernel import callable_kernel
from ksm_lightning.sklearn.precomputed import PRECOMPUTED, PrecomputedKernel, is_precomputed

PARAMETERS = ("sigma", "alpha", "degree", "order", "gamma", "coef0")
"""Parameters of kernels that are parameters of the estimator."""
# scikit-learn's names of kernels that exist here.
_ALIASES = {"rbf": "gaussian", "poly": "offset_polynomial"}
_DEGREE, _COEF0 = 3, 1.0  # scikit-learn's defaults
_ADVICE = {
    "cosine": "scale every sample to length 1 (sklearn.preprocessing.Normalizer) and use kernel='linear', which is the "
    "same",
    "sigmoid": "it is not a similarity, as it can be negative between equal samples; use kernel='gaussian'",
    "chi2": "subclass ksm_lightning.Kernel with its formula, and pass an object of that class",
}


class KernelChoice(NamedTuple):
    """A kernel whose width may still be open."""

    kernel: Kernel  # with a width of 1 if that is open
    chooses_width: bool  # whether the width is to be chosen from data

    def with_width(self, sigma: float) -> Kernel:
        """The kernel with this width, if it is open, and unchanged otherwise."""
        return self.kernel.with_params(sigma=sigma) if self.chooses_width else self.kernel


def choose_kernel(
    kernel: str | Kernel | Callable[..., Any],
    params: Mapping[str, Any],
    kernel_params: Mapping[str, Any] | None,
    X: Any,
) -> KernelChoice:
    """The kernel that an estimator's parameters describe.

    ``rbf`` is the Gaussian kernel with ``sigma = 1 / sqrt(2 gamma)``. ``poly``, and ``polynomial`` with ``gamma`` or
    ``coef0``, are ``(gamma u . v + coef0)^degree`` with scikit-learn's defaults (``gamma = 1 / m``, ``coef0 = 1``,
    ``degree = 3``); ``polynomial`` alone is the homogeneous kernel.

    Args:
        kernel: A registered name, a name of scikit-learn, a function, ``precomputed``, or a kernel. A kernel keeps its
            width, unless ``sigma`` is a number.
        params: Values of :data:`PARAMETERS`; None means unset, and ``sigma`` may be ``auto``.
        kernel_params: More parameters of the kernel.
        X: Samples (samples, m), an array, CSR matrix or tensor, or a kernel matrix that is precomputed.

    Raises:
        ValueError: If there is no such kernel or parameter, or two of them contradict each other.

    Example:
        >>> given = dict.fromkeys(PARAMETERS) | {"sigma": "auto"}
        >>> choose_kernel("rbf", given | {"gamma": 0.5}, None, np.eye(2))
        KernelChoice(kernel=GaussianKernel(sigma=1.0), chooses_width=False)
        >>> choose_kernel("laplacian", given, None, np.eye(2)).chooses_width
        True
    """
    given = {name: params[name] for name in PARAMETERS if params[name] is not None}
    if given.get("sigma") == AUTO:
        del given["sigma"]
    extra = dict(kernel_params or {})
    for name in sorted(given.keys() & extra.keys()):
        if given[name] != extra[name]:
            raise ValueError(f"`{name}` is {given[name]} and `kernel_params` has {extra[name]}: give only one of them.")
    if is_precomputed(kernel):
        _refuse_unknown(PRECOMPUTED, {**extra, **given}, ())
        return KernelChoice(PrecomputedKernel.of(X), chooses_width=False)
    if callable(kernel) and not isinstance(kernel, Kernel):
        for name in given:
            raise ValueError(f"`{name}` is not a parameter of a function as `kernel`: put it into `kernel_params`.")
        return KernelChoice(callable_kernel(kernel, extra, X), chooses_width=False)
    given = {**extra, **given}
    if isinstance(given.get("sigma"), str) and given["sigma"] != AUTO:
        raise ValueError(f"`sigma` must be {AUTO!r} or a positive number, got {given['sigma']!r}.")
    if isinstance(kernel, Kernel):
        given = {name: value for name, value in given.items() if not (name == "sigma" and value == AUTO)}
        return KernelChoice(kernel.with_params(**given), chooses_width=False)
    if not isinstance(kernel, str):
        raise ValueError(
            f"`kernel` must be a registered name, a ksm_lightning.Kernel, a function or 'precomputed', got {kernel!r}."
        )
    name = _ALIASES.get(kernel, kernel)
    if name not in kernel_names() and name in _ADVICE:
        raise ValueError(f"Kernel {kernel!r} does not exist here: {_ADVICE[name]}.")
    if kernel == "poly" or (name == "polynomial" and {"gamma", "coef0"} & given.keys()):
        return KernelChoice(_offset_polynomial(kernel, given, X.shape[1]), chooses_width=False)
    if name == "offset_polynomial" and "degree" in given:
        given["power"] = given.pop("degree")
    if "gamma" in given and "gamma" not in kernel_parameters(name):
        given["sigma"] = _width_of(kernel, name, given)
        del given["gamma"]
    _refuse_unknown(kernel, given, kernel_parameters(name))
    is_open = "sigma" in kernel_parameters(name) and given.get("sigma", AUTO) == AUTO
    return KernelChoice(make_kernel(name, **({**given, "sigma": 1.0} if is_open else given)), is_open)


def stream_kernel(
    choice: KernelChoice, x: Tensor, now: Kernel | None, first: Tensor | None
) -> tuple[Kernel, bool, Tensor]:
    """The kernel of a stream whose next samples are x (samples, m); whether it is new; the samples to learn then.

    While a stream is short, an open width follows its samples: each time that they have doubled, the stream restarts
    with all of them.

    Args:
        choice: The kernel.
        x: The next samples.
        now: The kernel of the stream so far, or None if it starts here.
        first: All samples of a short stream with an open width, or None.
    """
    if now is None:
        return (choice.with_width(typical_width(x) or 1.0) if choice.chooses_width else choice.kernel), True, x
    if not choice.chooses_width:
        return choice.kernel, False, x[:0]
    width = now.params().get("sigma", 1.0)
    if first is None:
        return choice.with_width(width), False, x[:0]
    known = torch.cat([first, x.to(first)])
    has_doubled = len(first).bit_length() < len(known).bit_length()
    sigma = typical_width(known) or width if has_doubled else width
    return choice.with_width(sigma), sigma != width, known


def _refuse_unknown(kernel: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            parameters = f"its parameters are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"Kernel {kernel!r} has no parameter `{name}`: {parameters}.")


def _width_of(kernel: str, name: str, given: Mapping[str, Any]) -> float:
    """The sigma of a Gaussian kernel ``exp(-gamma |u - v|^2)``."""
    gamma = given["gamma"]
    if name == "laplacian":
        raise ValueError(
            "The Laplacian kernel of this package is exp(-|u - v| / sigma) with the Euclidean distance, and the gamma "
            "of scikit-learn multiplies the L1 distance: give `sigma`."
        )
    if name != "gaussian":
        known = kernel_parameters(name)
        _refuse_unknown(kernel, {"gamma": gamma}, known)
    if given.get("sigma", AUTO) != AUTO:
        raise ValueError(
            f"`sigma` is {given['sigma']} and `gamma` is {gamma}: give only one of them; gamma = 1 / (2 sigma^2)."
        )
    if not (isinstance(gamma, int | float | np.number) and math.isfinite(gamma) and gamma > 0):
        raise ValueError(f"`gamma` must be positive and finite, got {gamma!r}.")
    return float(1 / math.sqrt(2 * gamma))


def _offset_polynomial(kernel: str, given: dict[str, Any], in_features: int) -> Kernel:
    """The polynomial kernel of scikit-learn."""
    _refuse_unknown(kernel, given, ("degree", "gamma", "coef0"))
    degree, gamma = given.get("degree", _DEGREE), given.get("gamma", 1 / max(1, in_features))
    return OffsetPolynomialKernel(degree, gamma, given.get("coef0", _COEF0))
