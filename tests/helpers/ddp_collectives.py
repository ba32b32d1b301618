"""Counts the collectives of a short training, started by test_distributed.py.

``python ddp_collectives.py FOLDER DEVICES SCHEDULE`` trains with 200 updates in blocks of 50, each of which logs 5, and
writes the calls and bytes of each rank by operation: of the updates, and of the blocks with all that ends them.
SCHEDULE is ``exact``, ``tracked`` or ``tight``.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ksm_lightning.callbacks import DivergenceGuard
from ksm_lightning.data import HalfMoonsDataModule
from ksm_lightning.learning import Learner
from ksm_lightning.module import KernelSimilarityMatching

OPTIONS = {
    "exact": {"inverse": "exact"},
    "tracked": {"inverse": "tracked"},
    "tight": {"bound": "tight", "num_landmarks": 12, "inverse": "exact"},
}


class CountCollectives(TorchDispatchMode):
    """Counts every operation of torch.distributed below it, whatever function called it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0]
            self.calls[name] += 1
            sent = tree_leaves(args[1] if "allgather" in name else args[0])
            self.bytes[name] += sum(part.numel() * part.element_size() for part in sent)
        return func(*args, **(kwargs or {}))


class CountedModel(KernelSimilarityMatching):
    """Counts the collectives of its blocks of updates."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.counts, self.blocks = CountCollectives(), 0

    def training_step(self, batch, batch_idx):
        self.blocks += 1
        with self.counts:
            return super().training_step(batch, batch_idx)


def main(folder: str, devices: int, schedule: str) -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(5)
    model = CountedModel(num_neurons=8, kernel_params={"sigma": 0.3}, updates=200, **OPTIONS[schedule])
    data = HalfMoonsDataModule(num_points=300, batch_size=32, updates_per_epoch=50)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=devices, max_epochs=-1, logger=False, enable_checkpointing=False,
        strategy=DDPStrategy(process_group_backend="gloo") if devices > 1 else "auto", log_every_n_steps=10,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
        callbacks=[DivergenceGuard()],
    )  # fmt: skip
    learn, updates = Learner.learn, CountCollectives()  # of the updates alone, without the end of a block

    def counted_learn(*args, **kwargs):
        with updates:
            return learn(*args, **kwargs)

    Learner.learn = counted_learn
    trainer.fit(model, datamodule=data)
    found = {
        "updates": trainer.global_step, "blocks": model.blocks, "calls": updates.calls, "bytes": updates.bytes,
        "calls_of_blocks": model.counts.calls,
    }  # fmt: skip
    (Path(folder) / f"collectives_{trainer.global_rank}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # otherwise gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
