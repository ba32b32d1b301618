"""Base class of kernels: Gram block, diagonal, and their derivatives in the second argument."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from ksm_lightning.kernels.limits import SMALL_TILE
from ksm_lightning.kernels.precision import full_precision

Pullback = Callable[[Tensor], Tensor]
Prepared = tuple[Tensor, ...]

# Points of which a diagonal is taken from a Gram block.


class PullbackParts(NamedTuple):
    """The pullback ``P_i = factor (matrix_i - along_i base_i)``, kept in parts so that an update can fuse them."""

    matrix: Tensor  # (n, m); the caller may overwrite it
    along: Tensor | None = None  # (n,), or None if the second part is 0
    base: Tensor | None = None  # (n, m), or None if the second part is 0
    factor: float = 1.0
    correlation: Tensor | None = None  # sum_b c_bi k_bi (n,), if the kernel computes it on the way

    def dense(self) -> Tensor:
        """The pullback P (n, m). Overwrites ``matrix``."""
        if self.along is not None and self.base is not None:
            self.matrix.addcmul_(self.base, self.along[:, None], value=-1)
        return self.matrix if self.factor == 1 else self.matrix.mul_(self.factor)


Evaluated = tuple[Tensor, Callable[[Tensor], PullbackParts]]
"""Similarities k (batch, n), and the map from coefficients c (batch, n) to the parts of the pullback."""


class SelfTerms(NamedTuple):
    """Quantities of ``f(w_i, w_i)`` that the update rules need. A float stands for equal values of all landmarks."""

    value: Tensor | None  # f(w_i, w_i) (n,), or None if it is always 1
    curvature: Tensor | float  # Kernel.curvature, (n,) or a float
    direction: Tensor | None  # the total derivative in w_i is slope_i direction_i; (n, m), or None if it is 0
    slope: Tensor | float  # (n,) or a float


class Kernel(nn.Module, ABC):
    """A positive semi-definite similarity ``f(u, v)``. A subclass only has to implement :meth:`gram`.

    The base class computes the diagonal from small tiles of the Gram matrix and the derivatives by autograd.
    Built-in kernels override what an update needs with closed forms.

    Constructor arguments must be numbers, stored under their own names. Checkpoints save them
    (:meth:`params`), and a phase of the schedule can change them (:meth:`with_params`). Put
    ``@register_kernel("name")`` above the class to use it by name, in configurations and checkpoints.

    Attributes:
        is_radial: Whether ``f(u, v)`` depends only on ``|u - v|``.
        is_odd: Whether ``f(-u, v) = -f(u, v)``. The sign of a neuron is then arbitrary.
        degree: ``d`` in ``f(a u, b v) = (a b)^d f(u, v)`` for positive a and b, or ``None`` if no such d exists.
        is_differentiable: Whether landmarks can move. If not, :func:`~ksm_lightning.learning.fit_network` leaves them
            at samples.

    Example:
        >>> class Quadratic(Kernel):
        ...     def gram(self, u, v):
        ...         return (1 + u @ v.mT) ** 2
        >>> Quadratic()(torch.eye(2), torch.eye(2))
        tensor([[4., 1.],
                [1., 4.]])
    """

    is_radial: bool = False
    is_odd: bool = False
    degree: float | None = None
    is_differentiable: bool = True

    @property
    def is_homogeneous(self) -> bool:
        """Whether the length of ``w`` acts as its gain, so that q stays 1. A kernel of degree 0 ignores lengths."""
        return self.degree is not None and self.degree > 0

    @abstractmethod
    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        """Block ``f(u_s, v_t)`` (n_u, n_v) for ``u`` (n_u, m) and ``v`` (n_v, m)."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        """:meth:`gram` with checked arguments, at full float32 precision."""
        _check_pair(u, v)
        with full_precision(u.device):
            return self.gram(u, v)

    def diag(self, u: Tensor) -> Tensor:
        """Diagonal ``f(u_s, u_s)`` (n_u,) for ``u`` (n_u, m)."""
        return torch.cat([self(tile, tile).diagonal() for tile in torch.split(u, SMALL_TILE)])

    def value_and_pullback(self, x: Tensor, w: Tensor) -> tuple[Tensor, Pullback]:
        """Block ``k = f(x, w)`` and the pullback ``c -> P`` with ``P_i = sum_b c_bi df(w_i, x_b)/dw_i``.

        Args:
            x: Inputs (batch, m), constant in the derivative.
            w: Landmarks (n, m).

        Returns:
            ``k`` (batch, n) and a function from coefficients ``c`` (batch, n) to ``P`` (n, m).
        """
        _check_pair(x, w)
        with full_precision(x.device):
            k, pullback_parts = self.evaluate(self.prepare(x), w, self.self_terms(w))

        def pullback(c: Tensor) -> Tensor:
            with full_precision(x.device):
                return pullback_parts(c).dense()

        return k, pullback

    def prepare(self, x: Tensor) -> Prepared:
        """Tensors that :meth:`evaluate` needs of inputs (..., batch, m), computed once for a block of batches.

        Each tensor keeps the leading dimensions of x. Its values for one batch do not depend on other batches.
        """
        return (x,)

    def evaluate(self, prepared: Prepared, w: Tensor, terms: SelfTerms) -> Evaluated:
        """:meth:`value_and_pullback` from the results of :meth:`prepare` for x and of :meth:`self_terms` for w.

        The caller has to set :func:`full_precision`.
        """
        with torch.inference_mode(False), torch.enable_grad():
            x, w = prepared[0].detach().clone(), w.detach().clone().requires_grad_()
            k = self(x, w)

        def pullback(c: Tensor) -> PullbackParts:
            with torch.inference_mode(False):
                return PullbackParts(torch.autograd.grad(k, w, c.detach().clone(), retain_graph=True)[0])

        return k.detach(), pullback

    def self_terms(self, w: Tensor) -> SelfTerms:
        """Values and derivatives of ``f(w_i, w_i)`` for ``w`` (n, m)."""
        return SelfTerms(self.diag(w), self.curvature(w), self.diag_gradient(w), 1.0)

    def diag_gradient(self, w: Tensor) -> Tensor:
        """Total derivative (n, m) of ``w_i -> f(w_i, w_i)`` for ``w`` (n, m)."""
        with torch.inference_mode(False), torch.enable_grad():
            w = w.detach().clone().requires_grad_()
            total = self.diag(w).sum()
            if not total.requires_grad:  # a constant diagonal
                return torch.zeros_like(w, requires_grad=False)
            return torch.autograd.grad(total, w, materialize_grads=True)[0]

    def curvature(self, w: Tensor) -> Tensor:
        """Squared length of the step in feature space per unit step of ``w_i``: (n,), positive, for ``w`` (n, m).

        A gradient in w divided by the curvature is a step that does not depend on the units of x or f. For a
        homogeneous kernel the curvature is ``degree f(w,w) / |w|^2``, which turns the gradient of ``f(w,w) / 2``
        into w itself. For any other kernel it is ``|phi(w + d) - phi(w)|^2 / |d|^2``, with a step d that is small
        compared to the spread of the landmarks.
        """
        square = (w * w).sum(1)
        if self.is_homogeneous and self.degree is not None:
            return torch.where(square > 0, self.degree * self.diag(w) / torch.where(square > 0, square, 1.0), 1.0)
        wide = w.detach().double()
        spread = (wide - wide.mean(0)).square().sum() / len(w)
        size = 1e-3 * torch.where(spread > 0, spread, 1.0).sqrt()
        signs = 1.0 - 2.0 * (torch.arange(w.shape[1], device=w.device) % 2)
        moved = wide + size * signs / w.shape[1] ** 0.5
        tiles = zip(torch.split(wide, SMALL_TILE), torch.split(moved, SMALL_TILE), strict=True)
        across = torch.cat([self(u, v).diagonal() for u, v in tiles])
        distance = self.diag(wide) + self.diag(moved) - 2 * across
        curvature = (distance / size.square()).to(w.dtype)
        return torch.where(curvature > 0, curvature, 1.0)

    @property
    def has_frequencies(self) -> bool:
        """Whether the kernel implements :meth:`frequencies`, so that random Fourier features exist."""
        return type(self).frequencies is not Kernel.frequencies

    def frequencies(self, count: int, in_features: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw frequencies (count, in_features) from the spectral density of the kernel.

        The kernel must be a function of ``u - v`` with ``f(u, u) = 1``. By Bochner's theorem ``f(u, v)`` is the mean
        of ``cos(w . (u - v))`` over these frequencies w.
        """
        raise ValueError(
            f"{type(self).__name__} has no random Fourier features: they need a kernel of the difference u - v with a "
            "known spectral density. For your own kernel, implement `frequencies`."
        )

    def params(self) -> dict[str, Any]:
        """Constructor arguments by name. NumPy scalars are converted to Python numbers."""
        values = {name: getattr(self, name) for name in constructor_arguments(type(self))}
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}

    def with_params(self, **changes: Any) -> Self:
        """A new kernel of the same class with some parameters changed.

        Example:
            >>> from ksm_lightning.kernels import PowerCosineKernel
            >>> PowerCosineKernel(alpha=1).with_params(alpha=3)
            PowerCosineKernel(alpha=3)
        """
        known = constructor_arguments(type(self))
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no parameter {unknown[0]!r}; its parameters: {', '.join(known) or 'none'}."
            )
        return type(self)(**{**self.params(), **changes})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.params().items())})"


@lru_cache
def constructor_arguments(cls: type[Kernel]) -> tuple[str, ...]:
    """Names of the parameters of a kernel's class."""
    return () if cls.__init__ is nn.Module.__init__ else tuple(inspect.signature(cls).parameters)


def _check_pair(u: Tensor, v: Tensor) -> None:
    if u.dim() != 2 or v.dim() != 2 or u.shape[1] != v.shape[1]:
        raise ValueError(
            "A kernel compares rows of two matrices with the same number of columns, "
            f"got shapes {tuple(u.shape)} and {tuple(v.shape)}."
        )
