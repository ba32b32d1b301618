"""What a similarity is: a Gram block, its diagonal, and their derivatives in the second argument."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from ksm_lightning.kernels.precision import full_precision

Pullback = Callable[[Tensor], Tensor]
Prepared = tuple[Tensor, ...]

_DIAGONAL_TILE = 64


class PullbackParts(NamedTuple):
    """A pullback in parts, ``P_i = factor (matrix_i - along_i base_i)``: the rules add multiples of w anyway."""

    matrix: Tensor
    """(n, m), the caller's to overwrite."""
    along: Tensor | None = None
    """(n,); none where there is no second part."""
    base: Tensor | None = None
    """(n, m)."""
    factor: float = 1.0
    correlation: Tensor | None = None
    """``sum_b c_bi k_bi`` (n,), where it fell out by the way."""

    def dense(self) -> Tensor:
        """All parts together."""
        if self.along is not None and self.base is not None:
            self.matrix.addcmul_(self.base, self.along[:, None], value=-1)
        return self.matrix if self.factor == 1 else self.matrix.mul_(self.factor)


class SelfTerms(NamedTuple):
    """What the rules need to know of ``f(w_i, w_i)``; numbers instead of tensors where all landmarks agree."""

    value: Tensor | None
    """``f(w_i, w_i)`` (n,); none where it is always 1."""
    curvature: Tensor | float
    """:meth:`Kernel.curvature`, (n,) or a number."""
    direction: Tensor | None
    """The total derivative in ``w_i`` is ``slope_i direction_i``, (n, m); none where it is 0."""
    slope: Tensor | float
    """(n,), or a number."""


class Kernel(nn.Module, ABC):
    """A positive semi-definite similarity ``f(u, v)``; a subclass writes :meth:`gram` and nothing else.

    The base class answers the diagonal from small tiles of the Gram matrix and the two derivatives by
    autograd. Built-in kernels override these with closed forms.

    Constructor arguments must be numbers, stored under their own names: that is how a checkpoint remembers a
    kernel (:meth:`params`) and how a phase of the schedule changes one (:meth:`with_params`).

    Attributes:
        is_radial: Whether ``f(u, v)`` depends on ``|u - v|`` alone.
        degree: ``d`` in ``f(a u, b v) = (a b)^d f(u, v)`` for positive a and b; ``None`` if there is no such d.

    Example:
        >>> class Quadratic(Kernel):
        ...     def gram(self, u, v):
        ...         return (1 + u @ v.mT) ** 2
        >>> Quadratic()(torch.eye(2), torch.eye(2))
        tensor([[4., 1.],
                [1., 4.]])
    """

    is_radial: bool = False
    degree: float | None = None

    @property
    def is_odd(self) -> bool:
        """Whether ``f(-u, v) = -f(u, v)``, which leaves the sign of a neuron free."""
        return False

    @property
    def is_homogeneous(self) -> bool:
        """Whether the length of ``w`` can play the part of its gain, so that q stays 1.

        This needs a degree above 0. The arc-cosine kernel of order 0 has degree 0: it ignores lengths, and its
        gains must be learned.
        """
        return self.degree is not None and self.degree > 0

    @abstractmethod
    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        """The block ``f(u_s, v_t)``: ``u`` (n_u, m) and ``v`` (n_v, m) give (n_u, n_v)."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        """:meth:`gram` with its arguments checked, at full float32 precision."""
        _check_pair(u, v)
        with full_precision(u.device):
            return self.gram(u, v)

    def diag(self, u: Tensor) -> Tensor:
        """The diagonal ``f(u_s, u_s)``: ``u`` (n_u, m) gives (n_u,)."""
        tiles = [self(tile, tile).diagonal() for tile in torch.split(u, _DIAGONAL_TILE)]
        return torch.cat(tiles)

    def value_and_pullback(self, x: Tensor, w: Tensor) -> tuple[Tensor, Pullback]:
        """The block ``k = f(x, w)`` and the map ``c -> P`` with ``P_i = sum_b c_bi df(w_i, x_b)/dw_i``.

        Value and pullback come together because they share most of their work.

        Args:
            x: Inputs (batch, m), constants of the derivative.
            w: Landmarks (n, m).

        Returns:
            ``k`` (batch, n), and a function from coefficients ``c`` (batch, n) to ``P`` (n, m).
        """
        _check_pair(x, w)
        with full_precision(x.device):
            k, pull = self.evaluate(self.prepare(x), w, self.self_terms(w))

        def pullback(c: Tensor) -> Tensor:
            with full_precision(x.device):
                return pull(c).dense()

        return k, pullback

    def prepare(self, x: Tensor) -> Prepared:
        """What :meth:`evaluate` wants to know of inputs (..., batch, m): computed once for a block of batches.

        Every tensor keeps the leading dimensions of x, and what it holds of a batch does not depend on other batches.
        """
        return (x,)

    def evaluate(
        self, prepared: Prepared, w: Tensor, terms: SelfTerms
    ) -> tuple[Tensor, Callable[[Tensor], PullbackParts]]:
        """:meth:`value_and_pullback` of one prepared batch; precision is the caller's business.

        Args:
            prepared: What :meth:`prepare` gave for the batch.
            w: Landmarks (n, m).
            terms: :meth:`self_terms` of the landmarks.
        """
        with torch.inference_mode(False), torch.enable_grad():
            x, w = prepared[0].detach().clone(), w.detach().clone().requires_grad_()
            k = self(x, w)

        def pullback(c: Tensor) -> PullbackParts:
            with torch.inference_mode(False):
                return PullbackParts(torch.autograd.grad(k, w, c.detach().clone(), retain_graph=True)[0])

        return k.detach(), pullback

    def self_terms(self, w: Tensor) -> SelfTerms:
        """Everything about ``f(w_i, w_i)`` at once: ``w`` (n, m)."""
        return SelfTerms(self.diag(w), self.curvature(w), self.diag_gradient(w), 1.0)

    def pullback(self, c: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """``P_i = sum_b c_bi df(w_i, x_b)/dw_i``: ``c`` (batch, n), ``x`` (batch, m), ``w`` (n, m) give (n, m)."""
        return self.value_and_pullback(x, w)[1](c)

    def diag_gradient(self, w: Tensor) -> Tensor:
        """Total derivative of ``w_i -> f(w_i, w_i)``: ``w`` (n, m) gives (n, m)."""
        with torch.inference_mode(False), torch.enable_grad():
            w = w.detach().clone().requires_grad_()
            total = self.diag(w).sum()
            if not total.requires_grad:  # a diagonal that is constant
                return torch.zeros_like(w, requires_grad=False)
            return torch.autograd.grad(total, w, materialize_grads=True)[0]

    def curvature(self, w: Tensor) -> Tensor:
        """How much ``|phi(w_i)|^2`` a unit step of ``w_i`` is worth: ``w`` (n, m) gives (n,), positive.

        Dividing a gradient in w by it makes a step that does not depend on the units of x or of f. For a homogeneous
        kernel it is ``degree f(w,w) / |w|^2``, with which the gradient's part from ``f(w,w)`` becomes w itself. For any
        other it is ``|phi(w + d) - phi(w)|^2 / |d|^2`` for a step d that is small against the spread of the landmarks.
        """
        square = (w * w).sum(1)
        if self.is_homogeneous and self.degree is not None:
            return torch.where(square > 0, self.degree * self.diag(w) / torch.where(square > 0, square, 1.0), 1.0)
        wide = w.detach().double()
        spread = (wide - wide.mean(0)).square().sum() / len(w)
        size = 1e-3 * torch.where(spread > 0, spread, 1.0).sqrt()
        signs = 1.0 - 2.0 * (torch.arange(w.shape[1], device=w.device) % 2)
        moved = wide + size * signs / w.shape[1] ** 0.5
        tiles = zip(torch.split(wide, _DIAGONAL_TILE), torch.split(moved, _DIAGONAL_TILE), strict=True)
        across = torch.cat([self(u, v).diagonal() for u, v in tiles])
        distance = self.diag(wide) + self.diag(moved) - 2 * across
        curvature = (distance / size.square()).to(w.dtype)
        return torch.where(curvature > 0, curvature, 1.0)

    @property
    def has_frequencies(self) -> bool:
        """Whether :meth:`frequencies` answers, so that random Fourier features exist."""
        return type(self).frequencies is not Kernel.frequencies

    def frequencies(self, count: int, in_features: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws (count, in_features) from the spectral density of a kernel of ``u - v`` with ``f(u, u) = 1``.

        By Bochner's theorem ``f(u, v)`` is the mean of ``cos(w . (u - v))`` over these w.

        Raises:
            ValueError: If the kernel has no such density, or it is not known here.
        """
        raise ValueError(
            f"{type(self).__name__} has no random Fourier features: they need a kernel of the difference u - v whose "
            "spectral density is known. For your own kernel, write its method `frequencies`."
        )

    def params(self) -> dict[str, Any]:
        """The constructor's arguments, by name; numbers of NumPy as plain ones, for files."""
        values = {name: getattr(self, name) for name in _constructor_arguments(type(self))}
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}

    def with_params(self, **changes: Any) -> Self:
        """A kernel of the same kind with some of its parameters changed.

        Example:
            >>> from ksm_lightning.kernels import PowerCosineKernel
            >>> PowerCosineKernel(alpha=1).with_params(alpha=3)
            PowerCosineKernel(alpha=3)
        """
        known = _constructor_arguments(type(self))
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no parameter {unknown[0]!r}; it takes {', '.join(known) or 'none'}."
            )
        return type(self)(**{**self.params(), **changes})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.params().items())})"


@lru_cache
def _constructor_arguments(cls: type[Kernel]) -> tuple[str, ...]:
    if cls.__init__ is nn.Module.__init__:
        return ()
    return tuple(inspect.signature(cls).parameters)


def _check_pair(u: Tensor, v: Tensor) -> None:
    if u.dim() != 2 or v.dim() != 2 or u.shape[1] != v.shape[1]:
        raise ValueError(
            "A kernel compares rows of two matrices with the same number of columns, "
            f"got shapes {tuple(u.shape)} and {tuple(v.shape)}."
        )
