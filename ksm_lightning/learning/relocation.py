"""Landmarks that explain nothing: how they are found, and where they should be instead."""

from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel
from ksm_lightning.network import KSMNetwork

# A landmark moves if the new position explains this many times more than the old one, plus this fraction of a neuron's
# fair share of the whole. Both keep landmarks of equal worth from swapping positions forever.
_ADVANTAGE, _WORTHWHILE = 1.2, 0.01
# Added to the diagonal, relative to f(w, w), so that landmarks closer than rounding can be told apart.
_JITTER = 1e-9


class Move(NamedTuple):
    """A landmark and the point that it should move to."""

    neuron: int
    point: int


@torch.no_grad()
def find_moves(kernel: Kernel, points: Tensor, W: Tensor, most: int, *, advantage: float = _ADVANTAGE) -> list[Move]:
    """Landmarks that would explain the points better elsewhere, worst first, with the point to move to.

    The residual of a set of landmarks is ``R = F - f(x,W) f(W,W)^-1 f(W,x)``. Removing landmark i adds
    ``sum_x v_ix^2 / P_ii`` to its trace, with ``P = f(W,W)^-1`` and ``v = P f(W,x)``. Adding one at point c removes
    ``sum_x R_xc^2 / R_cc``, where the point's own share is not counted. The loss is close to 0 for
    a neuron far from all data, for one of length 0, and for one of two at the same position. Each move is followed by
    rank-one corrections, so that the next one takes it into account.

    Args:
        kernel: The similarity.
        points: A sample of the data (samples, m) without repetitions, ideally several times as many as landmarks.
        W: Landmarks (n, m).
        most: Largest number of moves.
        advantage: How many times more a landmark must explain at the new position.
    """
    points, W = points.double(), W.double()
    n = len(W)
    K = kernel(W, W)
    if not (K.isfinite().all() and points.isfinite().all()):
        return []  # the divergence guard reports it
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
        # A point cannot explain more than is left. Where everything is explained, R is a ratio of rounding errors.
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


@torch.no_grad()
def relocate(network: KSMNetwork, x: Tensor, most: int | None = None, *, advantage: float = _ADVANTAGE) -> int:
    """Move landmarks that explain nothing to where the residual is largest; returns how many moved.

    A moved neuron gets the mean gain of all neurons, no lateral connections and the median self-inhibition.

    Args:
        network: The network, changed in place.
        x: A sample of the data (samples, m) without repetitions.
        most: Largest number of landmarks to move. Default: a quarter of them.
        advantage: How many times more a landmark must explain at the new position.
    """
    kernel, n = network.kernel, network.num_neurons
    most = max(1, n // 4) if most is None else most
    moves = dict(find_moves(kernel, x, network.W, most, advantage=advantage))  # the last move of each neuron
    if not moves:
        return 0
    gain = (network.q.square() * kernel.diag(network.W)).double().mean()
    inhibition = network.L.diagonal().median()
    neurons = torch.tensor(list(moves), device=x.device)
    positions = x[torch.tensor(list(moves.values()), device=x.device)].to(network.W)
    ratio = gain / kernel.diag(positions).double().clamp(min=torch.finfo(torch.float32).tiny)
    if not gain > 0:  # all neurons are silent: the first active ones keep their own length
        ratio = torch.ones_like(ratio)
    if kernel.is_homogeneous and kernel.degree is not None:
        positions = positions * (ratio ** (0.5 / kernel.degree)).to(positions)[:, None]
    else:
        network.q[neurons] = ratio.sqrt().to(network.q)
    network.W[neurons] = positions
    network.L[neurons] = 0
    network.L[:, neurons] = 0
    network.L[neurons, neurons] = inhibition
    return len(moves)
