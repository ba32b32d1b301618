"""Features of a kernel matrix that is computed beforehand: the samples are known by their numbers only."""

from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import validate_data
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.learning import Stream
from ksm_lightning.network import KSMNetwork
from ksm_lightning.sklearn.encoder import LazyEncoder
from ksm_lightning.sklearn.frozen import DTYPES
from ksm_lightning.sklearn.preimages import PreImages
from ksm_lightning.sklearn.similarity_matrix import check_similarities

PRECOMPUTED = "precomputed"
"""The name of the kernel."""


def is_precomputed(kernel: Any) -> bool:
    """Whether a parameter ``kernel`` says that samples are given by their kernel matrix."""
    return isinstance(kernel, str) and kernel == PRECOMPUTED


class PrecomputedKernel(Kernel):
    """The kernel of known samples, which are given by their numbers: ``f(s, t) = matrix[s, t]``.

    Args:
        matrix: Similarities (samples, samples).
        numbers: The number of each of these samples, in ascending order.

    Example:
        >>> kernel = PrecomputedKernel(torch.tensor([[1.0, 0.5], [0.5, 2.0]]), torch.tensor([3, 7]))
        >>> kernel(torch.tensor([[7.0]]), torch.tensor([[3.0], [7.0]]))
        tensor([[0.5000, 2.0000]])
    """

    is_differentiable = False

    def __init__(self, matrix: Tensor, numbers: Tensor) -> None:
        super().__init__()
        self.matrix, self.numbers = matrix, numbers

    @classmethod
    def of(cls, matrix: np.ndarray) -> "PrecomputedKernel":
        """The kernel of all samples of a matrix (samples, samples), which is checked and not copied."""
        if matrix.shape[0] != matrix.shape[1]:
            raise ValueError(
                "`fit` with kernel='precomputed' needs the square matrix of similarities of the samples, got the shape "
                f"{matrix.shape}."
            )
        check_similarities(matrix, "A precomputed kernel matrix")
        return cls(torch.from_numpy(matrix), torch.arange(len(matrix)))

    def only(self, numbers: Tensor) -> "PrecomputedKernel":
        """The kernel of some of the samples, in a matrix of its own."""
        numbers = numbers.sort().values
        index = self._index(numbers[:, None])
        return PrecomputedKernel(self.matrix[index[:, None], index], numbers)

    def _index(self, u: Tensor) -> Tensor:
        return torch.searchsorted(self.numbers, u[:, 0].long())

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        return self.matrix[self._index(u)[:, None], self._index(v)].to(u.dtype)

    def diag(self, u: Tensor) -> Tensor:
        return self.matrix.diagonal()[self._index(u)].to(u.dtype)

    def __repr__(self) -> str:
        return f"PrecomputedKernel({len(self.numbers)} samples)"


def as_samples(kernel: Kernel, X: Any) -> Any:
    """The samples that a kernel compares: X, or the numbers (samples, 1) of the rows of a precomputed matrix."""
    return np.arange(len(X), dtype=np.float64)[:, None] if isinstance(kernel, PrecomputedKernel) else X


def validate_rows(estimator: Any, X: Any, *, reset: bool) -> Any:
    """Check what is given to ``fit`` or, without ``reset``, to ``transform``: samples, or rows of a kernel matrix."""
    if not is_precomputed(estimator.kernel):
        return validate_data(estimator, X, dtype=DTYPES, accept_sparse="csr", reset=reset)
    try:
        return validate_data(estimator, X, dtype=DTYPES, reset=reset)
    except ValueError as error:
        if "features as input" not in str(error):
            raise
        raise ValueError(
            f"{str(error).rstrip('.')}: with kernel='precomputed' it takes the similarities (new samples, samples of "
            "`fit`)."
        ) from error


def check_stream(kernel: Any) -> None:
    """Raise ValueError if a network with this kernel cannot learn from a stream."""
    if is_precomputed(kernel) or isinstance(kernel, PrecomputedKernel):
        raise ValueError(
            "`partial_fit` is not possible with kernel='precomputed': the matrix has no similarities to later samples; "
            "call `fit`."
        )
    if isinstance(kernel, Kernel) and not kernel.is_differentiable:
        raise ValueError(
            "`partial_fit` moves landmarks, and torch cannot compute the derivatives of `kernel`: call `fit`, or write "
            "the kernel with torch operations."
        )


class PrecomputedEncoder:
    """Features ``K M`` of similarities K to the landmarks. Everything else of the kernel matrix is given up.

    Args:
        encoder: The features of a network.
        kernel: Its kernel.
    """

    def __init__(self, encoder: LazyEncoder, kernel: PrecomputedKernel) -> None:
        features = encoder.features
        self.network: KSMNetwork = encoder.network
        self.count = encoder.count
        self.landmarks: np.ndarray = features.W[:, 0].long().numpy()
        self.M: np.ndarray = features.M.numpy()
        self.network.kernel = kernel.only(torch.from_numpy(self.landmarks))

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Features (samples, k) of similarities (samples, samples of ``fit``), in their dtype."""
        found: np.ndarray = X[:, self.landmarks].astype(np.float64) @ self.M
        with np.errstate(over="ignore"):  # the caller checks the range
            return found.astype(X.dtype, copy=False)

    @property
    def preimages(self) -> PreImages:
        """Not possible."""
        raise ValueError(
            "`inverse_transform` is not possible with kernel='precomputed', because the samples themselves are not "
            "known."
        )


def encoder_of(encoder: LazyEncoder, stream: Stream) -> LazyEncoder | PrecomputedEncoder:
    """The encoder itself, or one without the kernel matrix of all samples."""
    if not isinstance(stream.kernel, PrecomputedKernel):
        return encoder
    found = PrecomputedEncoder(encoder, stream.kernel)
    stream.kernel = found.network.kernel
    return found
