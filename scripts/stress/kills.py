"""Runs that are killed repeatedly at random moments, with one process and with two."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import FOLDER, run_all, table

from ksm_lightning.runs.checkpoint import read_checkpoint

KILLS = 25
OPTIONS = [
    "--data=HalfMoonsDataModule", "--model.num_neurons=16", "--model.kernel_params.sigma=0.3",
    "--data.updates_per_epoch=500", "--checkpoint.every_n_updates=150", "--kernel_error.min_updates_between=5000",
    "--figures.every_n_updates=0", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu",
]  # fmt: skip


def command(job: dict[str, Any], name: str, *more: str) -> list[str]:
    """The command ``ksm fit`` for one or two processes."""
    ranks = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=32"] if job["ranks"] == 2 else []
    folder = [f"--trainer.logger.save_dir={FOLDER}", f"--trainer.logger.name={name}"]
    return [
        sys.executable, "-m", "ksm_lightning.cli", "fit", *OPTIONS, f"--model.updates={job['updates']}", *ranks,
        *folder, *more,
    ]  # fmt: skip


def launch(arguments: list[str]) -> "subprocess.Popen[bytes]":
    """Start a process in its own group, so that all ranks can be killed together."""
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def newest(folder: Path) -> tuple[int, Path | None]:
    """Update and path of the latest checkpoint; every checkpoint must load."""
    found = [
        (int(read_checkpoint(path)["global_step"]), path) for path in folder.glob("version_*/checkpoints/last.ckpt")
    ]
    return max(found, default=(0, None))


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Kill and resume runs until ``kills`` kills are done, and compare the end of each with an undisturbed run."""
    names = {name: f"kills_{job['ranks']}_{name}" for name in ("whole", "killed")}
    for name in names.values():
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    started = time.monotonic()
    assert launch(command(job, names["whole"])).wait() == 0
    whole = time.monotonic() - started
    _, path = newest(FOLDER / names["whole"])
    assert path is not None
    expected = read_checkpoint(path)["state_dict"]
    rng = random.Random(job["ranks"])
    folder = FOLDER / names["killed"]
    kills = before_checkpoint = equal = runs = 0
    while kills < job["kills"]:
        update, path = newest(folder)
        arguments = command(job, names["killed"], *([f"--ckpt_path={path}"] if path else []))
        # The delay reaches from the creation of the run's folder to beyond a few checkpoints.
        if update < job["updates"] and _is_killed(launch(arguments), folder, rng.uniform(0, 0.15 * whole)):
            kills += 1
            before_checkpoint += newest(folder)[0] == update
        if newest(folder)[0] >= job["updates"] or kills == job["kills"]:
            runs += 1
            equal += _ends_equal(job, names["killed"], folder, expected)
            shutil.rmtree(folder)
    return {"made": kills, "before_checkpoint": before_checkpoint, "runs": runs, "equal": equal}


def _is_killed(process: "subprocess.Popen[bytes]", folder: Path, delay: float) -> bool:
    """Kill all ranks ``delay`` seconds after the run has created its folder; False if it had already ended."""

    def versions() -> int:
        return len(list(folder.glob("version_*")))

    before = versions()
    while process.poll() is None and versions() == before:
        time.sleep(0.01)
    time.sleep(delay)
    is_running = process.poll() is None
    if is_running:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return is_running


def _ends_equal(job: dict[str, Any], name: str, folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Let a run finish and compare its weights."""
    update, path = newest(folder)
    if update < job["updates"]:
        assert launch(command(job, name, *([f"--ckpt_path={path}"] if path else []))).wait() == 0
        update, path = newest(folder)
    assert path is not None
    found = read_checkpoint(path)["state_dict"]
    return update == job["updates"] and all(torch.equal(found[name], value) for name, value in expected.items())


def main(quick: bool) -> list[str]:
    """Run the missing jobs and report all."""
    kills, updates = (3, 3000) if quick else (KILLS, 20_000)
    jobs = [{"ranks": ranks, "kills": kills, "updates": updates} for ranks in (1, 2)]
    done = run_all("kills", jobs, work, quick, processes=1)
    header = (
        "processes", "kills", "kills before the next checkpoint", "killed runs",
        "final weights bitwise equal to the undisturbed run",
    )  # fmt: skip
    rows = [
        (row["ranks"], row["made"], row["before_checkpoint"], row["runs"], f"{row['equal']} of {row['runs']}")
        for row in done
    ]
    return [
        f"Half moons, 16 neurons, {updates:,} updates of the adaptive schedule, one checkpoint every 150 updates. Each "
        "run was killed (SIGKILL, all ranks) at random moments after it had created its folder, and resumed from its "
        "last checkpoint. Every checkpoint that a kill left behind could be loaded.",
        "",
        *table(header, rows),
    ]
