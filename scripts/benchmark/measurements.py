"""Measurements of update.py: the time of updates, of whole commands and of imports, and their memory."""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import plain
import torch
from results import seconds_of
from torch import Tensor
from tqdm import tqdm

from ksm_lightning.cli import main as ksm
from ksm_lightning.data import HalfMoonsDataModule
from ksm_lightning.kernels import GaussianKernel, Kernel, PowerCosineKernel
from ksm_lightning.learning import Learner, Phase, PhaseSchedule, Rates, Schedule
from ksm_lightning.learning.acceleration import Acceleration
from ksm_lightning.learning.responses import Inverse
from ksm_lightning.network import DataInit, KSMNetwork, NormalInit, functional

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER_MOONS, PAPER_MNIST = Rates(0.01, 0.01, 0.1), Rates(0.001, 0.0, 0.01)
NATURAL_MOONS = Rates(0.08, 0.08, 0.25)


class FixedRates(PhaseSchedule):
    """The same rates at every update: the paper's, or natural steps."""

    def __init__(self, rates: Rates, *, is_natural: bool = False) -> None:
        super().__init__([Phase(1, *rates)])  # the last phase has no end
        self.is_natural = is_natural


class Contest:
    """Best time per update of several candidates, which run in turn so that other load affects all of them alike."""

    def __init__(self, **candidates: Callable[[], float]) -> None:
        self.candidates = candidates

    def run(self, rounds: int, name: str) -> dict[str, float]:
        """Milliseconds per update by candidate."""
        times: dict[str, list[float]] = {candidate: [] for candidate in self.candidates}
        for _ in tqdm(range(rounds), desc=name, leave=False):
            for candidate, work in self.candidates.items():
                times[candidate].append(1e3 * work())
        return {candidate: min(found) for candidate, found in times.items()}


def started(
    kernel: Kernel,
    x: Tensor,
    n: int,
    schedule: Schedule,
    inverse: Inverse = "auto",
    acceleration: Acceleration = "auto",
) -> Learner:
    """A learner at the start of its training."""
    generator = torch.Generator().manual_seed(0)
    sample = x[torch.randperm(len(x), generator=generator)[: max(2000, 2 * n)]]
    is_normal = x.shape[1] == 2 and not schedule.is_natural
    init = NormalInit(0.5) if is_normal else DataInit(sample)
    network = KSMNetwork(kernel, x.shape[1], n, plain.RIDGE, init, generator=generator)
    learner = Learner(network, schedule, chooses_ridge=schedule.is_natural, inverse=inverse, acceleration=acceleration)
    if learner.stage == "unstarted":
        learner.start(sample)
    return learner


def timed(learner: Learner, x: Tensor, batch: int, blocks: Sequence[int]) -> Callable[[], float]:
    """Measures seconds per update, including the drawing of batches; ``blocks`` are the updates of each block."""

    def loop() -> None:
        for updates in blocks:
            learner.learn(x[torch.randint(len(x), (updates * batch,))].view(updates, batch, -1))

    return lambda: seconds_of(loop) / sum(blocks)


def bare(
    kernel: Kernel, x: Tensor, n: int, rates: Rates, *, updates: int, batch: int = 64, is_natural: bool = False,
    inverse: Inverse = "auto", acceleration: Acceleration = "auto", block: int = 50,
) -> Callable[[], float]:  # fmt: skip
    """Measures seconds per update of our loop in blocks of 50."""
    learner = started(kernel, x, n, FixedRates(rates, is_natural=is_natural), inverse, acceleration)
    return timed(learner, x, batch, [min(block, updates - first) for first in range(0, updates, block)])


def fitted(configs: Sequence[str], *options: str) -> Callable[[], float]:
    """Measures seconds per update of a whole ``ksm fit``, as it prints them."""

    def work() -> float:
        out, err = io.StringIO(), io.StringIO()
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out), warnings.catch_warnings():
            os.chdir(folder)
            try:
                with contextlib.redirect_stderr(err):
                    ksm(fit_arguments(configs, *options))
            except SystemExit as stop:
                raise RuntimeError(err.getvalue()) from stop
            finally:
                os.chdir(before)
        found = re.search(r"updates, ([\d,]+) per second", out.getvalue())
        assert found is not None, out.getvalue()
        return 1 / float(found[1].replace(",", ""))

    return work


def fit_arguments(configs: Sequence[str], *options: str) -> list[str]:
    """Arguments of ``ksm`` for a fit with these config files."""
    return ["fit", *(f"--config={CONFIGS / config}.yaml" for config in configs), *options]


def half_moons(n: int, rounds: int, updates: int) -> dict[str, float]:
    """The paper's half-moons network: n neurons, batch 64."""
    x, kernel = HalfMoonsDataModule().train_points.data, GaussianKernel(0.3)
    W = started(kernel, x, n, FixedRates(PAPER_MOONS)).network.W.detach()
    phases = f"[{{updates: {updates // 2}, eta_w: 0.01, eta_q: 0.01, eta_l: 0.1}}, " + (
        f"{{updates: {updates - updates // 2}, eta_w: 0.001, eta_q: 0.001, eta_l: 0.01}}]"
    )
    neurons = f"--model.num_neurons={n}"
    # Each candidate runs for some seconds, so that all meet the same share of other load.
    length = updates // 5
    return Contest(
        plain=lambda: seconds_of(lambda: plain.train(x, W, plain.gaussian, length, *PAPER_MOONS)) / length,
        torch=bare(kernel, x, n, PAPER_MOONS, updates=2 * length, acceleration="none", block=200),
        torch_natural=bare(
            kernel, x, n, NATURAL_MOONS, updates=2 * length, is_natural=True, acceleration="none", block=200
        ),
        bare=bare(kernel, x, n, PAPER_MOONS, updates=10 * length, block=200),
        natural=bare(kernel, x, n, NATURAL_MOONS, updates=10 * length, is_natural=True, block=200),
        fit=fitted(["half_moons", "half_moons_paper"], neurons, "--model.init=data", f"--model.phases={phases}"),
        fit_adaptive=fitted(["half_moons"], neurons, f"--model.updates={updates // 4}"),
    ).run(rounds, f"half moons, n = {n}")


def native_or_torch(n: int, m: int, batch: int, rounds: int) -> tuple[float, float]:
    """Milliseconds per update in machine code and by torch operations, with natural steps and a Gaussian kernel."""
    x = torch.randn(2048, m, generator=torch.Generator().manual_seed(0))
    kernel, count = GaussianKernel(0.7 * m**0.5), max(10, 2_000_000 // (n * batch * max(m, n)))
    methods: dict[str, Acceleration] = {"native": "native", "torch": "none"}
    found = Contest(
        **{
            name: bare(
                kernel, x, n, Rates(0.01, 0.01, 0.03), updates=50 * count, batch=batch, is_natural=True,
                acceleration=method, block=50,
            )
            for name, method in methods.items()
        }
    ).run(rounds, f"machine code or torch, n = {n}, m = {m}, batch {batch}")  # fmt: skip
    return found["native"], found["torch"]


def products(x: Tensor, n: int, batch: int = 64) -> Callable[[], float]:
    """Measures seconds of the matrix products of one update; the factorisation counts as a product of n^3 / 3."""
    m = x.shape[1]
    inputs, W, y = torch.randn(batch, m), torch.randn(n, m), torch.randn(batch, n)
    L, part = torch.randn(n, n), torch.randn(n, n // 6)

    def loop() -> None:
        for _ in range(100):
            inputs @ W.T  # the similarities
            y @ L  # the responses: two triangular solutions
            y @ L
            y.T @ y  # C
            y.T @ inputs  # W's gradient
            L @ part  # the factorisation

    return lambda: seconds_of(loop) / 100


def mnist(x: Tensor, n: int, rounds: int, updates: int) -> dict[str, float]:
    """The paper's MNIST network: power-cosine kernel, alpha 3, batch 64."""
    kernel = PowerCosineKernel(3)
    W = started(kernel, x, n, FixedRates(PAPER_MNIST)).network.W.detach()
    step = 0.25 * 64 / n
    phases = f"[{{updates: {updates}, eta_w: 0.001, eta_q: 0.0, eta_l: 0.01}}]"
    quiet = ["--trainer.limit_val_batches=0", "--data.updates_per_epoch=1000000"]
    adaptive = Rates(step / 3, 0.0, step)
    return Contest(
        plain=lambda: seconds_of(lambda: plain.train(x, W, plain.power_cosine, 100, *PAPER_MNIST)) / 100,
        products=products(x, n),
        exact=bare(kernel, x, n, PAPER_MNIST, updates=150, inverse="exact"),
        tracked=bare(kernel, x, n, PAPER_MNIST, updates=300, inverse="tracked"),
        natural=bare(kernel, x, n, adaptive, updates=200, is_natural=True),
        fit=fitted(["mnist", "mnist_released"], f"--model.num_neurons={n}", f"--model.phases={phases}", *quiet),
    ).run(rounds, f"MNIST, n = {n}")


def factorised_responses(learner: Learner, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Responses (batch, n) by a factorisation in a dtype, limited in length like those of an update."""
    network, limit = learner.network, learner.rule.response_limit
    x, W, q, L = (value.detach().to(dtype) for value in (x, network.W, network.q, network.L))
    y = functional.hebbian_step(network.kernel, x, W, q, L, network.ridge).y
    if limit is not None:
        allowed = limit * network.kernel.diag(x).sqrt()
        y = y * (allowed / y.norm(dim=1)).clamp(max=1)[:, None]
    return y


def accuracy(x: Tensor, n: int, schedule: Schedule, updates: int) -> tuple[float, float]:
    """Largest relative errors of tracked and of float32 factorised responses over a run, compared with float64."""
    learner = started(PowerCosineKernel(3), x, n, schedule, "tracked")
    seen: list[Tensor] = []
    tracked, factorised = [], []
    for first in tqdm(range(0, updates, 10), desc="accuracy", leave=False):
        block = x[torch.randint(len(x), (10 * 64,))].view(10, 64, -1)
        learner.learn(block[:9], first)
        found, exact = (factorised_responses(learner, block[9], dtype) for dtype in (torch.float32, torch.float64))
        learner.learn(
            block[9:], first + 9, observe=lambda _: True, on_observation=lambda _, update, __: seen.append(update.y)
        )
        tracked.append(float((seen[-1] - exact).norm() / exact.norm()))
        factorised.append(float((found - exact).norm() / exact.norm()))
    return max(tracked), max(factorised)


def scaling(name: str, values: list[int], settings: Callable[[int], tuple[int, int, int]], rounds: int) -> list[float]:
    """Milliseconds per natural update for each value; ``settings`` returns (n, batch, m) for a value."""
    candidates = {}
    for value in values:
        n, batch, m = settings(value)
        x = torch.randn(4096, m, generator=torch.Generator().manual_seed(0))
        network = KSMNetwork(PowerCosineKernel(3), m, n, 0.005 * m / n, DataInit(torch.cat([x] * (1 + n // 4096))))
        with torch.no_grad():
            network.L.mul_(m / n)
        step = 0.25 * min(1, batch / n)
        schedule = FixedRates(Rates(step / 3, 0.0, step), is_natural=True)
        updates = max(2, min(50, 1600 // n, 2**22 // (batch * m)))
        # A tracked inverse is recomputed less often than once per block: several blocks include its share.
        blocks = [updates] * max(1, 30 // updates)
        candidates[str(value)] = timed(Learner(network, schedule, stage="learning"), x, batch, blocks)
    found = Contest(**candidates).run(rounds, name)
    return [found[str(value)] for value in values]


def crossover(n: int, rounds: int) -> list[tuple[int, float, float]]:
    """(neurons per sample, exact, tracked) in milliseconds by batch size, at the adaptive schedule's largest steps."""
    rows = []
    x = torch.randn(4096, 400, generator=torch.Generator().manual_seed(0))
    for batch in (n // 4, n // 8, n // 16, n // 32):
        rates = Rates(0.0, 0.0, 0.25 * batch / n)
        candidates = {
            inverse: bare(PowerCosineKernel(3), x, n, rates, updates=32, batch=batch, is_natural=True, inverse=inverse)
            for inverse in ("exact", "tracked")
        }
        found = Contest(**candidates).run(rounds, f"crossover, batch {batch}")
        rows.append((n // batch, found["exact"], found["tracked"]))
    return rows


def imports(rounds: int) -> dict[str, float]:
    """Seconds of processes, and of the imports inside one."""
    ksm = ["-m", "ksm_lightning.cli"]
    commands = {
        "torch": ["-c", "import torch"],
        "package": ["-c", "import ksm_lightning"],
        "network": ["-c", "from ksm_lightning import KSMNetwork, train"],
        "sklearn": ["-c", "import torch, sklearn.base, sklearn.utils.validation"],
        "estimator": ["-c", "from ksm_lightning.sklearn import KSMTransformer"],
        "lightning": ["-c", "import lightning"],
        "help": [*ksm, "--help"],
        "nothing": ksm,
        "version": [*ksm, "--version"],
        "typo": [*ksm, "fti"],
        "option": [*ksm, "--nonsense"],
        "config": [*ksm, "fit", "--config", "half_mons"],
        "fit_help": [*ksm, "fit", "--help"],
    }
    code = (
        "import lightning, time; start = time.perf_counter(); import ksm_lightning.module, ksm_lightning.extractor; "
        "print(time.perf_counter() - start)"
    )
    inside = [sys.executable, "-c", code]
    contest = Contest(
        above=lambda: float(subprocess.run(inside, check=True, capture_output=True, text=True).stdout.split()[-1]),
        **{
            name: lambda command=command: seconds_of(
                lambda: subprocess.run([sys.executable, *command], check=False, capture_output=True)
            )
            for name, command in commands.items()
        },
    )
    return {name: milliseconds / 1e3 for name, milliseconds in contest.run(rounds, "imports").items()}


# Scores a pipeline on wine twice, with a number of jobs; prints the seconds of both calls.
CROSS_VALIDATION = """
import sys, time
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from ksm_lightning.sklearn import KSMTransformer
X, y = load_wine(return_X_y=True)
features = KSMTransformer(n_components=20, kernel_params={"sigma": 3.0}, random_state=0)
pipeline = make_pipeline(StandardScaler(), features, LogisticRegression(max_iter=2000))
for _ in range(2):
    start = time.perf_counter()
    cross_val_score(pipeline, X, y, cv=5, n_jobs=int(sys.argv[1]))
    print(time.perf_counter() - start)
"""
COMPILE = """
import numpy as np
from ksm_lightning.learning import native
from ksm_lightning.sklearn import KSMTransformer
native.PATIENCE = 0
KSMTransformer(5, random_state=0).fit(np.random.rand(100, 2))
"""


def cross_validation(rounds: int) -> dict[tuple[str, int], tuple[float, float, float]]:
    """Seconds of the whole process, of its first and of its second call, by state of the compiled code and jobs."""
    best: dict[tuple[str, int], tuple[float, float, float]] = {}
    with tempfile.TemporaryDirectory() as compiled, tempfile.TemporaryDirectory() as empty:
        subprocess.run([sys.executable, "-c", COMPILE], check=True, env={**os.environ, "XDG_CACHE_HOME": compiled})
        for _ in range(rounds):
            for state, folder in (("none", empty), ("on disk", compiled)):
                for jobs in (1, 2):
                    start = time.perf_counter()
                    done = subprocess.run(
                        [sys.executable, "-c", CROSS_VALIDATION, str(jobs)], check=True, capture_output=True, text=True,
                        env={**os.environ, "XDG_CACHE_HOME": folder},
                    )  # fmt: skip
                    found = (time.perf_counter() - start, *map(float, done.stdout.split()))
                    before = best.get((state, jobs), found)
                    best[state, jobs] = (min(found[0], before[0]), min(found[1], before[1]), min(found[2], before[2]))
    return best


def peak_memory(arguments: list[str]) -> float:
    """Peak resident memory of ``ksm`` with these arguments in GiB; without arguments, of its imports.

    The process reads its own peak: the one that its parent gets includes the parent's memory at the fork.
    """
    code = (
        "import sys, ksm_lightning.cli.lightning_cli; arguments = sys.argv[1:]; "
        "arguments and ksm_lightning.cli.main(arguments); print(open('/proc/self/status').read())"
    )
    command = [sys.executable, "-c", code, *arguments]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.findall(r"VmHWM:\s+(\d+) kB", text)[-1]) / 2**20


def memory(n: int, updates: int) -> tuple[float, float]:
    """Peak memory of the imports and of ``ksm fit`` on MNIST in GiB."""
    phases = f"[{{updates: {updates}, eta_w: 0.001, eta_l: 0.01}}]"
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"--model.num_neurons={n}",
            f"--model.phases={phases}",
            f"--trainer.logger.init_args.save_dir={folder}",
        ]
        return peak_memory([]), peak_memory(fit_arguments(["mnist", "mnist_released"], *options))
