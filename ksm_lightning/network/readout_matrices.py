"""The matrices M (p, k) of the readouts ``f(x, W) M``: Nystroem's, the best for a sample, their leading directions."""

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, inverse_root, symmetric_tiles
from ksm_lightning.network.rare_points import limit_readout, points_at, weights_of_landmarks, with_landmarks

LEAST_SQUARES_RIDGE = 1e-3
"""Ridge of the least-squares readout, in units of the mean ``f(x, x)``. Without it, the error on new points was up to
500 times that of Nystroem's features; with it, on data where none is needed, it is higher by at most 0.3 %."""

_BLOCK = 8192
# Largest |y|^2 / f(x, x) of least-squares features fitted to a large sample.
_LIMIT = 5.0
# Nystroem's features are preferred if their error on held-out points is below this part of that of least squares.
_CLEARLY = 0.9
# Points that decide between the least-squares and the Nystroem readout, for samples of ten times as many.
_HELD_OUT = 500


def check_count(num_features: int, num_landmarks: int) -> None:
    """Raise ValueError if a readout of this number of landmarks cannot have this number of features."""
    if not 1 <= num_features <= num_landmarks:
        raise ValueError(
            f"`num_features` must be between 1 and the number of landmarks, {num_landmarks}, got {num_features}."
        )


@torch.no_grad()
def nystroem_matrix(kernel: Kernel, W: Tensor) -> Tensor:
    """``(f(W,W)^+)^(1/2)`` (p, p), in float64. It makes the kernel exact on the span of the landmarks.

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
    values, vectors = torch.linalg.eigh(kernel(W, W))
    matrix: Tensor = (vectors * inverse_root(values)) @ vectors.mT
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
    for part in torch.split(x, _BLOCK):
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
    features = torch.cat([kernel(part, W) @ first for part in torch.split(x, _BLOCK)])  # (samples, p)
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
def checked_least_squares(kernel: Kernel, W: Tensor, x: Tensor, count: int) -> Tensor:
    """The least-squares matrix M (p, k), or Nystroem's if its error on points held out from the fit is clearly lower.

    Nothing determines the features near landmarks that are far from the sample, and they could be any size. A ridge
    keeps them close to Nystroem's. A large sample is probably a part of the data, and such landmarks stand for the
    points that it lacks: they become part of it, and features are limited.
    """
    ridge = LEAST_SQUARES_RIDGE * kernel.diag(x).double().mean()
    if len(x) < 10 * _HELD_OUT:
        return least_squares_matrix(kernel, W, x, count, ridge=ridge)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    is_new = ~torch.isin(order, points_at(W, x))  # the others have the features of landmarks, not of new points
    order = torch.cat([order[is_new], order[~is_new]]).to(x.device)
    fitted, judges = x[order[_HELD_OUT:]], x[order[:_HELD_OUT]].double()
    weights = torch.cat([fitted.new_ones(len(fitted)), weights_of_landmarks(kernel, W, fitted)])
    M = least_squares_matrix(kernel, W, with_landmarks(kernel, W, fitted), count, weights=weights, ridge=ridge)
    M = limit_readout(kernel, W, M, _LIMIT)
    other = nystroem_matrix(kernel, W)
    other = compress(kernel, W, other, fitted, count) if count < len(W) else other
    k, F = kernel(judges, W.double()), kernel(judges, judges)

    def error(readout: Tensor) -> float:
        squares = (F - (k @ readout) @ (k @ readout).mT).square()
        squares.diagonal().mul_(len(judges) / len(fitted))  # as much as the diagonal counts in the fit
        return float(squares.sum().sqrt())

    return other if error(other) < _CLEARLY * error(M) else M
