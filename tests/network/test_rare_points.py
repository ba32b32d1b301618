"""Points at landmarks, and landmarks that a sample has nothing near."""

import pytest
import torch
from torch.testing import assert_close

from ksm_lightning.kernels import GaussianKernel, PowerCosineKernel
from ksm_lightning.network.rare_points import points_at, weights_of_landmarks


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
