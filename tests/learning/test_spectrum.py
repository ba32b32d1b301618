"""The leading spectrum of the drive's second moment, and the first L of many neurons, against eigen-decompositions."""

import pytest
import torch
from torch.testing import assert_close

from ksm_lightning.kernels import GaussianKernel, LinearKernel, PowerCosineKernel
from ksm_lightning.learning import exact, spectrum
from ksm_lightning.learning.exact import balance
from ksm_lightning.learning.moments import similarity_moment
from ksm_lightning.network import KSMNetwork


@pytest.fixture
def problem(rng):
    x = torch.randn(3000, 6, generator=rng, dtype=torch.float64)
    return GaussianKernel(2.0), x, x[:80], torch.linspace(0.5, 1.5, 80, dtype=torch.float64)


def test_all_directions_give_the_whole_matrix(problem):
    kernel, x, W, q = problem
    found = spectrum.leading_spectrum(kernel, x, W, q, rank=80)
    assert found.values.shape == found.eigenvalues.shape == (80,)
    assert_close(found.dense(), similarity_moment(kernel, [x], W).of_drive(q))


def test_leading_eigenvalues_are_exact_and_the_trace_is_kept(problem, monkeypatch):
    kernel, x, W, q = problem
    monkeypatch.setattr(spectrum, "ROWS_AT_ONCE", 700)
    B = similarity_moment(kernel, [x], W).of_drive(q)
    found = spectrum.leading_spectrum(kernel, x, W, q, rank=30)
    assert_close(found.values[-10:], torch.linalg.eigvalsh(B)[-10:], rtol=1e-3, atol=0)
    assert_close(found.dense().diagonal().sum(), B.diagonal().sum())
    shrunk = found.shrunk(0.3)
    mean = B.diagonal().mean()
    assert_close(shrunk.dense(), 0.7 * found.dense() + 0.3 * mean * torch.eye(80, dtype=torch.float64))


def test_a_matrix_of_low_rank_has_no_rest(rng):
    x = torch.randn(500, 3, generator=rng, dtype=torch.float64)
    q = torch.ones(50, dtype=torch.float64)
    found = spectrum.leading_spectrum(LinearKernel(), x, x[:50], q, rank=10)
    assert float(found.rest) < 1e-12
    assert_close(found.dense(), similarity_moment(LinearKernel(), [x], x[:50]).of_drive(q))


@pytest.mark.parametrize("kernel", [GaussianKernel(1.0), PowerCosineKernel(3)], ids=str)
def test_the_first_L_of_many_neurons_is_close_to_the_exact_one(rng, monkeypatch, kernel):
    """The energy of the responses, which L maximises, and the common scale; 100 neurons, of which 40 directions."""
    x = torch.randn(2000, 5, generator=rng)
    networks = [KSMNetwork(kernel, 5, 100, 1e-4, lambda *_: x[:100].clone()) for _ in range(2)]
    balance(networks[0], x, shrinkage=0.1)
    monkeypatch.setattr(exact, "MANY_LANDMARKS", 99)
    monkeypatch.setattr(exact, "leading_spectrum", lambda *args: spectrum.leading_spectrum(*args, rank=40))
    balance(networks[1], x, shrinkage=0.1)
    best, ours = (float(network.energy_of(x)) for network in networks)
    assert ours == pytest.approx(best, rel=0.02)
    for parameter in ("W", "q"):
        assert_close(getattr(networks[1], parameter), getattr(networks[0], parameter), rtol=0.02, atol=0.02)
    assert float((networks[1].L - networks[0].L).detach().norm() / networks[0].L.detach().norm()) < 0.1
