"""The kernel's NRMSE against full matrices."""

import pytest
import torch

import references
from ksm_lightning.kernels import GaussianKernel, LinearKernel
from ksm_lightning.metrics import KernelNRMSE, kernel_nrmse


@pytest.mark.parametrize("tile", [1, 7, 32, 100])
def test_tiles_equal_the_full_matrix(spec, kernel, tile):
    x, y, z = torch.randn(32, 4), torch.randn(32, 6), torch.randn(32, 3)
    F = references.gram(*spec, x, x)
    errors = kernel_nrmse(kernel, x, y, z, tile=tile)
    assert errors.dtype == torch.float64
    assert errors.tolist() == pytest.approx([references.nrmse(F, y), references.nrmse(F, z)], rel=1e-5)


def test_exact_features_have_no_error_and_none_have_all():
    x = torch.randn(50, 4, dtype=torch.float64)
    assert kernel_nrmse(LinearKernel(), x, x, torch.zeros(50, 1, dtype=torch.float64)).tolist() == pytest.approx(
        [0.0, 1.0], abs=1e-15
    )


def test_small_errors_of_many_points_survive_float32():
    x = torch.randn(3000, 5)
    y = x * (1 + 5e-4)
    expected = references.nrmse(x.double() @ x.double().mT, y)
    assert kernel_nrmse(LinearKernel(), x, y).item() == pytest.approx(expected, rel=1e-3)


def test_metric_over_batches_equals_the_function():
    kernel, x, y = GaussianKernel(0.5), torch.randn(40, 2), torch.randn(40, 3)
    metric = KernelNRMSE(kernel)
    for part in range(0, 40, 16):
        metric.update(x[part : part + 16], y[part : part + 16])
    assert metric.compute().item() == pytest.approx(kernel_nrmse(kernel, x, y).item(), rel=1e-12)
    metric.reset()
    metric.update(x[:8], y[:8])
    assert metric.compute().item() == pytest.approx(kernel_nrmse(kernel, x[:8], y[:8]).item(), rel=1e-12)


def test_a_subset_is_spread_evenly():
    kernel, x, y = GaussianKernel(0.5), torch.randn(40, 2), torch.randn(40, 3)
    metric = KernelNRMSE(kernel, max_points=10)
    metric.update(x, y)
    assert metric.compute().item() == pytest.approx(kernel_nrmse(kernel, x[::4], y[::4]).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernel_nrmse(LinearKernel(), torch.zeros(0, 2), torch.zeros(0, 2)), "at least one sample"),
        (lambda: kernel_nrmse(LinearKernel(), torch.zeros(3, 2)), "one representation"),
        (lambda: kernel_nrmse(LinearKernel(), torch.zeros(3, 2), torch.zeros(4, 2)), "3 inputs but 4"),
        (lambda: KernelNRMSE(LinearKernel(), max_points=0), "`max_points` must be at least 1"),
    ],
)
def test_impossible_errors_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
