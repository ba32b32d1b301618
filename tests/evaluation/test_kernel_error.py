"""The kernel error against full matrices."""

import pytest
import torch

from helpers import references
from ksm_lightning.evaluation.kernel_error import KernelNRMSE, kernel_nrmse, kernel_squared_errors
from ksm_lightning.kernels import GaussianKernel, LinearKernel
from ksm_lightning.kernels.pairs import random_subset, symmetric_tiles


@pytest.mark.parametrize("tile", [1, 7, 32, 100])
def test_tiles_equal_the_full_matrix(spec, kernel, tile):
    x, y, z = torch.randn(32, 4), torch.randn(32, 6), torch.randn(32, 3)
    F = references.gram(*spec, x, x)
    errors = kernel_nrmse(kernel, x, y, z, tile=tile)
    assert errors.dtype == torch.float64
    assert errors.tolist() == pytest.approx([references.nrmse(F, y), references.nrmse(F, z)], rel=1e-5)


def test_exact_features_have_error_0_and_zeros_have_error_1():
    x = torch.randn(50, 4, dtype=torch.float64)
    assert kernel_nrmse(LinearKernel(), x, x, torch.zeros(50, 1, dtype=torch.float64)).tolist() == pytest.approx(
        [0.0, 1.0], abs=1e-15
    )


def test_small_errors_of_many_points_are_accurate_in_float32():
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


def test_a_subset_is_random_but_fixed():
    kernel, x, y = GaussianKernel(0.5), torch.randn(40, 2), torch.randn(40, 3)
    chosen = random_subset(40, 10)
    assert len(chosen.unique()) == 10
    assert torch.equal(chosen, random_subset(40, 10))
    assert not torch.equal(chosen, random_subset(40, 10, seed=1))
    assert torch.equal(random_subset(5, 10), torch.arange(5))
    metric = KernelNRMSE(kernel, max_points=10)
    metric.update(x, y)
    assert metric.compute().item() == pytest.approx(kernel_nrmse(kernel, x[chosen], y[chosen]).item(), rel=1e-12)


def test_choosing_a_subset_does_not_change_the_global_random_state():
    before = torch.get_rng_state()
    random_subset(40, 10)
    assert torch.equal(torch.get_rng_state(), before)


def test_several_representations_share_one_pass():
    calls = []

    class Counting(GaussianKernel):
        def gram(self, u, v):
            calls.append(None)
            return super().gram(u, v)

    x, y, z = torch.randn(20, 2), torch.randn(20, 3), torch.randn(20, 5)
    metric = KernelNRMSE(Counting(0.5), num_representations=2)
    metric.update(x[:12], y[:12], z[:12])
    metric.update(x[12:], y[12:], z[12:])
    both = metric.compute()
    assert len(calls) == 1
    assert both.tolist() == pytest.approx(
        [kernel_nrmse(GaussianKernel(0.5), x, part).item() for part in (y, z)], rel=1e-12
    )
    with pytest.raises(ValueError, match="Expected 2 representations, got 1"):
        metric.update(x, y)


def test_sums_over_shares_of_the_tiles_add_up():
    kernel, x, y = GaussianKernel(0.5), torch.randn(50, 2), torch.randn(50, 3)
    tiles = list(symmetric_tiles(50, 8))
    whole = kernel_squared_errors(kernel, x, [y], tiles)
    shares = [kernel_squared_errors(kernel, x, [y], tiles[rank::3]) for rank in range(3)]
    assert sum(shares).tolist() == pytest.approx(whole.tolist(), rel=1e-12)
    covered = torch.zeros(50, 50)
    for rows, columns, weight in tiles:
        covered[rows, columns] += 1
        if weight == 2:
            covered[columns, rows] += 1
    assert covered.eq(1).all()


def test_the_metric_reports_every_tile_once():
    x, y, ticks = torch.randn(2100, 2), torch.randn(2100, 3), []
    metric = KernelNRMSE(GaussianKernel(0.5), progress=ticks.append)
    metric.update(x, y)
    metric.compute()
    assert ticks == [1] * len(list(symmetric_tiles(2100)))


@pytest.mark.parametrize("is_replicated", [False, True])
def test_processes_share_the_tiles_of_the_metric(monkeypatch, is_replicated):
    """Without a process group, rank 1 of 3 is simulated. Its sums are those of every third tile from the second on."""
    kernel, x, y = GaussianKernel(0.5), torch.randn(2100, 2), torch.randn(2100, 3)
    reduced = []
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 3}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.distributed, "all_reduce", reduced.append)
    gathered = {"dist_sync_fn": lambda value, group: [value], "distributed_available_fn": lambda: True}
    metric = KernelNRMSE(kernel, is_replicated=is_replicated, **gathered)
    metric.update(x, y)
    metric.compute()
    expected = kernel_squared_errors(kernel, x, [y], list(symmetric_tiles(2100))[1::3])
    (sums,) = reduced
    assert sums.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernel_nrmse(LinearKernel(), torch.zeros(0, 2), torch.zeros(0, 2)), "at least one sample"),
        (lambda: kernel_nrmse(LinearKernel(), torch.zeros(3, 2)), "one representation"),
        (
            lambda: kernel_nrmse(LinearKernel(), torch.zeros(3, 2), torch.zeros(4, 2)),
            "got 3 inputs and 4",
        ),
        (lambda: KernelNRMSE(LinearKernel(), max_points=0), "`max_points` must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_stopped_error_is_nan_and_computes_no_further_tile():
    x, done = torch.randn(3000, 2), []
    metric = KernelNRMSE(GaussianKernel(1.0), progress=done.append, should_stop=lambda: len(done) == 2)
    metric.update(x, x)
    assert metric.compute().isnan()
    assert done == [1, 1]
