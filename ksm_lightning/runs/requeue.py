"""SLURM's requeue signal: a checkpoint where Lightning looks for it, and the job back in the queue.

SLURM sends a signal, SIGUSR1 by default, some time before a job reaches its limit. Lightning's handler saves and
requeues between any two instructions: in the middle of an update, or while a lock is held that it needs. Here the
handler sets a flag (:mod:`ksm_lightning.runs.stop`), and the work is done after a block of updates or between two
parts of a validation.
"""

import os
import re
import subprocess
from pathlib import Path

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_warn

from ksm_lightning.runs.checkpoint_file import write_checkpoint
from ksm_lightning.runs.processes import PATIENCE, on_first_process


def hpc_checkpoints(root: Path) -> list[Path]:
    """The checkpoints of requeued jobs in a folder, by their number; Lightning continues from the last one."""
    found = [path for path in root.glob("hpc_ckpt_*.ckpt") if re.fullmatch(r"hpc_ckpt_\d+\.ckpt", path.name)]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    """The K of ``hpc_ckpt_K.ckpt``."""
    return int(path.stem.rpartition("_")[2])


def checkpoint_of_requeued_job(root: str | Path | None) -> Path | None:
    """The checkpoint from which a job in SLURM continues without ``ckpt_path``; None if there is none, or no SLURM.

    Args:
        root: The trainer's ``default_root_dir``. Default: the working folder.
    """
    found = hpc_checkpoints(Path(root or ".")) if SLURMEnvironment.detect() else []
    return found[-1] if found else None


def requeue(trainer: L.Trainer) -> Path | None:
    """Save ``hpc_ckpt_K.ckpt`` in the trainer's root folder and put the job back in the queue. Every process calls it.

    Only a trainer that fits saves a checkpoint. If SLURM refuses, a warning is given and the run may continue.

    Returns:
        The checkpoint, or the root folder without one; None if the job is not in the queue again.
    """
    root = path = Path(trainer.default_root_dir)
    if trainer.state.fn == "fit":
        last = hpc_checkpoints(root)[-1:]
        path = root / f"hpc_ckpt_{_number(last[0]) + 1 if last else 1}.ckpt"
        write_checkpoint(trainer, path)
    failure = on_first_process(trainer, _ask_slurm)
    if failure:
        rank_zero_warn(f"SLURM did not requeue the job ({failure}), so the run goes on. Its state is saved in {path}.")
        return None
    return path


def _ask_slurm() -> str:
    """Requeue the job of this process; returns why it failed, or an empty string."""
    job, task = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_ARRAY_TASK_ID")
    if task is not None:
        job = f"{os.environ.get('SLURM_ARRAY_JOB_ID', job)}_{task}"
    try:
        result = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    message = (result.stderr.strip() or f"scontrol ended with {result.returncode}").splitlines()[-1]
    return message if result.returncode else ""
