"""A short training run on one or several processes, started by test_distributed.py.

``python ddp_run.py FOLDER DEVICES BATCH_SIZE UPDATES SCHEDULE [CKPT]`` writes the weights and logged values of each
rank and the features of all points, or the error message of each rank. SCHEDULE is ``phases``, ``adaptive`` or
``tight`` (50 updates), ``wild`` (which diverges), ``unequal`` (the second rank changes its W) or ``broken`` (the first
rank's probe fails).
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

from ksm_lightning.callbacks import (
    DivergenceGuard,
    FeatureWriter,
    Figures,
    KernelErrorEvaluation,
    KMeansProbe,
    LinearProbe,
    UpdateCheckpoint,
)
from ksm_lightning.data import HalfMoonsDataModule
from ksm_lightning.evaluation.kernel_error import KernelNRMSE
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.runs.logger import RunLogger

SCHEDULES = {
    "phases": {"phases": [Phase(10_000)]},
    "adaptive": {"updates": 50},
    "tight": {"updates": 50, "bound": "tight", "num_landmarks": 12},
    "unequal": {"updates": 50},
    "broken": {"updates": 50},
    "wild": {"phases": [Phase(30, 0.01, 0.01, 0.1), Phase(10_000, 50.0, 5.0, 50.0)]},
}


class ChangeW(lightning.Callback):
    """Changes W on the second rank after the first block of updates."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_rank == 1:
            pl_module.network.W.data[0] += 1


class BrokenProbe(LinearProbe):
    """A probe that fails. Only the first rank computes it."""

    def _scores(self, model, data):
        raise ValueError("the probe is broken")


def main(folder: str, devices: int, batch_size: int, updates: int, schedule: str, ckpt: str | None = None) -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(5)
    model = KernelSimilarityMatching(num_neurons=8, kernel_params={"sigma": 0.3}, **SCHEDULES[schedule])
    data = HalfMoonsDataModule(num_points=300, batch_size=batch_size, updates_per_epoch=25, eval_batch_size=64)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=DDPStrategy(process_group_backend="gloo") if devices > 1 else "auto",
        max_epochs=-1,
        max_steps=updates,
        num_sanity_val_steps=0,
        logger=RunLogger(folder, "run", version=f"of_{updates}"),
        log_every_n_steps=5,
        enable_progress_bar=False,
        callbacks=[
            KernelErrorEvaluation(), (BrokenProbe if schedule == "broken" else LinearProbe)(labels_per_class=20),
            KMeansProbe(starts=2), *([ChangeW()] if schedule == "unequal" else []),
            Figures(num_neurons=1), DivergenceGuard(), UpdateCheckpoint(every_n_updates=20),
            FeatureWriter(str(Path(folder) / f"features_of_{updates}.npz"), "least_squares"),
        ],
    )  # fmt: skip
    try:
        trainer.fit(model, datamodule=data, ckpt_path=ckpt, weights_only=True)
    except Exception as error:
        (Path(folder) / f"error_{trainer.global_rank}.txt").write_text(str(error))
        raise
    torch.save(model.state_dict(), Path(folder) / f"rank_{trainer.global_rank}.pt")
    scores = {name: float(value) for name, value in trainer.callback_metrics.items()}
    # Each rank gives the metric its share of the points.
    metric = KernelNRMSE(model.network.kernel)
    x = data.train_points.data[trainer.global_rank :: trainer.world_size]
    metric.update(x, model(x))
    scores["metric"] = float(metric.compute())
    (Path(folder) / f"scores_{trainer.global_rank}.json").write_text(json.dumps(scores))
    trainer.predict(model, datamodule=data, return_predictions=False)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # otherwise gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:])
