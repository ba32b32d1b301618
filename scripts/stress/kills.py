"""200 processes killed at random moments and before random changes of files, with one rank and with two.

A run is killed by SIGKILL, all ranks at once: half of the times at a random moment of one of its phases, half of the
times right before one of its changes of the file system, such as the opening or renaming of a file. Then the same
command is run again. Nothing that the kill left behind may be wrong, and the second run must end as an undisturbed one.
"""

import csv
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import forked
import numpy as np
import torch
from common import FOLDER, run_all, table
from PIL import Image

from ksm_lightning import FeatureExtractor
from ksm_lightning.runs.checkpoint import read_checkpoint

KILLS = 20  # per phase and number of ranks
WORK = FOLDER / "kills"
POINTS = WORK / "x.npy"
# What is killed, and the function during which it is killed at a random moment.
PHASES = {
    "fit": "lightning.pytorch.trainer.trainer:Trainer.fit",
    "consolidation": "ksm_lightning.learning.learner:Learner.finish",
    "figures": "ksm_lightning.callbacks.run_figures:Figures.on_train_end",
    "predict": "lightning.pytorch.trainer.trainer:Trainer.predict",
    "compare": "ksm_lightning.baselines.comparison:Comparison.run",
    "export": "ksm_lightning.cli.export:write",
}
FITS = ("fit", "consolidation", "figures")
UPDATES = 900
RANKS = ["--trainer.devices=2", "--trainer.strategy=ddp"]
DATA = ["--data=ArrayDataModule", f"--data.path={POINTS}", "--data.memory_map=always"]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


def command(job: dict[str, Any], folder: Path) -> list[str]:
    """The arguments of ``ksm``; everything is written below ``folder``."""
    ranks = RANKS if job["ranks"] == 2 else []
    if job["phase"] in FITS:
        found = newest(folder)
        return [
            "fit", *DATA, *QUIET, *ranks, f"--data.batch_size={64 // job['ranks']}", "--data.updates_per_epoch=300",
            "--model.num_neurons=16", "--model.kernel_params.sigma=0.3", f"--model.updates={UPDATES}",
            "--checkpoint.every_n_updates=150", "--kernel_error.min_updates_between=5000",
            "--figures.every_n_updates=0", "--trainer.log_every_n_steps=50", f"--trainer.logger.save_dir={folder}",
            "--trainer.logger.name=run", *([f"--ckpt_path={found[1]}"] if found else []),
        ]  # fmt: skip
    if job["phase"] == "predict":
        return [
            "predict", *DATA, *QUIET, *ranks, f"--data.labels={POINTS.with_name('x_labels.npy')}",
            "--data.eval_batch_size=16", f"--ckpt_path={checkpoint(1)}", f"--features.path={folder / 'f.npy'}",
            "--features.readout=nystroem",
        ]  # fmt: skip
    if job["phase"] == "compare":
        return [
            "compare", *DATA, "--kernel_params.sigma=0.3", "--sizes=[2,4,8]", "--seeds=2", "--max_points=300",
            "--methods=[kernel_pca,nystroem_uniform,nystroem_kmeans,random_fourier,ksm]", "--updates=50",
            "--show_progress=false", f"--out={folder / 'out'}",
        ]  # fmt: skip
    return ["export", f"--ckpt_path={checkpoint(1)}", "--format=torch", f"--out={folder / 'e.pt2'}"]


def checkpoint(ranks: int) -> Path:
    """The last checkpoint of the undisturbed fit, which is made if there is none."""
    folder = reference({"phase": "fit", "ranks": ranks})
    found = newest(folder)
    assert found is not None
    return found[1]


def reference(job: dict[str, Any]) -> Path:
    """The folder of the undisturbed run of a phase, which is made at the first call."""
    folder = WORK / f"{job['phase']}_{job['ranks']}"
    if not (folder / "started.changes").exists():
        shutil.rmtree(folder, ignore_errors=True)
        if not POINTS.exists():
            forked.half_moons(POINTS)
        arguments = command(job, folder / "files")
        process = forked.run(
            arguments, folder / "log", job["ranks"], phase=PHASES[job["phase"]], started=folder / "started",
            folder=folder / "files",
        )  # fmt: skip
        if process.wait() != 0:
            raise RuntimeError(f"The undisturbed run of {job} failed: {process.output()[-2000:]}")
    return folder / "files"


def newest(folder: Path) -> tuple[int, Path] | None:
    """Update and path of the latest checkpoint; every checkpoint must load."""
    paths = folder.glob("run/version_*/checkpoints/*.ckpt")
    found = [(int(read_checkpoint(path)["global_step"]), path) for path in paths if not path.name.startswith(".")]
    return max(found, default=None)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Kill one run, check what it left, run it again and compare the result."""
    torch.set_num_threads(1)
    expected = reference(job)
    started = expected.parent / "started"
    duration, changes = json.loads(started.read_text()), int(started.with_suffix(".changes").read_text())
    rng = random.Random(f"{job}")
    folder = WORK / "killed"
    is_killed, tries = False, 0
    while not is_killed:
        assert tries < 10, f"{job} always ends before it is killed"
        tries += 1
        shutil.rmtree(folder, ignore_errors=True)
        is_killed = _kill(job, folder, rng, duration, changes)
    left = [path for path in folder.rglob(".*") if path.name.endswith(".draft")]
    result: dict[str, Any] = {"drafts": len(left), "wrong": wrong(job, folder / "files", expected, is_complete=False)}
    complete = is_finished(job, folder / "files")
    process = forked.run(command(job, folder / "files"), folder / "log", job["ranks"])
    try:
        code = process.wait()
    except TimeoutError:
        code = -1
    # What was complete before the kill is refused the second time; a comparison is always continued.
    result["rerun"] = code == (2 if complete and job["phase"] != "compare" else 0)
    result["error"] = process.error() if not result["rerun"] else ""
    result["complete"] = complete
    result["wrong"] += wrong(job, folder / "files", expected, is_complete=True)
    remaining = [path for path in (folder / "files").rglob(".*") if job["phase"] not in FITS]
    result["left"] = len(remaining)
    return result


def _kill(job: dict[str, Any], folder: Path, rng: random.Random, duration: float, changes: int) -> bool:
    """Start a run and kill it; False if it ended before."""
    if job["number"] % 2:
        process = forked.run(
            command(job, folder / "files"), folder / "log", job["ranks"], folder=folder / "files",
            kill_at_change=rng.randrange(changes),
        )  # fmt: skip
        return process.wait() < 0
    begun = folder / "started"
    process = forked.run(
        command(job, folder / "files"), folder / "log", job["ranks"], phase=PHASES[job["phase"]], started=begun
    )
    while not begun.exists() and not process.poll():
        time.sleep(0.001)
    time.sleep(rng.uniform(0, duration))
    return process.kill()


def is_finished(job: dict[str, Any], folder: Path) -> bool:
    """Whether a run has nothing left to do."""
    if job["phase"] in FITS:
        found = newest(folder)
        return found is not None and found[0] >= UPDATES
    return {"predict": folder / "f.npy", "compare": folder / "none", "export": folder / "e.pt2"}[job["phase"]].exists()


def wrong(job: dict[str, Any], folder: Path, expected: Path, is_complete: bool) -> list[str]:
    """The visible files that are damaged or differ from those of the undisturbed run."""
    found: list[str] = []
    try:
        if job["phase"] in FITS:
            _check_fit(folder, expected, is_complete)
        elif job["phase"] == "predict":
            _check_arrays(folder, expected, is_complete)
        elif job["phase"] == "compare":
            _check_rows(folder / "out", expected / "out", is_complete)
        elif is_complete or (folder / "e.pt2").exists():
            _check_program(folder / "e.pt2", expected / "e.pt2")
    except Exception as error:  # any error is a finding
        found.append(f"{'after the second run' if is_complete else 'after the kill'}: {error!r}"[:300])
    return found


def _check_fit(folder: Path, expected: Path, is_complete: bool) -> None:
    for path in folder.rglob("*.png"):
        with Image.open(path) as image:
            image.load()
    found = newest(folder)
    if found is None or (found[0] < UPDATES and not is_complete):
        return
    reached, path = found
    assert reached == UPDATES, f"ends at update {reached}"
    wanted = newest(expected)
    assert wanted is not None
    weights, right = (read_checkpoint(one)["state_dict"] for one in (path, wanted[1]))
    assert all(torch.equal(weights[name], value) for name, value in right.items()), "other weights"


def _check_arrays(folder: Path, expected: Path, is_complete: bool) -> None:
    for path in expected.glob("f*"):
        other = folder / path.name
        if is_complete or (folder / "f.npy").exists() or other.exists():
            same = other.read_bytes() == path.read_bytes()
            if not same and path.name == "f.npy":
                same = np.array_equal(np.load(other), np.load(path))
            assert same, f"{path.name} differs"


def _check_rows(folder: Path, expected: Path, is_complete: bool) -> None:
    rows, right = (
        {(row["method"], row["n"], row["seed"]): row["nrmse"] for row in _table(each / "errors.csv")}
        for each in (folder, expected)
    )
    assert all(right[key] == value for key, value in rows.items()), "a row differs"
    assert not is_complete or rows == right, f"{len(rows)} of {len(right)} rows"
    if is_complete:
        assert (folder / "summary.csv").read_text() == (expected / "summary.csv").read_text()
        assert (folder / "errors.png").read_bytes() == (expected / "errors.png").read_bytes()


def _table(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _check_program(path: Path, expected: Path) -> None:
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    y, right = (torch.export.load(one).module()(x) for one in (path, expected))
    assert torch.equal(y, right), "other features"
    assert torch.allclose(y, FeatureExtractor.from_checkpoint(checkpoint(1))(x), atol=1e-5)


def jobs_of(kills: int) -> list[dict[str, Any]]:
    """The jobs: every phase, with one and with two ranks where it trains or predicts."""
    return [
        {"phase": phase, "ranks": ranks, "number": number}
        for phase in PHASES
        for ranks in ((1, 2) if phase not in ("compare", "export") else (1,))
        for number in range(kills)
    ]


def main(quick: bool) -> list[str]:
    """Run the missing jobs and report all."""
    jobs = jobs_of(2 if quick else KILLS)
    done = run_all("kills", jobs, work, quick, processes=1)
    rows = []
    for phase, ranks in dict.fromkeys((job["phase"], job["ranks"]) for job in jobs):
        some = [row for row in done if (row["phase"], row["ranks"]) == (phase, ranks)]
        rows.append(
            (
                phase, ranks, len(some), sum(row["complete"] for row in some), sum(row["drafts"] > 0 for row in some),
                sum(bool(row["wrong"]) for row in some), f"{sum(row['rerun'] for row in some)} of {len(some)}",
                sum(row["left"] for row in some),
            )
        )  # fmt: skip
    header = (
        "killed", "ranks", "kills", "after the last file was complete", "with a draft left", "wrong files",
        "second run as expected", "hidden files after it",
    )  # fmt: skip
    faults = [f"- {row['phase']}, {row['ranks']} ranks, {row['number']}: {row['wrong']} {row['error']}"
              for row in done if row["wrong"] or not row["rerun"]]  # fmt: skip
    return [
        f"2,000 half moons in a memory-mapped file, 16 neurons, {UPDATES} updates, one checkpoint every 150 updates. "
        f"{len(done)} kills (SIGKILL, all ranks), half of them at a random moment of the phase, half right before a "
        "random change of a file. Then the same command was run again, fits from their newest checkpoint. Weights, "
        "features, rows of a comparison (without seconds) and exported programs must equal those of an undisturbed "
        "run bit by bit.",
        "",
        *table(header, rows),
        "",
        *(faults or ["No file was wrong, and every second run ended as expected."]),
    ]
