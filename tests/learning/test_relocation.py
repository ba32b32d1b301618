"""The search for landmarks that explain nothing, against the same search without rank-one scores."""

import pytest
import torch
from torch import Tensor

from ksm_lightning.kernels import (
    ArcCosineKernel,
    GaussianKernel,
    Kernel,
    LaplacianKernel,
    LinearKernel,
    PolynomialKernel,
    PowerCosineKernel,
)
from ksm_lightning.learning import relocation
from ksm_lightning.learning.relocation import find_moves

KERNELS = [
    GaussianKernel(1.0), GaussianKernel(3.0), LaplacianKernel(1.5), PowerCosineKernel(3), ArcCosineKernel(0),
    ArcCosineKernel(1), PolynomialKernel(2), LinearKernel(),
]  # fmt: skip


def reference_moves(kernel: Kernel, points: Tensor, W: Tensor, most: int) -> tuple[list[tuple[int, int]], list[float]]:
    """Moves, and the loss of each as a fraction of a neuron's share. All is recomputed for every move."""
    points, W = points.double(), W.double().clone()
    F = kernel(points, points)
    share = F.diagonal().sum() / len(W)
    advantage = 1 + 10 * len(W) / len(points)
    most_loss = 0.01 * share if len(points) < 10 * len(W) else torch.inf
    smallest = 1e-9 * F.diagonal().mean()

    def explained(landmarks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        K = kernel(landmarks, landmarks)
        unit = K.diagonal().clamp(min=1e-30 * K.diagonal().mean().clamp(min=1e-200)).rsqrt()
        K = K * unit * unit[:, None]
        K.diagonal().add_(1e-10)
        drive = kernel(points, landmarks) * unit
        factor = torch.linalg.cholesky(K)
        root = torch.linalg.solve_triangular(factor, drive.mT, upper=False)
        return torch.cholesky_inverse(factor), torch.cholesky_solve(drive.mT, factor), F - root.mT @ root

    moves, losses = [], []
    while len(moves) < most:
        P, V, _ = explained(W)
        loss = V.square().sum(1) / P.diagonal()
        i = int(loss.argmin())
        R = explained(torch.cat([W[:i], W[i + 1 :]]))[2] if len(W) > 1 else F
        own = R.diagonal()
        gain = (R.square().sum(1) - own.square()) / own.clamp(min=smallest)
        gain = gain.clamp(max=float(own.clamp(min=0).sum()))
        c = int(gain.argmax())
        if not (loss[i] < most_loss and gain[c] > advantage * loss[i] + 0.01 * share):
            break
        W[i] = points[c]
        moves.append((i, c))
        losses.append(float(loss[i] / share))
    return moves, losses


def assert_same_moves(kernel: Kernel, x: Tensor, W: Tensor, most: int) -> int:
    """Landmarks of no use may be exchanged: rounding decides which of them moves first, also of two equal ones."""
    moves = find_moves(kernel, x, W, most)
    expected, losses = reference_moves(kernel, x, W, most)
    assert [point for _, point in moves] == [point for _, point in expected]
    ours, theirs = W.clone(), W.clone()
    for step, (move, other) in enumerate(zip(moves, expected, strict=True)):
        ours[move.neuron], theirs[other[0]] = x[move.point], x[other[1]]
        if all(loss < 1e-6 for loss in losses[step + 1 :]) or losses[step + 1] > 1e-6:
            assert sorted(ours.tolist()) == sorted(theirs.tolist())
    return len(moves)


@pytest.mark.parametrize(("n", "samples", "m"), [(1, 10, 2), (12, 100, 2), (46, 165, 2), (40, 150, 5), (60, 90, 12)])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_moves_equal_those_of_the_slow_search(rng, monkeypatch, kernel, n, samples, m):
    monkeypatch.setattr(relocation, "SMALL_TILE", 6)  # corrections are added to the matrices within a run
    monkeypatch.setattr(relocation, "TILE", 40)
    x = torch.randn(samples, m, generator=rng) * torch.linspace(0.2, 1.5, m)
    assert_same_moves(kernel, x, torch.randn(n, m, generator=rng), most=n)


@pytest.mark.parametrize("kernel", KERNELS[:5], ids=str)
@pytest.mark.parametrize("case", ["duplicates", "nearly duplicates", "far away", "zero length", "all far away"])
def test_moves_of_useless_landmarks_equal_those_of_the_slow_search(rng, kernel, case):
    x = torch.randn(120, 6, generator=rng)
    W = torch.randn(20, 6, generator=rng)
    if case == "duplicates":
        W[10:15] = W[:5]
    elif case == "nearly duplicates":  # an inverse kernel matrix of 1e8, with landmarks among the points
        W[10:15] = W[:5] + 1e-4 * torch.randn(5, 6, generator=rng)
        x = torch.cat([x, W])
    elif case == "zero length":
        W[3:6] = 0
    else:
        W[3 if case == "far away" else 0 : 10] += 1000
    moved = assert_same_moves(kernel, x, W, most=20)
    assert moved > 0 or case == "nearly duplicates"  # two of these may explain a derivative


def test_no_landmark_moves_where_the_kernel_matrix_is_singular(rng):
    x = torch.randn(90, 4, generator=rng)
    assert assert_same_moves(LinearKernel(), x, x[:30], most=30) == 0
    assert assert_same_moves(GaussianKernel(1.0), x[:5], x[[0, 1, 2, 3, 4, 0, 1]], most=7) == 0


def test_an_indefinite_kernel_matrix_falls_back_to_the_pseudo_inverse(rng):
    class Indefinite(Kernel):
        def gram(self, u: Tensor, v: Tensor) -> Tensor:
            return (u @ v.mT).tanh() - 0.3 * u[:, :1] @ v[:, :1].mT

    x = torch.randn(40, 3, generator=rng)
    for _, point in find_moves(Indefinite(), x, torch.randn(10, 3, generator=rng), most=10):
        assert 0 <= point < 40


def test_of_many_points_those_with_the_largest_residuals_are_searched(rng, monkeypatch):
    """Three rare points among 5,000, of which 60 are drawn: two per landmark, and at least ``EXACT_UP_TO``."""
    monkeypatch.setattr(relocation, "EXACT_UP_TO", 60)
    common, rare = 0.1 * torch.randn(5000, 2, generator=rng), torch.tensor([[9.0, 0], [0, 9], [-9, 0]])
    x, W = torch.cat([common, rare]), torch.cat([common[:3], torch.full((3, 2), 300.0)])
    moves = find_moves(GaussianKernel(1.0), x, W, most=3)
    assert moves == find_moves(GaussianKernel(1.0), x, W, most=3)  # the draw is always the same
    counts, full = [], relocation._Exchange.__init__

    def spy(self, kernel, points, *args, **options):
        counts.append(len(points))
        full(self, kernel, points, *args, **options)

    monkeypatch.setattr(relocation._Exchange, "__init__", spy)
    found = dict(find_moves(GaussianKernel(1.0), torch.cat([x, rare + 0.1, rare - 0.1]), W, most=3))
    assert counts == [63]  # with the point next to each landmark
    assert set(found) <= {3, 4, 5}
    assert all(point >= 5000 for point in found.values())


def test_with_few_points_per_landmark_only_idle_landmarks_move(rng):
    """119 points for 12 landmarks: one fewer than ten per landmark."""
    x, W = torch.randn(120, 2, generator=rng), 0.3 * torch.randn(12, 2, generator=rng)
    W[5] = 100.0
    assert {move.neuron for move in find_moves(GaussianKernel(0.5), x[:119], W, most=12)} == {5}
    assert len({move.neuron for move in find_moves(GaussianKernel(0.5), x, W, most=12)}) > 1


def test_more_than_2048_landmarks_are_not_searched(rng, monkeypatch):
    x, W = torch.randn(100, 2, generator=rng), torch.full((9, 2), 100.0)
    assert len(find_moves(GaussianKernel(1.0), x, W, most=9)) == 9
    monkeypatch.setattr(relocation, "MANY_LANDMARKS", 8)
    assert find_moves(GaussianKernel(1.0), x, W, most=9) == []


def test_scores_that_drift_are_corrected(rng, monkeypatch):
    """Wrong scores of a landmark and of a candidate are noticed before they decide a move."""
    x, W = torch.randn(100, 2, generator=rng), torch.randn(10, 2, generator=rng)
    W[4] = 50.0
    expected = find_moves(GaussianKernel(0.5), x, W, most=1)
    score = relocation._Exchange._score

    def spoiled(self: relocation._Exchange) -> None:
        score(self)
        self.g[0], self.g[-1] = 0.0, 1e6

    monkeypatch.setattr(relocation._Exchange, "_score", spoiled)
    assert find_moves(GaussianKernel(0.5), x, W, most=1) == expected


def test_non_finite_inputs_move_nothing(rng):
    x, W = torch.randn(30, 2, generator=rng), torch.randn(4, 2, generator=rng)
    assert find_moves(GaussianKernel(1.0), x.index_fill(0, torch.tensor([3]), torch.nan), W, most=4) == []
    assert find_moves(LinearKernel(), x, W.index_fill(0, torch.tensor([3]), torch.inf), most=4) == []
