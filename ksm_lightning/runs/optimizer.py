"""The optimizer that Lightning sees: it has the groups W, q and L, and the Learner makes the updates."""

from collections.abc import Callable
from typing import Any

import torch


class HebbianOptimizer(torch.optim.Optimizer):
    """Shows W, q and L to Lightning as named groups. The closure makes the updates of a block."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()
