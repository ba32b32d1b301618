"""Landmarks that do nothing, noticed and moved to where the residual is largest."""

from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel

# A landmark moves if the new place explains so many times more than the old one, and at least this part of a neuron's
# fair share of all there is to explain. Both keep landmarks of equal worth from changing places for ever.
_ADVANTAGE, _WORTHWHILE = 1.2, 0.01
# Landmarks closer than rounding are told apart by this much, relative to their self-similarity.
_JITTER = 1e-9


class Move(NamedTuple):
    """A landmark and the point that it should move to."""

    neuron: int
    point: int


@torch.no_grad()
def find_moves(kernel: Kernel, points: Tensor, W: Tensor, most: int, *, advantage: float = _ADVANTAGE) -> list[Move]:
    """Landmarks that would explain the points better elsewhere, worst first, each with the place to go.

    What a set of landmarks leaves unexplained is the residual kernel ``R = F - f(x,W) f(W,W)^-1 f(W,x)``. Taking
    landmark i away adds ``sum_x v_ix^2 / P_ii`` to its trace, with ``P = f(W,W)^-1`` and ``v = P f(W,x)``; one more at
    point c takes ``sum_x R_xc^2 / R_cc`` from it, of which the point's own share does not count. A neuron far from all
    data, one of length 0 and one of two at the same place all explain nothing, and are noticed by the same number. Each
    move is followed by rank-one corrections, so that the next one sees it.

    Args:
        kernel: The similarity.
        points: A sample of the data (samples, m), without repetitions, ideally several times as many as landmarks.
        W: Landmarks (n, m).
        most: Moves at most.
        advantage: How many times more than at the old place a landmark must explain at the new one.

    Returns:
        The moves, possibly none.
    """
    points, W = points.double(), W.double()
    n = len(W)
    K = kernel(W, W)
    if not (K.isfinite().all() and points.isfinite().all()):
        return []  # whoever guards the run will say so
    length = K.diagonal().clamp(min=1e-30 * K.diagonal().mean().clamp(min=1e-200))
    unit = length.rsqrt()  # in units of its own length no landmark is too short to be compared
    K = K * unit * unit[:, None]
    K.diagonal().add_(_JITTER)
    P = torch.linalg.pinv(K, hermitian=True)  # (n, n)
    drive = kernel(points, W) * unit  # (samples, n)
    V = P @ drive.mT  # (n, samples)
    F = kernel(points, points)
    share = float(F.diagonal().sum()) / n
    R = F - drive @ V  # (samples, samples)
    smallest = 1e-9 * share * n / len(points)
    moves: list[Move] = []
    while len(moves) < most:
        loss = V.square().sum(1) / P.diagonal()
        i = int(loss.argmin())
        p, v = P[:, i].clone(), V[i].clone()
        R += torch.outer(v, v / p[i])
        own = R.diagonal()
        gain = (R.square().sum(1) - own.square()) / own.clamp(min=smallest)
        # Nothing explains more than is left; where all is explained, what is left of R is rounding over rounding.
        gain.clamp_(max=float(own.clamp(min=0).sum()))
        c = int(gain.argmax())
        if not gain[c] > advantage * loss[i] + _WORTHWHILE * share:
            break
        P -= torch.outer(p, p / p[i])
        V -= torch.outer(p, v / p[i])
        new, residual = -V[:, c], R[c].clone()
        new[i] = 1
        P += torch.outer(new, new / residual[c])
        V += torch.outer(new, residual / residual[c])
        R -= torch.outer(residual, residual / residual[c])
        moves.append(Move(i, c))
    return moves
