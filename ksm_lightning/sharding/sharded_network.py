"""A network of which each process owns some neurons. Every process must call its methods, with the same inputs."""

import torch
from torch import Tensor, nn

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.network import KSMNetwork, functional
from ksm_lightning.network.functional import EnergyTerms
from ksm_lightning.network.landmark_error import MANY_LANDMARKS
from ksm_lightning.private_apis import version_of
from ksm_lightning.sharding.inversion import invert
from ksm_lightning.sharding.layout import Shard


class ShardedNetwork(KSMNetwork):
    """The rows W (n_r, m), q (n_r,) and L (n_r, n) that one process owns of a :class:`~ksm_lightning.KSMNetwork`.

    Responses are those of all neurons, on every process. No process allocates (n, n).

    Args:
        kernel: The similarity to match.
        shard: The neurons of this process.
        in_features: Number of input features m.
        ridge: The paper's lambda, positive.

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> from ksm_lightning.learning import SingleProcess
        >>> net = ShardedNetwork(GaussianKernel(0.3), Shard(16, SingleProcess()), in_features=2, ridge=1e-3)
        >>> net.L.shape, net(torch.zeros(5, 2)).shape
        (torch.Size([16, 16]), torch.Size([5, 16]))
    """

    def __init__(self, kernel: Kernel, shard: Shard, in_features: int, ridge: float) -> None:
        nn.Module.__init__(self)
        self.kernel, self.ridge, self.solver = kernel, ridge, "closed_form"
        self.shard = shard
        self.W = nn.Parameter(torch.zeros(shard.count, in_features))
        self.q = nn.Parameter(torch.ones(shard.count))
        self.L = nn.Parameter(torch.zeros(shard.count, shard.num_neurons))
        shard.diagonal(self.L.data).fill_(1)
        self._inverse: Tensor | None = None  # rows of (L + ridge I)^-1 for evaluations
        self._belongs_to: tuple[int, float] | None = None

    @property
    def num_neurons(self) -> int:
        """Number of neurons n of all processes."""
        return self.shard.num_neurons

    @property
    def num_landmarks(self) -> int:
        """Number of landmarks of all processes, one per neuron."""
        return self.shard.num_neurons

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Responses y (batch, n) of all neurons to inputs ``x`` (batch, m), which all processes share."""
        with full_precision(x.device):
            drive = self.shard.gather(self.drive(x).mT)  # (n, batch)
            return self.shard.gather(self._evaluation_inverse() @ drive).mT.contiguous()

    def _evaluation_inverse(self) -> Tensor:
        """Rows of the inverse for the present L, kept until L changes or :meth:`release` is called."""
        now = (version_of(self.L), self.ridge)
        if self._inverse is None or self._belongs_to != now or self._inverse.device != self.L.device:
            self._inverse = None  # frees the memory of the last one
            inverse = self.L.detach().clone()
            self.shard.diagonal(inverse).add_(self.ridge)
            failed = invert(inverse, self.shard)
            self._inverse, self._belongs_to = inverse.masked_fill_(failed != 0, torch.nan), now
        return self._inverse

    def release(self) -> None:
        """Free the memory of the inverse that evaluations use."""
        self._inverse = self._belongs_to = None

    @torch.no_grad()
    def energy_of(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean energy of inputs (batch, m); float64. Responses ``y`` (batch, n) are computed if they are not given."""
        y = self.forward(x) if y is None else y
        with full_precision(x.device):
            return self.energy_terms(self.kernel(x, self.W), y).total

    def energy_terms(self, k: Tensor, y: Tensor, C: Tensor | None = None) -> EnergyTerms:
        """Energy by terms of this process's similarities k (batch, n_r) and all responses y (batch, n)."""
        own, f64, batch = y[:, self.shard.rows], torch.float64, len(y)
        terms = [
            -(self.q * k * own).sum(dtype=f64) / batch,
            0.5 * (self.q * self.q * self.kernel.diag(self.W)).sum(dtype=f64),
            0.5 * ((y @ self.L.mT) * own).sum(dtype=f64) / batch,
            -0.25 * torch.linalg.vector_norm(self.L, dtype=f64).square(),
            0.5 * self.ridge * own.square().sum(dtype=f64) / batch,
        ]
        return EnergyTerms(*self.shard.sum(torch.stack(terms)).unbind())

    def all_landmarks(self) -> Tensor:
        """The landmarks W (n, m) of all processes."""
        return self.shard.gather(self.W.detach())

    def align_signs(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """All landmarks and responses y (samples, n) with signs such that mean responses are positive."""
        W = self.all_landmarks()
        return functional.align_signs(W, y) if self.kernel.is_odd else (W, y)

    def readout_matrix(self) -> Tensor:
        """The matrix M (n, n) of :meth:`whole`."""
        return self.whole().readout_matrix()

    @torch.no_grad()
    def whole(self) -> KSMNetwork:
        """The network with all neurons, on every process.

        Raises:
            ValueError: If it has more than 2,048 neurons.
        """
        n = self.num_neurons
        if n > MANY_LANDMARKS:
            raise ValueError(
                f"This needs matrices of {n:,} x {n:,} numbers on one device, which parallel=neurons avoids: choose "
                "the readout neural, or export the checkpoint on a machine that has the memory."
            )
        like = self.W
        network = KSMNetwork(self.kernel, self.in_features, n, self.ridge, generator=torch.Generator()).to(like)
        for name, parameter in network.named_parameters():
            parameter.copy_(self.shard.gather(self.get_parameter(name).detach()))
        return network

    @torch.no_grad()
    def take(self, W: Tensor, q: Tensor | None = None, L: Tensor | None = None) -> None:
        """Copy the rows of this process from the weights W (n, m), q (n,) and L (n, n) of all neurons."""
        for own, value in ((self.W, W), (self.q, q), (self.L, L)):
            if value is not None:
                own.copy_(value[self.shard.rows])
