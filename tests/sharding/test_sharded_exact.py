"""The first and the exact L of shared neurons, against the eigen-decompositions of a whole network."""

import copy

import pytest
import torch

from helpers.learning_cases import blocks, network_for
from helpers.shards import joined, on_ranks, relative_difference, rows_of, shard_of
from ksm_lightning.kernels import GaussianKernel, PowerCosineKernel
from ksm_lightning.learning import exact
from ksm_lightning.learning.exact import lateral_eigenvalues, solve_inner
from ksm_lightning.learning.moments import similarity_moment
from ksm_lightning.learning.spectrum import leading_spectrum
from ksm_lightning.sharding import Shard, sharded_exact
from ksm_lightning.sharding.matrix_function import exact_lateral, lateral_fractions

KERNELS = [GaussianKernel(0.7), PowerCosineKernel(3)]


@pytest.mark.parametrize("ridge", [1e-2, 1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize("largest", [1e-6, 1.0, 1e8])
def test_fractions_match_the_eigenvalues_of_the_exact_L(ridge, largest):
    """To 1.5e-4 of l + ridge, which responses are divided by, above rounding errors; with few shifts."""
    ridge = ridge * largest ** (1 / 3)
    found = lateral_fractions(ridge, largest)
    beta = largest * torch.logspace(-10, 0, 300, dtype=torch.float64)
    expected = lateral_eigenvalues(beta, ridge)
    assert ((torch.from_numpy(found(beta.numpy())) - expected).abs() < 1.5e-4 * (expected + ridge)).all()
    assert (found.weights > 0).all()
    assert len(found.shifts) <= 36


@pytest.mark.parametrize("is_singular", [False, True])
def test_the_exact_L_is_that_of_the_eigen_decomposition(is_singular):
    n, ridge = 30, 1e-3
    b = torch.randn(500, n, dtype=torch.float64) * torch.logspace(0, -3, n, dtype=torch.float64)
    if is_singular:
        b[:, 20:] = b[:, :10]
    B = b.mT @ b / len(b)
    expected = solve_inner(B, torch.ones(n), torch.ones(n), ridge).L

    def work(ranks):
        shard = Shard(n, ranks)
        L, failed = exact_lateral(B[shard.rows], shard, ridge)
        assert int(failed) == 0
        return L

    L = torch.cat(on_ranks(2, work))
    assert relative_difference(L, expected) < 2e-4
    assert (L - L.mT).abs().max() < 1e-8 * L.abs().max()


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_the_start_and_the_end_set_the_L_of_a_whole_network(kernel):
    x = 0.5 * blocks(8)
    network = network_for(kernel, x, natural=False, n=13)
    points = x.flatten(0, 1)
    started, ended = copy.deepcopy(network), copy.deepcopy(network)
    exact.balance(started, points, 0.1)
    bound = exact.consolidate(ended, similarity_moment(kernel, [points], network.W))

    def work(ranks):
        own, other = shard_of(network, ranks), shard_of(network, ranks)
        sharded_exact.balance(own, points, 0.1)
        on_sample = sharded_exact.bound_on(own, points)
        bound = sharded_exact.consolidate(other, torch.split(points, 50))
        return rows_of(own), on_sample, bound, rows_of(other)

    results = on_ranks(2, work)
    found = joined([result[0] for result in results])
    for name, value in started.named_parameters():
        assert relative_difference(found[name], value.detach()) < 1e-9, name
    assert [result[1] for result in results] == pytest.approx([exact.bound_on(started, points).item()] * 2, rel=1e-9)
    assert [result[2] for result in results] == pytest.approx([bound] * 2, rel=1e-5)
    found = joined([result[3] for result in results])
    for name, value in ended.named_parameters():
        assert relative_difference(found[name], value.detach()) < (2e-4 if name == "L" else 1e-9), name


def test_the_leading_spectrum_is_that_of_one_process():
    """From other random vectors: after two passes the leading eigenvalues agree closely, the sum exactly."""
    kernel, x = GaussianKernel(0.7), 0.5 * blocks(20).flatten(0, 1)
    W, q = x[:60], torch.linspace(0.5, 1.5, 60, dtype=torch.float64)
    expected = leading_spectrum(kernel, x, W, q, rank=30)

    def work(ranks):
        shard = Shard(60, ranks)
        return sharded_exact.leading_spectrum(kernel, x, W[shard.rows], q[shard.rows], shard, rank=30)

    for found in on_ranks(4, work):
        torch.testing.assert_close(found.values[-15:], expected.values[-15:], rtol=1e-3, atol=0)
        total = found.values.sum() + 30 * found.rest
        assert float(total) == pytest.approx(float(expected.values.sum() + 30 * expected.rest))


def test_the_end_of_a_run_without_data_is_an_error():
    network = network_for(KERNELS[0], blocks(2), natural=False)
    with pytest.raises(ValueError, match=r"^The exact L needs data, but there are no inputs\.$"):
        on_ranks(1, lambda ranks: sharded_exact.consolidate(shard_of(network, ranks), []))
