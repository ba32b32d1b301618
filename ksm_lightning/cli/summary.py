"""What ``ksm fit`` prints at the end of a run."""

from pathlib import Path

import lightning as L
import torch

from ksm_lightning.callbacks import KernelErrorEvaluation
from ksm_lightning.data.datamodule import datamodule_of
from ksm_lightning.evaluation.plausibility import width_advice
from ksm_lightning.kernels.limits import TILE
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.runs import metric_names
from ksm_lightning.runs.cut_short import cut_short

_PARTS = {"Run folder": "", "Figures": "figures", "Checkpoint": "checkpoints/last.ckpt"}


def print_summary(trainer: L.Trainer, model: KernelSimilarityMatching, has_folder: bool) -> None:
    """Print the final scores of a run and where its files are. Every rank must call it."""
    folder = trainer.log_dir  # a broadcast
    if trainer.is_global_zero:
        files = (
            _files(Path(folder)) if has_folder and folder else ["Nothing was saved, because of --trainer.logger=false."]
        )
        print("\n" + "\n".join([*_scores(trainer, model), *files]))


def _scores(trainer: L.Trainer, model: KernelSimilarityMatching) -> list[str]:
    done, metrics = trainer.global_step, trainer.callback_metrics
    lines = [f"Trained for {done:,} updates, {model.run_state.updates_per_second:,.0f} per second."]
    lines.append(f"Kernel:             {model.network.kernel}")
    data = datamodule_of(trainer)
    if data is not None:
        x = data.random_points(TILE, torch.Generator().manual_seed(0))
        lines += filter(None, [width_advice(model.network.kernel, x, model.network.num_neurons)])
    if missing := cut_short(model.schedule, done, model.hparams["consolidate"]):
        lines.append(missing)
    active: list[L.Callback] = getattr(trainer, "callbacks", [])
    measured = [callback.last_update for callback in active if isinstance(callback, KernelErrorEvaluation)]
    error = metrics.get(metric_names.kernel_nrmse("val"))
    if error is not None:
        name = "Final kernel NRMSE:" if done in measured else f"Kernel NRMSE at update {measured[0]:,}:"
        lines.append(f"{name} {float(error):.4f}")
    nystroem = metrics.get(metric_names.kernel_nrmse("val", "nystroem"))
    if nystroem is not None:
        lines.append(f"Nystroem readout:   {float(nystroem):.4f}")
    accuracy = metrics.get(metric_names.probe_accuracy("test"))
    if accuracy is not None:
        lines.append(f"Linear probe:       {100 * float(accuracy):.2f} % of the test labels")
    return lines


def _files(folder: Path) -> list[str]:
    lines = [f"{name + ':':13} {folder / part}" for name, part in _PARTS.items() if (folder / part).exists()]
    return [*lines, f"TensorBoard:  tensorboard --logdir {folder}"]
