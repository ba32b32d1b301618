"""What the stress tests share: jobs that run side by side and are not run twice."""

import json
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ksm_lightning import KSMNetwork

FOLDER = Path("runs") / "stress"
Job = dict[str, Any]


def run_all(name: str, jobs: Sequence[Job], work: Callable[[Job], Job], quick: bool, processes: int = 2) -> list[Job]:
    """Results of all jobs, each with its job's own entries; those in the file of an earlier run are not repeated.

    Args:
        name: Names the file of results, below ``runs/stress``.
        jobs: What to do, as plain values.
        work: Does one job; a function of a module, so that another process finds it.
        quick: Keeps the results of quick runs apart.
        processes: Jobs at the same time, with one thread each.
    """
    path = FOLDER / f"{name}{'_quick' if quick else ''}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    done = {_key(entry["job"]): entry["result"] for entry in map(json.loads, lines)}
    missing = [job for job in jobs if _key(job) not in done]
    with (
        path.open("a") as file,
        multiprocessing.get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool,
    ):
        results = pool.imap_unordered(_Work(work), missing)
        for job, result in tqdm(results, total=len(missing), desc=name, disable=not missing):
            done[_key(job)] = result
            file.write(json.dumps({"job": job, "result": result}) + "\n")
            file.flush()
    return [{**job, **done[_key(job)]} for job in jobs]


class _Work:
    def __init__(self, work: Callable[[Job], Job]) -> None:
        self.work = work

    def __call__(self, job: Job) -> tuple[Job, Job]:
        return job, self.work(job)


def _key(job: Job) -> str:
    return json.dumps(job, sort_keys=True)


def is_finite(network: KSMNetwork) -> bool:
    """Whether all weights are."""
    return all(bool(parameter.isfinite().all()) for parameter in network.parameters())


def median(values: Sequence[float]) -> str:
    """The median and, in brackets, the largest."""
    return f"{statistics.median(values):.4f} ({max(values):.4f})" if values else "none"
