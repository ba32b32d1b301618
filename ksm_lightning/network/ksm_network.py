"""The network as an ``nn.Module``: W, q, L and a kernel; and the tight network, with a matrix Q in place of q."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.network import functional, tight
from ksm_lightning.network.initialisation import Initialiser, NormalInit

Solver = Literal["closed_form", "dynamics"]
Bound = Literal["paper", "tight"]
PAPER_RIDGE = 1e-3
"""The paper's lambda."""


class KSMNetwork(nn.Module):
    """Maps x to ``y = (L + ridge I)^-1 (q * f(x, W))``, so that ``y_s . y_t`` approximates ``f(x_s, x_t)``.

    The parameters are learned by local rules (:mod:`ksm_lightning.learning`), not by back-propagation.

    Args:
        kernel: The similarity to match.
        in_features: Number of input features m.
        num_neurons: Number of neurons n, the dimension of y.
        ridge: The paper's lambda, positive. It keeps the responses finite.
        init: Initialisation of W. Default: the paper's ``N(0, 1)``.
        solver: ``"closed_form"`` solves for y with a Cholesky factorisation. ``"dynamics"`` integrates the recurrent
            dynamics, which is much slower.
        generator: CPU random generator for ``init``. Default: the global one.
        num_landmarks: Number of landmarks p, the rows of W. Here every neuron has one; :class:`TightNetwork` may have
            more. Default: the number of neurons.

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> net = KSMNetwork(GaussianKernel(sigma=0.3), in_features=2, num_neurons=16)
        >>> net(torch.zeros(5, 2)).shape
        torch.Size([5, 16])
    """

    bound: Bound = "paper"

    def __init__(
        self,
        kernel: Kernel,
        in_features: int,
        num_neurons: int,
        ridge: float = PAPER_RIDGE,
        init: Initialiser | None = None,
        solver: Solver = "closed_form",
        generator: torch.Generator | None = None,
        num_landmarks: int | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("num_neurons", num_neurons)):
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1, got {size}.")
        count = self.check_sizes(num_neurons, num_landmarks)
        if not (math.isfinite(ridge) and ridge > 0):
            raise ValueError(f"`ridge` must be positive and finite, got {ridge}. The paper uses 0.001.")
        if solver not in ("closed_form", "dynamics"):
            raise ValueError(f"`solver` must be 'closed_form' or 'dynamics', got {solver!r}.")
        self.kernel = kernel
        self.ridge = ridge
        self.solver = solver
        W = (init or NormalInit())(kernel, count, in_features, generator)
        self.W = nn.Parameter(W.to(torch.get_default_dtype()))  # (p, m)
        self._add_gains(num_neurons)
        self.L = nn.Parameter(torch.eye(num_neurons))  # (n, n)

    @staticmethod
    def check_sizes(num_neurons: int, num_landmarks: int | None) -> int:
        """Number of landmarks, one per neuron; another number is an error."""
        if num_landmarks not in (None, num_neurons):
            raise ValueError(
                f"With the paper's bound every neuron has one landmark, but `num_landmarks` is {num_landmarks} and "
                f"`num_neurons` is {num_neurons}: leave `num_landmarks` out, or choose bound=tight."
            )
        return num_neurons

    def _add_gains(self, num_neurons: int) -> None:
        self.q = nn.Parameter(torch.ones(num_neurons))  # (n,)

    @property
    def gains(self) -> nn.Parameter:
        """The feedforward weights behind the kernel: q (n,), or Q (n, p) of a :class:`TightNetwork`."""
        return self.q

    @property
    def in_features(self) -> int:
        """Number of input features m."""
        return self.W.shape[1]

    @property
    def num_neurons(self) -> int:
        """Number of neurons n."""
        return self.L.shape[0]

    @property
    def num_landmarks(self) -> int:
        """Number of landmarks p."""
        return self.W.shape[0]

    def check_input(self, x: Tensor) -> None:
        """Raise a ValueError if the shape of ``x`` is not (batch, in_features)."""
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"The network takes inputs of shape (batch, {self.in_features}), got {tuple(x.shape)}.")

    def apply_gains(self, k: Tensor) -> Tensor:
        """Drive ``q * k`` (batch, n) of similarities ``k`` (batch, p)."""
        return self.q * k

    def drive(self, x: Tensor) -> Tensor:
        """Feedforward drive (batch, n) of inputs ``x`` (batch, m)."""
        self.check_input(x)
        return self.apply_gains(self.kernel(x, self.W))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Responses y (batch, n) to inputs ``x`` (batch, m)."""
        with full_precision(x.device):
            drive = self.drive(x)
            if self.solver == "dynamics":
                return functional.run_dynamics(drive, self.L, self.ridge).y
            return functional.responses(drive, self.L, self.ridge)

    @torch.no_grad()
    def energy_of(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean energy of inputs (batch, m); float64. Responses ``y`` (batch, n) are computed if they are not given."""
        with full_precision(x.device):
            k = self.kernel(x, self.W)
            y = functional.responses(self.apply_gains(k), self.L, self.ridge) if y is None else y
            return self.energy_terms(k, y).total

    def energy_terms(self, k: Tensor, y: Tensor, C: Tensor | None = None) -> functional.EnergyTerms:
        """Energy by terms of similarities k (batch, p), responses y (batch, n) and, if known, ``C = <y y^T>``."""
        return functional.energy_terms(k, y, self.kernel.diag(self.W), self.q, self.L, self.ridge, C=C)

    @torch.no_grad()
    def readout_matrix(self) -> Tensor:
        """The matrix M (p, n), in float64, with ``y = f(x, W) M``: ``diag(q) (L + ridge I)^-1``."""
        factor = functional.factorise(self.L.double(), self.ridge)
        return self.q.double()[:, None] * torch.cholesky_inverse(factor)

    def whole(self) -> "KSMNetwork":
        """The network with all neurons: itself. Of a sharded network, each process owns some of them."""
        return self

    def align_signs(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """W and responses y (samples, n) with signs such that mean responses are positive, where signs are free."""
        W = self.W.detach()
        return functional.align_signs(W, y) if self.kernel.is_odd else (W, y)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_neurons={self.num_neurons}, ridge={self.ridge}"


class TightNetwork(KSMNetwork):
    """The network of the tight bound: maps x to ``y = (L + ridge I)^-1 Q f(x, W)``, with a matrix Q (n, p).

    Every neuron is connected to all p landmarks, and p may be larger than n. In the feature space of the kernel, neuron
    i compares its input with ``u_i = sum_j Q_ij phi(w_j)`` instead of ``q_i phi(w_i)``. This closes the gap of the
    paper's bound: with the best Q, responses are the n leading principal components of the Nystroem features of W. The
    price: they are determined up to a rotation only, so the sparse template tuning of the paper's network is lost.
    Formulas are in :mod:`ksm_lightning.network.tight`.

    Args:
        kernel: The similarity to match.
        in_features: Number of input features m.
        num_neurons: Number of neurons n, the dimension of y.
        ridge: The paper's lambda, positive.
        init: Initialisation of W. Default: ``N(0, 1)``.
        solver: As in :class:`KSMNetwork`.
        generator: CPU random generator for ``init``. Default: the global one.
        num_landmarks: Number of landmarks p, at least n. Default: n.

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> net = TightNetwork(GaussianKernel(sigma=0.3), in_features=2, num_neurons=16, num_landmarks=32)
        >>> net.Q.shape, net(torch.zeros(5, 2)).shape
        (torch.Size([16, 32]), torch.Size([5, 16]))
    """

    bound: Bound = "tight"

    @staticmethod
    def check_sizes(num_neurons: int, num_landmarks: int | None) -> int:
        """Number of landmarks, at least one per neuron."""
        if num_landmarks is not None and num_landmarks < num_neurons:
            raise ValueError(
                f"`num_landmarks` must be at least the number of neurons, {num_neurons}, got {num_landmarks}: p "
                "landmarks cannot determine more than p responses."
            )
        return num_neurons if num_landmarks is None else num_landmarks

    def _add_gains(self, num_neurons: int) -> None:
        self.Q = nn.Parameter(torch.eye(num_neurons, len(self.W)))  # (n, p)

    @property
    def gains(self) -> nn.Parameter:
        return self.Q

    def apply_gains(self, k: Tensor) -> Tensor:
        """Drive ``Q k`` (batch, n) of similarities ``k`` (batch, p)."""
        return k @ self.Q.mT

    def energy_terms(self, k: Tensor, y: Tensor, C: Tensor | None = None) -> functional.EnergyTerms:
        return tight.energy_terms(k, y, self.kernel(self.W, self.W), self.Q, self.L, self.ridge, C=C)

    @torch.no_grad()
    def readout_matrix(self) -> Tensor:
        """The matrix M (p, n), in float64, with ``y = f(x, W) M``: ``Q^T (L + ridge I)^-1``."""
        return functional.solve(self.Q.double().mT, functional.factorise(self.L.double(), self.ridge))

    def align_signs(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """W, and responses y (samples, n) whose means are positive: the sign of a response is free."""
        return self.W.detach(), functional.align_signs(y.new_empty(y.shape[1], 0), y)[1]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_landmarks={self.num_landmarks}"


NETWORKS: dict[Bound, type[KSMNetwork]] = {"paper": KSMNetwork, "tight": TightNetwork}
"""The network of each bound."""


def check_bound(name: str) -> Bound:
    """Return the name if it is one of :data:`NETWORKS`, or raise a ValueError."""
    for known in NETWORKS:
        if name == known:
            return known
    raise ValueError(f"`bound` must be 'tight' or 'paper', got {name!r}.")
