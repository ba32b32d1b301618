"""Residual pivots, against the residuals of a pseudo-inverse."""

import pytest
import torch

from ksm_lightning.kernels import GaussianKernel, LinearKernel, PolynomialKernel
from ksm_lightning.network.pivots import residual_pivots


def residuals(kernel, x, landmarks):
    k = kernel(x, landmarks)
    return kernel.diag(x) - (k @ torch.linalg.pinv(kernel(landmarks, landmarks), hermitian=True) * k).sum(1)


@pytest.mark.parametrize("kernel", [GaussianKernel(0.8), PolynomialKernel(3)], ids=str)
@pytest.mark.parametrize("landmarks", [0, 7])
def test_every_pivot_has_the_largest_residual_under_those_before(kernel, landmarks):
    x = torch.randn(3000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x *= torch.linspace(0.5, 2, len(x))[:, None]
    W = x[:landmarks] + 0.1
    pivots = residual_pivots(kernel, x, W, 6)
    assert len(pivots) == 6
    for done, pivot in enumerate(pivots):
        rest = residuals(kernel, x, torch.cat([W, x[pivots[:done]]]))
        assert rest[pivot] == pytest.approx(float(rest.max()), rel=1e-6)


def test_there_are_no_more_pivots_than_dimensions():
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    assert len(residual_pivots(LinearKernel(), x, x[:1], 10)) == 2
    assert len(residual_pivots(LinearKernel(), x, x[:3], 10)) == 0
