"""The spectrum of ``B = <b b^T>``, or its leading part for networks too large for an eigen-decomposition of B."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.kernels.limits import ROWS_AT_ONCE

# Number of leading eigenvectors, and passes over the sample that make them precise.
RANK, PASSES = 1024, 2


class Spectrum(NamedTuple):
    """A symmetric matrix ``rest I + U (values - rest) U^T``, where U are the leading eigenvectors."""

    values: Tensor  # (r,), float64
    vectors: Tensor  # U (n, r)
    rest: Tensor  # the other n - r eigenvalues, which count as equal; ()

    @classmethod
    def of(cls, matrix: Tensor) -> "Spectrum":
        """All eigenvalues of a positive semi-definite matrix (n, n), float64; negative rounding errors count as 0."""
        values, vectors = torch.linalg.eigh(matrix.double())
        return cls(values.clamp(min=0), vectors, values.new_zeros(()))

    @property
    def eigenvalues(self) -> Tensor:
        """All eigenvalues (n,)."""
        return torch.cat([self.values, self.rest.expand(len(self.vectors) - len(self.values))])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Spectrum":
        """The matrix with a function of each eigenvalue."""
        return Spectrum(function(self.values), self.vectors, function(self.rest))

    def shrunk(self, shrinkage: float) -> "Spectrum":
        """The matrix moved towards a multiple of I with the same trace."""
        mean = self.eigenvalues.mean()
        return self.map(lambda beta: (1 - shrinkage) * beta + shrinkage * mean)

    def dense(self) -> Tensor:
        """The matrix (n, n), in the dtype of the vectors."""
        matrix = (self.vectors * (self.values - self.rest).to(self.vectors)) @ self.vectors.mT
        matrix.diagonal().add_(self.rest.to(matrix))
        return matrix


def moment_eigenvalues(b: Tensor) -> Tensor:
    """The eigenvalues of ``<b b^T>`` for rows (samples, n), float64, except zeros: those of the smaller Gram matrix."""
    return gram_eigenvalues((b.mT @ b if b.shape[1] <= len(b) else b @ b.mT) / len(b))


def gram_eigenvalues(gram: Tensor) -> Tensor:
    """The eigenvalues of a positive semi-definite matrix; NaN if it is not finite, which would be an error."""
    is_finite = bool(gram.isfinite().all())
    return torch.linalg.eigvalsh(gram).clamp(min=0) if is_finite else torch.full_like(gram.diagonal(), torch.nan)


@torch.no_grad()
def leading_spectrum(kernel: Kernel, x: Tensor, W: Tensor, q: Tensor, rank: int = RANK) -> Spectrum:
    """The leading eigenvalues of ``B = <b b^T>`` for the drive ``b = q * f(x, W)``, by subspace iteration.

    B itself is never formed: memory is that of matrices (n, rank) and (4096, n). The eigenvalues that remain count as
    equal, so that the trace is that of B. The first subspace is random with a fixed seed.

    Args:
        kernel: The similarity.
        x: A sample of the data (samples, m).
        W: Landmarks (n, m).
        q: Gains (n,).
        rank: Number of leading eigenvalues r.
    """
    n = len(W)
    first = torch.randn(n, min(rank, n), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = torch.linalg.qr(first.to(W))[0]
    blocks = torch.split(x.to(W), ROWS_AT_ONCE)
    with full_precision(W.device):
        for _ in range(PASSES):
            product = torch.zeros_like(basis)
            for part in blocks:
                drive = kernel(part, W) * q  # (block, n)
                product.addmm_(drive.mT, drive @ basis)
            basis = torch.linalg.qr(product)[0]
        small = torch.zeros(basis.shape[1], basis.shape[1], dtype=torch.float64, device=W.device)
        trace = small.new_zeros(())
        for part in blocks:
            drive = kernel(part, W) * q
            seen = (drive @ basis).double()  # (block, rank)
            small.addmm_(seen.mT, seen)
            trace += drive.square().sum(dtype=torch.float64)
        values, turn = torch.linalg.eigh(small / len(x))
        values = values.clamp(min=0)
        rest = (trace / len(x) - values.sum()).clamp(min=0) / max(1, n - len(values))
        return Spectrum(values, basis @ turn.to(basis), rest)
