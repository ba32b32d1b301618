"""The built-in kernels as functions of numbers, for the native updates of small networks.

A formula gets ``s``, the squared distance of x and w for a radial kernel and ``x . w`` for any other, the squared
lengths ``x2`` and ``w2``, and the kernel's numbers ``p``. It returns ``k = f(x, w)`` and the coefficients of
``df(w, x)/dw = a x - b w``. A self formula returns ``f(w, w)``, :meth:`~.Kernel.curvature` and the factor of w in the
total derivative of ``f(w, w)``. They are compiled, so they consist of arithmetic and functions of :mod:`math`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ksm_lightning.kernels.angular import ArcCosineKernel, LinearKernel, PolynomialKernel, PowerCosineKernel
from ksm_lightning.kernels.base import Kernel
from ksm_lightning.kernels.radial import CauchyKernel, GaussianKernel, LaplacianKernel

Triple = tuple[float, float, float]
Formula = Callable[[float, float, float, Any], Triple]
SelfFormula = Callable[[float, Any], Triple]


def exponential(x: float) -> float:
    """``e^x``. Machine code has a version of its own, see :mod:`ksm_lightning.learning.native_exponential`."""
    return math.exp(x)


def gaussian(s: float, x2: float, w2: float, p: Any) -> Triple:
    """``exp(-s / (2 sigma^2))`` with p = (-1 / (2 sigma^2), 1 / sigma^2)."""
    k = exponential(p[0] * s)
    return k, k * p[1], k * p[1]


def laplacian(s: float, x2: float, w2: float, p: Any) -> Triple:
    """``exp(-sqrt(s) / sigma)`` with p = (-1 / sigma, 1 / sigma^2). The derivative at the cusp counts as 0."""
    distance = math.sqrt(s)
    k = exponential(p[0] * distance)
    a = -p[0] * k / distance if distance > 0 else 0.0
    return k, a, a


def cauchy(s: float, x2: float, w2: float, p: Any) -> Triple:
    """``1 / (1 + s / sigma^2)`` with p = (1 / sigma^2, 2 / sigma^2)."""
    k = 1 / (1 + p[0] * s)
    return k, p[1] * k * k, p[1] * k * k


def radial_self(w2: float, p: Any) -> Triple:
    """``f(w, w) = 1``; the last number of p is the curvature."""
    return 1.0, p[len(p) - 1], 0.0


def linear(s: float, x2: float, w2: float, p: Any) -> Triple:
    """``x . w``."""
    return s, 1.0, 0.0


def squared_length_self(w2: float, p: Any) -> Triple:
    """``f(w, w) = |w|^2``."""
    return w2, 1.0, 2.0


def polynomial(s: float, x2: float, w2: float, p: Any) -> Triple:
    """``(x . w)^d`` with p = (d,)."""
    power = 1.0
    for _ in range(int(p[0]) - 1):
        power = power * s
    return power * s, p[0] * power, 0.0


def polynomial_self(w2: float, p: Any) -> Triple:
    """``|w|^(2 d)`` with p = (d,)."""
    power = w2 ** (p[0] - 1)
    return power * w2, p[0] * power if w2 > 0 else 1.0, 2 * p[0] * power


def power_cosine(s: float, x2: float, w2: float, p: Any) -> Triple:
    """``|x| |w| cos(x, w)^alpha`` with p = (alpha,)."""
    x_length, w_length = math.sqrt(x2), math.sqrt(w2)
    if x_length == 0:
        return 0.0, 0.0, 0.0
    x_inverse, w_inverse = 1 / x_length, 1 / w_length if w_length > 0 else 1.0
    cosine = s * x_inverse * w_inverse
    power = 1.0
    for _ in range(int(p[0]) - 1):
        power = power * cosine
    k = cosine * power * x_length
    return k * w_length, p[0] * power, (p[0] - 1) * k * w_inverse


def arc_cosine(s: float, x2: float, w2: float, p: Any) -> Triple:
    """The arc-cosine kernel of order 1, with p = (1 - 4 eps,): closer to parallel, the angle counts as 0."""
    x_length, w_length = math.sqrt(x2), math.sqrt(w2)
    x_inverse = 1 / x_length if x_length > 0 else 1.0
    w_inverse = 1 / w_length if w_length > 0 else 1.0
    cosine = s * x_inverse * w_inverse
    if abs(cosine) >= p[0]:
        cosine, sine, theta = math.copysign(1.0, cosine), 0.0, math.pi * (cosine < 0)
    else:
        sine, theta = math.sqrt(1 - cosine * cosine), math.acos(cosine)
    k = (sine + (math.pi - theta) * cosine) * x_length * w_length / math.pi
    a = (math.pi - theta) / math.pi if x_length > 0 else 0.0
    return k, a, -x_length * sine / math.pi * w_inverse


def arc_cosine_0(s: float, x2: float, w2: float, p: Any) -> Triple:
    """The arc-cosine kernel of order 0, with p = (1 - 4 eps, sqrt(eps)). The derivative at the cusp counts as 0."""
    x_length, w_length = math.sqrt(x2), math.sqrt(w2)
    x_inverse = 1 / x_length if x_length > 0 else 1.0
    w_inverse = 1 / w_length if w_length > 0 else 0.0
    cosine = s * x_inverse * w_inverse
    if abs(cosine) >= p[0]:
        return 1.0 - (cosine < 0), 0.0, 0.0
    sine, theta = math.sqrt(1 - cosine * cosine), math.acos(cosine)
    a = w_inverse / (math.pi * sine) if sine > p[1] else 0.0
    return 1 - theta / math.pi, (a * x_inverse if x_length > 0 else 0.0), a * cosine * w_inverse


def arc_cosine_0_self(w2: float, p: Any) -> Triple:
    """``f(w, w) = 1``, and 1/2 for w = 0."""
    if w2 > 0:
        return 1.0, 2 / (math.pi * w2), 0.0
    return 0.5, 1.0, 0.0


class ScalarKernel(NamedTuple):
    """A kernel as functions of numbers."""

    formula: Formula
    self_formula: SelfFormula
    params: tuple[float, ...]


def scalar_kernel(kernel: Kernel, eps: float) -> ScalarKernel | None:
    """The formulas of a built-in kernel for numbers with this precision; None for any other kernel.

    Example:
        >>> found = scalar_kernel(GaussianKernel(2.0), 1e-7)
        >>> found.formula.__name__, found.params
        ('gaussian', (-0.125, 0.25))
    """
    kind = type(kernel)  # not isinstance: a subclass may have other formulas
    if isinstance(kernel, GaussianKernel | LaplacianKernel | CauchyKernel):
        unit = 1 / kernel.sigma**2
        radial: dict[type[Kernel], ScalarKernel] = {
            GaussianKernel: ScalarKernel(gaussian, radial_self, (-0.5 * unit, unit)),
            LaplacianKernel: ScalarKernel(laplacian, radial_self, (-1 / kernel.sigma, unit)),
            CauchyKernel: ScalarKernel(cauchy, radial_self, (unit, 2 * unit)),
        }
        return radial.get(kind)
    if kind is LinearKernel:
        return ScalarKernel(linear, squared_length_self, (1.0,))
    if kind is PolynomialKernel and isinstance(kernel, PolynomialKernel):
        return ScalarKernel(polynomial, polynomial_self, (float(kernel.degree),))
    if kind is PowerCosineKernel and isinstance(kernel, PowerCosineKernel):
        return ScalarKernel(power_cosine, squared_length_self, (float(kernel.alpha),))
    if kind is ArcCosineKernel and isinstance(kernel, ArcCosineKernel):
        numbers = (1 - 4 * eps, math.sqrt(eps))
        if kernel.order == 1:
            return ScalarKernel(arc_cosine, squared_length_self, numbers)
        return ScalarKernel(arc_cosine_0, arc_cosine_0_self, numbers)
    return None
