"""Groups of neighbouring landmarks, and the search for idle landmarks within them."""

import pytest
import torch

from ksm_lightning.kernels import GaussianKernel, PowerCosineKernel
from ksm_lightning.learning import relocation
from ksm_lightning.learning.neighbours import groups_of_neighbours
from ksm_lightning.learning.relocation import find_moves
from ksm_lightning.network.landmark_error import LandmarkError


def test_groups_are_small_disjoint_and_complete(rng):
    W, x = torch.randn(100, 3, generator=rng), torch.randn(700, 3, generator=rng)
    groups = groups_of_neighbours(GaussianKernel(), W, x, 16)
    assert len(groups) == 8
    assert all(len(neurons) <= 16 and len(near) >= 700 // 4**3 for neurons, near in groups)
    assert torch.cat([neurons for neurons, _ in groups]).sort().values.tolist() == list(range(100))
    assert torch.cat([near for _, near in groups]).sort().values.tolist() == list(range(700))


def test_opposite_directions_are_neighbours_where_the_sign_does_not_matter(rng):
    axes = torch.eye(4)[torch.arange(40) % 2] + 0.1 * torch.randn(40, 4, generator=rng)
    signs = torch.where(torch.rand(40, generator=rng) < 0.5, -1.0, 1.0)
    W = axes * signs[:, None]
    groups = groups_of_neighbours(PowerCosineKernel(2), W, W, 20)
    assert sorted(neurons.tolist() for neurons, _ in groups) == [list(range(0, 40, 2)), list(range(1, 40, 2))]
    assert all(neurons.tolist() == near.tolist() for neurons, near in groups)


def test_landmarks_far_from_all_points_get_points_too(rng):
    W, x = 100 + torch.randn(64, 2, generator=rng), torch.randn(200, 2, generator=rng)
    assert all(len(near) >= 40 for _, near in groups_of_neighbours(GaussianKernel(), W, x, 32))


@pytest.mark.parametrize(("kernel", "m"), [(GaussianKernel(0.3), 3), (PowerCosineKernel(3), 10)])
def test_a_search_in_groups_is_nearly_as_good_as_one_of_all_landmarks(rng, monkeypatch, kernel, m):
    """A quarter of the landmarks are copies of others."""
    x = torch.randn(400, m, generator=rng)
    W = x[:64].clone()
    W[48:] = W[:16]
    error, errors = LandmarkError(kernel, torch.randn(1000, m, generator=rng)), []
    for together in (2048, 20):
        monkeypatch.setattr(relocation, "_TOGETHER", together)
        moved = W.clone()
        for neuron, point in find_moves(kernel, x, W, 64):
            moved[neuron] = x[point]
        errors.append(error(moved))
    before = error(W)
    assert errors[0] < 0.93 * before
    assert before - errors[1] > 0.7 * (before - errors[0])


def test_the_search_in_groups_has_bounded_memory(rng, monkeypatch):
    """The largest matrix of the search grows with the group, not with the number of landmarks."""
    sizes, exchange = [], relocation._Exchange

    class Counted(exchange):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            sizes.append(self.T.numel() + self.P.numel())

    monkeypatch.setattr(relocation, "_Exchange", Counted)
    monkeypatch.setattr(relocation, "_TOGETHER", 32)
    for n in (64, 256):
        x = torch.randn(2 * n, 2, generator=rng)
        find_moves(GaussianKernel(0.1), x, x[:n], n // 4)
        assert max(sizes) <= 32 * 32 + (32 + 3 * 64) * 3 * 64, n
        sizes.clear()


def test_values_that_are_not_finite_move_nothing(rng, monkeypatch):
    monkeypatch.setattr(relocation, "_TOGETHER", 4)
    x = torch.randn(40, 2, generator=rng)
    W = x[:10].clone()
    W[3, 1] = torch.nan
    assert find_moves(GaussianKernel(), x, W, 5) == []
