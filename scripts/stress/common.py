"""What the stress tests share: jobs that run in parallel and whose results are stored."""

import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ksm_lightning import KSMNetwork

FOLDER = Path("runs") / "stress"
Job = dict[str, Any]


def run_all(name: str, jobs: Sequence[Job], work: Callable[[Job], Job], quick: bool, processes: int = 2) -> list[Job]:
    """Run the jobs that no earlier run has finished; returns the results of all jobs, each merged with its job.

    Args:
        name: Name of the result file in ``runs/stress``.
        jobs: The jobs, as plain values.
        work: Runs one job. It must be a function of a module, because it runs in another process.
        quick: Whether this is a quick run, which has its own result file.
        processes: Number of parallel jobs, with one thread each.
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
    """Whether all weights of a network are finite."""
    return all(bool(parameter.isfinite().all()) for parameter in network.parameters())


def median(values: Sequence[float]) -> str:
    """The median, with the largest value in brackets."""
    return f"{statistics.median(values):.4f} ({max(values):.4f})" if values else "none"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows)]
