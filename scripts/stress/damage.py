"""Damaged checkpoints, extractors, .npz files and configurations: none is believed, none fails in an unexpected way."""

import contextlib
import functools
import io
import random
import resource
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from common import run_all, table
from mutations import DAMAGES

from ksm_lightning import FeatureExtractor, KernelSimilarityMatching
from ksm_lightning.cli import main as ksm
from ksm_lightning.data import ArrayDataModule, HalfMoonsDataModule
from ksm_lightning.runs.checkpoint import read_checkpoint
from ksm_lightning.runs.digest import digest_of
from ksm_lightning.runs.finished_run import FinishedRun

CASES = {"checkpoint": 4000, "extractor": 2500, "npz": 2000, "config": 1500}
JOB = 100  # cases per job
TIME_LIMIT, MEMORY_LIMIT = 20.0, 2**30  # seconds of one case; bytes that the cases may need in addition
OUTCOMES = ("refused", "equal to the original", "believed", "unexpected exception", "too slow")
# A configuration has no digest: what is left of it may describe other data, or options that are valid.
DOCUMENTED = (ValueError, FileNotFoundError)


class TooSlow(BaseException):
    """A case took longer than TIME_LIMIT. Readers do not catch it, as it is not an Exception."""


# ---------------------------------------------------------------------- the originals


def make_originals(folder: Path) -> None:
    """Write small files of each kind: runs of both bounds in the middle, extractors, archives, a configuration."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_neurons": 6, "kernel_params": {"sigma": 0.3}, "updates": 40}
    for name, more in (("paper", {"inverse": "tracked"}), ("tight", {"bound": "tight", "num_landmarks": 9})):
        model, data = KernelSimilarityMatching(**options, **more), HalfMoonsDataModule(num_points=200)
        trainer = lightning.Trainer(
            max_steps=25, logger=False, enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu",
            enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(model, datamodule=data)
        path = folder / f"{name}.checkpoint"
        trainer.save_checkpoint(path, weights_only=False)
        FeatureExtractor.from_checkpoint(path).save(folder / f"{name}.safetensors")
        (folder / f"{name}.safetensors").rename(folder / f"{name}.extractor")
    x, y = HalfMoonsDataModule(num_points=200).load()[0].x, np.arange(200) % 7
    for name, save in (("plain", np.savez), ("compressed", np.savez_compressed)):
        buffer = io.BytesIO()
        save(buffer, x=x, y=y)
        (folder / f"{name}.npz").write_bytes(buffer.getvalue())
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        ksm(["fit", "--data=HalfMoonsDataModule", "--data.num_points=200", "--print_config"])
    (folder / "half_moons.config").write_text(printed.getvalue())


# ---------------------------------------------------------------------- reading


def read(kind: str, path: Path) -> str:
    """Read a file as the package does; returns a digest of what was read."""
    if kind == "checkpoint":
        content = read_checkpoint(path)
        KernelSimilarityMatching.load_from_checkpoint(path)
        # Keys that a subclass of the module may add are not covered by the digest of the file, and not used.
        return digest_of({key: content[key] for key in (*content["ksm_lightning"]["covers"], "ksm_lightning")})
    if kind == "extractor":
        extractor = FeatureExtractor.load(path)
        return digest_of([extractor.W, extractor.M, extractor.preprocessing.state(), extractor.metadata])
    if kind == "npz":
        data = ArrayDataModule(str(path), key="x", labels="y")
        data.setup()
        return digest_of([data.train_points.data, data.train_labels])
    run = FinishedRun(path.parent)
    run.data()
    return "a configuration"


def parse(path: Path) -> None:
    """Parse a configuration as ``ksm fit`` does. A configuration is code there: only errors are looked at."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            ksm(["fit", f"--config={path}", "--print_config"])
        except SystemExit as stop:
            if stop.code == 0:
                return
    text = errors.getvalue().strip()
    if "KSM_DEBUG" in text or len(text.splitlines()) != 1:
        raise RuntimeError(text)
    raise ValueError(text)


def outcome(kind: str, path: Path, expected: str | None, parses: bool) -> tuple[str, str]:
    """What reading a damaged file leads to, and details of what should not happen."""
    try:
        with _time_limit(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = read(kind, path)
            if parses:
                parse(path)
    except TooSlow:
        return "too slow", ""
    except DOCUMENTED as error:
        is_sentence = "\n" not in str(error).strip() and str(error)
        return ("refused", "") if is_sentence else ("unexpected exception", f"{type(error).__name__}: {error}")
    except Exception as error:  # that none comes here is what is tested
        return "unexpected exception", f"{type(error).__name__}: {error}"[:300]
    return ("equal to the original", "") if expected in (None, found) else ("believed", "")


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _memory_limit() -> Iterator[None]:
    """Let allocations fail that need more than MEMORY_LIMIT beyond what the process has now."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run_cases(originals: Path, kind: str, damage: str, cases: range) -> dict[str, Any]:
    """Damage copies of the originals of a kind, read them, and count the outcomes."""
    sources = sorted(originals.glob(f"*.{kind}"))
    whole = {path: path.read_bytes() for path in sources}
    expected = {path: None if kind == "config" else read(kind, path) for path in sources}
    counts: Counter[str] = Counter()
    details, slowest = [], 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as name, _memory_limit():
        target = Path(name) / ("config.yaml" if kind == "config" else f"x.{kind}")
        if kind == "config":
            (Path(name) / "checkpoints").mkdir()
            (Path(name) / "checkpoints" / "last.ckpt").write_bytes((originals / "paper.checkpoint").read_bytes())
        for case in cases:
            rng = random.Random(f"{kind} {damage} {case}")
            source = rng.choice(sources)
            damaged = DAMAGES[kind][damage](whole[source], rng)
            target.write_bytes(damaged)
            started = time.perf_counter()
            parses = kind == "config" and case % 5 == 0  # parsing takes a hundred times as long as reading
            found, detail = outcome(kind, target, expected[source], parses)
            if damaged == whole[source]:
                found = "equal to the original" if found == "equal to the original" else "unexpected exception"
            slowest = max(slowest, time.perf_counter() - started)
            counts[found] += 1
            if found in OUTCOMES[2:]:
                details.append(f"case {case}: {found} {detail}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    return {"outcomes": dict(counts), "details": details[:5], "slowest": round(slowest, 3), "megabytes": round(grown)}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Run the cases of a job."""
    cases = range(job["first"], job["first"] + job["count"])
    return run_cases(Path(_originals().name), job["kind"], job["damage"], cases)


@functools.cache
def _originals() -> "tempfile.TemporaryDirectory[str]":
    """The originals of this process, deleted at its end."""
    folder = tempfile.TemporaryDirectory()
    make_originals(Path(folder.name))
    return folder


def jobs_of(quick: bool) -> list[dict[str, Any]]:
    """Jobs of at most JOB cases; each kind of damage has the same number of cases for one kind of file."""
    jobs = []
    for kind, total in CASES.items():
        each, rest = divmod(total // (20 if quick else 1), len(DAMAGES[kind]))
        for index, damage in enumerate(DAMAGES[kind]):
            count = each + (index < rest)
            for first in range(0, count, JOB):
                jobs.append({"kind": kind, "damage": damage, "first": first, "count": min(JOB, count - first)})
    return jobs


def main(quick: bool) -> list[str]:
    """Run the missing jobs and report all."""
    done = run_all("damage", jobs_of(quick), work, quick, processes=1)
    rows = []
    for kind, damages in DAMAGES.items():
        for damage in damages:
            found = [row for row in done if (row["kind"], row["damage"]) == (kind, damage)]
            counts = sum((Counter(row["outcomes"]) for row in found), Counter[str]())
            slowest = max(row["slowest"] for row in found)
            rows.append((kind, damage, counts.total(), *(counts[name] for name in OUTCOMES), f"{slowest:.2f}"))
    totals = [sum(row[index] for row in rows) for index in range(2, 3 + len(OUTCOMES))]
    details = [f"- {row['kind']}, {row['damage']}: {text}" for row in done for text in row["details"]]
    return [
        f"{totals[0]:,} damaged files: checkpoints of both bounds in the middle of a run, extractors, plain and "
        "compressed archives, and the configuration of a run (a fifth of them also parsed by `ksm fit`). Each was read "
        f"as the package does, within {TIME_LIMIT:g} seconds and {MEMORY_LIMIT // 2**20:,} MB of additional address "
        "space. Refused means a ValueError of one sentence. Believed means that something else than the original was "
        "read from a file with a digest or checksums; a configuration has none, so it counts as equal if it describes "
        f"any data. The memory of the process grew by at most {max(row['megabytes'] for row in done):,} MB in "
        f"{JOB} cases.",
        "",
        *table(("file", "damage", "cases", *OUTCOMES, "slowest case [s]"), rows),
        f"| all | | {' | '.join(f'{total:,}' for total in totals)} | |",
        *(["", *details] if details else []),
    ]
