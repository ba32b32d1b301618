"""Readouts: three matrices M (p, k) that turn the same p landmarks W into k features ``y = f(x, W) M``.

The network's own representation has one feature per neuron. It minimises an upper bound of the kernel error, not the
error itself. On half moons its error stays near 0.14 however many neurons it has. The other two readouts reach lower
errors with the same landmarks, and they can compress: with k < p they keep the top k principal directions of their p
features. With p = 2 k, the compressed least-squares features are nearly as good as kernel PCA with k features.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Self, get_args

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision, kernel_sample
from ksm_lightning.kernels.limits import ROWS_AT_ONCE
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.network.preprocessing import Frozen
from ksm_lightning.network.readout_matrices import (
    READOUT_SAMPLE,
    check_count,
    compress,
    nystroem_matrix,
    robust_least_squares,
)

Readout = Literal["neural", "nystroem", "least_squares"]
READOUTS: tuple[Readout, ...] = get_args(Readout)
Encoder = Callable[[Tensor], Tensor]
"""Maps inputs (samples, m) to features (samples, k)."""


def check_readout(name: str) -> Readout:
    """Return the name if it is one of :data:`READOUTS`, or raise a ValueError."""
    for known in READOUTS:
        if name == known:
            return known
    raise ValueError(f"There is no readout {name!r}: choose one of {', '.join(READOUTS)}.")


def feature_count(network: KSMNetwork, readout: str, num_features: int | None = None) -> int:
    """Number of features k of a readout. Default: the number of neurons.

    Raises:
        ValueError: If there is no such readout, or it cannot have ``num_features`` features.
    """
    n = network.num_neurons
    count = n if num_features is None else num_features
    if check_readout(readout) != "neural":
        check_count(count, network.num_landmarks)
    elif count != n:
        raise ValueError(
            f"The neural readout always has {n} features, one per neuron, but `num_features` is {count}: leave it out, "
            "or choose the readout nystroem or least_squares."
        )
    return count


def needs_sample(network: KSMNetwork, readout: str, num_features: int | None = None) -> bool:
    """Whether a readout is fitted to a sample of the data: ``least_squares`` always, ``nystroem`` if it compresses.

    Raises the errors of :func:`feature_count`.
    """
    count = feature_count(network, readout, num_features)
    return readout == "least_squares" or (readout == "nystroem" and count < network.num_landmarks)


def readout_sample_size(num_landmarks: int) -> int:
    """Largest number of points that a readout is fitted to. The time grows with its square."""
    return max(READOUT_SAMPLE, 4 * num_landmarks)


def readout_matrix(
    network: KSMNetwork, readout: str, x: Tensor | None = None, num_features: int | None = None
) -> Tensor:
    """The matrix M (p, k) of a readout, one of :data:`READOUTS`, in float64.

    Args:
        network: The network, with p landmarks.
        readout: One of :data:`READOUTS`.
        x: Sample of the data (samples, m) for a readout that :func:`needs_sample`, of which
            :func:`readout_sample_size` random points are used.
        num_features: Number of features k, from 1 to p. Default: the number of neurons, which ``neural`` always has.
    """
    count = feature_count(network, readout, num_features)
    if readout == "neural":
        return network.readout_matrix()
    kernel, W = network.kernel, network.W.detach()
    if not needs_sample(network, readout, count):
        return nystroem_matrix(kernel, W)
    if x is None:
        raise ValueError(
            f"The readout {readout} with {count} features of {len(W)} landmarks needs a sample of the data: pass one."
        )
    x = kernel_sample(kernel, x, readout_sample_size(len(W)))
    if readout == "nystroem":
        return compress(kernel, W, nystroem_matrix(kernel, W), x, count)
    return robust_least_squares(kernel, W, x, count)


class LandmarkFeatures(Frozen):
    """Features ``f(x, W) M`` of inputs x (samples, m), computed at full precision in the dtype of W and M.

    Args:
        kernel: The similarity.
        W: Landmarks (p, m).
        M: Readout (p, k), in the dtype of W.
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
                f"Landmarks (p, m) and readout (p, k) must match in p and dtype, got {tuple(W.shape)} in {W.dtype} and "
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
        cls,
        network: KSMNetwork,
        readout: str,
        sample: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        num_features: int | None = None,
    ) -> Self:
        """The features of a network by any readout, computed in float64.

        Args:
            network: The trained network. Later changes of its weights do not change the features.
            readout: One of :data:`READOUTS`.
            sample: Sample of the data (samples, m) for ``least_squares``, and for ``nystroem`` if it compresses.
            out_dtype: Dtype of the features. Default: float64.
            num_features: Number of features k, at most the number of landmarks. Default: the number of neurons, which
                ``neural`` always has.
        """
        W = network.W.detach().to(torch.float64, copy=True)
        return cls(network.kernel, W, readout_matrix(network, readout, sample, num_features), out_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Features (samples, k) of inputs (samples, m)."""
        x = x.to(self.W.dtype).contiguous()  # the memory layout would change the last digits
        with full_precision(x.device):
            features: Tensor = self.kernel(x, self.W) @ self.M
        return features if self.out_dtype is None else features.to(self.out_dtype)


def make_encoder(
    network: KSMNetwork, readout: str, sample: Tensor | None = None, num_features: int | None = None
) -> Encoder:
    """An encoder from inputs (samples, m) to features (samples, k) in the dtype of the network.

    The neural readout is the network itself. The other readouts are computed in float64 and then cast, because their
    matrices amplify rounding errors by up to ``1e5``. Arguments as in :meth:`LandmarkFeatures.of`.
    """
    feature_count(network, readout, num_features)
    if readout == "neural":
        return network.forward
    return LandmarkFeatures.of(network, readout, sample, network.W.dtype, num_features)


def encode_in_blocks(encoder: Encoder, x: Tensor, block: int = ROWS_AT_ONCE) -> Tensor:
    """Features (samples, k) of inputs (samples, m), computed ``block`` inputs at a time."""
    return torch.cat([encoder(part) for part in torch.split(x, block)])


def read_out(
    network: KSMNetwork,
    readout: str,
    x: Tensor,
    *,
    sample: Tensor | None = None,
    num_features: int | None = None,
    block: int = ROWS_AT_ONCE,
) -> Tensor:
    """Features (samples, k) of inputs (samples, m) by one readout of a network; see :func:`make_encoder`.

    The sample that a readout is fitted to defaults to the inputs. ``block`` inputs are computed at a time.
    """
    encoder = make_encoder(network, readout, x if sample is None else sample, num_features)
    return encode_in_blocks(encoder, x, block)
