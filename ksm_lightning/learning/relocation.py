"""Landmarks that explain nothing: how they are found, and where they should be instead."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.kernels.limits import (
    EXACT_UP_TO,
    FLOAT32_ROUNDING,
    NOTICEABLE,
    POINTS_PER_LANDMARK,
    ROUNDING,
    SMALL_TILE,
    TILE,
)
from ksm_lightning.learning.collectives import Collectives
from ksm_lightning.network import KSMNetwork, TightNetwork
from ksm_lightning.network.landmark_error import MANY_LANDMARKS
from ksm_lightning.network.pivots import nearest_points, residuals, weighted_draw


class Move(NamedTuple):
    """A landmark and the point that it should move to."""

    neuron: int
    point: int


@torch.no_grad()
def find_moves(kernel: Kernel, points: Tensor, W: Tensor, most: int, *, advantage: float = 1.0) -> list[Move]:
    """Landmarks that would explain the points better elsewhere, worst first, with the point to move to.

    The residual of a set of landmarks is ``R = F - f(x,W) f(W,W)^-1 f(W,x)``. Removing landmark i adds
    ``sum_x v_ix^2 / P_ii`` to its trace, with ``P = f(W,W)^-1`` and ``v = P f(W,x)``. Adding one at point c removes
    ``sum_x R_xc^2 / R_cc``, where the point's own share is not counted. The loss is close to 0 for
    a neuron far from all data, for one of length 0, and for one of two at the same position. A landmark moves if its
    gain exceeds ``1 + 10 n / samples`` times the loss, by 1 % of a neuron's fair share of the whole: both keep
    landmarks of equal worth from swapping positions. Each move is followed by rank-one corrections, of which up to 64
    are kept apart before they are added, so that the next move takes it into account.

    Of many points, 2,000 are drawn in proportion to their residual, or two per landmark: among them are the rare ones,
    and the sum over them weights points by their residual, as the kernel error does. The point next to each landmark is
    added, without which a landmark at a rare point would seem idle. With fewer than 10 points per
    landmark only idle landmarks move, which explain almost nothing: the others would fit the points. More than 2,048
    landmarks are not searched, because the matrices (n, n) and (n + samples, samples) would take too long.

    Args:
        kernel: The similarity.
        points: A sample of the data (samples, m) without repetitions, ideally several times as many as landmarks.
        W: Landmarks (n, m).
        most: Largest number of moves.
        advantage: How many times more a landmark must explain at the new position, at least.
    """
    moves: list[Move] = []
    if len(W) > MANY_LANDMARKS or not (W.isfinite().all() and points.isfinite().all() and len(points)):
        return moves  # the divergence guard reports what is not finite
    count = max(EXACT_UP_TO, 2 * len(W))
    order = torch.arange(len(points), device=points.device)
    if len(points) > count:
        drawn = weighted_draw(residuals(kernel, points, W), count, torch.Generator().manual_seed(0))
        order = torch.unique(torch.cat([drawn, nearest_points(kernel, points, W)]))
    points, W = points[order].double(), W.double()
    K = kernel(W, W)
    if not K.isfinite().all():
        return moves
    length = K.diagonal().clamp(min=1e-30 * K.diagonal().mean().clamp(min=1e-200))
    unit = length.rsqrt()  # in units of its own length no landmark is too short to be compared
    K = K * unit * unit[:, None]
    K.diagonal().add_(ROUNDING)
    total = kernel.diag(points).sum()
    worthwhile = NOTICEABLE * float(total) / len(W)
    advantage = max(advantage, 1 + POINTS_PER_LANDMARK * len(W) / len(points))  # the largest gain is partly chance
    smallest = 1e-9 * float(total) / len(points)
    state = _Exchange(kernel, points, K, kernel(points, W) * unit, smallest=smallest, worthwhile=worthwhile)
    most_loss = worthwhile if len(points) < POINTS_PER_LANDMARK * len(W) else math.inf
    while len(moves) < most:
        i, loss = state.remove_landmark()
        c, gain = state.best_candidate()
        if not (loss < most_loss and gain > advantage * loss + worthwhile):
            break
        state.add_landmark(i, c)
        moves.append(Move(i, int(order[c])))
    return moves


def _solve(K: Tensor, drive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``P = K^-1``, ``V = P drive^T`` and the root ``B`` (n, samples) with ``B^T B = drive V``.

    The residual ``F - B^T B`` is more precise than ``F - drive V``: the square root halves the digits that a nearly
    singular K costs.
    """
    factor, info = torch.linalg.cholesky_ex(K)
    if not int(info):
        B = torch.linalg.solve_triangular(factor, drive.mT, upper=False)
        return torch.cholesky_inverse(factor), torch.linalg.solve_triangular(factor.mT, B, upper=True), B
    values, vectors = torch.linalg.eigh(K)
    root = vectors * values.clamp(min=ROUNDING).rsqrt()
    B = root.mT @ drive.mT
    return root @ root.mT, root @ B, B


class _Exchange:
    """Removes and adds landmarks one at a time, and keeps the scores of all landmarks and candidates up to date.

    The symmetric matrix ``M = [[P, V], [V^T, -R]]`` changes by ``-z z^T / z_i`` when landmark i is removed, where z is
    its column i, and by ``y y^T / R_cc`` when candidate c is added, where y is minus the column of c with a 1 at row i.
    Only P and ``T = [V; -R]`` (n + samples, samples) are stored, and the last changes as ``a z z^T`` beside them.
    The sums of squares g over the rows of T are the scores. They change by ``2 a z * (T z) + a^2 z^2 |z|^2``.

    Args:
        kernel: The similarity.
        points: The sample (samples, m), whose points are the candidates.
        K: Similarities f(W, W) (n, n).
        drive: Similarities f(x, W) (samples, n).
        smallest: Values of R_xx below this are rounding errors.
        worthwhile: The least worthwhile gain.
    """

    def __init__(
        self, kernel: Kernel, points: Tensor, K: Tensor, drive: Tensor, *, smallest: float, worthwhile: float
    ) -> None:
        samples, n = drive.shape
        self.n = n
        self.smallest, self.worthwhile = smallest, worthwhile
        self.T = drive.new_empty(n + samples, samples)
        self.P, self.T[:n], B = _solve(K, drive)
        R = self.T[n:]  # with a minus sign
        for start in range(0, samples, TILE):
            rows, stop = slice(start, min(start + TILE, samples)), start + TILE
            F = kernel(points[rows], points[start:])
            torch.addmm(F, B[:, rows].mT, B[:, start:], beta=-1, out=R[rows, start:])
            R[stop:, rows] = R[rows, stop:].mT
        self.own = -R.diagonal()  # R_xx (samples,)
        self.own_P = self.P.diagonal().clone()
        self.Z, self.X = drive.new_empty(SMALL_TILE, n + samples), drive.new_empty(SMALL_TILE, samples)
        self.a = drive.new_empty(SMALL_TILE)
        self.pending = 0
        self._score()

    def remove_landmark(self) -> tuple[int, float]:
        """Remove the landmark with the least loss; returns its index and the loss, infinite if none can be removed."""
        while True:
            i = int((self.g[: self.n].clamp(min=0) / self.own_P.clamp(min=torch.finfo(self.g.dtype).tiny)).argmin())
            v = self._row(i)
            if not self._has_drifted(i, v, self.own_P[i]):
                break
        p = self._column_of_P(i)
        if not bool(p[i] > 0):
            return i, math.inf  # rounding errors have made P indefinite, and no landmark can be judged
        loss = float(v.square().sum() / p[i])
        self._change(torch.cat([p, v]), v, -1 / p[i])
        return i, loss

    def best_candidate(self) -> tuple[int, float]:
        """The candidate with the largest gain, and the gain."""
        own = self.own
        length = own.clamp(min=self.smallest)
        # A point cannot explain more than is left. Where everything is explained, R is a ratio of rounding errors.
        left = float(own.clamp(min=0).sum())
        while True:
            gains = ((self.g[self.n :] - own.square()) / length).clamp_(max=left)
            c = int(gains.argmax())
            if not self._has_drifted(self.n + c, self._row(self.n + c), length[c]):
                return c, float(gains[c])

    def _has_drifted(self, index: int, row: Tensor, scale: Tensor) -> bool:
        """Whether the score ``g / scale`` was inaccurate. Its exact value then replaces it."""
        exact = row.square().sum()
        has_drifted = bool(
            (self.g[index] - exact).abs() > FLOAT32_ROUNDING * (exact + self.worthwhile * scale.clamp(min=0))
        )
        if has_drifted:
            self.g[index] = exact
        return has_drifted

    def add_landmark(self, i: int, c: int) -> None:
        """Put the removed landmark i at candidate c."""
        r = -self._row(self.n + c)
        new = -self._column_of_V(c)
        new[i] = 1
        self._change(torch.cat([new, r]), r, 1 / r[c])

    def _change(self, z: Tensor, x: Tensor, a: Tensor) -> None:
        """Add ``a z x^T`` to T and the same change to P, where x (samples,) continues the rows of z of the points."""
        k = self.pending
        product = self.T @ x + self.Z[:k].mT @ (self.a[:k] * (self.X[:k] @ x))
        self.g += 2 * a * z * product + (a * z).square() * x.square().sum()
        self.own -= a * x.square()
        self.own_P += a * z[: self.n].square()
        self.Z[k], self.X[k], self.a[k] = z, x, a
        self.pending += 1
        if self.pending == SMALL_TILE:
            scaled = self.Z.mT * self.a
            self.T.addmm_(scaled, self.X)
            self.P.addmm_(scaled[: self.n], self.Z[:, : self.n])
            self.pending = 0
            self._score()

    def _score(self) -> None:
        self.g = torch.linalg.vector_norm(self.T, dim=1).square()

    def _row(self, index: int) -> Tensor:
        k = self.pending
        return self.T[index] + (self.a[:k] * self.Z[:k, index]) @ self.X[:k]

    def _column_of_V(self, c: int) -> Tensor:
        k = self.pending
        return self.T[: self.n, c] + (self.a[:k] * self.X[:k, c]) @ self.Z[:k, : self.n]

    def _column_of_P(self, i: int) -> Tensor:
        k = self.pending
        return self.P[:, i] + (self.a[:k] * self.Z[:k, i]) @ self.Z[:k, : self.n]


@torch.no_grad()
def relocate(
    network: KSMNetwork,
    x: Tensor,
    most: int | None = None,
    *,
    advantage: float = 1.0,
    collectives: Collectives | None = None,
) -> int:
    """Move landmarks that explain nothing to where the residual is largest; returns how many moved.

    A moved neuron gets the mean gain of all neurons, no lateral connections and the median self-inhibition. In a tight
    network only W changes: Q and L have to be set by :func:`~ksm_lightning.learning.exact.balance` afterwards.

    Args:
        network: The network, changed in place.
        x: A sample of the data (samples, m) without repetitions.
        most: Largest number of landmarks to move. Default: a quarter of them.
        advantage: How many times more a landmark must explain at the new position, at least.
        collectives: The processes that train together, of which the first searches for all. Default: there is one.
    """
    kernel, W = network.kernel, network.W
    neurons, points = choose_moves(kernel, x, W, most, advantage=advantage, collectives=collectives)
    if not len(neurons):
        return 0
    positions = x[points].to(W)
    if isinstance(network, TightNetwork):
        _move(network, neurons, positions)
        return len(neurons)
    gain = (network.q.square() * kernel.diag(W)).double().mean()
    place(kernel, (W, network.q, network.L), neurons, positions, gain, network.L.diagonal().median())
    return len(neurons)


def choose_moves(
    kernel: Kernel,
    x: Tensor,
    W: Tensor,
    most: int | None = None,
    *,
    advantage: float = 1.0,
    collectives: Collectives | None = None,
) -> tuple[Tensor, Tensor]:
    """Indices (moved,) of landmarks that should move, and of their new points, as the first process has chosen them.

    Arguments as for :func:`relocate`; W are all landmarks (n, m).
    """
    n = len(W)
    most = max(1, n // 4) if most is None else most
    moves = {}
    if collectives is None or collectives.is_first:
        moves = dict(find_moves(kernel, x, W, most, advantage=advantage))  # the last move of each neuron
    if collectives is not None and collectives.size > 1:
        moves = _of_first(moves, n, collectives)
    neurons, points = (torch.tensor(list(each), dtype=torch.int64) for each in (moves, moves.values()))
    return neurons.to(x.device), points.to(x.device)


def place(
    kernel: Kernel, weights: tuple[Tensor, Tensor, Tensor], neurons: Tensor, positions: Tensor, gain: Tensor,
    inhibition: Tensor, first: int = 0,
) -> None:  # fmt: skip
    """Put neurons at new positions, in place: with a common gain, without lateral connections.

    Args:
        kernel: The similarity.
        weights: W (n_r, m), q (n_r,) and L (n_r, n) of the neurons from ``first`` on, of which there are n in all.
        neurons: Indices (moved,) among all neurons.
        positions: Their new landmarks (moved, m).
        gain: The new ``q_i^2 f(w_i, w_i)``; ().
        inhibition: The new ``L_ii``; ().
        first: Index of the neuron of the first row.
    """
    W, q, L = weights
    L[:, neurons] = 0
    is_own = (neurons >= first) & (neurons < first + len(W))
    neurons, positions = neurons[is_own], positions[is_own]
    rows = neurons - first
    ratio = gain / kernel.diag(positions).double().clamp(min=torch.finfo(torch.float32).tiny)
    if not gain > 0:  # all neurons are silent: the first active ones keep their own length
        ratio = torch.ones_like(ratio)
    if kernel.is_homogeneous and kernel.degree is not None:
        positions = positions * (ratio ** (0.5 / kernel.degree)).to(positions)[:, None]
    else:
        q[rows] = ratio.sqrt().to(q)
    W[rows] = positions
    L[rows] = 0
    L[rows, neurons] = inhibition


def _of_first(moves: dict[int, int], n: int, collectives: Collectives) -> dict[int, int]:
    """The moves of the first process: rounding could decide between two equal landmarks differently elsewhere."""
    points = torch.full((n,), -1)
    for neuron, point in moves.items():
        points[neuron] = point
    return {neuron: point for neuron, point in enumerate(collectives.broadcast(points).tolist()) if point >= 0}


def _move(network: TightNetwork, landmarks: Tensor, positions: Tensor) -> None:
    """Move landmarks (moved,) to positions (moved, m). Where lengths act as gains, they get the mean length of all."""
    kernel, W = network.kernel, network.W
    if kernel.is_homogeneous and kernel.degree is not None:
        ratio = kernel.diag(W).double().mean() / kernel.diag(positions).double().clamp(min=torch.finfo(W.dtype).tiny)
        positions = positions * (ratio.clamp(min=torch.finfo(W.dtype).tiny) ** (0.5 / kernel.degree)).to(W)[:, None]
    W[landmarks] = positions
