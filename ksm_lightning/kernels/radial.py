"""Kernels of the distance: ``f(u, v) = g(|u - v|^2)`` with ``g(0) = 1``."""

import math
from abc import abstractmethod

import torch
from torch import Tensor

from ksm_lightning.kernels.base import Kernel, Pullback, _check_pair
from ksm_lightning.kernels.precision import full_precision
from ksm_lightning.kernels.registry import register_kernel


def squared_distances(u: Tensor, v: Tensor) -> Tensor:
    """``|u_s - v_t|^2`` by one matrix product: ``u`` (n_u, m) and ``v`` (n_v, m) give (n_u, n_v).

    The square is expanded, ``|u|^2 + |v|^2 - 2 u.v``, after the mean of ``v`` is removed from both. What is left
    is an absolute error of about ``eps R^2``, with ``eps`` the dtype's (1.2e-7 in float32) and ``R`` the radius of
    the points about that mean: the distance of the data from the origin costs nothing, its spread does. Two
    clusters 1,000 kernel widths apart leave an error of 0.1 in ``|u - v|^2 / sigma^2``; use float64 there.
    """
    u, v = _remove_offset(u, v)
    return _expanded_square(u, v)


def _remove_offset(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    offset = v.mean(0)
    return u - offset, v - offset


def _expanded_square(u: Tensor, v: Tensor) -> Tensor:
    square = torch.addmm((v * v).sum(1), u, v.mT, alpha=-2)  # (n_u, n_v)
    return square.add_((u * u).sum(1, keepdim=True)).clamp_(min=0)


class RadialKernel(Kernel):
    """A function of the distance in units of ``sigma``; a subclass writes :meth:`profile` and :meth:`slope`.

    Precision: see :func:`squared_distances`; nearly equal points keep their digits however far they lie from the
    origin, as long as the data's spread is small against ``sigma / sqrt(eps)`` (about 1,000 sigma in float32).

    Args:
        sigma: The kernel's width in input units, positive.

    Raises:
        ValueError: If ``sigma`` is not positive and finite.
    """

    is_radial = True
    # ``-2 sigma^2 dg/d(d2)`` at 0, or what serves as such where there is a cusp.
    _stiffness = 1.0

    def __init__(self, sigma: float = 1.0) -> None:
        super().__init__()
        if not (isinstance(sigma, int | float) and math.isfinite(sigma) and sigma > 0):
            raise ValueError(
                f"`sigma` must be positive and finite, got {sigma}. It is the kernel's width in input units."
            )
        self.sigma = float(sigma)

    @abstractmethod
    def profile(self, d2: Tensor) -> Tensor:
        """``g`` at squared distances; may overwrite ``d2``."""

    @abstractmethod
    def slope(self, d2: Tensor, k: Tensor) -> Tensor:
        """``dg/d(d2)`` at squared distances, given ``k = g(d2)``."""

    def distances2(self, u: Tensor, v: Tensor) -> Tensor:
        """Squared distances of centred points, as this kernel resolves them."""
        return _expanded_square(u, v)

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        return self.profile(self.distances2(*_remove_offset(u, v)))

    def diag(self, u: Tensor) -> Tensor:
        return u.new_ones(u.shape[0])

    def value_and_pullback(self, x: Tensor, w: Tensor) -> tuple[Tensor, Pullback]:
        _check_pair(x, w)
        with full_precision(x.device):
            x, w = _remove_offset(x, w)
            d2 = self.distances2(x, w)  # (batch, n)
            k = self.profile(d2.clone())

        def pullback(c: Tensor) -> Tensor:
            with full_precision(x.device):
                a = c * self.slope(d2, k)  # (batch, n); df(w_i, x_b)/dw_i = 2 slope_bi (w_i - x_b)
                return torch.addmm(a.sum(0)[:, None] * w, a.mT, x, beta=2, alpha=-2)  # (n, m)

        return k, pullback

    def diag_gradient(self, w: Tensor) -> Tensor:
        return torch.zeros_like(w)

    def curvature(self, w: Tensor) -> Tensor:
        return w.new_full((w.shape[0],), self._stiffness / self.sigma**2)


@register_kernel("gaussian")
class GaussianKernel(RadialKernel):
    """``f(u, v) = exp(-|u - v|^2 / (2 sigma^2))``.

    Example:
        >>> GaussianKernel(sigma=0.5)(torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [0.0, 0.5]]))
        tensor([[1.0000, 0.6065]])
    """

    def profile(self, d2: Tensor) -> Tensor:
        return d2.mul_(-0.5 / self.sigma**2).exp_()

    def slope(self, d2: Tensor, k: Tensor) -> Tensor:
        return k * (-0.5 / self.sigma**2)


@register_kernel("laplacian")
class LaplacianKernel(RadialKernel):
    """``f(u, v) = exp(-|u - v| / sigma)`` with the Euclidean distance (scikit-learn's namesake uses the L1 norm).

    The kernel has a cusp at 0, where its derivative is taken as 0. Distances that the expanded square cannot tell
    from 0, below about ``3 sqrt(eps) R`` for points of radius ``R`` about their mean, count as 0.
    """

    def distances2(self, u: Tensor, v: Tensor) -> Tensor:
        d2 = _expanded_square(u, v)
        unresolved = (u * u).sum(1, keepdim=True) + (v * v).sum(1)  # (n_u, n_v)
        return d2.masked_fill_(d2 <= unresolved.mul_(4 * torch.finfo(d2.dtype).eps), 0.0)

    def profile(self, d2: Tensor) -> Tensor:
        return (d2.sqrt() * (-1 / self.sigma)).exp_()

    def slope(self, d2: Tensor, k: Tensor) -> Tensor:
        return torch.where(d2 > 0, k * d2.rsqrt() * (-0.5 / self.sigma), 0.0)


@register_kernel("cauchy")
class CauchyKernel(RadialKernel):
    """``f(u, v) = 1 / (1 + |u - v|^2 / sigma^2)``."""

    _stiffness = 2.0

    def profile(self, d2: Tensor) -> Tensor:
        return d2.div_(self.sigma**2).add_(1).reciprocal_()

    def slope(self, d2: Tensor, k: Tensor) -> Tensor:
        return k * k * (-1 / self.sigma**2)
