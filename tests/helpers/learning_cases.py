"""Blocks of batches and networks for the tests of the Learner."""

import torch

from ksm_lightning.kernels import GaussianKernel, Kernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, Rates, natural_ridge
from ksm_lightning.network import KSMNetwork, NormalInit


class ScaledGaussian(Kernel):
    """A user's kernel: a Gaussian times 3, with derivatives by autograd."""

    def gram(self, u, v):
        return 3.0 * GaussianKernel(0.7).gram(u, v)


def blocks(updates=20, batch=24, m=5, seed=0) -> torch.Tensor:
    return torch.randn(updates, batch, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def started(network: KSMNetwork, x: torch.Tensor, **options) -> KSMNetwork:
    """The network after the start of the adaptive schedule on points (samples, m)."""
    Learner(network, AdaptiveSchedule(), **options).start(x)
    return network


def network_for(kernel: Kernel, x: torch.Tensor, natural: bool, n: int = 7) -> KSMNetwork:
    """A network in float64 with unequal gains, and with natural steps a started one."""
    torch.manual_seed(1)
    ridge = natural_ridge(kernel, x[0], n) if natural else 1e-3
    net = KSMNetwork(kernel, x.shape[2], n, ridge, NormalInit(0.7)).double()
    if natural:
        started(net, x.flatten(0, 1))
    elif not kernel.is_homogeneous:
        with torch.no_grad():
            net.q.copy_(torch.linspace(0.6, 1.4, n))
    return net


def rates_for(kernel: Kernel, natural: bool) -> Rates:
    rates = Rates(0.04, 0.03, 0.1) if natural else Rates(0.01, 0.02, 0.1)
    return rates._replace(q=0.0) if kernel.is_homogeneous else rates
