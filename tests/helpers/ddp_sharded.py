"""A short training run of shared neurons, started by test_sharded_runs.py.

``python ddp_sharded.py FOLDER DEVICES NAME [CKPT] [KILL]`` trains 60 updates and writes the rows and scores of each
rank. CKPT continues a run; ``-`` does not. KILL is an update after which all ranks are killed, or ``again``: the run is
then repeated from the checkpoint of update 20 in the same processes, and compared; or ``wild``: rates that diverge, and
the error message of each rank.
"""

import json
import os
import signal
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

from ksm_lightning.callbacks import (
    DivergenceGuard,
    Figures,
    KernelErrorEvaluation,
    KMeansProbe,
    LinearProbe,
    UpdateCheckpoint,
)
from ksm_lightning.data import HalfMoonsDataModule
from ksm_lightning.learning import Phase
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.runs.logger import RunLogger

WILD = [Phase(25, 0.01, 0.01, 0.1), Phase(1000, 50.0, 5.0, 1.9)]


class Kill(lightning.Callback):
    """Kills the process after the checkpoint of an update, as a full machine would."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.update:
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def make_model(**options) -> KernelSimilarityMatching:
    """A network whose inverse is tracked; 26 neurons do not divide evenly by 4."""
    sigma = {"sigma": 0.3}
    return KernelSimilarityMatching(
        **{
            "num_neurons": 26,
            "kernel_params": sigma,
            "updates": 60,
            "inverse": "tracked",
            "parallel": "neurons",
            **options,
        }
    )


def make_data() -> HalfMoonsDataModule:
    return HalfMoonsDataModule(num_points=300, batch_size=8, updates_per_epoch=30, eval_batch_size=150, seed=3)


def make_trainer(folder: str, devices: int, name: str, kill: int = 0) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu", devices=devices, max_epochs=-1, num_sanity_val_steps=0, precision="64-true",
        strategy=DDPStrategy(process_group_backend="gloo") if devices > 1 else "auto", log_every_n_steps=5,
        logger=RunLogger(folder, "run", version=name), enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            KernelErrorEvaluation(), LinearProbe(labels_per_class=20), KMeansProbe(starts=2), Figures(num_neurons=1),
            DivergenceGuard(), UpdateCheckpoint(every_n_updates=20, keep_all=not kill), *([Kill(kill)] if kill else []),
        ],
    )  # fmt: skip


def main(folder: str, devices: int, name: str, ckpt: str = "-", kill: str = "") -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(5)
    model = make_model(phases=WILD, updates=None) if kill == "wild" else make_model()
    trainer = make_trainer(folder, devices, name, int(kill) if kill.isdigit() else 0)
    try:
        trainer.fit(model, datamodule=make_data(), ckpt_path=None if ckpt == "-" else ckpt, weights_only=True)
    except FloatingPointError as error:
        Path(folder, f"error_{trainer.global_rank}.txt").write_text(str(error))
        raise
    rank = trainer.global_rank
    torch.save(model.network.state_dict(), Path(folder, f"{name}_{rank}.pt"))
    scores = {each: float(value) for each, value in trainer.callback_metrics.items()}
    trainer.save_checkpoint(Path(folder, f"{name}.ckpt"))
    if kill == "again":
        half = Path(folder, "run", name, "checkpoints", "update-0000020.ckpt")
        lightning.seed_everything(5)
        again = make_model()
        make_trainer(folder, devices, "again").fit(again, datamodule=make_data(), ckpt_path=half, weights_only=True)
        pairs = zip(again.network.parameters(), model.network.parameters(), strict=True)
        scores["again"] = float(all(torch.equal(ours, theirs) for ours, theirs in pairs))
    Path(folder, f"{name}_{rank}.json").write_text(json.dumps(scores))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
