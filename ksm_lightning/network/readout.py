"""Readouts: three matrices M that turn the same landmarks W into features ``y = f(x, W) M``.

The network's own representation minimises an upper bound of the kernel error, not the error itself. On half moons its
error stays near 0.14 however many neurons it has. The other two readouts reach lower errors with the same landmarks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Self, get_args

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision, inverse_root, random_subset, symmetric_tiles
from ksm_lightning.network import functional
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.network.preprocessing import Frozen

Readout = Literal["neural", "nystroem", "least_squares"]
READOUTS: tuple[Readout, ...] = get_args(Readout)
READOUT_SAMPLE = 10_000
"""Maximum number of points that the least-squares readout is fitted to."""

Encoder = Callable[[Tensor], Tensor]
"""Maps inputs (samples, m) to features (samples, k)."""


def check_readout(name: str) -> Readout:
    """Return the name if it is one of :data:`READOUTS`, or raise a ValueError."""
    for known in READOUTS:
        if name == known:
            return known
    raise ValueError(f"There is no readout {name!r}: choose one of {', '.join(READOUTS)}.")


@torch.no_grad()
def neural_matrix(network: KSMNetwork) -> Tensor:
    """``diag(q) (L + ridge I)^-1`` (n, n), in float64: the paper's representation."""
    factor = functional.factorise(network.L.double(), network.ridge)
    return network.q.double()[:, None] * torch.cholesky_inverse(factor)


@torch.no_grad()
def nystroem_matrix(kernel: Kernel, W: Tensor) -> Tensor:
    """``(f(W,W)^+)^(1/2)`` (n, n), in float64. It makes the kernel exact on the span of the landmarks.

    Args:
        kernel: The similarity.
        W: Landmarks (n, m), learned or chosen in any other way.

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
    """The M (n, n), in float64, that minimises ``||F - Y Y^T||`` for ``Y = f(x, W) M`` on a sample.

    With ``U`` an orthonormal basis of the columns of ``f(x, W)``, the best approximation of F in their span is
    ``U (U^T F U) U^T``, which is positive semi-definite. F is computed one tile at a time.

    Args:
        kernel: The similarity.
        W: Landmarks (n, m), learned or chosen in any other way.
        x: Sample of the data (samples, m), several times as many points as landmarks.
    """
    if len(x) == 0:
        raise ValueError("The least-squares readout needs a sample of the data, but the sample is empty.")
    W, x = W.double(), x.double()
    # Start from Nystroem features: their scales differ by far less than those of f(x, W).
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
    """The matrix M (n, n) of a readout, one of :data:`READOUTS`, in float64.

    ``least_squares`` is fitted to at most 10,000 random points of the sample x (samples, m).
    """
    if check_readout(readout) == "neural":
        return neural_matrix(network)
    if readout == "nystroem":
        return nystroem_matrix(network.kernel, network.W.detach())
    if x is None:
        raise ValueError("The least-squares readout needs a sample of the data: pass `x`.")
    chosen = random_subset(len(x), READOUT_SAMPLE).to(x.device)
    return least_squares_matrix(network.kernel, network.W.detach(), x[chosen])


class LandmarkFeatures(Frozen):
    """Features ``f(x, W) M`` of inputs x (samples, m), computed at full precision in the dtype of W and M.

    Args:
        kernel: The similarity.
        W: Landmarks (n, m).
        M: Readout (n, k), in the dtype of W.
        out_dtype: Dtype of the features. Default: the dtype of W and M.

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> features = LandmarkFeatures(LinearKernel(), torch.eye(2), torch.tensor([[1.0], [10.0]]))
        >>> features(torch.tensor([[2.0, 3.0]]))
        tensor([[32.]])
    """

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...

    def __init__(self, kernel: Kernel, W: Tensor, M: Tensor, out_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if W.dim() != 2 or M.dim() != 2 or len(W) != len(M) or W.dtype != M.dtype:
            raise ValueError(
                f"Landmarks (n, m) and readout (n, k) must match in n and dtype, got {tuple(W.shape)} in {W.dtype} and "
                f"{tuple(M.shape)} in {M.dtype}."
            )
        self.kernel = kernel
        self.register_buffer("W", W.detach())
        self.register_buffer("M", M.detach())
        self.W: Tensor
        self.M: Tensor
        self.out_dtype = out_dtype

    @classmethod
    def of(
        cls, network: KSMNetwork, readout: str, sample: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Self:
        """The features of a network by any readout, computed in float64.

        Args:
            network: The trained network. Later changes of its weights do not change the features.
            readout: One of :data:`READOUTS`.
            sample: Sample of the data (samples, m) for ``least_squares``.
            out_dtype: Dtype of the features. Default: float64.
        """
        W = network.W.detach().to(torch.float64, copy=True)
        return cls(network.kernel, W, readout_matrix(network, readout, sample), out_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Features (samples, k) of inputs (samples, m)."""
        x = x.to(self.W.dtype).contiguous()  # the memory layout would change the last digits
        with full_precision(x.device):
            features: Tensor = self.kernel(x, self.W) @ self.M
        return features if self.out_dtype is None else features.to(self.out_dtype)


def make_encoder(network: KSMNetwork, readout: str, sample: Tensor | None = None) -> Encoder:
    """An encoder from inputs (samples, m) to features (samples, n) in the dtype of the network.

    The neural readout is the network itself. The other readouts are computed in float64 and then cast, because their
    matrices amplify rounding errors by up to ``1e5``. Arguments as in :meth:`LandmarkFeatures.of`.
    """
    if check_readout(readout) == "neural":
        return network.forward
    return LandmarkFeatures.of(network, readout, sample, out_dtype=network.W.dtype)


def encode_in_blocks(encoder: Encoder, x: Tensor, block: int = 8192) -> Tensor:
    """Features (samples, k) of inputs (samples, m), computed ``block`` inputs at a time."""
    return torch.cat([encoder(part) for part in torch.split(x, block)])


def read_out(
    network: KSMNetwork, readout: str, x: Tensor, *, sample: Tensor | None = None, block: int = 8192
) -> Tensor:
    """Features (samples, n) of inputs (samples, m) by one readout of a network; see :func:`make_encoder`.

    The sample for ``least_squares`` defaults to the inputs. ``block`` inputs are computed at a time.
    """
    return encode_in_blocks(make_encoder(network, readout, x if sample is None else sample), x, block)
