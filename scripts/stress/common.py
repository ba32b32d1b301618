"""What the stress tests share: jobs that run side by side and are not run twice."""

import json
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ksm_lightning import DataInit, Kernel, KSMNetwork
from ksm_lightning.data.batches import draw_indices
from ksm_lightning.initialisation import Initialiser
from ksm_lightning.learning import learn, sample_size, start
from ksm_lightning.schedule import LearningSchedule

FOLDER = Path("runs") / "stress"
BATCH = 64
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


def train(
    kernel: Kernel, x: Tensor, num_neurons: int, schedule: LearningSchedule, ridge: float, seed: int, updates: int,
    init: Initialiser | None = None,
) -> KSMNetwork:  # fmt: skip
    """A network after so many updates of a batch of 64, in a loop; not consolidated.

    Args:
        kernel: The similarity.
        x: The data (samples, m).
        num_neurons: Neurons.
        schedule: The schedule; an adaptive one has its start, too.
        ridge: The paper's lambda.
        seed: Seed of start, batches and samples.
        updates: Updates to make.
        init: Start of W; data points unless given.
    """
    generator = torch.Generator().manual_seed(seed)
    candidates = x[torch.randperm(len(x), generator=generator)[:2000]]
    network = KSMNetwork(kernel, x.shape[1], num_neurons, ridge, init or DataInit(candidates), generator=generator)
    if schedule.is_natural:
        start(network, candidates)
    indices = draw_indices(seed, torch.arange(updates), torch.arange(BATCH), len(x))
    learn(
        network, schedule, (x[chosen] for chosen in indices),
        sample=lambda update: x[torch.randperm(len(x), generator=generator)[: sample_size(num_neurons)]],
    )  # fmt: skip
    return network


def is_finite(network: KSMNetwork) -> bool:
    """Whether all weights are."""
    return all(bool(parameter.isfinite().all()) for parameter in network.parameters())


def median(values: Sequence[float]) -> str:
    """The median and, in brackets, the largest."""
    return f"{statistics.median(values):.4f} ({max(values):.4f})" if values else "none"
