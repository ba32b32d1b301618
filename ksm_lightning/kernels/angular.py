"""Kernels of inner products and angles: linear, polynomial with and without offset, power-cosine and arc-cosine."""

import math

import torch
from torch import Tensor

from ksm_lightning.kernels.base import Evaluated, Kernel, Prepared, PullbackParts, SelfTerms
from ksm_lightning.kernels.registry import register_kernel


def _positive_whole(value: float, name: str, meaning: str) -> int:
    if isinstance(value, bool) or not math.isfinite(value) or value != int(value) or value < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1, got {value}. {meaning}")
    return int(value)


class _SquaredLengthKernel(Kernel):
    """Kernels with ``f(w, w) = |w|^2``."""

    degree: float = 1

    def diag(self, u: Tensor) -> Tensor:
        return (u * u).sum(1)

    def self_terms(self, w: Tensor) -> SelfTerms:
        return SelfTerms(torch.linalg.vector_norm(w, dim=1).square_(), 1.0, w, 2.0)


@register_kernel("linear")
class LinearKernel(_SquaredLengthKernel):
    """``f(u, v) = u . v``, the original similarity matching without a kernel.

    Precision: that of one matrix product. A common offset of the data is part of the similarity.
    """

    is_odd = True

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        return u @ v.mT

    def evaluate(self, prepared: Prepared, w: Tensor, terms: SelfTerms) -> Evaluated:
        (x,) = prepared
        return x @ w.mT, lambda c: PullbackParts(c.mT @ x)


@register_kernel("polynomial")
class PolynomialKernel(Kernel):
    """``f(u, v) = (u . v)^degree``, the homogeneous polynomial kernel.

    Precision: relative error about ``degree * eps`` times ``|u||v| / |u.v|``.

    Args:
        degree: Power of the inner product, a whole number of at least 1. Default: 2.

    Example:
        >>> PolynomialKernel(degree=2)(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0], [2.0, 1.0]]))
        tensor([[ 1., 16.]])
    """

    def __init__(self, degree: int = 2) -> None:
        super().__init__()
        self.degree: int = _positive_whole(degree, "degree", "It is the power of the inner product.")
        self.is_odd = self.degree % 2 == 1

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        return _power(u @ v.mT, self.degree)

    def diag(self, u: Tensor) -> Tensor:
        return (u * u).sum(1) ** self.degree

    def evaluate(self, prepared: Prepared, w: Tensor, terms: SelfTerms) -> Evaluated:
        (x,) = prepared
        z = x @ w.mT  # (batch, n)
        power = _power(z, self.degree - 1) if self.degree > 1 else torch.ones_like(z)
        return power * z, lambda c: PullbackParts((c * power).mT @ x, factor=self.degree)

    def diag_gradient(self, w: Tensor) -> Tensor:
        norm2 = (w * w).sum(1, keepdim=True)
        return 2 * self.degree * norm2 ** (self.degree - 1) * w


@register_kernel("offset_polynomial")
class OffsetPolynomialKernel(Kernel):
    """``f(u, v) = (gamma u . v + coef0)^power``, the polynomial kernel of scikit-learn, which calls the power degree.

    Unlike :class:`PolynomialKernel` it is not homogeneous: it contains all products of up to ``power`` inputs.

    Args:
        power: Power, a whole number of at least 1. Default: 3.
        gamma: Factor of the inner product, positive. Default: 1.
        coef0: Offset, positive or 0. Default: 1.

    Example:
        >>> OffsetPolynomialKernel(power=2)(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0], [2.0, 1.0]]))
        tensor([[ 4., 25.]])
    """

    def __init__(self, power: int = 3, gamma: float = 1.0, coef0: float = 1.0) -> None:
        super().__init__()
        self.power = _positive_whole(power, "power", "It is the power of the inner product and its offset.")
        if not (math.isfinite(gamma) and gamma > 0):
            raise ValueError(f"`gamma` must be positive and finite, got {gamma}. It is the factor of u . v.")
        if not (math.isfinite(coef0) and coef0 >= 0):
            raise ValueError(f"`coef0` must be 0 or positive, and finite, got {coef0}: the kernel is a similarity.")
        self.gamma, self.coef0 = float(gamma), float(coef0)

    def _base(self, u: Tensor, v: Tensor) -> Tensor:
        return (u @ v.mT).mul_(self.gamma).add_(self.coef0)

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        return _power(self._base(u, v), self.power)

    def diag(self, u: Tensor) -> Tensor:
        return (self.gamma * (u * u).sum(1) + self.coef0) ** self.power

    def evaluate(self, prepared: Prepared, w: Tensor, terms: SelfTerms) -> Evaluated:
        (x,) = prepared
        z = self._base(x, w)  # (batch, n)
        power = _power(z, self.power - 1) if self.power > 1 else torch.ones_like(z)
        return power * z, lambda c: PullbackParts((c * power).mT @ x, factor=self.power * self.gamma)

    def diag_gradient(self, w: Tensor) -> Tensor:
        base = self.gamma * (w * w).sum(1, keepdim=True) + self.coef0
        return 2 * self.power * self.gamma * base ** (self.power - 1) * w

    def curvature(self, w: Tensor) -> Tensor:
        # The mean over directions of d^2 f / du dv = k gamma b^(k-1) I + k (k-1) gamma^2 b^(k-2) w w^T.
        squares = (w * w).sum(1)
        base, factor = self.gamma * squares + self.coef0, self.power * self.gamma
        first = factor * base ** (self.power - 1)
        if self.power == 1:
            return first
        return first + factor * (self.power - 1) * self.gamma * base ** (self.power - 2) * squares / w.shape[1]


def _power(base: Tensor, exponent: int) -> Tensor:
    """``base ** exponent`` by repeated products, several times faster than ``torch.pow``."""
    if exponent == 1:
        return base
    half = _power(base, exponent // 2)
    return half * half if exponent % 2 == 0 else half * half * base


def _norms(u: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths (..., 1) of the rows and the unit rows (..., m). A zero row has a zero unit row and finite gradients.

    Rows whose squares underflow (lengths below 1e-22 in float32) are treated as zero.
    """
    lengths = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    return lengths, u / torch.where(lengths > 0, lengths, 1.0)


@register_kernel("power_cosine")
class PowerCosineKernel(_SquaredLengthKernel):
    """``f(u, v) = |u| |v| cos(u, v)^alpha``, proportional to the lengths of its inputs.

    ``alpha = 1`` is the linear kernel. The cosine with a zero vector is defined as 0, and derivatives that do not
    exist there are 0. Precision: the cosine has an absolute error of about ``eps``, the kernel of nearly parallel
    vectors a relative error of about ``alpha eps``.

    Args:
        alpha: Power of the cosine, a whole number of at least 1 because cosines can be negative. Default: 3.

    Example:
        >>> PowerCosineKernel(alpha=2)(torch.tensor([[4.0, 0.0], [0.0, 0.0]]), torch.tensor([[9.0, 0.0]]))
        tensor([[36.],
                [ 0.]])
    """

    def __init__(self, alpha: int = 3) -> None:
        super().__init__()
        self.alpha = _positive_whole(alpha, "alpha", "It is the power of the cosine.")
        self.is_odd = self.alpha % 2 == 1

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        if self.alpha == 1:
            return u @ v.mT
        # Rescale vectors to the length |u|^(1/alpha): the kernel is then a power of one matrix product.
        return _power(self._root(u) @ self._root(v).mT, self.alpha)

    def _root(self, u: Tensor) -> Tensor:
        lengths, unit = _norms(u)
        return unit * torch.where(lengths > 0, lengths, 1.0) ** (1 / self.alpha)

    def prepare(self, x: Tensor) -> Prepared:
        return _norms(x)

    def evaluate(self, prepared: Prepared, w: Tensor, terms: SelfTerms) -> Evaluated:
        x_length, x_unit = prepared
        alpha = self.alpha
        assert terms.value is not None
        w_length = terms.value.sqrt()
        w_inverse = 1 / torch.where(w_length > 0, w_length, 1.0)
        cosine = (x_unit @ w.mT).mul_(w_inverse)  # (batch, n)
        # Value and pullback share the factor cos^(alpha-1) |x|.
        power = _power(cosine, alpha - 1) * x_length if alpha > 1 else x_length.expand_as(cosine)
        k = (cosine * power).mul_(w_length)

        def pullback(c: Tensor) -> PullbackParts:
            # df(w, x)/dw = alpha |x| cos^(alpha-1) x_unit + (1 - alpha) |x| cos^alpha w_unit
            a = c * power
            if alpha == 1:
                return PullbackParts(a.mT @ x_unit)
            along = (a * cosine).sum(0).mul_(w_inverse).mul_((alpha - 1) / alpha)  # (n,)
            return PullbackParts(a.mT @ x_unit, along, w, alpha)

        return k, pullback


@register_kernel("arc_cosine")
class ArcCosineKernel(_SquaredLengthKernel):
    """Kernel of an infinitely wide random network: ``f(u, v) = (|u| |v|)^order J(theta) / pi`` (Cho and Saul, 2009).

    ``J_0 = pi - theta`` (threshold units) and ``J_1 = sin(theta) + (pi - theta) cos(theta)`` (rectified units),
    where ``theta`` is the angle between u and v. The cosine with a zero vector is defined as 0. Order 0 ignores
    lengths, so its gains q are learned. It has a cusp at ``theta = 0``, where the derivative is defined as 0.

    Precision: angles below about ``sqrt(8 eps)`` (1e-3 in float32) are rounded to 0. The error is then up to 3e-4
    for order 0 and ``eps`` for order 1. Equal vectors have no error.

    Args:
        order: 0 or 1. Default: 1.
    """

    def __init__(self, order: int = 1) -> None:
        super().__init__()
        if order not in (0, 1):
            raise ValueError(f"`order` must be 0 or 1, got {order}.")
        self.order = int(order)
        self.degree = float(self.order)

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        u_length, u_unit = _norms(u)
        v_length, v_unit = _norms(v)
        return self._value(u_length, v_length, *_angle(u_unit @ v_unit.mT))

    def diag(self, u: Tensor) -> Tensor:
        norm2 = super().diag(u)
        return norm2 if self.order == 1 else torch.where(norm2 > 0, 1.0, 0.5).to(u.dtype)

    def prepare(self, x: Tensor) -> Prepared:
        return _norms(x)

    def evaluate(self, prepared: Prepared, w: Tensor, terms: SelfTerms) -> Evaluated:
        x_length, x_unit = prepared
        w_length = torch.linalg.vector_norm(w, dim=1)
        w_inverse = 1 / torch.where(w_length > 0, w_length, 1.0)
        cosine, sine, theta = _angle((x_unit @ w.mT).mul_(w_inverse))  # each (batch, n)
        k = self._value(x_length, w_length[:, None], cosine, sine, theta)

        def pullback(c: Tensor) -> PullbackParts:
            if self.order == 1:
                # df/dw = |x| (sin(theta) w_unit + (pi - theta) x_unit) / pi
                a = c * x_length / math.pi
                return PullbackParts((a * (math.pi - theta)).mT @ x_unit, (a * sine).sum(0) * -w_inverse, w)
            # df/dw = (x_unit - cos(theta) w_unit) / (pi |w| sin(theta))
            resolved = sine > math.sqrt(torch.finfo(sine.dtype).eps)
            a = c * torch.where(resolved, 1 / (math.pi * sine), 0.0)
            a = a * torch.where(w_length > 0, w_inverse, 0.0)
            return PullbackParts(a.mT @ x_unit, (a * cosine).sum(0) * w_inverse, w)

        return k, pullback

    def self_terms(self, w: Tensor) -> SelfTerms:
        return super().self_terms(w) if self.order == 1 else SelfTerms(self.diag(w), self.curvature(w), None, 0.0)

    def curvature(self, w: Tensor) -> Tensor:
        if self.order == 1:
            return super().curvature(w)
        # The kernel has a cusp at angle 0. With this value, a gradient of full size turns w by half a radian.
        square = (w * w).sum(1)
        return torch.where(square > 0, 2 / (math.pi * torch.where(square > 0, square, 1.0)), 1.0)

    def _value(self, u_length: Tensor, v_length: Tensor, cosine: Tensor, sine: Tensor, theta: Tensor) -> Tensor:
        if self.order == 0:
            return 1 - theta / math.pi
        return (sine + (math.pi - theta) * cosine) * (u_length / math.pi) * v_length.mT


def _angle(cosine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine, sine and angle. Angles within rounding of 0 or pi are set to 0 or pi, with zero gradient."""
    limit = 1 - 4 * torch.finfo(cosine.dtype).eps
    is_end = cosine.abs() >= limit
    inside = cosine.clamp(-limit, limit)
    return (
        torch.where(is_end, cosine.sign(), inside),
        torch.where(is_end, 0.0, (1 - inside * inside).sqrt()),
        torch.where(is_end, math.pi * (cosine < 0).to(cosine.dtype), inside.acos()),
    )
