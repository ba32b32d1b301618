"""Randomly pivoted Cholesky against its law, and residuals against a pseudo-inverse."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from helpers.kernels import KERNELS
from ksm_lightning.kernels import GaussianKernel, Kernel, LinearKernel, PowerCosineKernel, make_kernel
from ksm_lightning.network import pivots
from ksm_lightning.network.pivots import pivoted_cholesky, residuals, weighted_draw


def residuals_by_pinv(kernel: Kernel, x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    k = kernel(x, W)
    return kernel.diag(x) - (k @ torch.linalg.pinv(kernel(W, W), hermitian=True) * k).sum(1)


@pytest.mark.parametrize("kernel", [GaussianKernel(1.0), LinearKernel()], ids=str)
def test_pivots_are_drawn_in_proportion_to_their_residuals(kernel):
    """Frequencies of all sequences of three of six points against the definition."""
    x = torch.tensor([[0.0, 0, 1], [0.1, 0, 1], [2, 0, 0], [2, 0.5, 0], [0, 3, 0.2], [1, 1, 1]], dtype=torch.float64)
    trials, counts, expected = 1500, torch.zeros(6, 6, 6), torch.zeros(6, 6, 6)
    for sequence in itertools.permutations(range(6), 3):
        probability = 1.0
        for done, index in enumerate(sequence):
            rest = (residuals_by_pinv(kernel, x, x[list(sequence[:done])]) if done else kernel.diag(x)).clamp(min=0)
            probability *= float((rest / rest.sum())[index])
        expected[sequence] = probability
    assert expected.sum() == pytest.approx(1)
    for seed in range(trials):
        counts[tuple(pivoted_cholesky(kernel, x, 3, torch.Generator().manual_seed(seed)).tolist())] += 1 / trials
    deviation = (expected * (1 - expected) / trials).sqrt()
    assert ((counts - expected).abs() <= 4.5 * deviation + 1 / trials).all()


@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_residuals_equal_those_of_the_pseudo_inverse(rng, monkeypatch, spec):
    monkeypatch.setattr(pivots, "ROWS_AT_ONCE", 30)
    kernel = make_kernel(spec[0], **spec[1])
    x, W = (torch.randn(count, 4, generator=rng, dtype=torch.float64) for count in (100, 3))
    found = residuals(kernel, x, W)
    assert found.dtype == torch.float64
    assert_close(found, residuals_by_pinv(kernel, x, W), rtol=1e-6, atol=1e-7 * float(kernel.diag(x).max()))
    assert residuals(kernel, W, W).max() < 1e-8 * kernel.diag(W).max()


def test_every_cluster_has_a_pivot_before_one_has_two(rng):
    centres = 10 * torch.randn(8, 3, generator=rng)
    x = (centres[:, None] + 1e-3 * torch.randn(8, 40, 3, generator=rng)).flatten(0, 1)
    assert sorted((pivoted_cholesky(GaussianKernel(1.0), x, 8, rng) // 40).tolist()) == list(range(8))


def test_pivots_are_distinct_and_repeated_points_come_last(rng):
    x = torch.randn(300, 3, generator=rng)
    assert pivoted_cholesky(GaussianKernel(1.0), x, 300, rng).sort().values.tolist() == list(range(300))
    repeated = pivoted_cholesky(GaussianKernel(1.0), x.repeat(2, 1), 420, rng)
    assert len(repeated.unique()) == 420
    assert len((repeated[:300] % 300).unique()) == 300


def test_beyond_the_rank_of_the_kernel_other_points_are_drawn_uniformly():
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(40)
    for seed in range(500):
        chosen = pivoted_cholesky(LinearKernel(), x, 10, torch.Generator().manual_seed(seed))
        assert len(chosen.unique()) == 10
        counts[chosen[2:]] += 1
    assert counts.min() > 0.5 * counts.mean()


def test_points_without_similarity_are_drawn_uniformly(rng):
    chosen = pivoted_cholesky(PowerCosineKernel(3), torch.zeros(500, 2), 300, rng)
    assert len(chosen.unique()) == 300
    assert 200 < chosen.double().mean() < 300


def test_beyond_the_most_pivots_the_rest_is_drawn_by_residual(rng, monkeypatch):
    monkeypatch.setattr(pivots, "MANY_LANDMARKS", 5)
    x = torch.cat([0.01 * torch.randn(500, 2, generator=rng), 10 * torch.randn(40, 2, generator=rng)])
    chosen = pivoted_cholesky(GaussianKernel(0.5), x, 30, rng)
    assert len(chosen.unique()) == 30
    assert (chosen >= 500).sum() >= 25  # one of the others explains the cluster


def test_the_generator_determines_the_pivots(rng):
    x = torch.randn(200, 3, generator=rng)
    first, again, other = (
        pivoted_cholesky(GaussianKernel(1.0), x, 20, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_weighted_draw_has_the_frequencies_of_successive_draws():
    weights, trials = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64), 4000
    counts = torch.zeros(4, 4)
    for seed in range(trials):
        counts[tuple(weighted_draw(weights, 2, torch.Generator().manual_seed(seed)).tolist())] += 1 / trials
    first = weights / weights.sum()
    expected = first[:, None] * weights / (weights.sum() - weights)[:, None]
    expected.fill_diagonal_(0)
    assert expected.sum() == pytest.approx(1)
    assert (counts - expected).abs().max() < 4.5 * (0.25 / trials) ** 0.5


def test_weights_of_0_are_drawn_last_and_uniformly():
    weights, counts = torch.tensor([0.0, 3.0, 0.0, 0.0, 1e-3]), torch.zeros(5)
    for seed in range(600):
        chosen = weighted_draw(weights, 3, torch.Generator().manual_seed(seed)).tolist()
        assert set(chosen[:2]) == {1, 4}
        counts[chosen[2]] += 1
    assert counts[[0, 2, 3]].min() > 140
    assert weighted_draw(torch.zeros(4), 4).sort().values.tolist() == [0, 1, 2, 3]
