"""Kernels of the distance: ``f(u, v) = g(|u - v|^2)`` with ``g(0) = 1``."""

import math
from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels.base import Evaluated, Kernel, Prepared, PullbackParts, SelfTerms
from ksm_lightning.kernels.registry import register_kernel


class RadialKernel(Kernel):
    """A function of the distance in units of ``sigma``. A subclass implements :meth:`profile` and :meth:`weight`.

    Precision: distances come from the expanded square ``|u|^2 + |v|^2 - 2 u.v`` after a common mean was subtracted.
    The absolute error of ``|u - v|^2`` is about ``eps R^2``, where ``R`` is the radius of the points around that
    mean. An offset of the data costs no precision. A spread of 1,000 sigma leaves an error of 0.1 in
    ``|u - v|^2 / sigma^2`` in float32; use float64 there.

    Args:
        sigma: Width of the kernel in input units, positive. Default: 1.
    """

    is_radial = True
    # Value of ``weight`` at distance 0, or a substitute for kernels with a cusp there.
    _stiffness = 1.0
    # The argument t of ``profile`` is ``_factor * |u - v|^2 / sigma^2``.
    _factor = 1.0

    def __init__(self, sigma: float = 1.0) -> None:
        super().__init__()
        if not (isinstance(sigma, int | float | np.number) and math.isfinite(sigma) and sigma > 0):
            raise ValueError(
                f"`sigma` must be positive and finite, got {sigma}. It is the kernel's width in input units."
            )
        if not 1e-100 < float(sigma) < 1e100:  # its square must be a number, too
            raise ValueError(f"`sigma` must be between 1e-100 and 1e100, got {sigma}: scale the data.")
        self.sigma = float(sigma)

    @abstractmethod
    def profile(self, t: Tensor) -> Tensor:
        """``g`` as a function of ``t = _factor * |u - v|^2 / sigma^2``. Must not modify t."""

    @abstractmethod
    def weight(self, t: Tensor, k: Tensor) -> Tensor:
        """``-2 sigma^2 dg/d(|u - v|^2)`` at t, given ``k = g(t)``: how strongly a point attracts a landmark."""

    def scaled_distances(self, u: Tensor, v: Tensor, u2: Tensor) -> Tensor:
        """The argument t of :meth:`profile` for centred points. ``u2`` (n_u, 1) is t between u and the origin."""
        scale = self._factor / self.sigma**2
        t = torch.addmm((v * v).sum(1), u, v.mT, beta=scale, alpha=-2 * scale).add_(u2)  # (n_u, n_v)
        return t.clamp_(min=0) if scale > 0 else t.clamp_(max=0)

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        offset = v.mean(0)
        u, v = u - offset, v - offset
        return self.profile(self.scaled_distances(u, v, self._to_origin(u)))

    def diag(self, u: Tensor) -> Tensor:
        return u.new_ones(u.shape[0])

    def _to_origin(self, u: Tensor) -> Tensor:
        return (u * u).sum(-1, keepdim=True).mul_(self._factor / self.sigma**2)

    def prepare(self, x: Tensor) -> Prepared:
        offset = x.mean(-2)  # one per batch
        centred = x - offset[..., None, :]
        return centred, self._to_origin(centred), offset

    def evaluate(self, prepared: Prepared, w: Tensor, terms: SelfTerms) -> Evaluated:
        x, x2, offset = prepared
        w = w - offset
        t = self.scaled_distances(x, w, x2)  # (batch, n)
        k = self.profile(t)

        def pullback(c: Tensor) -> PullbackParts:
            # df(w_i, x_b)/dw_i = weight_bi (x_b - w_i) / sigma^2
            weight = self.weight(t, k)
            a = c * weight  # (batch, n)
            along = a.sum(0)
            return PullbackParts(a.mT @ x, along, w, 1 / self.sigma**2, along if weight is k else None)

        return k, pullback

    def curvature(self, w: Tensor) -> Tensor:
        return w.new_full((w.shape[0],), self._stiffness / self.sigma**2)

    def self_terms(self, w: Tensor) -> SelfTerms:
        return SelfTerms(None, self._stiffness / self.sigma**2, None, 0.0)


@register_kernel("gaussian")
class GaussianKernel(RadialKernel):
    """``f(u, v) = exp(-|u - v|^2 / (2 sigma^2))``.

    Example:
        >>> GaussianKernel(sigma=0.5)(torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [0.0, 0.5]]))
        tensor([[1.0000, 0.6065]])
    """

    _factor = -0.5

    def profile(self, t: Tensor) -> Tensor:
        return t.exp()

    def weight(self, t: Tensor, k: Tensor) -> Tensor:
        return k

    def frequencies(self, count: int, in_features: int, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(count, in_features, generator=generator) / self.sigma


@register_kernel("laplacian")
class LaplacianKernel(RadialKernel):
    """``f(u, v) = exp(-|u - v| / sigma)`` with the Euclidean distance (scikit-learn uses the L1 norm).

    The kernel has a cusp at distance 0, where the derivative is defined as 0. Distances below about
    ``3 sqrt(eps) R``, for points of radius ``R`` around their mean, are within rounding and set to 0.
    """

    def scaled_distances(self, u: Tensor, v: Tensor, u2: Tensor) -> Tensor:
        t = super().scaled_distances(u, v, u2)
        unresolved = u2 + (v * v).sum(1).mul_(1 / self.sigma**2)  # (n_u, n_v)
        return t.masked_fill_(t <= unresolved.mul_(4 * torch.finfo(t.dtype).eps), 0.0)

    def profile(self, t: Tensor) -> Tensor:
        return (-t.sqrt()).exp_()

    def weight(self, t: Tensor, k: Tensor) -> Tensor:
        return torch.where(t > 0, k * t.rsqrt(), 0.0)

    def frequencies(self, count: int, in_features: int, *, generator: torch.Generator | None = None) -> Tensor:
        # The spectral density is a multivariate Cauchy distribution: a normal vector divided by a normal number.
        normal = torch.randn(count, in_features, generator=generator)
        return normal / torch.randn(count, 1, generator=generator).abs_().clamp_(min=1e-30) / self.sigma


@register_kernel("cauchy")
class CauchyKernel(RadialKernel):
    """``f(u, v) = 1 / (1 + |u - v|^2 / sigma^2)``."""

    _stiffness = 2.0

    def profile(self, t: Tensor) -> Tensor:
        return (1 + t).reciprocal_()

    def weight(self, t: Tensor, k: Tensor) -> Tensor:
        return (k * k).mul_(2)

    def frequencies(self, count: int, in_features: int, *, generator: torch.Generator | None = None) -> Tensor:
        # 1 / (1 + t) is the mean of exp(-s t) over an exponential s, so draw normal vectors of variance 2 s.
        normal = torch.randn(count, in_features, generator=generator)
        return normal * (2 * torch.empty(count, 1).exponential_(generator=generator)).sqrt_() / self.sigma
