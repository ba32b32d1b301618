"""The matrices M (p, k) of the readouts ``f(x, W) M``: Nystroem's, the best for a sample, their leading directions."""

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, inverse_root, symmetric_tiles
from ksm_lightning.kernels.limits import EXACT_UP_TO, NOTICEABLE, POINTS_PER_LANDMARK, ROWS_AT_ONCE

READOUT_SAMPLE = 5000
"""Number of points that a readout is fitted to, or four per landmark."""
LEAST_SQUARES_RIDGE = 1e-3
"""Ridge of the least-squares readout towards Nystroem's features, in units of the mean ``f(x, x)``."""
FEATURE_LIMIT = 4.0
"""Largest ``|y|^2 / f(x, x)`` of fitted features: nothing determines their size near points unlike the sample."""


def check_count(num_features: int, num_landmarks: int) -> None:
    """Raise ValueError if a readout of this number of landmarks cannot have this number of features."""
    if not 1 <= num_features <= num_landmarks:
        raise ValueError(
            f"`num_features` must be between 1 and the number of landmarks, {num_landmarks}, got {num_features}."
        )


@torch.no_grad()
def nystroem_matrix(kernel: Kernel, W: Tensor) -> Tensor:
    """A root of ``f(W,W)^+`` (p, p), in float64. It makes the kernel exact on the span of the landmarks.

    Args:
        kernel: The similarity.
        W: Landmarks (p, m), learned or chosen in any other way.

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> nystroem_matrix(LinearKernel(), torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        tensor([[0.5000, 0.0000],
                [0.0000, 0.2500]], dtype=torch.float64)
    """
    W = W.double()
    K = kernel(W, W)
    unit = K.diagonal().clamp(min=torch.finfo(K.dtype).tiny).rsqrt()  # the length of a landmark must not decide
    values, vectors = torch.linalg.eigh(K * unit * unit[:, None])
    matrix: Tensor = unit[:, None] * (vectors * inverse_root(values)) @ vectors.mT
    return matrix


@torch.no_grad()
def compress(kernel: Kernel, W: Tensor, M: Tensor, x: Tensor, num_features: int) -> Tensor:
    """``M V`` (p, k), in float64, with the top k principal directions V of the features ``Y = f(x, W) M`` of a sample.

    ``Y V V^T Y^T`` is the best approximation of ``Y Y^T`` of rank k. The directions are in descending order of the
    eigenvalues of ``Y^T Y``.

    Args:
        kernel: The similarity.
        W: Landmarks (p, m).
        M: Readout (p, p).
        x: Sample of the data (samples, m).
        num_features: Number of features k, at most p.

    Example:
        >>> from ksm_lightning.kernels import LinearKernel
        >>> x = torch.tensor([[1.0, 2.0], [1.0, -2.0]])  # varies most along the second axis
        >>> compress(LinearKernel(), torch.eye(2), torch.eye(2), x, num_features=1)
        tensor([[0.],
                [1.]], dtype=torch.float64)
    """
    check_count(num_features, M.shape[1])
    _check_sample(x)
    W, M, x = W.double(), M.double(), x.double()
    moment = M.new_zeros(M.shape[1], M.shape[1])  # Y^T Y (p, p)
    for part in torch.split(x, ROWS_AT_ONCE):
        features = kernel(part, W) @ M
        moment += features.mT @ features
    _, vectors = torch.linalg.eigh(moment)
    return _fix_signs(kernel, W, M @ vectors[:, -num_features:].flip(1))


def _fix_signs(kernel: Kernel, W: Tensor, M: Tensor) -> Tensor:
    """Make the largest feature of the landmarks positive: the signs of eigenvectors depend on the machine."""
    features = kernel(W, W) @ M  # (p, k)
    largest = features.gather(0, features.abs().argmax(0, keepdim=True))
    return torch.where(largest < 0, -M, M)


def _check_sample(x: Tensor) -> None:
    if len(x) == 0:
        raise ValueError("This readout is fitted to a sample of the data, but the sample is empty.")


@torch.no_grad()
def least_squares_matrix(
    kernel: Kernel,
    W: Tensor,
    x: Tensor,
    num_features: int | None = None,
    *,
    weights: Tensor | None = None,
    ridge: float | Tensor = 0.0,
) -> Tensor:
    """The M (p, k), in float64, that minimises ``||F - Y Y^T||`` for ``Y = f(x, W) M`` on a sample.

    With ``U`` an orthonormal basis of the columns of ``f(x, W)``, the best approximation of F in their span is
    ``U (U^T F U) U^T``, which is positive semi-definite. The k leading eigenvectors of ``U^T F U`` give the best one
    of rank k. F is computed one tile at a time.

    A ridge keeps the features close to Nystroem's in directions that the sample hardly varies in. With Nystroem
    features Z and ``Y Y^T = Z A Z^T`` it adds ``2 ridge tr(D Z^T Z D) + ridge^2 |D|^2`` to the squared error, where
    ``D = A - I``. This is the error of p more points with the Nystroem features ``ridge^(1/2) I``, whose similarities
    are those of their features.

    Args:
        kernel: The similarity.
        W: Landmarks (p, m), learned or chosen in any other way.
        x: Sample of the data (samples, m), several times as many points as landmarks.
        num_features: Number of features k, at most p. Fewer than p are in descending order of their eigenvalues.
            Default: p.
        weights: Weights of the points (samples,): a weight of 2 equals a repeated point. Default: 1.
        ridge: Strength of the ridge, in units of ``f(x, x)``. Default: 0, none.
    """
    count = len(W) if num_features is None else num_features
    check_count(count, len(W))
    _check_sample(x)
    W, x = W.double(), x.double()
    # Start from Nystroem features: their scales differ by far less than those of f(x, W).
    first = nystroem_matrix(kernel, W)
    features = torch.cat([kernel(part, W) @ first for part in torch.split(x, ROWS_AT_ONCE)])  # (samples, p)
    weighted = features if weights is None else features * weights.to(features)[:, None]
    values, vectors = torch.linalg.eigh(features.mT @ weighted)
    scale = inverse_root(values + ridge)
    onto = vectors * scale  # (p, p); the features @ onto of the sample and of the ridge's points are orthonormal
    basis = weighted @ onto
    inside = torch.diag(ridge * (2 * values + ridge) * scale.square())  # the part of the ridge's points
    for rows, columns, weight in symmetric_tiles(len(x)):
        part = basis[rows].mT @ (kernel(x[rows], x[columns]) @ basis[columns])
        inside += part if weight == 1 else part + part.mT
    squares, directions = torch.linalg.eigh(inside)
    scaled = directions * squares.clamp(min=0).sqrt()
    if count < len(W):  # the principal directions of the features of the sample
        _, leading = torch.linalg.eigh(scaled.mT @ (scaled * (values * scale.square())[:, None]))
        return _fix_signs(kernel, W, first @ onto @ (scaled @ leading[:, -count:].flip(1)))
    matrix: Tensor = first @ onto @ (scaled @ directions.mT)
    return matrix


@torch.no_grad()
def limit_readout(kernel: Kernel, W: Tensor, M: Tensor, limit: float = FEATURE_LIMIT) -> Tensor:
    """The M (p, k), in float64, with directions shortened so that ``|y|^2 <= limit f(x, x)`` for every point x.

    ``f(x, W) = K^(1/2) z`` with ``|z|^2 <= f(x, x)``, so the singular values of ``K^(1/2) M`` bound the features. They
    exceed 1 where a readout was fitted to points that barely vary in a direction.

    Args:
        kernel: The similarity.
        W: Landmarks (p, m).
        M: Readout (p, k).
        limit: Largest ``|y|^2 / f(x, x)``.
    """
    W, M = W.double(), M.double()
    values, vectors = torch.linalg.eigh(M.mT @ kernel(W, W) @ M)
    factors = (limit / values.clamp(min=torch.finfo(values.dtype).tiny)).clamp(max=1).sqrt()
    return torch.where((factors == 1).all(), M, M @ (vectors * factors) @ vectors.mT)


@torch.no_grad()
def robust_least_squares(kernel: Kernel, W: Tensor, x: Tensor, count: int, is_part: bool | None = None) -> Tensor:
    """The least-squares matrix M (p, k) of a sample, in float64, with a ridge and a limit on the features.

    A sample that is a part of the data (``is_part``, by default more than 2,000 points) lacks rare points, for which
    landmarks stand: they become points of it, see :func:`weights_of_landmarks`. Otherwise nothing would determine the
    features near them, and one rare point could double the error of all.
    """
    ridge, points, weights = LEAST_SQUARES_RIDGE * kernel.diag(x).double().mean(), x, None
    if len(x) > EXACT_UP_TO if is_part is None else is_part:
        points = torch.cat([x, _of_typical_length(kernel, W, x)])
        weights = torch.cat([x.new_ones(len(x)), weights_of_landmarks(kernel, W, x)])
    return limit_readout(kernel, W, least_squares_matrix(kernel, W, points, count, weights=weights, ridge=ridge))


def _of_typical_length(kernel: Kernel, W: Tensor, x: Tensor) -> Tensor:
    """Landmarks (p, m) as points: the length of one of a homogeneous kernel is its gain, not the length of a point."""
    W = W.to(x)
    if kernel.is_homogeneous and kernel.degree is not None:
        ratio = kernel.diag(x).mean() / kernel.diag(W).clamp(min=torch.finfo(x.dtype).tiny)
        W = W * ratio.clamp(max=1e12)[:, None] ** (0.5 / kernel.degree)
    return W


@torch.no_grad()
def weights_of_landmarks(kernel: Kernel, W: Tensor, x: Tensor) -> Tensor:
    """Weights (p,) from 0 to 1 of landmarks as points of a sample x: high for those that the sample has nothing near.

    The weight is ``c / (c + s_j)``, where ``s_j = sum_x cos(x, w_j)^2`` is the number of points near landmark j in
    feature space and c is 10, or 1 % of its mean if the kernel is so narrow that all landmarks have few.

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> weights = weights_of_landmarks(GaussianKernel(1.0), torch.tensor([[0.0], [9.0]]), torch.zeros(5000, 1))
        >>> [round(weight, 3) for weight in weights.tolist()]
        [0.002, 1.0]
    """
    W, near = W.double(), W.new_zeros(len(W), dtype=torch.float64)
    tiny = torch.finfo(torch.float64).tiny
    length = kernel.diag(W).clamp(min=tiny).rsqrt()
    for part in torch.split(x, ROWS_AT_ONCE):
        part = part.double()
        cosines = kernel(part, W) * length
        near += (cosines.square() / kernel.diag(part).clamp(min=tiny)[:, None]).sum(0)
    enough = (NOTICEABLE * near.mean()).clamp(min=tiny, max=POINTS_PER_LANDMARK)
    weights: Tensor = enough / (enough + near)
    return weights.to(x)
