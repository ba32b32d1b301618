"""Points at landmarks, and landmarks that a sample has nothing near."""

import pytest
import torch
from torch.testing import assert_close

from ksm_lightning.kernels import GaussianKernel, LinearKernel, PowerCosineKernel
from ksm_lightning.network.rare_points import points_at, weights_of_landmarks, with_heaviest, without_heavy_at_end


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_at_landmarks_are_found_once_and_no_others(dtype):
    x = torch.randn(5000, 30, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x[4000:4500] = x[7]  # repeated
    W = torch.cat([x[[7, 123, 4999]], x[:20] + 1e-3, -x[:20]]).float()
    assert points_at(W, x).tolist() == [7, 123, 4999]


def test_there_are_no_points_at_landmarks_without_points_or_landmarks():
    x = torch.randn(5, 2)
    assert points_at(x[:0], x).tolist() == []
    assert points_at(x, x[:0]).tolist() == []


def test_the_weight_of_a_landmark_is_that_of_the_points_missing_near_it():
    x = torch.zeros(90, 2)
    W = torch.tensor([[0.0, 0.0], [1.0, 0.0], [50.0, 0.0]])
    near = torch.tensor([90.0, 90 * torch.e**-1, 0.0])
    enough = 0.05 * near.mean()  # which is below 10
    assert_close(weights_of_landmarks(GaussianKernel(1.0), W, x), enough / (enough + near))


def test_lengths_do_not_change_the_weights_of_landmarks():
    generator = torch.Generator().manual_seed(0)
    x, W = torch.randn(300, 3, generator=generator), torch.randn(8, 3, generator=generator)
    x[0] = 0
    kernel, lengths = PowerCosineKernel(3), 10.0 ** torch.arange(-4, 4)[:, None]
    assert_close(weights_of_landmarks(kernel, W * lengths, 7 * x), weights_of_landmarks(kernel, W, x))


def test_heavy_points_count_in_a_sample_as_much_as_in_all():
    """The second moment of the sample has the part of the heavy point that it has in that of all points."""
    x = torch.randn(4000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[3999] = torch.tensor([200.0, 0.0])
    sample = with_heaviest(LinearKernel(), x[:1000], x[1000:])
    assert len(sample) == 1001
    assert_close(sample.mT @ sample / 1000, x.mT @ x / 4000, rtol=0.1, atol=0.1)


def test_no_heavy_point_is_among_the_last():
    x = torch.ones(1000, 2)
    x[[5, 899, 950, 999]] *= 1000
    order = without_heavy_at_end(LinearKernel(), x, 100)
    assert sorted(order.tolist()) == list(range(1000))
    assert (x[order[-100:]] == 1).all()
    assert order[:897].tolist() == list(range(897))  # as few as possible change their places
    assert without_heavy_at_end(GaussianKernel(1.0), x, 100).tolist() == list(range(1000))
    assert without_heavy_at_end(LinearKernel(), x, 0).tolist() == list(range(1000))


@pytest.mark.parametrize("kernel", [GaussianKernel(1.0), PowerCosineKernel(3)], ids=str)
def test_most_data_has_no_heavy_points(kernel):
    x = torch.randn(500, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(with_heaviest(kernel, x[:100], x[100:]), x[:100])
    assert torch.equal(with_heaviest(kernel, x[:100], x[:0]), x[:100])
