#!/usr/bin/env python3
"""Networks whose neurons are shared out over processes: operations, memory and time of a rank, and the cost model.

Writes scripts/benchmark/SHARDED.md.

.venv/bin/python scripts/benchmark/sharded.py                 about 20 minutes on two free cores, 8 GB of memory
.venv/bin/python scripts/benchmark/sharded.py --only model    one part; the others are kept
.venv/bin/python scripts/benchmark/sharded.py --quick         small sizes; results are only printed
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from counting import CountedRanks, CountedWork, ShapesOnly
from lightning.pytorch.strategies import DDPStrategy
from results import chosen_parts, machine, table, write_sections
from start import points
from torch._subclasses.fake_tensor import FakeTensorMode

from ksm_lightning.callbacks import KernelErrorEvaluation, UpdateCheckpoint
from ksm_lightning.data import ArrayDataModule
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, Phase
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network import KSMNetwork
from ksm_lightning.runs.logger import RunLogger
from ksm_lightning.sharding import Shard, ShardedLearner, ShardedNetwork
from ksm_lightning.sharding.cost import memory, refresh_cost, update_cost

BATCH, UPDATES, RANKS = 64, 20, 4
# Assumed of a GPU: operations and bytes per second, in one machine of 8 and between machines.
RATE, INSIDE, BETWEEN = 14e12, 200e9, 25e9
REFRESH_EVERY = 64
WORKER = "--worker"


# ---------------------------------------------------------------------- one run, on one or several processes


def worker(folder: str, options: dict[str, Any]) -> None:
    """Train, and write what this rank counted. Lightning starts the other ranks with the same arguments."""
    torch.set_num_threads(1)
    lightning.seed_everything(0)
    n, ranks, updates = options["neurons"], options["ranks"], UPDATES
    # Long schedules, so that no idle landmarks are searched: the first process does that alone.
    schedule = {"updates": 10_000} if options["start"] else {"phases": [Phase(10_000, 1e-3, 1e-3, 4e-3)]}
    model = KernelSimilarityMatching(
        num_neurons=n, kernel_params={"sigma": 4.0}, parallel="neurons", inverse="tracked", acceleration="none",
        init="data" if options["start"] else "normal", **schedule,
    )  # fmt: skip
    data = ArrayDataModule(f"{folder}/points.npy", batch_size=BATCH, updates_per_epoch=updates)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, max_epochs=-1, max_steps=updates, num_sanity_val_steps=0,
        strategy=DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto", enable_progress_bar=False,
        limit_val_batches=1 if options["evaluates"] else 0, enable_model_summary=False, log_every_n_steps=10,
        logger=RunLogger(folder, "run", version=str(ranks)) if options["evaluates"] else False,
        enable_checkpointing=bool(options["evaluates"]),
        callbacks=[KernelErrorEvaluation(["neural"], max_points=1000), UpdateCheckpoint()]
        if options["evaluates"]
        else [],
    )  # fmt: skip
    data.setup()
    learn, seconds = Learner.learn, 0.0

    def timed_learn(*args: Any, **more: Any) -> int:
        nonlocal seconds
        started = time.perf_counter()
        made = learn(*args, **more)
        seconds += time.perf_counter() - started
        return made

    Learner.learn = timed_learn  # type: ignore[method-assign]
    before, started = _peak(), time.perf_counter()
    trainer.fit(model, datamodule=data)
    found = {
        "updates": trainer.global_step, "bytes": _peak() - before, "seconds": time.perf_counter() - started,
        "learning": seconds,
        "error": float(trainer.callback_metrics.get("val/kernel_nrmse", float("nan"))),
    }  # fmt: skip
    Path(folder, f"rank_{trainer.global_rank}.json").write_text(json.dumps(found))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(neurons: int, ranks: int, *, start: bool = False, evaluates: bool = False) -> list[dict[str, Any]]:
    """What each rank of a run counted."""
    options = {"neurons": neurons, "ranks": ranks, "start": start, "evaluates": evaluates}
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/points.npy", points(20_000).numpy())
        command = [sys.executable, __file__, WORKER, folder, json.dumps(options)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
        return [json.loads(Path(folder, f"rank_{rank}.json").read_text()) for rank in range(ranks)]


# ---------------------------------------------------------------------- parts


def compare(n: int) -> list[str]:
    """Memory and operations of a rank of four, and of a process with the whole network."""
    rows = []
    for start in (False, True):
        (whole,), shards = run(n, 1, start=start), run(n, RANKS, start=start)
        largest = max(each["bytes"] for each in shards)
        name = "adaptive, with its start" if start else "the paper's rule, normal start"
        rows.append([f"GB: {name}", f"{whole['bytes'] / 1e9:.2f}", f"{largest / 1e9:.2f}", whole["bytes"], largest])
    counted = [operations(n, ranks, REFRESH_EVERY) for ranks in (1, RANKS)]
    rows.append([f"GFLOP: {REFRESH_EVERY} updates, one refresh", *(f"{each / 1e9:,.0f}" for each in counted), *counted])
    shown = [[name, one, many, f"{shared / whole:.3f}"] for name, one, many, whole, shared in rows]
    return [
        f"{RANKS} ranks with gloo, batch {BATCH}, 50 features, float32. GB: resident memory at the peak beyond the "
        f"imports, of a run of {UPDATES} updates. GFLOP: products and factorisations, counted with tensors that have "
        "shapes only.",
        "",
        *table([f"n = {n:,}", "one process", f"largest of {RANKS} ranks", "ratio"], shown),
    ]


def operations(n: int, ranks: int, updates: int) -> int:
    """Counted operations of updates that begin with a refresh of the inverse."""
    schedule, x = AdaptiveSchedule(10_000), (updates, BATCH, 50)
    with FakeTensorMode():
        learner: Learner
        if ranks == 1:
            learner = Learner(
                KSMNetwork(GaussianKernel(), 50, n), schedule, stage="learning", inverse="tracked", acceleration="none"
            )
        else:
            network = ShardedNetwork(GaussianKernel(), Shard(n, ShapesOnly(ranks)), 50, ridge=1e-3)
            learner = ShardedLearner(network, schedule, stage="learning", inverse="tracked")
        with CountedWork() as counted:
            learner.learn(torch.empty(x))
    return counted.operations + counted.factorised


def large(n: int) -> list[str]:
    """A large network on four ranks, from its start to a validation and a checkpoint in panels."""
    shards = run(n, RANKS, start=True, evaluates=True)
    first = shards[0]
    rows = [
        [
            "seconds of the run, with start, validation and checkpoint",
            f"{max(each['seconds'] for each in shards):,.0f}",
        ],
        [f"seconds of its {first['updates']} updates", f"{max(each['learning'] for each in shards):,.0f}"],
        ["peak GB of a rank beyond the imports", ", ".join(f"{each['bytes'] / 1e9:.2f}" for each in shards)],
        [f"kernel NRMSE of 1,000 points after {UPDATES} of 10,000 updates", f"{first['error']:.4f}"],
    ]
    return table([f"n = {n:,}, m = 50, {RANKS} ranks", "measured"], rows)


def shapes(cases: list[tuple[int, int, int]]) -> list[str]:
    """What a rank allocates and sends, counted with tensors that have shapes only."""
    rows = []
    for n, m, ranks in cases:
        with FakeTensorMode():
            group = CountedRanks(ShapesOnly(ranks))
            network = ShardedNetwork(GaussianKernel(), Shard(n, group), m, ridge=1e-3)
            learner = ShardedLearner(network, AdaptiveSchedule(10_000), stage="learning", inverse="tracked")
            batches = torch.empty(1, BATCH, m)
            with CountedWork() as first:  # computes the inverse
                learner.learn(batches, 0)
            group.calls.clear()
            with CountedWork() as second:
                learner.learn(batches, 1)
        sent = [number for numbers in group.calls.values() for number in numbers]
        model, rank = update_cost(n, m, BATCH, ranks, means=1), -(-n // ranks)
        rows.append(
            [
                f"{n:,}", f"{m}", f"{ranks}", f"{first.peak / 1e9:.2f}", f"{4 * memory(n, m, BATCH, ranks) / 1e9:.2f}",
                f"{first.largest:,}", f"{rank * n:,}", f"{second.operations:,}", f"{model.operations:,}",
                f"{sum(sent):,}", f"{model.received:,}", f"{max(sent):,}",
            ]
        )  # fmt: skip
    heads = [
        "n", "m", "ranks", "peak GB, counted", "model", "numbers of the largest tensor", "n n_r", "operations, counted",
        "model", "numbers received, counted", "model", "largest collective",
    ]  # fmt: skip
    return [
        f"Tensors with shapes only, float32, batch {BATCH}. Peak: an update that computes the inverse. Operations and "
        "numbers received: an update between two refreshes.",
        "",
        *table(heads, rows),
    ]


def model() -> list[str]:
    """What the cost model says about networks for which GPUs are needed."""
    rows = []
    for n in (10_000, 50_000, 100_000):
        for ranks in (8, 64, 256):
            update, refresh = update_cost(n, 400, BATCH, ranks), refresh_cost(n, ranks).every(REFRESH_EVERY)
            speed = INSIDE if ranks <= 8 else BETWEEN
            times = [
                ("products of the update", update.operations / RATE),
                ("products of the refresh", refresh.operations / RATE),
                ("gathers of the update", 4 * update.received / speed),
                ("panels of the refresh", 4 * refresh.received / speed),
            ]
            rows.append(
                [
                    f"{n:,}", f"{ranks}", f"{4 * memory(n, 400, BATCH, ranks, copies=2) / 1e9:.2f}",
                    f"{update.operations / 1e9:,.1f}", f"{refresh.operations / 1e9:,.1f}",
                    f"{4 * update.received / 1e6:,.0f}", f"{4 * refresh.received / 1e6:,.0f}",
                    f"{1e3 * sum(seconds for _, seconds in times):,.1f}", max(times, key=lambda part: part[1])[0],
                ]
            )  # fmt: skip
    heads = [
        "n", "GPUs", "GB, guarded", "GFLOP, update", "GFLOP, refresh", "MB, update", "MB, refresh", "ms per update",
        "longest part",
    ]  # fmt: skip
    return [
        f"Per rank and update, m = 400, batch {BATCH}, float32; the share of a refresh every {REFRESH_EVERY} updates. "
        f"Times assume {RATE / 1e12:.0f} TFLOP/s, {INSIDE / 1e9:.0f} GB/s in a machine of 8 GPUs and "
        f"{BETWEEN / 1e9:.0f} GB/s between machines, one after the other, without latencies. They come from the model, "
        "not from a GPU.",
        "",
        *table(heads, rows),
        "",
        "**The next bottleneck.** Up to 10,000 neurons it is the gathers: more than 8 GPUs gain little. From 50,000 on "
        "it is the refresh, which has a fixed share of 1 in 64 updates, and in it the panels, as every rank receives "
        "all of L. By the steps of L alone the inverse could be kept for 1.2 n / batch updates (1,900 at 100,000): a "
        "refresh when the measured residual asks for it, and blocks of rows and columns instead of rows, are the next "
        "steps. The start keeps 1,024 eigenvectors on every rank, 12 kB per neuron, and the first rank chooses all "
        "landmarks.",
    ]


TITLES = {
    "compare": "A rank of four against the whole network",
    "large": "A network of 12,000 neurons on two cores",
    "shapes": "Counted operations, numbers and memory against the model",
    "model": "What the model says",
}


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == WORKER:
        worker(sys.argv[2], json.loads(sys.argv[3]))
        return
    wanted, quick = chosen_parts(__doc__, TITLES)
    parts = {
        "compare": lambda: compare(200 if quick else 8000),
        "large": lambda: large(200 if quick else 12_000),
        "shapes": lambda: shapes([(400, 20, 4)] if quick else [(8000, 50, 4), (10_000, 400, 8), (100_000, 50, 256)]),
        "model": model,
    }
    measured = {name: parts[name]() for name in wanted}
    if quick:
        for lines in measured.values():
            print("\n".join(lines))
        return
    heading = (
        f"# Neurons shared out over processes\n\n{machine(f'{os.cpu_count()} cores', '1 thread per rank')}. Written by "
        "`scripts/benchmark/sharded.py`. The cost model is `ksm_lightning/sharding/cost.py`."
    )
    write_sections(Path(__file__).parent / "SHARDED.md", heading, TITLES, measured)


if __name__ == "__main__":
    main()
