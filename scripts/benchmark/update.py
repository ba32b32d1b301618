#!/usr/bin/env python3
"""What an update costs: the plain loop of the paper's algorithm, our update alone, and `ksm fit` with everything on,
side by side in one run. Writes scripts/benchmark/RESULTS.md and update.png beside it.

.venv/bin/python scripts/benchmark/update.py              about 15 minutes on two cores; needs KSM_DATA_DIR for MNIST
.venv/bin/python scripts/benchmark/update.py --quick      two minutes, to see that it works; no figure to trust
"""

import argparse
import contextlib
import io
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning
import numpy as np
import plain
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from ksm_lightning import DataInit, KSMNetwork, NormalInit
from ksm_lightning.cli import main as ksm
from ksm_lightning.data import CroppedMNISTDataModule, HalfMoonsDataModule
from ksm_lightning.kernels import GaussianKernel, Kernel, PowerCosineKernel
from ksm_lightning.learning.rules import compute_step, rates_at
from ksm_lightning.learning.schedule import AdaptiveSchedule, Phase, PhaseSchedule, Rates, Schedule
from ksm_lightning.learning.train import natural_ridge, start
from ksm_lightning.learning.updater import NEURONS_PER_SAMPLE, Inverse, Updater

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
MNIST_CONFIG = [f"--config={CONFIGS / name}.yaml" for name in ("mnist", "mnist_released")]
KEPT = Path("runs") / "benchmark"
PAPER_MOONS, PAPER_MNIST = Rates(0.01, 0.01, 0.1), Rates(0.001, 0.0, 0.01)


def seconds_of(work: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Contest:
    """The best time an update of each contestant, who take turns, so that the machine's moods meet all of them."""

    def __init__(self, **contestants: Callable[[], float]) -> None:
        self.contestants = contestants
        self.times: dict[str, list[float]] = {name: [] for name in contestants}

    def run(self, rounds: int, name: str) -> dict[str, float]:
        """Milliseconds an update."""
        for _ in tqdm(range(rounds), desc=name, leave=False):
            for contestant, work in self.contestants.items():
                self.times[contestant].append(1e3 * work())
        return {name: min(times) for name, times in self.times.items()}


def made(kernel: Kernel, x: Tensor, n: int, *, natural: bool) -> KSMNetwork:
    """A network at the beginning of its training."""
    generator = torch.Generator().manual_seed(0)
    sample = x[torch.randperm(len(x), generator=generator)[: max(2000, 2 * n)]]
    if not natural:
        init = NormalInit(0.5) if x.shape[1] == 2 else DataInit(sample)
        return KSMNetwork(kernel, x.shape[1], n, plain.RIDGE, init, generator=generator)
    network = KSMNetwork(kernel, x.shape[1], n, natural_ridge(kernel, sample, n), DataInit(sample), generator=generator)
    start(network, sample)
    return network


def bare(
    kernel: Kernel, x: Tensor, n: int, rates: Rates, *, updates: int, batch: int = 64, natural: bool = False,
    inverse: Inverse = "auto",
) -> Callable[[], float]:  # fmt: skip
    """Seconds an update of our own loop, drawing of the batches included."""
    network = made(kernel, x, n, natural=natural)
    updater = Updater(network, natural, inverse=inverse)

    def work() -> float:
        def loop() -> None:
            for first in range(0, updates, 50):
                size = min(50, updates - first)
                block = x[torch.randint(len(x), (size * batch,))].view(size, batch, -1)
                with updater.block(block):
                    for place in range(size):
                        updater.update(place, rates)

        return seconds_of(loop) / updates

    return work


def fitted(arguments: list[str]) -> Callable[[], float]:
    """Seconds an update of a whole ``ksm fit``, as it says itself: logging, progress bar, checkpoints, validations."""

    def work() -> float:
        out, said = io.StringIO(), io.StringIO()
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out), warnings.catch_warnings():
            os.chdir(folder)
            try:
                with contextlib.redirect_stderr(said):
                    ksm(["fit", *arguments])
            except SystemExit as stop:
                raise RuntimeError(said.getvalue()) from stop
            finally:
                os.chdir(before)
        found = re.search(r"updates, ([\d,]+) per second", out.getvalue())
        assert found is not None, out.getvalue()
        return 1 / float(found[1].replace(",", ""))

    return work


def half_moons(n: int, rounds: int, updates: int) -> dict[str, float]:
    """The paper's half-moons network: n neurons, batch 64."""
    x, kernel = HalfMoonsDataModule().train_points.data, GaussianKernel(0.3)
    W = made(kernel, x, n, natural=False).W.detach()
    phases = f"[{{updates: {updates // 2}, eta_w: 0.01, eta_q: 0.01, eta_l: 0.1}}, " + (
        f"{{updates: {updates - updates // 2}, eta_w: 0.001, eta_q: 0.001, eta_l: 0.01}}]"
    )
    adaptive = ["--config", str(CONFIGS / "half_moons.yaml"), f"--model.num_neurons={n}"]
    config = [*adaptive, "--config", str(CONFIGS / "half_moons_paper.yaml"), "--model.init=data"]
    # Each for some seconds, so that all meet the same share of bad luck.
    length = updates // 5
    return Contest(
        plain=lambda: seconds_of(lambda: plain.train(x, W, plain.gaussian, length, *PAPER_MOONS)) / length,
        bare=bare(kernel, x, n, PAPER_MOONS, updates=2 * length),
        natural=bare(kernel, x, n, Rates(0.08, 0.08, 0.25), updates=2 * length, natural=True),
        fit=fitted([*config, f"--model.phases={phases}"]),
        fit_adaptive=fitted([*adaptive, f"--model.updates={updates // 4}"]),
    ).run(rounds, f"half moons, n = {n}")


def products(x: Tensor, n: int, batch: int = 64) -> Callable[[], float]:
    """Seconds of the products that one update must make, in these shapes; n^3 / 3 of the factorisation as one more."""
    m = x.shape[1]
    inputs, W, y = torch.randn(batch, m), torch.randn(n, m), torch.randn(batch, n)
    L, part = torch.randn(n, n), torch.randn(n, n // 6)

    def work() -> float:
        def once() -> None:
            for _ in range(100):
                inputs @ W.T  # the similarities
                y @ L  # the responses: two triangular solutions
                y @ L
                y.T @ y  # C
                y.T @ inputs  # W's gradient
                L @ part  # the factorisation

        return seconds_of(once) / 100

    return work


def mnist(x: Tensor, n: int, rounds: int, updates: int) -> dict[str, float]:
    """The paper's MNIST network: power-cosine kernel, alpha 3, batch 64."""
    kernel = PowerCosineKernel(3)
    W = made(kernel, x, n, natural=False).W.detach()
    step = 0.25 * 64 / n
    phases = f"[{{updates: {updates}, eta_w: 0.001, eta_q: 0.0, eta_l: 0.01}}]"
    config = [*MNIST_CONFIG, f"--model.num_neurons={n}", f"--model.phases={phases}"]
    quiet = ["--trainer.limit_val_batches=0", "--data.updates_per_epoch=1000000"]
    adaptive = Rates(step / 3, 0.0, step)
    return Contest(
        plain=lambda: seconds_of(lambda: plain.train(x, W, plain.power_cosine, 100, *PAPER_MNIST)) / 100,
        products=products(x, n),
        exact=bare(kernel, x, n, PAPER_MNIST, updates=150, inverse="exact"),
        tracked=bare(kernel, x, n, PAPER_MNIST, updates=300, inverse="tracked"),
        natural=bare(kernel, x, n, adaptive, updates=200, natural=True),
        fit=fitted([*config, *quiet]),
    ).run(rounds, f"MNIST, n = {n}")


def accuracy(x: Tensor, n: int, schedule: Schedule, updates: int) -> tuple[float, float]:
    """Largest relative errors of tracked responses and of float32 Cholesky's over a run, against float64."""
    kernel = PowerCosineKernel(3)
    network = made(kernel, x, n, natural=schedule.is_natural)
    updater = Updater(network, schedule.is_natural, inverse="tracked")
    tracked, factorised = [], []
    for first in tqdm(range(0, updates, 50), desc="accuracy", leave=False):
        block = x[torch.randint(len(x), (50 * 64,))].view(50, 64, -1)
        with updater.block(block):
            for place in range(50):
                is_seen = place % 10 == 9
                if is_seen:
                    theirs = compute_step(network, block[place], schedule.is_natural).y
                    exact = compute_step(network.double(), block[place].double(), schedule.is_natural).y
                    network.float()
                seen = updater.update(place, rates_at(schedule, kernel, first + place, n, 64), observe=is_seen)
                if seen is not None:
                    tracked.append(float((seen.y - exact).norm() / exact.norm()))
                    factorised.append(float((theirs - exact).norm() / exact.norm()))
    return max(tracked), max(factorised)


def scaling(name: str, values: list[int], settings: Callable[[int], tuple[int, int, int]], rounds: int) -> list[float]:
    """Milliseconds of a natural update for each value; settings gives (n, batch, m) of one."""
    contestants = {}
    for value in values:
        n, batch, m = settings(value)
        x = torch.randn(4096, m, generator=torch.Generator().manual_seed(0))
        network = KSMNetwork(PowerCosineKernel(3), m, n, 0.005 * m / n, DataInit(torch.cat([x] * (1 + n // 4096))))
        with torch.no_grad():
            network.L.mul_(m / n)
        updates = max(2, min(50, 1600 // n, 2**22 // (batch * m)))
        contestants[str(value)] = _loop(network, x, batch, updates, 0.25 * min(1, batch / n))
    found = Contest(**contestants).run(rounds, name)
    return [found[str(value)] for value in values]


def _loop(network: KSMNetwork, x: Tensor, batch: int, updates: int, step: float) -> Callable[[], float]:
    updater = Updater(network, natural=True)
    # A period of the tracked inverse is longer than what is timed at once: its renewal is timed on average.
    repeats = max(1, 30 // updates)

    def work() -> float:
        def loop() -> None:
            for _ in range(repeats):
                block = x[torch.randint(len(x), (updates * batch,))].view(updates, batch, -1)
                with updater.block(block):
                    for place in range(updates):
                        updater.update(place, Rates(step / 3, 0.0, step))

        return seconds_of(loop) / (updates * repeats)

    return work


def exponent(values: list[int], times: list[float]) -> float:
    """The slope in a double-logarithmic plot."""
    return float(np.polyfit(np.log(values), np.log(times), 1)[0])


def crossover(n: int, rounds: int) -> list[tuple[int, float, float]]:
    """(neurons a sample, exact, tracked) in milliseconds for several batches, at the adaptive schedule's own steps."""
    rows = []
    x = torch.randn(4096, 400, generator=torch.Generator().manual_seed(0))
    for batch in (n // 4, n // 8, n // 16, n // 32):
        rates = Rates(0.0, 0.0, 0.25 * batch / n)
        found = Contest(
            exact=bare(PowerCosineKernel(3), x, n, rates, updates=32, batch=batch, natural=True, inverse="exact"),
            tracked=bare(PowerCosineKernel(3), x, n, rates, updates=32, batch=batch, natural=True, inverse="tracked"),
        ).run(rounds, f"crossover, batch {batch}")
        rows.append((n // batch, found["exact"], found["tracked"]))
    return rows


def imports(rounds: int) -> dict[str, float]:
    """Seconds of whole processes."""
    commands = {
        "python": [sys.executable, "-c", ""],
        "lightning": [sys.executable, "-c", "import lightning"],
        "help": [sys.executable, "-m", "ksm_lightning.cli", "--help"],
    }
    code = (
        "import lightning, time; start = time.perf_counter(); import ksm_lightning; print(time.perf_counter() - start)"
    )
    inside = [sys.executable, "-c", code]
    contest = Contest(
        above=lambda: float(subprocess.run(inside, check=True, capture_output=True, text=True).stdout.split()[-1]),
        **{
            name: lambda command=command: seconds_of(lambda: subprocess.run(command, check=True, capture_output=True))
            for name, command in commands.items()
        },
    )
    return {name: time / 1e3 for name, time in contest.run(rounds, "imports").items()}


def peak_memory(arguments: list[str]) -> float:
    """Peak resident memory of ``ksm`` with these arguments, or of its imports alone, in GiB.

    The process itself is asked: what its parent is told includes the parent's own memory at the fork.
    """
    code = (
        "import sys, ksm_lightning.cli; arguments = sys.argv[1:]; arguments and ksm_lightning.cli.main(arguments); "
        "print(open('/proc/self/status').read())"
    )
    command = [sys.executable, "-c", code, *arguments]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.findall(r"VmHWM:\s+(\d+) kB", text)[-1]) / 2**20


def memory(n: int, updates: int) -> tuple[float, float]:
    """Peak of the imports and of ``ksm fit`` on MNIST, in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        fit = [
            "fit", *MNIST_CONFIG, f"--model.num_neurons={n}",
            f"--model.phases=[{{updates: {updates}, eta_w: 0.001, eta_l: 0.01}}]",
            "--trainer.logger.init_args.save_dir", folder,
        ]  # fmt: skip
        return peak_memory([]), peak_memory(fit)


def draw(curves: dict[str, tuple[str, list[int], list[float]]], path: Path) -> None:
    """Time an update against n, batch and input size, with the fitted slopes."""
    figure = Figure(figsize=(12, 3.8), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    for place, (name, (rest, values, times)) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), place + 1)
        axes.loglog(values, times, "o-", color="#d81f2a", markersize=4)
        upper = values[len(values) // 2 :]
        slope = exponent(upper, times[len(values) // 2 :])
        axes.set_title(f"{rest}; slope {slope:.2f} from {upper[0]:,}", fontsize=10)
        axes.set(xlabel=name, ylabel="milliseconds an update")
        axes.set_xticks(values, [f"{value:,}" for value in values], fontsize=8)
        marks = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]
        shown = [mark for mark in marks if 0.8 * min(times) <= mark <= 1.25 * max(times)]
        axes.set_yticks(shown, [f"{mark:g}" for mark in shown], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.savefig(path)


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)] + [""]


def rounds_for(quick: bool) -> int:
    """How often every contestant has its turn."""
    return 1 if quick else 4


def heading() -> list[str]:
    """On what machine, and how."""
    return [
        "# What an update costs",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}. Made by "
        "`scripts/benchmark/update.py`. Contestants of a table take turns in one process, each for some seconds, and "
        f"the best of {rounds_for(False)} rounds counts; times are milliseconds an update, ratios are to the plain "
        "loop (`plain.py`).",
        "",
        "`ksm fit` is the whole command, from its first update to its last validation: Trainer, TensorBoard at its "
        "default, progress bar, checkpoints, guard, and on half moons validations with kernel error and probe. The "
        "figures drawn after the last update are not in it.",
        "",
    ]


def moons_report(quick: bool) -> list[str]:
    """The part about half moons."""
    rows, updates = [], 400 if quick else 20_000
    for n, wanted in ((16, 3.0), (64, 3.5)):
        found = half_moons(n, rounds_for(quick), updates)
        for name, label in (
            ("plain", "the plain loop"),
            ("bare", "our update, the paper's rates"),
            ("natural", "our update, natural steps"),
            ("fit", f"`ksm fit`, the paper's schedule, {updates:,} updates (wanted: at least {wanted} times)"),
            ("fit_adaptive", f"`ksm fit`, adaptive schedule, {updates // 4:,} updates"),
        ):
            rows.append([str(n), label, f"{found[name]:.3f}", f"{found['plain'] / found[name]:.1f}"])
    return ["## Half moons, batch 64", "", *table(["n", "", "ms", "times as fast"], rows)]


def start_report(quick: bool) -> list[str]:
    """The part about starting."""
    found = imports(1 if quick else 5)
    ratio = found["help"] / found["lightning"]
    rows = [
        ["`import lightning`", f"{found['lightning']:.2f}"],
        ["`import ksm_lightning` after it", f"{found['above']:.2f} (wanted: at most 0.30)"],
        ["`ksm --help`", f"{found['help']:.2f} ({ratio:.2f} times `import lightning`; wanted: at most 1.5)"],
    ]
    return ["## Starting", "", *table(["", "s"], rows)]


def mnist_report(quick: bool) -> list[str]:
    """The part about MNIST."""
    x, rounds = CroppedMNISTDataModule().train_points.data, rounds_for(quick)
    n, updates = (100, 100) if quick else (800, 1000)
    found = mnist(x, n, rounds, updates)
    rows = [
        [label, f"{found[name]:.2f}", f"{found['plain'] / found[name]:.1f}", f"{found[name] / found['products']:.2f}"]
        for name, label in (
            ("plain", "the plain loop"),
            ("products", "the products that an update must make, alone"),
            ("exact", "our update, factorising every time"),
            ("tracked", "our update, inverse tracked: the default here (wanted: at most 1.8 times the products)"),
            ("natural", "our update, natural steps at their largest, inverse tracked"),
            ("fit", f"`ksm fit`, {updates:,} updates without validation (wanted: at least 8 times)"),
        )
    ]
    lines = [
        f"## MNIST, 400 inputs, n = {n}, batch 64",
        "",
        *table(["", "ms", "times as fast", "times the products"], rows),
        f"The products alone are {found['plain'] / found['products']:.1f} times as fast as the plain loop, which no "
        "update with these products can exceed.",
        "",
    ]
    before, peak = memory(n, 50 if quick else 300)
    lines += [
        f"Peak memory of `ksm fit` with validation, probe and figures: {peak:.2f} GiB, {peak - before:.2f} GiB above "
        "the imports (wanted: at most 1.2).",
        "",
    ]
    length = 100 if quick else 1000
    halves = PhaseSchedule([Phase(length // 2, 0.001, 0.0, 0.01), Phase(length // 2, 0.0001, 0.0, 0.001)])
    errors = [
        [name, *(f"{error:.1e}" for error in accuracy(x, n, schedule, length))]
        for name, schedule in (("adaptive", AdaptiveSchedule(length)), ("the paper's rates", halves))
    ]
    return [
        *lines,
        f"Largest relative error of a batch's responses over {length:,} updates, against float64 of the same weights:",
        "",
        *table(["schedule", "tracked, float32", "factorised, float32"], errors),
    ]


def sizes_report(quick: bool) -> list[str]:
    """The part about sizes."""
    rounds = max(1, rounds_for(quick) - 1)
    sizes = [16, 50, 100] if quick else [16, 50, 100, 200, 400, 800, 1600, 3200]
    batches = [16, 32, 64] if quick else [16, 32, 64, 128, 256, 512, 1024]
    inputs = [10, 40, 160] if quick else [10, 40, 160, 640, 2560]
    fixed = 100 if quick else 800
    curves = {
        "neurons n": ("batch 64, 400 inputs", sizes, scaling("neurons", sizes, lambda n: (n, 64, 400), rounds)),
        "batch": (f"n = {fixed}, 400 inputs", batches, scaling("batch", batches, lambda b: (fixed, b, 400), rounds)),
        "inputs m": (f"n = {fixed}, batch 64", inputs, scaling("inputs", inputs, lambda m: (fixed, 64, m), rounds)),
    }
    draw(curves, KEPT / "quick.png" if quick else HERE / "update.png")
    lines = ["## Sizes", "", "Natural steps at their largest, power-cosine kernel. ![cost](update.png)", ""]
    for name, (rest, values, times) in curves.items():
        lines += table(
            [f"{name} ({rest})", *(f"{value:,}" for value in values)], [["ms", *(f"{time:.3g}" for time in times)]]
        )
    times = dict(zip(sizes, curves["neurons n"][2], strict=True))
    if 3200 in times:
        lines += [
            f"From n = 800 to 3,200 the exponent is {exponent([800, 3200], [times[800], times[3200]]):.2f} "
            "(wanted: at most 2.4).",
            "",
        ]
    rows = [
        [str(ratio), f"{exact:.2f}", f"{tracked:.2f}", f"{exact / tracked:.2f}"]
        for ratio, exact, tracked in crossover(128 if quick else 1024, rounds)
    ]
    return [
        *lines,
        f"Where tracking the inverse pays, n = {128 if quick else 1024}: `auto` tracks from {NEURONS_PER_SAMPLE} "
        "neurons a sample on.",
        "",
        *table(["neurons a sample", "factorised, ms", "tracked, ms", "ratio"], rows),
    ]


PARTS = {"moons": moons_report, "mnist": mnist_report, "sizes": sizes_report, "start": start_report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round; prints and keeps nothing")
    parser.add_argument("--only", choices=PARTS, help="one part; the others are taken from an earlier run")
    options = parser.parse_args()
    wanted = [options.only] if options.only else list(PARTS)
    if "mnist" in wanted and not os.environ.get("KSM_DATA_DIR"):
        print("MNIST is left out: set KSM_DATA_DIR to a folder with its files.", file=sys.stderr)
        wanted.remove("mnist")
    KEPT.mkdir(parents=True, exist_ok=True)
    for part in wanted:
        text = "\n".join(PARTS[part](options.quick))
        print(text)
        if not options.quick:
            (KEPT / f"{part}.md").write_text(text)
    if not options.quick:
        kept = [KEPT / f"{part}.md" for part in PARTS]
        (HERE / "RESULTS.md").write_text("\n".join([*heading(), *(path.read_text() for path in kept if path.exists())]))


if __name__ == "__main__":
    main()
