"""Samples that are sparse, or have weights."""

import numpy as np
import pytest
import torch
from scipy import sparse

from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import TightSchedule, train
from ksm_lightning.learning.samples import Samples, canonical_order, counts_of, in_blocks

X = np.random.RandomState(0).randn(30, 4)


@pytest.mark.parametrize("rows", [X, sparse.csr_array(X)], ids=["dense", "sparse"])
def test_samples_are_indexed_like_a_tensor(rows):
    index = np.array([3, 3, 0, 29])
    samples, expected = Samples(rows, index), torch.tensor(X[index])
    assert (len(samples), samples.shape, samples.dtype) == (4, expected.shape, torch.float64)
    assert torch.equal(samples[1:3], expected[1:3])
    assert torch.equal(samples[torch.tensor([2, 0])], expected[[2, 0]])
    assert torch.equal(torch.cat(list(in_blocks(samples, 3))), expected)


def test_equal_weights_do_not_matter():
    assert counts_of(np.array([0.5, 0.0, 0.5])).tolist() == counts_of(np.array([7.0, 0.0, 7.0])).tolist() == [1, 0, 1]


def test_whole_weights_are_counts_and_others_are_in_proportion():
    assert counts_of(np.array([2.0, 0.0, 5.0])).tolist() == [2, 0, 5]
    weights = np.array([0.1, 0.0, 0.25, 1e-9, 0.65 - 1e-9])
    counts = counts_of(weights)
    assert counts.sum() == 100_000
    np.testing.assert_allclose(counts / 1e5, weights, rtol=0, atol=2e-5)
    assert counts[1] == 0
    huge = counts_of(np.array([1e9, 3e9, 0.0]))  # not a billion rows
    assert huge.tolist() == [25_000, 75_000, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_order_depends_on_the_values_only(dtype):
    x = np.repeat(X, 3, 0).astype(dtype)
    shuffled = x[np.random.RandomState(1).permutation(len(x))]
    expected = x[canonical_order(x)]
    assert np.array_equal(shuffled[canonical_order(shuffled)], expected)
    assert np.array_equal(x[canonical_order(sparse.csr_array(x))], expected)
    assert np.array_equal(expected[::3], expected[1::3])  # equal rows are together
    assert np.array_equal(canonical_order(np.array([[0.0], [1.0]])), canonical_order(np.array([[-0.0], [1.0]])))


def test_training_on_samples_equals_training_on_the_repeated_rows():
    index = np.repeat(np.arange(30), np.arange(30) % 4)
    options = {"bound": "tight", "batch_size": 16, "seed": 3}
    expected = train(GaussianKernel(2.0), torch.tensor(X[index]), 4, TightSchedule(5), **options)
    for rows in (X, sparse.csr_array(X)):
        found = train(GaussianKernel(2.0), Samples(rows, index), 4, TightSchedule(5), **options)
        for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs)
