"""Landmarks from data: k-means++ in rounds and Lloyd's method in the kernel's geometry."""

import pytest
import torch
from torch import Tensor

from ksm_lightning.baselines import Nystroem
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import (
    ArcCosineKernel,
    GaussianKernel,
    Kernel,
    LaplacianKernel,
    LinearKernel,
    PolynomialKernel,
    PowerCosineKernel,
)
from ksm_lightning.network import initialisation
from ksm_lightning.network.initialisation import DataInit, kernel_kmeans_plus_plus, lloyd
from ksm_lightning.network.landmark_error import LandmarkError


class Quadratic(Kernel):
    """A kernel that is neither radial nor homogeneous."""

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        return (1 + u @ v.mT) ** 2


def error(kernel: Kernel, x: Tensor, W: Tensor) -> float:
    return kernel_nrmse(kernel, x, Nystroem(kernel, len(W), landmarks=W).fit_transform(x)).item()


# ---------------------------------------------------------------------- k-means++ in rounds


def test_rounds_draw_with_probability_proportional_to_the_squared_distance(monkeypatch):
    """Frequencies of all sequences of three points against the definition of k-means++."""
    monkeypatch.setattr(initialisation, "_ONE_BY_ONE", 0)
    monkeypatch.setattr(initialisation, "_DRAWS", 4)
    x = torch.tensor([[0.0], [1.0], [3.0], [3.5]])
    squares = torch.cdist(x, x).square()
    nearest = torch.minimum(squares[:, None], squares[None])  # of each point to a pair
    second = squares / squares.sum(1, keepdim=True)
    third = nearest / nearest.sum(2, keepdim=True)
    expected = second[:, :, None] * third / 4
    counts = torch.zeros(4, 4, 4)
    for seed in range(3000):
        chosen = kernel_kmeans_plus_plus(LinearKernel(), x, 3, generator=torch.Generator().manual_seed(seed))
        counts[tuple(chosen.tolist())] += 1 / 3000
    assert (counts - expected).abs().max() < 0.02


def test_rounds_choose_distinct_points_until_all_are_used(rng, monkeypatch):
    monkeypatch.setattr(initialisation, "_ONE_BY_ONE", 0)
    x = torch.randn(400, 3, generator=rng)
    chosen = kernel_kmeans_plus_plus(GaussianKernel(1.0), x, 400, generator=rng)
    assert len(chosen.unique()) == 400
    repeated = kernel_kmeans_plus_plus(GaussianKernel(1.0), x[:300].repeat(2, 1), 420, generator=rng)
    assert repeated.shape == (420,)
    assert len((repeated % 300).unique()) == 300


def test_equal_points_are_drawn_uniformly_in_rounds(rng, monkeypatch):
    monkeypatch.setattr(initialisation, "_ONE_BY_ONE", 0)
    chosen = kernel_kmeans_plus_plus(PowerCosineKernel(3), torch.zeros(500, 2), 300, generator=rng)
    assert chosen.shape == (300,)
    assert chosen.max() < 500


# ---------------------------------------------------------------------- Lloyd's method


def reference_lloyd(x: Tensor, W: Tensor, iterations: int) -> Tensor:
    """Euclidean, one landmark after the other."""
    x, W = x.double(), W.double().clone()
    for _ in range(iterations):
        nearest = torch.cdist(x, W).argmin(1)
        for index in range(len(W)):
            if (nearest == index).any():
                W[index] = x[nearest == index].mean(0)
    return W


@pytest.mark.parametrize("kernel", [GaussianKernel(0.5), LaplacianKernel(2.0)], ids=str)
def test_a_radial_kernel_gives_euclidean_kmeans(rng, monkeypatch, kernel):
    monkeypatch.setattr(initialisation, "_PROGRESS", -1.0)  # no early end
    monkeypatch.setattr(initialisation, "_BLOCK", 100)
    x = 1000 + torch.randn(330, 4, generator=rng)
    W = torch.cat([x[:9], torch.full((1, 4), -1e4)])  # the last has no points
    moved = lloyd(kernel, x, W, 5)
    torch.testing.assert_close(moved.double(), reference_lloyd(x, W, 5), rtol=0, atol=2e-3)
    torch.testing.assert_close(moved[9], W[9], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "kernel",
    [PowerCosineKernel(3), PowerCosineKernel(2), PolynomialKernel(2), LinearKernel(), ArcCosineKernel(1)],
    ids=str,
)
def test_a_homogeneous_kernel_finds_directions_whatever_the_lengths_and_signs(rng, kernel):
    axes = torch.eye(4)[:3]
    lengths = 0.5 + 3 * torch.rand(3, 60, 1, generator=rng)
    signs = 1.0 if isinstance(kernel, ArcCosineKernel) else torch.randn(3, 60, 1, generator=rng).sign()
    x = (signs * lengths * (axes[:, None] + 0.05 * torch.randn(3, 60, 4, generator=rng))).flatten(0, 1)
    W = lloyd(kernel, x, x[[0, 60, 120]], 10)
    cosines = (W * axes).sum(1).abs() / W.norm(dim=1)
    assert cosines.min() > 0.999


@pytest.mark.parametrize(
    "kernel", [GaussianKernel(1.0), PowerCosineKernel(3), Quadratic(), ArcCosineKernel(0)], ids=str
)
def test_refined_landmarks_explain_clusters_better(rng, kernel):
    centres = 2 * torch.randn(10, 5, generator=rng)
    x = (centres[:, None] + 0.4 * torch.randn(10, 50, 5, generator=rng)).flatten(0, 1)
    W = x[kernel_kmeans_plus_plus(kernel, x, 10, generator=rng)]
    assert error(kernel, x, lloyd(kernel, x, W)) < 0.95 * error(kernel, x, W)


def test_a_landmark_stays_where_its_mean_explains_less(rng):
    class Circle(Kernel):
        """Only points near the unit circle have features; the mean of a circle has none."""

        def gram(self, u: Tensor, v: Tensor) -> Tensor:
            near = [torch.exp(-20 * (z.norm(dim=1) - 1).square()) for z in (u, v)]
            return near[0][:, None] * near[1] * (1 + 0.1 * u @ v.mT)

    angles = 6.3 * torch.rand(200, generator=rng)
    x = torch.stack([angles.cos(), angles.sin()], 1)
    assert torch.equal(lloyd(Circle(), x, x[:1], 5), x[:1])
    assert lloyd(GaussianKernel(1.0), x, x[:1], 5).norm() < 0.2


@pytest.mark.parametrize("kernel", [GaussianKernel(1.0), PowerCosineKernel(3), LinearKernel(), Quadratic()], ids=str)
@pytest.mark.parametrize("case", ["zeros", "one point", "duplicates", "more landmarks than points"])
def test_degenerate_points_give_finite_landmarks(rng, kernel, case):
    normal = torch.randn(40, 3, generator=rng)
    x, n = {
        "zeros": (torch.zeros(40, 3), 5),
        "one point": (normal[:1], 1),
        "duplicates": (normal[:4].repeat(10, 1), 6),
        "more landmarks than points": (normal[:3], 8),
    }[case]
    W = DataInit(x, iterations=10)(kernel, n, 3, rng)
    assert W.shape == (n, 3)
    assert W.isfinite().all()


def test_no_iterations_leave_the_data_points(rng):
    x = torch.randn(100, 3, generator=rng)
    chosen = kernel_kmeans_plus_plus(GaussianKernel(1.0), x, 8, generator=torch.Generator().manual_seed(3))
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert torch.equal(DataInit(x)(GaussianKernel(1.0), 8, 3, generators[0]), x[chosen])
    refined = DataInit(x, iterations=4)(GaussianKernel(1.0), 8, 3, generators[1])
    assert torch.equal(refined, lloyd(GaussianKernel(1.0), x, x[chosen], 4))
    assert refined.dtype == x.dtype


def test_a_negative_number_of_iterations_is_refused():
    with pytest.raises(ValueError, match="`iterations` must be at least 0, got -1"):
        DataInit(torch.zeros(3, 2), iterations=-1)


@pytest.fixture
def rare_points():
    """Candidates (1000, 2), a cluster and 20 rare points; and judges, points near the rare ones and a rarer one."""
    x = torch.randn(1000, 2, generator=torch.Generator().manual_seed(1))
    x[::50] = 8 * torch.stack([torch.arange(20.0), -torch.arange(20.0)], dim=1) + 30
    return x, torch.cat([x[::50] + 0.2, x[1::50], torch.full((1, 2), 500.0)])


def test_rare_points_become_landmarks_if_other_points_say_so(rare_points):
    kernel, (x, judges) = GaussianKernel(2.0), rare_points
    error = LandmarkError(kernel, judges[:-1])
    means = DataInit(x, 10)(kernel, 30, 2, torch.Generator().manual_seed(0))
    W = DataInit(x, 10, judges)(kernel, 30, 2, torch.Generator().manual_seed(0))
    assert W.shape == (30, 2)
    assert error(W) < 0.95 * error(means)
    assert int((torch.cdist(W, x).amin(1) == 0).sum()) >= 3  # 10 % or more are data points


def test_pivots_are_not_used_where_they_do_not_help():
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    means = DataInit(x[:1500], 10)(GaussianKernel(1.0), 10, 2, torch.Generator().manual_seed(0))
    W = DataInit(x[:1500], 10, x[1500:])(GaussianKernel(1.0), 10, 2, torch.Generator().manual_seed(0))
    assert torch.equal(W, means)


def test_a_start_has_all_landmarks_even_if_a_long_judge_leaves_no_other_pivots():
    x = torch.randn(1000, 30, generator=torch.Generator().manual_seed(0))
    x[::50] *= 8
    judges = torch.cat([torch.randn(200, 30, generator=torch.Generator().manual_seed(1)), x[::50] + 0.1])
    judges[-1] *= 1e4
    init = DataInit(x, 10, judges, takes_judges=True)
    assert init(PowerCosineKernel(3), 40, 30, torch.Generator().manual_seed(0)).shape == (40, 30)


@pytest.mark.parametrize("takes_judges", [False, True])
def test_a_judge_is_a_landmark_only_if_it_judges_no_more(rare_points, takes_judges):
    x, judges = rare_points
    W = DataInit(x, 10, judges, takes_judges=takes_judges)(GaussianKernel(2.0), 30, 2, torch.Generator().manual_seed(0))
    assert bool((W == 500).all(1).any()) is takes_judges


@pytest.mark.parametrize(("gain", "is_at_points"), [(0.02, False), (0.04, True)])
def test_landmarks_at_points_must_be_clearly_better_than_means(monkeypatch, gain, is_at_points):
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    is_point = lambda W: bool((torch.cdist(W, x[:1500]).amin(1) == 0).all())  # noqa: E731
    monkeypatch.setattr(LandmarkError, "__call__", lambda self, W, n=None: 1 - gain if is_point(W) else 1.0)
    W = DataInit(x[:1500], 10, x[1500:])(GaussianKernel(1.0), 10, 2, torch.Generator().manual_seed(0))
    assert is_point(W) is is_at_points
