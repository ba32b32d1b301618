"""The documented memory of a run (scripts/benchmark/README.md): bytes of all large tensors that are alive at once."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.paths import ROOT
from helpers.runs import moons, trainer
from ksm_lightning.callbacks import DivergenceGuard
from ksm_lightning.learning import Phase
from ksm_lightning.module import KernelSimilarityMatching

N = 320  # above 256, where a constant matrix is kept to save time


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return, if they have at least ``smallest``."""

    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest, self.peak, self._alive = smallest, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if size >= self.smallest and key not in self._alive:
            self._alive[key] = size
            self.peak = max(self.peak, sum(self._alive.values()))
            weakref.finalize(storage, self._alive.pop, key, None)


@pytest.mark.parametrize("inverse", ["exact", "tracked"])
@pytest.mark.parametrize(("callbacks", "documented"), [((), 20), ((DivergenceGuard,), 28)], ids=["plain", "guarded"])
def test_updates_take_the_documented_memory(inverse, callbacks, documented):
    assert f"{documented} n^2 bytes" in (ROOT / "scripts" / "benchmark" / "README.md").read_text()
    torch.manual_seed(0)
    module = KernelSimilarityMatching(
        num_neurons=N, in_features=2, init="normal", kernel_params={"sigma": 0.3}, phases=[Phase(30)], inverse=inverse
    )
    with PeakBytes(N * N) as memory:
        for parameter in module.parameters():
            memory.see(parameter)
        run = trainer([callback() for callback in callbacks], limit_val_batches=0)
        run.fit(module, datamodule=moons(updates_per_epoch=10))
    assert memory.peak / N**2 == pytest.approx(documented, abs=0.5)
