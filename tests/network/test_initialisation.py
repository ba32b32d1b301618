"""Landmarks from data: pivots, and Lloyd's method in the kernel's geometry."""

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
from ksm_lightning.network.initialisation import DataInit, lloyd
from ksm_lightning.network.pivots import pivoted_cholesky


class Quadratic(Kernel):
    """A kernel that is neither radial nor homogeneous."""

    def gram(self, u: Tensor, v: Tensor) -> Tensor:
        return (1 + u @ v.mT) ** 2


def error(kernel: Kernel, x: Tensor, W: Tensor) -> float:
    return kernel_nrmse(kernel, x, Nystroem(kernel, len(W), landmarks=W).fit_transform(x)).item()


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
    monkeypatch.setattr(initialisation, "PROGRESS", -1.0)  # no early end
    monkeypatch.setattr(initialisation, "TILE", 100)
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
    W = x[torch.randperm(len(x), generator=rng)[:10]]
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
    chosen = pivoted_cholesky(GaussianKernel(1.0), x, 8, torch.Generator().manual_seed(3))
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert torch.equal(DataInit(x)(GaussianKernel(1.0), 8, 3, generators[0]), x[chosen])
    refined = DataInit(x, iterations=4)(GaussianKernel(1.0), 8, 3, generators[1])
    means = lloyd(GaussianKernel(1.0), x, x[chosen], 4)
    is_mean, is_pivot = (refined == means).all(1), (refined == x[chosen]).all(1)
    assert (is_mean | is_pivot).all()
    assert is_mean.any()
    assert refined.dtype == x.dtype


def test_a_landmark_stays_at_its_pivot_if_the_mean_is_unlike_the_points_next_to_it(rng):
    x = torch.cat([0.1 * torch.randn(500, 2, generator=rng), torch.tensor([[6.0, 0.0], [0.0, 6.0]])])
    pivots, means = torch.tensor([[0.5, 0.5], [6.0, 0.0]]), torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    W = initialisation._better(GaussianKernel(1.0), x, pivots, means)
    assert torch.equal(W, torch.stack([means[0], pivots[1]]))


def test_a_negative_number_of_iterations_is_refused():
    with pytest.raises(ValueError, match="`iterations` must be at least 0, got -1"):
        DataInit(torch.zeros(3, 2), iterations=-1)
