"""Signals at random moments of runs that validate, log and draw all the time, with one process and with two."""

import contextlib
import functools
import io
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import FOLDER, run_all, table

from ksm_lightning.cli import main as ksm
from ksm_lightning.runs.checkpoint import read_checkpoint

SIGNALS, OF_TWO_RANKS = 500, 100
PATIENCE = 15.0  # seconds from the signal to the end of all processes
HANG = 60.0  # seconds after which a process is killed
ENDED = 0.5  # seconds; a run that ends by itself within them was already ending
UPDATES = 20
OPTIONS = [
    "fit", "--data=HalfMoonsDataModule", "--data.num_points=400", "--data.eval_batch_size=64", "--model.num_neurons=8",
    "--model.kernel_params.sigma=0.3", f"--model.updates={UPDATES}", "--data.updates_per_epoch=2",
    "--trainer.log_every_n_steps=1", "--probe.min_updates_between=0", "--probe.labels_per_class=50",
    "--figures.every_n_updates=16", "--figures.num_neurons=1", "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu", "--trainer.logger.name=run",
]  # fmt: skip


@functools.cache
def warm_up() -> None:
    """One whole run in this process: those that are forked from it find everything imported and cached."""
    torch.set_num_threads(1)  # threads do not survive a fork
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        ksm([*OPTIONS, f"--trainer.logger.save_dir={folder}"])


def start(folder: Path, ranks: int) -> list[int]:
    """Fork the processes of a run, which writes to ``folder``; returns their ids."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [_fork(folder, rank, ranks, port) for rank in range(ranks)]


def _fork(folder: Path, rank: int, ranks: int, port: int) -> int:
    """Start one process; returns when it has the handlers that a user's process starts with."""
    ready, is_ready = os.pipe()
    process = os.fork()
    if process:
        os.close(is_ready)
        os.read(ready, 1)
        os.close(ready)
        return process
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.write(is_ready, b"!")
        os.chdir(folder)
        output = os.open(f"rank_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        more = []
        if ranks > 1:  # as torchrun starts them
            os.environ |= {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "stress",
                "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            }  # fmt: skip
            more = [f"--trainer.devices={ranks}", "--trainer.strategy=ddp", "--data.batch_size=32"]
        ksm([*OPTIONS, *more])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except KeyboardInterrupt:  # before or after the command itself
        code = 130
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def finish(processes: list[int], deadline: float) -> tuple[list[int], bool]:
    """Exit codes of the processes, minus the number of the signal that killed one, and whether one had to be killed."""
    codes: dict[int, int] = {}
    has_hung = False
    while len(codes) < len(processes):
        for process in set(processes) - set(codes):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                has_hung = True
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[process] for process in processes], has_hung


def wait_for_folder(folder: Path, processes: list[int]) -> None:
    """Wait until the run has created its folder, or has ended."""
    while not list(folder.glob("runs/run/version_*")) and not os.waitid(
        os.P_PID, processes[0], os.WEXITED | os.WNOHANG | os.WNOWAIT
    ):
        time.sleep(0.005)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Send one signal, and look at what is left."""
    warm_up()
    folder = (FOLDER / "signals" / f"{job['ranks']}_{job['index']}").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    processes = start(folder, job["ranks"])
    if job["after_start"]:
        wait_for_folder(folder, processes)
    time.sleep(job["delay"])
    number = signal.Signals[job["signal"]]
    for process in processes if job["to_all"] else processes[:1]:
        os.kill(process, number)  # a process that has ended is still to be waited for
    sent = time.monotonic()
    codes, has_hung = finish(processes, sent + HANG)
    result = {"codes": codes, "hung": has_hung, "seconds": time.monotonic() - sent, **_left(folder)}
    shutil.rmtree(folder)
    return result


def _left(folder: Path) -> dict[str, Any]:
    """The update that the message names, the one of the checkpoint, and files that are half written."""
    text = (folder / "rank_0.txt").read_text() if (folder / "rank_0.txt").exists() else ""
    named = re.search(r"ksm: stopped (?:at|after) update ([\d,]+)", text)
    paths = list(folder.rglob("last.ckpt"))
    saved = [int(read_checkpoint(path)["global_step"]) for path in paths]  # damaged ones are an error
    drafts = [path.name for path in folder.rglob("*") if "draft" in path.name]
    return {
        "named": int(named[1].replace(",", "")) if named else None,
        "saved": saved[0] if saved else None,
        "drafts": drafts,
        "is_complete": "Trained for" in text,
    }


def outcome(row: dict[str, Any]) -> str:
    """What became of a signal: one of the kinds of the table, or ``LOST``."""
    number = int(signal.Signals[row["signal"]])
    if row["hung"]:
        return "HUNG"
    if all(code == 0 for code in row["codes"]) and row["is_complete"] and row["seconds"] < ENDED:
        return "the run had ended"
    stopped = {128 + number, -number}
    if row["codes"][0] not in stopped:
        return "LOST"
    if row["saved"] is None:
        return "before the first checkpoint"
    if row["is_complete"]:
        return "after the last update"
    return "with a checkpoint of the update" if row["saved"] == row["named"] else "WRONG CHECKPOINT"


def duration(ranks: int) -> float:
    """Seconds of an undisturbed run after it has created its folder."""
    warm_up()
    folder = (FOLDER / "signals" / f"whole_{ranks}").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    processes = start(folder, ranks)
    wait_for_folder(folder, processes)
    started = time.monotonic()
    codes, _ = finish(processes, started + 10 * HANG)
    assert codes == [0] * ranks, (folder / "rank_0.txt").read_text()
    return time.monotonic() - started


def jobs(count: int, of_two_ranks: int, lengths: dict[int, float]) -> list[dict[str, Any]]:
    """Signals at moments that are spread over the length of a run; one in ten comes while the run is still starting."""
    rng = random.Random(0)
    found: list[dict[str, Any]] = []
    for index in range(count):
        ranks = 2 if index < of_two_ranks else 1
        name, to_all, after_start = rng.choice(["SIGINT", "SIGTERM"]), rng.random() < 0.5, rng.random() < 0.9
        # Before a run has started, it has no handler: as under torchrun, one that is killed takes the others with it.
        to_all = to_all or (ranks == 2 and not after_start)
        delay = round(rng.random() * (lengths[ranks] if after_start else 0.5), 3)
        found.append(
            {
                "index": index,
                "ranks": ranks,
                "signal": name,
                "to_all": to_all,
                "after_start": after_start,
                "delay": delay,
            }
        )
    rng.shuffle(found)
    return found


def report(done: list[dict[str, Any]]) -> list[str]:
    """The results as Markdown."""
    kinds = [outcome(row) for row in done]
    groups = sorted({(row["ranks"], row["signal"]) for row in done})
    rows = [
        (kind, *(sum(k == kind and (row["ranks"], row["signal"]) == group for k, row in zip(kinds, done, strict=True))
                 for group in groups))
        for kind in sorted(set(kinds))
    ]  # fmt: skip
    seconds = sorted(row["seconds"] for row in done)
    late = sum(value > PATIENCE for value in seconds)
    return [
        f"{len(done)} signals at random moments of `ksm fit` on half moons: {UPDATES} updates, validation with kernel "
        "error and linear probe every 2 updates, every update logged, figures after 16 and at the end. One signal in "
        "ten came while the run was still starting. With two processes the signal went to both, or to the first only.",
        "",
        *table(["the run ended", *(f"{ranks} process{'es' * (ranks > 1)}, {name}" for ranks, name in groups)], rows),
        "",
        f"Seconds from the signal to the end of all processes: median {seconds[len(seconds) // 2]:.2f}, largest "
        f"{seconds[-1]:.2f}; above {PATIENCE:g}: {late}. Lost: {kinds.count('LOST')}. Hung: {kinds.count('HUNG')}. "
        f"Files left half written: {sum(len(row['drafts']) for row in done)}. Every checkpoint that was left could be "
        "loaded.",
    ]


def main(quick: bool) -> list[str]:
    """Run the missing jobs and report all. The length of a run is measured once, so that the jobs stay the same."""
    path = FOLDER / f"signals_length{'_quick' if quick else ''}.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(f"{duration(ranks):.3f}" for ranks in (1, 2)))
    lengths = dict(zip((1, 2), map(float, path.read_text().split()), strict=True))
    todo = jobs(*((6, 2) if quick else (SIGNALS, OF_TWO_RANKS)), lengths)
    return report(run_all("signals", todo, work, quick, processes=1))
