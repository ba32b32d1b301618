"""The inverse of a matrix whose rows are shared out, against torch.linalg.inv."""

import re

import pytest
import torch

from helpers.plain_rules import FixedRates
from helpers.shards import on_ranks, shard_of
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import Rates
from ksm_lightning.network import KSMNetwork
from ksm_lightning.sharding import Shard, ShardedLearner
from ksm_lightning.sharding.inversion import invert, residual

N = 90


def matrix(condition: float) -> torch.Tensor:
    """A positive definite matrix with eigenvalues from 1 to 1 / condition."""
    vectors = torch.linalg.qr(torch.randn(N, N, dtype=torch.float64))[0]
    values = torch.logspace(0, -float(torch.tensor(condition).log10()), N, dtype=torch.float64)
    made = (vectors * values) @ vectors.mT
    return (made + made.mT) / 2


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 6e-8), (torch.float64, 1.1e-16)])
@pytest.mark.parametrize("condition", [1e1, 1e3, 1e5])
def test_the_inverse_is_as_precise_as_the_condition_number_allows(size, dtype, eps, condition):
    A = matrix(condition).to(dtype)
    expected = torch.linalg.inv(A.double())

    def work(ranks):
        shard = Shard(N, ranks)
        own = A[shard.rows].clone()
        assert int(invert(own, shard, panel=16)) == 0
        found = residual(A[shard.rows] - 0.01 * torch.eye(N, dtype=dtype)[shard.rows], 0.01, own, shard)
        return own, float(found)

    results = on_ranks(size, work)
    P = torch.cat([own for own, _ in results])
    assert (P.double() - expected).norm() < 5 * eps * condition * expected.norm()
    exact = ((A.double() @ P.double()) - torch.eye(N)).norm() / N**0.5
    for _, found in results:  # the same on all ranks, and of the size of the residual over all directions
        assert found == results[0][1]
        assert 0.2 * exact < found + eps * condition
        assert found < 50 * eps * condition


def test_a_matrix_that_is_not_positive_definite_is_reported_on_all_ranks():
    A = matrix(10.0)
    A[50, 50] = -1

    def work(ranks):
        shard = Shard(N, ranks)
        return int(invert(A[shard.rows].clone(), shard, panel=16))

    assert all(status > 0 for status in on_ranks(2, work))


def test_an_inaccurate_inverse_is_said_in_one_sentence():
    """In float32 a condition number of 1e8 leaves no digits; one of 1e5 leaves two, and is not mentioned."""
    message = "The inverse of L + ridge I was recomputed with a residual of "

    def warning_of(condition: float, dtype: torch.dtype) -> str:
        network = KSMNetwork(GaussianKernel(0.5), 2, N, ridge=1 / condition)
        network.L.data = (matrix(condition * 1e3) * (1 + 1 / condition)).float()
        network = network.to(dtype)

        def work(ranks):
            learner = ShardedLearner(
                shard_of(network, ranks), FixedRates(Rates(0.0, 0.0, 1e-6), False), stage="learning", inverse="tracked"
            )
            learner.learn(torch.zeros(1, 4, 2, dtype=dtype))
            with pytest.MonkeyPatch.context() as patch:
                said = []
                patch.setattr("warnings.warn", lambda text, **_: said.append(text))
                learner.responses.warn_if_inaccurate()
            return "".join(said)

        (said,) = set(on_ranks(1, work))
        return said

    assert warning_of(1e4, torch.float32) == ""
    assert warning_of(1e8, torch.float64) == ""
    said = warning_of(1e8, torch.float32)
    assert re.fullmatch(re.escape(message) + r"\S+, and responses are reliable up to 0\.01: raise `ridge`.*", said)
