"""SLURM's requeue signal at random moments of runs that validate, log and draw all the time, with an imitated SLURM."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import forked
import torch
from common import FOLDER, run_all, table
from signals import OPTIONS, UPDATES, warm_up

from ksm_lightning.cli import main as ksm
from ksm_lightning.runs.checkpoint import read_checkpoint

SIGNALS, OF_TWO_RANKS = 100, 20
PATIENCE = 60.0  # seconds from the signal to the end of all processes
BURST = 5  # signals within a tenth of a second; one job in four gets them
_SCONTROL = '#!/bin/sh\necho "$@" >> "$FAKE_SCONTROL_LOG"\n'


def start(folder: Path, name: str, ranks: int) -> forked.Process:
    """Start `ksm fit` in a folder, as a job of SLURM. All runs have the same blocks of updates."""
    commands = folder.parent / "bin"
    commands.mkdir(parents=True, exist_ok=True)
    (commands / "scontrol").write_text(_SCONTROL)
    (commands / "scontrol").chmod(0o755)
    folder.mkdir(parents=True, exist_ok=True)

    def job() -> None:
        rank = os.environ.pop("LOCAL_RANK", "0")
        os.chdir(folder)
        os.environ |= {
            "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "stress", "SLURM_NTASKS": str(ranks), "SLURM_NODEID": "0",
            "SLURM_NTASKS_PER_NODE": str(ranks), "SLURM_PROCID": rank, "SLURM_LOCALID": rank,
            "FAKE_SCONTROL_LOG": str(folder / "scontrol.txt"), "PATH": f"{commands}:{os.environ['PATH']}",
        }  # fmt: skip
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        more = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=32"] if ranks > 1 else []
        ksm([*OPTIONS, f"--trainer.logger.name={name}", "--checkpoint.every_n_updates=2",
             "--checkpoint.keep_all=true", *more])  # fmt: skip

    return forked.run(job, folder / f"{name}.txt", ranks)


def undisturbed(ranks: int) -> Path:
    """The folder with the checkpoints of an undisturbed run, one per block; it is made at the first call."""
    warm_up()
    folder = (FOLDER / "requeue" / f"whole_{ranks}").absolute()
    done = folder / "runs" / "whole" / "version_0" / "checkpoints"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        process = start(folder, "whole", ranks)
        _wait_for_folder(folder, process)
        begin = time.time()
        assert process.wait(PATIENCE) == 0, process.output()
        (folder / "done").write_text(f"{(done / 'last.ckpt').stat().st_mtime - begin:.3f}")
    return done


def length(ranks: int) -> float:
    """Seconds of an undisturbed run from the creation of its folder to its last update."""
    return float((undisturbed(ranks).parents[3] / "done").read_text())


def _wait_for_folder(folder: Path, process: forked.Process) -> None:
    while not list(folder.glob("runs/*/version_*")) and not process.poll():
        time.sleep(0.005)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Send one or several signals, compare what was saved, and let the next job continue."""
    expected = undisturbed(job["ranks"])
    folder = (FOLDER / "requeue" / f"{job['ranks']}_{job['index']}").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    process = start(folder, "first", job["ranks"])
    if job["after_start"]:
        _wait_for_folder(folder, process)
    time.sleep(job["delay"])
    for _ in range(BURST if job["burst"] else 1):
        for pid in process.ranks if job["to_all"] else process.ranks[:1]:
            if not process.poll() and pid not in process.codes:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.02 if job["burst"] else 0)
    sent = time.monotonic()
    has_hung = False
    try:
        process.wait(PATIENCE)
    except TimeoutError:
        has_hung = True
    seconds = time.monotonic() - sent
    codes = [process.codes.get(pid) for pid in process.ranks]
    saved, calls = sorted(folder.glob("hpc_ckpt_*.ckpt")), folder / "scontrol.txt"
    row = {
        "codes": codes,
        "hung": has_hung,
        "seconds": seconds,
        "updates": [int(read_checkpoint(path)["global_step"]) for path in saved],
        "wrong": [path.name for path in saved if not _is_right(path, expected)],
        "requeued": calls.read_text().splitlines() if calls.exists() else [],
        "drafts": [path.name for path in folder.rglob("*") if "draft" in path.name],
        "ends_alike": None,
    }  # fmt: skip
    if saved and row["requeued"]:
        again = start(folder, "second", job["ranks"])
        with contextlib.suppress(TimeoutError):
            again.wait(PATIENCE)
        end = folder / "runs" / "second" / "version_0" / "checkpoints" / "last.ckpt"
        said = f"Continuing from {saved[-1].name}" in again.output()
        row["ends_alike"] = end.is_file() and said and _is_right(end, expected)
    shutil.rmtree(folder)
    return row


def _is_right(path: Path, expected: Path) -> bool:
    """Whether the weights of a checkpoint are those of the undisturbed run at its update, bit for bit."""
    content = read_checkpoint(path)  # a damaged one is an error
    if content["global_step"] == 0:
        return True  # the start is compared by the run that continues from it
    whole = read_checkpoint(expected / f"update-{content['global_step']:07d}.ckpt")["state_dict"]
    return all(torch.equal(value, whole[name]) for name, value in content["state_dict"].items())


def outcome(row: dict[str, Any]) -> str:
    """What became of a job; faults are in capital letters."""
    if row["hung"]:
        return "HUNG"
    if row["wrong"] or row["drafts"] or row["ends_alike"] is False:
        return "WRONG"
    if row["requeued"]:
        right = row["requeued"] == ["requeue 77"] and row["updates"] and row["codes"][0] == 143
        return "saved, requeued and continued" if right else "WRONG"
    if row["codes"][0] == -signal.SIGUSR1:
        return "killed while it was starting" if not row["updates"] else "WRONG"
    return "the run had made its updates" if row["codes"][0] == 0 else "LOST"


def jobs(count: int, of_two_ranks: int, lengths: dict[int, float]) -> list[dict[str, Any]]:
    """Signals at moments that are spread over the length of a run; one in ten comes while the run is still starting."""
    rng = random.Random(0)
    found: list[dict[str, Any]] = []
    for index in range(count):
        ranks = 2 if index < of_two_ranks else 1
        after_start, to_all, burst = rng.random() < 0.9, rng.random() < 0.5, rng.random() < 0.25
        # Before a run has started it has no handler: what kills one of its processes must kill all.
        to_all = to_all or not after_start
        delay = round(rng.random() * (1.1 * lengths[ranks] if after_start else 0.3), 3)
        found.append({"index": index, "ranks": ranks, "to_all": to_all, "burst": burst, "after_start": after_start,
                      "delay": delay})  # fmt: skip
    return found


def report(done: list[dict[str, Any]]) -> list[str]:
    """The results as Markdown."""
    kinds = [outcome(row) for row in done]
    rows = [
        (kind, *(sum(k == kind and row["ranks"] == ranks for k, row in zip(kinds, done, strict=True))
                 for ranks in (1, 2)))
        for kind in sorted(set(kinds))
    ]  # fmt: skip
    seconds = sorted(row["seconds"] for row in done)
    saved = [update for row in done for update in row["updates"]]
    wrong = sum(len(row["wrong"]) for row in done)
    continued = [row["ends_alike"] for row in done if row["ends_alike"] is not None]
    return [
        f"{len(done)} runs of `ksm fit` on half moons in an imitated SLURM ({UPDATES} updates, validation with kernel "
        "error and linear probe every 2 updates, every update logged, figures). Each got SIGUSR1 at a random moment, "
        f"one in four {BURST} times within a tenth of a second, one in ten while it was still starting. With two "
        "processes the signal went to both, or to the first only.",
        "",
        *table(["the run", "1 process", "2 processes"], rows),
        "",
        f"Checkpoints `hpc_ckpt_1.ckpt`: {len(saved)}, of {len(set(saved))} different updates; not equal to the "
        f"undisturbed run at their update: {wrong}. Continued by a second `ksm fit` in the same folder: "
        f"{len(continued)}; not equal to the undisturbed run at the end: {continued.count(False)}. Seconds from the "
        f"signal to the end of all processes: median {seconds[len(seconds) // 2]:.2f}, largest {seconds[-1]:.2f}. "
        f"Hung: {kinds.count('HUNG')}.",
    ]


def main(quick: bool) -> list[str]:
    """Run the missing jobs and report all. The length of a run is measured once, so that the jobs stay the same."""
    path = FOLDER / f"requeue_length{'_quick' if quick else ''}.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(f"{length(ranks):.3f}" for ranks in (1, 2)))
    lengths = dict(zip((1, 2), map(float, re.findall(r"[\d.]+", path.read_text())), strict=True))
    todo = jobs(*((6, 2) if quick else (SIGNALS, OF_TWO_RANKS)), lengths)
    return report(run_all("requeue", todo, work, quick, processes=1))
