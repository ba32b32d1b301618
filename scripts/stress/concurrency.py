"""Several processes or threads that write the same files, or use the same objects, at the same time."""

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import numpy as np
import torch
import yaml
from common import FOLDER, run_all, table
from sklearn.datasets import make_moons

from ksm_lightning import FeatureExtractor, files
from ksm_lightning.baselines.tables import read_rows
from ksm_lightning.report.page import MARK
from ksm_lightning.runs.checkpoint import read_checkpoint
from ksm_lightning.sklearn import KSMTransformer

ROUNDS, WRITERS = 12, 3
WORK = FOLDER / "concurrency"
POINTS = WORK / "x.npy"
DATA = ["--data=ArrayDataModule", f"--data.path={POINTS}"]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
SIGMAS = (0.3, 0.6, 0.9)
METHODS = ("nystroem_uniform", "nystroem_kmeans", "random_fourier")
_REFUSED = re.compile(
    r"ksm: error: (\S+ is being written by (process \d+ on \S+ since [-\d]+ [:\d]+|another process): .*"
    r"|\S+ exists already: .*|The run folder \S+ exists already: .*"
    r"|\S+ was written by another process in the meantime and is left as it is: .*)"
)


def checkpoint(writer: int) -> Path:
    """The checkpoint of one of three different networks, which is made at the first call."""
    path = WORK / "runs" / f"net_{writer}" / "version_0" / "checkpoints" / "last.ckpt"
    if not path.exists():
        shutil.rmtree(path.parents[1], ignore_errors=True)
        if not POINTS.exists():
            forked.half_moons(POINTS, 20_000)
        process = forked.run(fit(writer, WORK / "runs", f"net_{writer}"), WORK / "log")
        assert process.wait() == 0, process.output()
    return path


def fit(writer: int, folder: Path, name: str, *more: str) -> list[str]:
    """The command that trains one of three different networks."""
    return [
        "fit", *DATA, *QUIET, "--model.num_neurons=8", f"--model.kernel_params.sigma={SIGMAS[writer]}",
        "--model.updates=100", "--figures.every_n_updates=0", "--kernel_error.max_points=100",
        f"--trainer.logger.save_dir={folder}", f"--trainer.logger.name={name}", *more,
    ]  # fmt: skip


class Round:
    """A folder in which several writers compete, what became of them and what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    def compete(self, commands: Sequence[Sequence[str] | Callable[[], object]], gap: float = 0.0) -> list[int]:
        """Run the commands at the same time; returns the numbers of those that succeed."""
        processes = []
        for number, arguments in enumerate(commands):
            processes.append(forked.run(arguments, self.folder.parent / f"log_{number}"))
            time.sleep(gap)
        won = []
        for number, process in enumerate(processes):
            code = process.wait()
            if code == 0:
                won.append(number)
            elif code != 2 or not _REFUSED.fullmatch(process.error()) or process.output().count("error") != 1:
                self.faults.append(f"exit code {code}: {process.error()}"[:300])
            self.outcomes["succeeded" if code == 0 else "refused"] += 1
        return won

    def check(self, is_right: object, text: str) -> None:
        """Note a fault unless ``is_right``."""
        if not is_right:
            self.faults.append(text)

    def names(self) -> list[str]:
        """All files, hidden ones too, with their paths in the folder."""
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------------- commands


def predict(round_: Round, number: int) -> None:
    """One file of features: one run wins and the file is its own; without locks, too, in every second round."""
    name = ("f.npy", "f.npz")[number % 2]
    commands: list[Callable[[], object]] = []
    expected = []
    for writer in range(WRITERS):
        arguments = [
            "predict", *DATA, *QUIET, "--data.eval_batch_size=256", f"--ckpt_path={checkpoint(writer)}",
        ]  # fmt: skip
        right = WORK / f"right_{writer}.npy"
        if not right.exists():
            assert forked.run([*arguments, f"--features.path={right}"], WORK / "log").wait() == 0
        expected.append(np.load(right))
        commands.append(_ksm([*arguments, f"--features.path={round_.folder / name}"], has_locks=number % 4 < 2))
    won = round_.compete(commands, gap=0.1 * (number % 3))
    round_.check(len(won) == 1, f"{len(won)} runs succeeded")
    files_of = {"f.npy": ["f.json", "f.npy"], "f.npz": ["f.npz"]}
    round_.check(round_.names() == files_of[name], f"files: {round_.names()}")
    if won and (round_.folder / name).exists():
        loaded = np.load(round_.folder / name)
        features = loaded if isinstance(loaded, np.ndarray) else loaded["features"]
        round_.check(np.array_equal(features, expected[won[0]]), "the features are not those of the winner")


def _ksm(arguments: Sequence[str], has_locks: bool) -> Callable[[], object]:
    def run() -> None:
        if not has_locks:
            files.fcntl = None  # type: ignore[assignment]
        forked.main(list(arguments))

    return run


def export(round_: Round, number: int) -> None:
    """One exported file: one run wins."""
    suffix, kind = ((".safetensors", "safetensors"), (".pt2", "torch"))[number % 2]
    path = round_.folder / f"e{suffix}"
    commands = [
        ["export", f"--ckpt_path={checkpoint(writer)}", f"--format={kind}", f"--out={path}"]
        for writer in range(WRITERS)
    ]
    won = round_.compete(commands)
    round_.check(len(won) == 1, f"{len(won)} runs succeeded")
    round_.check(round_.names() == [path.name], f"files: {round_.names()}")
    if won and path.exists():
        x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
        right = FeatureExtractor.from_checkpoint(checkpoint(won[0]))(x)
        found = (FeatureExtractor.load(path) if kind == "safetensors" else torch.export.load(path).module())(x)
        round_.check(torch.allclose(found, right, atol=1e-5), "the features are not those of the winner")


def compare(round_: Round, number: int) -> None:
    """One folder of results: runs are refused while another one works, and no finished row is lost."""
    out = round_.folder / "out"
    commands = [
        [
            "compare", *DATA, "--kernel_params.sigma=0.3", "--sizes=[2,4]", "--seeds=2", "--max_points=300",
            f"--methods=[{method}]", "--show_progress=false", f"--out={out}",
        ]
        for method in METHODS
    ]  # fmt: skip
    won = round_.compete(commands, gap=0.15 * (number % 4))
    round_.check(won, "no run succeeded")
    rows = {row[:3] for row in read_rows(out / "errors.csv")} if (out / "errors.csv").exists() else set()
    missing = {(METHODS[one], n, seed) for one in won for n in (2, 4) for seed in (0, 1)} - rows
    round_.check(not missing, f"{len(missing)} rows were lost")
    for one in set(range(WRITERS)) - set(won):
        round_.check(forked.run(commands[one], WORK / "log").wait() == 0, "a later run failed")
    found = [row[:3] for row in read_rows(out / "errors.csv")]
    round_.check(len(found) == len(set(found)) == 12, f"{len(found)} rows at the end")
    wanted = [f"out/{name}" for name in ("comparison.json", "errors.csv", "errors.png", "summary.csv")]
    round_.check(round_.names() == wanted, f"files: {round_.names()}")


def report(round_: Round, number: int) -> None:
    """One page: every run succeeds, and the last complete page remains."""
    run, page = checkpoint(0).parents[1], round_.folder / "report.html"
    commands = [["report", str(run), f"--out={page}", "--max_points=100", "--show_progress=false"]] * WRITERS
    won = round_.compete(commands)
    round_.check(len(won) == WRITERS, f"{len(won)} runs succeeded")
    text = page.read_bytes()
    round_.check(MARK in text and text.rstrip().endswith(b"</html>"), "the page is not complete")
    round_.check(round_.names() == ["report.html"], f"files: {round_.names()}")


def fits(round_: Round, number: int) -> None:
    """Runs of one name: each gets its own folder, or with a given version one run gets it."""
    checkpoint(0)
    version = [] if number % 2 else ["--trainer.logger.version=7"]
    won = round_.compete([fit(writer, round_.folder, "run", *version) for writer in range(WRITERS)])
    round_.check(len(won) == (1 if version else WRITERS), f"{len(won)} runs succeeded")
    sigmas = []
    for path in round_.folder.glob("run/version_*/checkpoints/last.ckpt"):
        content = read_checkpoint(path)
        sigma = content["hyper_parameters"]["kernel_params"]["sigma"]
        config = yaml.safe_load((path.parents[1] / "config.yaml").read_text())
        is_same = config["model"]["kernel_params"]["sigma"] == sigma
        round_.check(is_same, "configuration and checkpoint are of two runs")
        sigmas.append(SIGMAS.index(sigma))
    round_.check(sorted(sigmas) == won, f"checkpoints of {sorted(sigmas)}, but {won} succeeded")
    folders = len(list(round_.folder.glob("run/*")))
    round_.check(folders == len(won), f"{folders} folders of {len(won)} runs")
    hidden = [name for name in round_.names() if "/." in name]
    round_.check(not hidden, f"hidden files: {hidden}")


# ---------------------------------------------------------------------- objects


def checkpoints(round_: Round, number: int) -> None:
    """One checkpoint that several processes replace while others read it: every reader finds a whole one."""
    path = round_.folder / "last.ckpt"
    contents = [checkpoint(writer).read_bytes() for writer in range(WRITERS)]
    files_of_writers = [_replace(path, content) for content in contents]
    path.write_bytes(contents[0])
    won = round_.compete([*files_of_writers, *[_read(path)] * 2])
    round_.check(len(won) == WRITERS + 2, f"{len(won)} processes succeeded")
    round_.check(path.read_bytes() in contents, "the checkpoint is mixed")
    round_.check(round_.names() == ["last.ckpt"], f"files: {round_.names()}")


def _replace(path: Path, content: bytes) -> Callable[[], None]:
    def run() -> None:
        for _ in range(100):
            with files.draft_of(path) as draft:
                draft.write_bytes(content)

    return run


def _read(path: Path) -> Callable[[], None]:
    def run() -> None:
        for _ in range(50):
            read_checkpoint(path)

    return run


def threads(round_: Round, number: int) -> None:
    """Transformers that are fitted in threads, and one that several threads use, give what they give alone."""
    round_.check(round_.compete([lambda: _threads(number)]) == [0], "the process failed")


def _threads(number: int) -> None:
    x = make_moons(600, noise=0.1, random_state=number)[0]

    def fitted(seed: int) -> np.ndarray:
        learned = KSMTransformer(8, kernel_params={"sigma": 0.3}, random_state=seed).fit(x)
        return np.asarray(learned.transform(x))

    def streamed(seed: int) -> np.ndarray:
        learned = KSMTransformer(8, kernel_params={"sigma": 0.3}, random_state=seed)
        for part in np.split(x, 6):
            learned.partial_fit(part)
        return np.asarray(learned.transform(x))

    shared = KSMTransformer(8, kernel_params={"sigma": 0.3}, random_state=0).fit(x)
    extractor = FeatureExtractor.from_network(shared.network_)
    uses: list[Callable[[int], np.ndarray]] = [
        fitted, streamed, lambda seed: np.asarray(shared.transform(x)), lambda seed: np.asarray(extractor.transform(x)),
    ]  # fmt: skip
    for use in uses:
        alone = [use(seed) for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(use, range(4)))
        for found, right in zip(together, alone, strict=True):
            np.testing.assert_array_equal(found, right)


KINDS: dict[str, Callable[[Round, int], None]] = {
    "predict": predict, "export": export, "compare": compare, "report": report, "fit": fits,
    "checkpoints": checkpoints, "threads": threads,
}  # fmt: skip


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Run one round."""
    torch.set_num_threads(1)
    folder = WORK / "round" / "files"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    round_ = Round(folder)
    try:
        KINDS[job["kind"]](round_, job["number"])
    except Exception as error:  # any error is a finding
        round_.faults.append(repr(error)[:500])
    return {"outcomes": dict(round_.outcomes), "faults": round_.faults}


def main(quick: bool) -> list[str]:
    """Run the missing jobs and report all."""
    jobs = [{"kind": kind, "number": number} for kind in KINDS for number in range(2 if quick else ROUNDS)]
    done = run_all("concurrency", jobs, work, quick, processes=1)
    rows = []
    for kind, function in KINDS.items():
        some = [row for row in done if row["kind"] == kind]
        counts = sum((Counter(row["outcomes"]) for row in some), Counter())
        faults = sum(bool(row["faults"]) for row in some)
        rows.append((kind, function.__doc__, len(some), counts["succeeded"], counts["refused"], faults))
    header = ("what", "expected", "rounds", "succeeded", "refused in one sentence", "rounds with a fault")
    faults_found = [f"- {row['kind']} {row['number']}: {fault}" for row in done for fault in row["faults"]]
    return [
        f"{WRITERS} forked processes at a time, with three different networks, into the same file or folder.",
        "",
        *table(header, rows),
        "",
        *(faults_found or ["No fault was found."]),
    ]
