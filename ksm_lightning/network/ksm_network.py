"""The network as an ``nn.Module``: W, q, L and a kernel."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.network import functional
from ksm_lightning.network.initialisation import Initialiser, NormalInit

Solver = Literal["closed_form", "dynamics"]
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

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> net = KSMNetwork(GaussianKernel(sigma=0.3), in_features=2, num_neurons=16)
        >>> net(torch.zeros(5, 2)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        kernel: Kernel,
        in_features: int,
        num_neurons: int,
        ridge: float = PAPER_RIDGE,
        init: Initialiser | None = None,
        solver: Solver = "closed_form",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("num_neurons", num_neurons)):
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1, got {size}.")
        if not (math.isfinite(ridge) and ridge > 0):
            raise ValueError(f"`ridge` must be positive and finite, got {ridge}. The paper uses 0.001.")
        if solver not in ("closed_form", "dynamics"):
            raise ValueError(f"`solver` must be 'closed_form' or 'dynamics', got {solver!r}.")
        self.kernel = kernel
        self.ridge = ridge
        self.solver = solver
        W = (init or NormalInit())(kernel, num_neurons, in_features, generator)
        self.W = nn.Parameter(W.to(torch.get_default_dtype()))  # (n, m)
        self.q = nn.Parameter(torch.ones(num_neurons))  # (n,)
        self.L = nn.Parameter(torch.eye(num_neurons))  # (n, n)

    @property
    def in_features(self) -> int:
        """Number of input features m."""
        return self.W.shape[1]

    @property
    def num_neurons(self) -> int:
        """Number of neurons n."""
        return self.W.shape[0]

    def check_input(self, x: Tensor) -> None:
        """Raise a ValueError if the shape of ``x`` is not (batch, in_features)."""
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"The network takes inputs of shape (batch, {self.in_features}), got {tuple(x.shape)}.")

    def drive(self, x: Tensor) -> Tensor:
        """Feedforward drive ``q * f(x, W)`` (batch, n) of inputs ``x`` (batch, m)."""
        self.check_input(x)
        drive: Tensor = self.q * self.kernel(x, self.W)
        return drive

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
            y = functional.responses(self.q * k, self.L, self.ridge) if y is None else y
            return functional.energy_terms(k, y, self.kernel.diag(self.W), self.q, self.L, self.ridge).total

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_neurons={self.num_neurons}, ridge={self.ridge}"
