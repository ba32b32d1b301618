"""Readouts: three ways to make features of the same landmarks, each one matrix M with ``y = f(x, W) M``.

The network's own representation minimises an upper bound of the error, not the error: on half moons its error stops
falling near 0.14, however many neurons there are. The landmarks are better than that, and another M shows it.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision, inverse_root, random_subset, symmetric_tiles
from ksm_lightning.network import functional
from ksm_lightning.network.ksm_network import KSMNetwork

Readout = Literal["neural", "nystroem", "least_squares"]
READOUTS: tuple[Readout, ...] = get_args(Readout)
READOUT_SAMPLE = 10_000
"""Points that the least-squares readout looks at, at most."""


def check_readout(name: str) -> Readout:
    """The name, if it is one of :data:`READOUTS`.

    Raises:
        ValueError: If it is not.
    """
    for known in READOUTS:
        if name == known:
            return known
    raise ValueError(f"There is no readout {name!r}: choose one of {', '.join(READOUTS)}.")


@torch.no_grad()
def neural_matrix(network: KSMNetwork) -> Tensor:
    """``diag(q) (L + ridge I)^-1`` (n, n), float64: the paper's representation."""
    factor = functional.factorise(network.L.double(), network.ridge)
    return network.q.double()[:, None] * torch.cholesky_inverse(factor)


@torch.no_grad()
def nystroem_matrix(kernel: Kernel, W: Tensor) -> Tensor:
    """``(f(W,W)^+)^(1/2)`` (n, n), float64: on the span of the landmarks the kernel is then exact.

    Args:
        kernel: The similarity.
        W: Landmarks (n, m), of any origin.

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> nystroem_matrix(LinearKernel(), torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        tensor([[0.5000, 0.0000],
                [0.0000, 0.2500]], dtype=torch.float64)
    """
    W = W.double()
    values, vectors = torch.linalg.eigh(kernel(W, W))
    matrix: Tensor = (vectors * inverse_root(values)) @ vectors.mT
    return matrix


@torch.no_grad()
def least_squares_matrix(kernel: Kernel, W: Tensor, x: Tensor) -> Tensor:
    """The M (n, n), float64, with the smallest ``||F - Y Y^T||`` for ``Y = f(x, W) M`` on a sample.

    With ``U`` an orthonormal basis of the columns of ``f(x, W)``, the best approximation of F in their span is
    ``U (U^T F U) U^T``, which is positive semi-definite as F is. The walk over F holds one tile at a time.

    Args:
        kernel: The similarity.
        W: Landmarks (n, m), of any origin.
        x: A sample of the data (samples, m), several times as many as landmarks.

    Raises:
        ValueError: If there is no sample.
    """
    if len(x) == 0:
        raise ValueError("The least-squares readout needs a sample of the data, and it is empty.")
    W, x = W.double(), x.double()
    # From Nystroem's features, whose scales differ by far less than those of f(x, W).
    first = nystroem_matrix(kernel, W)
    features = torch.cat([kernel(part, W) @ first for part in torch.split(x, 8192)])  # (samples, n)
    values, vectors = torch.linalg.eigh(features.mT @ features)
    onto = vectors * inverse_root(values)  # (n, n); features @ onto has orthonormal columns
    basis = features @ onto
    inside = torch.zeros_like(first)
    for rows, columns, weight in symmetric_tiles(len(x)):
        part = basis[rows].mT @ (kernel(x[rows], x[columns]) @ basis[columns])
        inside += part if weight == 1 else part + part.mT
    values, vectors = torch.linalg.eigh(inside)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    matrix: Tensor = first @ onto @ root
    return matrix


def readout_matrix(network: KSMNetwork, readout: str, x: Tensor | None = None) -> Tensor:
    """The matrix M (n, n), float64, of a readout by name.

    Args:
        network: The trained network.
        readout: One of :data:`READOUTS`.
        x: A sample of the data for ``least_squares``; a random 10,000 of them are used.

    Raises:
        ValueError: If the name is unknown, or the sample is missing.
    """
    name = check_readout(readout)
    if name == "neural":
        return neural_matrix(network)
    if name == "nystroem":
        return nystroem_matrix(network.kernel, network.W.detach())
    if x is None:
        raise ValueError("The least-squares readout needs a sample of the data: pass `x`.")
    chosen = random_subset(len(x), READOUT_SAMPLE).to(x.device)
    return least_squares_matrix(network.kernel, network.W.detach(), x[chosen])


@torch.no_grad()
def landmark_features(kernel: Kernel, x: Tensor, W: Tensor, M: Tensor) -> Tensor:
    """``f(x, W) M`` in the dtype of W and M: ``x`` (samples, m), ``W`` (n, m) and ``M`` (n, k) give (samples, k)."""
    with full_precision(x.device):
        features: Tensor = kernel(x.to(W), W) @ M
    return features


def make_encoder(network: KSMNetwork, readout: str, sample: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """A function from inputs (samples, m) to features (samples, n) in the dtype of the network.

    The neural readout is the network itself. The two others are computed in float64 and then cast: their matrices
    multiply rounding by up to ``1e5``.

    Args:
        network: The trained network.
        readout: One of :data:`READOUTS`.
        sample: A sample of the data (samples, m) for ``least_squares``.
    """
    if check_readout(readout) == "neural":
        return network.forward
    M = readout_matrix(network, readout, sample)
    W = network.W.detach().double()

    def read(x: Tensor) -> Tensor:
        network.check_input(x)
        return landmark_features(network.kernel, x, W, M).to(network.W.dtype)

    return read


def read_out(
    network: KSMNetwork, readout: str, x: Tensor, *, sample: Tensor | None = None, block: int = 8192
) -> Tensor:
    """Features (samples, n) of any number of inputs (samples, m), a block at a time; see :func:`make_encoder`.

    Args:
        network: The trained network.
        readout: One of :data:`READOUTS`.
        x: The inputs.
        sample: A sample of the data for ``least_squares``; the inputs themselves unless given.
        block: Inputs at a time.
    """
    read = make_encoder(network, readout, x if sample is None else sample)
    return torch.cat([read(part) for part in torch.split(x, block)])
