"""Kernel PCA without centring: the best approximation of the kernel matrix with n features."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ksm_lightning.baselines.feature_map import FeatureMap, check_enough
from ksm_lightning.kernels import Kernel
from ksm_lightning.kernels.factorisation import robust_cholesky
from ksm_lightning.kernels.limits import EXACT_UP_TO, ROWS_AT_ONCE
from ksm_lightning.kernels.pairs import symmetric_tiles

Solver = Literal["auto", "exact", "randomised"]


class Eigenpairs(NamedTuple):
    """The largest eigenvalues of a matrix and their eigenvectors."""

    values: Tensor  # (n,), descending
    vectors: Tensor  # unit vectors (samples, n)


def leading_eigenpairs(
    product: Callable[[Tensor], Tensor], start: Tensor, count: int, *, power_iterations: int
) -> Eigenpairs:
    """The leading eigenpairs of a positive semi-definite matrix F, given only products with it.

    A random block is multiplied by F ``2 power_iterations + 1`` times, as in ``torch.svd_lowrank``, and
    orthonormalised to Q after each product. With one more product ``Z = F Q``, F is approximated by
    ``Z (Q^T Z)^+ Z^T`` instead of the projection ``Q Q^T F``, which is as accurate as another half iteration (Tropp,
    Yurtsever, Udell and Cevher, 2017).

    Args:
        product: Maps v (samples, columns) to ``F v``.
        start: A random block (samples, q) with q at least ``count``.
        count: Number of eigenpairs.
        power_iterations: Number of power iterations, with two products each.
    """
    basis = torch.linalg.qr(product(start))[0]
    for _ in range(2 * power_iterations):
        basis = torch.linalg.qr(product(basis))[0]
    Z = product(basis)  # (samples, q)
    # A shift of the size of rounding errors makes Q^T Z invertible; it is subtracted from the eigenvalues below.
    shift = torch.finfo(Z.dtype).eps * float(torch.linalg.vector_norm(Z))
    Z.add_(basis, alpha=shift)
    middle = _inner(basis, Z)
    factor = robust_cholesky((middle + middle.mT) / 2)
    root = torch.linalg.solve_triangular(factor, Z.double().mT, upper=False).mT  # (samples, q); F ~ root root^T
    values, axes = torch.linalg.eigh(root.mT @ root)
    values, axes = values.flip(0)[:count], axes.flip(1)[:, :count]
    vectors = root @ (axes * values.clamp(min=torch.finfo(torch.float64).tiny).rsqrt())
    return Eigenpairs((values - shift).clamp(min=0).to(Z), vectors.to(Z))


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """``a^T b`` in float64, computed in blocks of rows."""
    total = a.new_zeros(a.shape[1], b.shape[1], dtype=torch.float64)
    for rows in range(0, len(a), ROWS_AT_ONCE):
        total.addmm_(a[rows : rows + ROWS_AT_ONCE].double().mT, b[rows : rows + ROWS_AT_ONCE].double())
    return total


class KernelPCA(FeatureMap):
    """The n leading eigenvectors of the kernel matrix, scaled by the square roots of their eigenvalues.

    No other n features have a smaller error on the points X passed to :meth:`fit`. New points are mapped to
    ``f(x, X) V Lambda^(-1/2)``, which agrees with the eigenvectors on X.

    Args:
        kernel: The similarity.
        n_components: Number of features n.
        solver: ``exact`` decomposes the full matrix in float64; ``randomised`` computes the leading eigenvectors from
            products with it; ``auto`` is exact up to 2,000 points.
        oversampling: Number of directions beyond n in the randomised solver.
        power_iterations: Number of power iterations of the randomised solver, ``niter`` of ``torch.svd_lowrank``.
        most_bytes: The randomised solver stores the matrix if it fits into this size. Otherwise it recomputes the
            matrix tile by tile for every product.
        progress: Called with the number of tiles computed since the last call, if the matrix is not stored.
        seed: Seed of the randomised solver.

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> KernelPCA(LinearKernel(), n_components=1).fit(x).eigenvalues_
        tensor([9.], dtype=torch.float64)
    """

    def __init__(
        self,
        kernel: Kernel,
        n_components: int,
        *,
        solver: Solver = "auto",
        oversampling: int = 256,
        power_iterations: int = 4,
        most_bytes: int = 2**30,
        progress: Callable[[int], object] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(kernel, n_components, seed=seed)
        if solver not in ("auto", "exact", "randomised"):
            raise ValueError(f"`solver` must be 'auto', 'exact' or 'randomised', got {solver!r}.")
        if oversampling < 0 or power_iterations < 0:
            raise ValueError(
                f"`oversampling` and `power_iterations` must be at least 0, got {oversampling} and {power_iterations}."
            )
        self.solver = solver
        self.oversampling = oversampling
        self.power_iterations = power_iterations
        self.most_bytes = most_bytes
        self.progress = progress

    def _fit(self, x: Tensor, generator: torch.Generator) -> None:
        check_enough("Kernel PCA", self.n_components, len(x))
        is_exact = len(x) <= EXACT_UP_TO if self.solver == "auto" else self.solver == "exact"
        if is_exact:
            x = x.double()
            values, vectors = torch.linalg.eigh(self.kernel(x, x))
            found = Eigenpairs(values.flip(0)[: self.n_components], vectors.flip(1)[:, : self.n_components])
        else:
            found = self._randomised(x, generator)
        # Eigenvalues at the level of rounding errors are set to 0, and so are their features.
        rounding = 10 * torch.finfo(x.dtype).eps * found.values[0]
        values = torch.where(found.values > rounding, found.values, 0.0)
        inverse = torch.where(values > 0, values.clamp(min=torch.finfo(values.dtype).tiny).rsqrt(), 0.0)
        self.eigenvalues_ = values
        self.points_ = x
        self.dual_ = found.vectors * inverse  # (samples, n)
        self.embedding_ = found.vectors * values.sqrt()  # (samples, n)

    def _randomised(self, x: Tensor, generator: torch.Generator) -> Eigenpairs:
        size = min(len(x), self.n_components + self.oversampling)
        start = torch.randn(len(x), size, generator=generator).to(x)
        product: Callable[[Tensor], Tensor] = _TiledProduct(self.kernel, x, self.progress)
        if len(x) ** 2 * x.element_size() <= self.most_bytes:
            product = self.kernel(x, x).__matmul__
        return leading_eigenpairs(product, start, self.n_components, power_iterations=self.power_iterations)

    def _features(self, x: Tensor) -> Tensor:
        features = self.dual_.new_zeros(len(x), self.n_components)
        for points, dual in zip(
            torch.split(self.points_, ROWS_AT_ONCE), torch.split(self.dual_, ROWS_AT_ONCE), strict=True
        ):
            features.addmm_(self.kernel(x.to(points), points), dual)
        return features

    def fit_transform(self, x: Tensor) -> Tensor:
        """:meth:`fit`, then the features of the same points, without recomputing the matrix."""
        self.fit(x)
        return self.embedding_.to(x.dtype)


class _TiledProduct:
    """``v -> F v`` with one tile of F in memory at a time; each tile is used for both of its symmetric positions."""

    def __init__(self, kernel: Kernel, x: Tensor, progress: Callable[[int], object] | None) -> None:
        self.kernel, self.x, self.progress = kernel, x, progress

    def __call__(self, v: Tensor) -> Tensor:
        result = torch.zeros_like(v)
        for rows, columns, weight in symmetric_tiles(len(v)):
            F = self.kernel(self.x[rows], self.x[columns])
            result[rows].addmm_(F, v[columns])
            if weight == 2:
                result[columns].addmm_(F.mT, v[rows])
            if self.progress is not None:
                self.progress(1)
        return result
