"""Kernels that are given as a function: of two tensors, of two NumPy arrays, or of two rows."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.kernels.limits import FEW
from ksm_lightning.sklearn.similarity_matrix import check_similarities

Form = Literal["tensors", "arrays", "rows"]
_WANTED = (
    "`kernel` must map arrays (a, m) and (b, m) to the matrix (a, b) of their similarities, or two rows (m,) to one "
    "number"
)


class CallableKernel(Kernel):
    """The kernel ``f(u, v) = function(u, v, **options)``. The function always gets float64.

    Args:
        function: Maps u (a, m) and v (b, m) to the Gram matrix (a, b), or two rows (m,) to a number.
        options: Keyword arguments of the function.
        form: What the function takes: ``tensors``, NumPy ``arrays``, or two NumPy ``rows``.
        is_differentiable: Whether torch can compute its derivatives. If not, landmarks stay at samples.

    Example:
        >>> CallableKernel(lambda u, v, c: c + u @ v.T, {"c": 1.0}, "arrays", False)(torch.eye(2), torch.eye(2))
        tensor([[2., 1.],
                [1., 2.]])
    """

    function: Callable[..., Any]

    def __init__(
        self, function: Callable[..., Any], options: Mapping[str, Any], form: Form, is_differentiable: bool
    ) -> None:
        super().__init__()
        self.__dict__["function"] = function  # a torch module must not become a part of the network
        self.options, self.form, self.is_differentiable = dict(options), form, is_differentiable

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_differentiable):
            found = self.call(u.double(), v.double())
        if not self.is_differentiable and not bool(found.isfinite().all()):
            raise ValueError("`kernel` returned a similarity of two samples that is not finite: check the samples.")
        # A copy, because callers overwrite the matrix, and the function may keep it.
        return found.to(u.dtype) if found.requires_grad else found.to(u.dtype, copy=True)

    def diag(self, u: Tensor) -> Tensor:
        if self.form != "rows":
            return super().diag(u)
        values = [self.function(row, row, **self.options) for row in u.double().numpy()]
        return torch.tensor(np.array(values, dtype=np.float64).reshape(len(u)), dtype=u.dtype)

    def call(self, u: Tensor, v: Tensor) -> Tensor:
        """The result (a, b) of the function for u (a, m) and v (b, m), float64, whose shape alone is checked."""
        if self.form == "tensors":
            found = self.function(u, v, **self.options)
            if not isinstance(found, Tensor):
                raise TypeError(f"returned {type(found).__name__} instead of a tensor")
            found = found if u.requires_grad or v.requires_grad else found.detach()
        else:
            a, b = u.detach().numpy(), v.detach().numpy()
            if self.form == "arrays":
                values = self.function(a, b, **self.options)
            else:
                values = [[self.function(one, other, **self.options) for other in b] for one in a]
            found = torch.tensor(np.asarray(values, dtype=np.float64))
        if found.shape != (len(u), len(v)):
            raise ValueError(
                f"{_WANTED}; called with {tuple(u.shape)} and {tuple(v.shape)}, it returned {tuple(found.shape)}."
            )
        return found


def callable_kernel(function: Callable[..., Any], options: Mapping[str, Any], X: Any) -> CallableKernel:
    """The kernel of a function, tried on a few samples: with tensors first, then with NumPy arrays, then row by row.

    Args:
        function: The function.
        options: Its keyword arguments.
        X: Samples (samples, m), at least one: an array, CSR matrix or tensor.

    Raises:
        ValueError: If the function fails, or its values are not similarities.

    Example:
        >>> callable_kernel(lambda u, v: (1 + u @ v.T) ** 2, {}, np.eye(3)).is_differentiable
        True
        >>> callable_kernel(lambda u, v: np.minimum(u, v).sum(), {}, np.eye(3)).form
        'rows'
    """
    if isinstance(function, type):
        raise ValueError(f"`kernel` is the class {function.__name__}: pass an object, {function.__name__}(...).")
    some = X[:FEW] if isinstance(X, np.ndarray | Tensor) else X[:FEW].toarray()
    rows = torch.as_tensor(some, dtype=torch.float64).repeat(3 if len(some) < 3 else 1, 1)
    failures: dict[Form, Exception] = {}
    for form in ("tensors", "arrays", "rows"):
        if form == "rows" and isinstance(failures["arrays"], ValueError) and _WANTED in str(failures["arrays"]):
            break  # it takes two dimensions
        kernel = CallableKernel(function, options, form, is_differentiable=form == "tensors")
        try:
            kernel.is_differentiable = form == "tensors" and _has_derivatives(kernel, rows)
            # Different numbers of rows first: a function of two single rows fails with them.
            *parts, found = (kernel.call(rows[:a], rows[:b]).numpy() for a, b in ((3, 2), (1, 1), (FEW, FEW)))
        except Exception as error:  # whatever the function raises
            failures[form] = error
            continue
        check_similarities(found, "`kernel`")
        for part in parts:
            if not np.allclose(part, found[: len(part), : part.shape[1]], rtol=1e-6, atol=1e-6 * np.abs(found).max()):
                raise ValueError("`kernel` gives two samples another similarity when it is called with other samples.")
        return kernel
    told = {form: _as_text(failures[form]) for form in ("tensors", "arrays")}
    if any(_WANTED in text for text in told.values()):
        raise ValueError(next(text for text in told.values() if _WANTED in text)) from failures["arrays"]
    tensors, arrays = told.values()
    reasons = arrays if tensors == arrays else f"{tensors} with tensors, {arrays} with NumPy arrays"
    raise ValueError(f"{_WANTED}; it failed: {reasons}.") from failures["arrays"]


def _has_derivatives(kernel: CallableKernel, rows: Tensor) -> bool:
    """Whether the derivatives in the second argument exist and are finite. Warns if they exist but are not finite."""
    with torch.inference_mode(False), torch.enable_grad():
        v = rows[:2].clone().requires_grad_()
        k = kernel(rows[:3].clone(), v)
        if not k.requires_grad:
            return False
        gradient = torch.autograd.grad(k.sum(), v, materialize_grads=True)[0]
    if not bool(gradient.isfinite().all()):
        warnings.warn(
            "The derivatives of `kernel` are not finite between equal samples, so that landmarks stay at samples: to "
            "learn them, keep the argument of a square root above 0 with `clamp`.",
            stacklevel=6,  # the caller of `fit`
        )
        return False
    return True


def _as_text(error: Exception) -> str:
    text = str(error)
    return text if _WANTED in text else f"{type(error).__name__}: {text.strip().splitlines()[0] if text else ''}"
