"""The programs in scripts/: help texts, figures and their report, error messages, the plain loop of the benchmark."""

import json
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from helpers.paths import ROOT
from ksm_lightning.kernels import GaussianKernel, PowerCosineKernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, Phase, PhaseSchedule, Rates
from ksm_lightning.network import KSMNetwork


def run(script: str, *arguments: str) -> int:
    """Run a script in this process, which saves importing everything again; returns its exit code."""
    path = ROOT / "scripts" / script
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.syspath_prepend(str(path.parent))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as stop:
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
                return 1
            return int(stop.code or 0)
    return 0


REPRODUCE = ROOT / "scripts" / "reproduce"
FIGURES = [path.stem for path in sorted(REPRODUCE.glob("*.py")) if "SCRIPT = " in path.read_text()]


@pytest.mark.parametrize(
    "script",
    [
        "count_constants.py",
        "probe_table.py",
        "benchmark/ablation.py",
        "benchmark/board.py",
        "benchmark/defaults.py",
        "benchmark/evaluation.py",
        "benchmark/features.py",
        "benchmark/race.py",
        "benchmark/reuse.py",
        "benchmark/sharded.py",
        "benchmark/start.py",
        "benchmark/streams.py",
        "benchmark/update.py",
        "stress/run.py",
        *(f"reproduce/{name}.py" for name in ["run", *FIGURES]),
    ],
)
def test_help_names_the_script_and_its_usage(script, capsys):
    assert run(script, "--help") == 0
    text = capsys.readouterr().out
    assert "usage:" in text
    assert f"scripts/{script.replace('run.py', 'all') if 'reproduce' in script else script}" in text


@pytest.fixture
def results_folder(tmp_path, monkeypatch):
    """A temporary folder for the results of the figure scripts."""
    monkeypatch.syspath_prepend(str(REPRODUCE))
    import figure_script

    monkeypatch.setattr(figure_script, "ROOT", tmp_path)
    return tmp_path / "runs" / "reproduce_quick"


def test_a_figure_is_computed_to_a_file_and_drawn_from_it(results_folder, capsys):
    assert run("reproduce/half_moons_overview.py", "--quick") == 0
    printed = capsys.readouterr().out
    assert "- the features tile the input space:" in printed
    results = results_folder / "half_moons_overview.npz"
    picture = results_folder / "figures" / "half_moons_overview.png"
    with np.load(results) as file:
        assert file["W"].shape == (16, 2)
        assert file["y"].shape == (1600, 16)
    written = results.stat().st_mtime_ns
    picture.unlink()
    assert run("reproduce/half_moons_overview.py", "--quick") == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert results.stat().st_mtime_ns == written, "the figure was computed again"
    assert run("reproduce/half_moons_overview.py", "--quick", "--again") == 0
    assert results.stat().st_mtime_ns > written


def test_damaged_results_are_named(results_folder, capsys):
    assert run("reproduce/half_moons_overview.py", "--quick") == 0
    results = results_folder / "half_moons_overview.npz"
    results.write_bytes(results.read_bytes()[:1000])
    capsys.readouterr()
    assert run("reproduce/half_moons_overview.py", "--quick") == 1
    printed = capsys.readouterr().err.strip()
    assert printed == f"half_moons_overview: error: {results} is damaged: delete it to compute it again."


def test_the_report_has_a_section_for_every_figure():
    text = (REPRODUCE / "REPORT.md").read_text()
    for name in FIGURES:
        assert f"(figures/{name}.png)" in text
        assert (REPRODUCE / "figures" / f"{name}.png").is_file()


@pytest.mark.slow
@pytest.mark.mnist
def test_the_quick_reproduction_writes_every_figure_and_resumes(results_folder, capsys):
    assert run("reproduce/run.py", "--quick") == 0
    report = (results_folder / "REPORT.md").read_text()
    rows = [line for line in report.splitlines() if re.match(r"\| (?!the paper says|---)", line)]
    assert len(rows) > 50
    assert all(line.count(" | ") == 3 for line in rows)
    for name in FIGURES:
        assert (results_folder / "figures" / f"{name}.png").is_file()
        assert f"(figures/{name}.png)" in report
    assert f"{len(FIGURES)} figures, {len(FIGURES)} to compute" in capsys.readouterr().out
    (results_folder / "mnist_spectra.npz").unlink()
    assert run("reproduce/run.py", "--quick") == 0
    printed = capsys.readouterr().out
    assert f"{len(FIGURES)} figures, 1 to compute" in printed
    assert printed.count(": stored") == len(FIGURES) - 1
    assert (results_folder / "REPORT.md").read_text() == report


def test_figures_of_mnist_are_skipped_without_its_files(results_folder, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KSM_DATA_DIR", str(tmp_path))
    assert run("reproduce/run.py", "--quick", "--only", "mnist_weights", "half_moons_overview") == 0
    printed = capsys.readouterr().out
    assert "MNIST was not found" in printed
    assert "1 figures, 1 to compute" in printed
    assert "No report was written" in printed
    assert not (results_folder / "REPORT.md").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("x:missing.ckpt", "There is no checkpoint missing.ckpt."), ("x", "--run must be NAME:CKPT")]
)
def test_the_probe_table_rejects_bad_input_with_one_line(name, message, capsys):
    assert run("probe_table.py", "--run", name) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.strip().splitlines()) == 1


@pytest.fixture
def _benchmark_modules(monkeypatch):
    """Make the modules of scripts/benchmark importable."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmark"))


@pytest.mark.usefixtures("_benchmark_modules")
def test_measured_sections_replace_those_in_the_result_file(tmp_path):
    import results

    path, titles = tmp_path / "RESULTS.md", {"a": "First", "b": "Second"}
    results.write_sections(path, "# Head", titles, {"b": ["2"]})
    results.write_sections(path, "# Head", titles, {"a": ["1", "1"]})
    results.write_sections(path, "# Other head", titles, {"b": ["3"]})
    assert path.read_text() == "# Other head\n\n## First\n\n1\n1\n\n## Second\n\n3\n"


@pytest.mark.usefixtures("_benchmark_modules")
@pytest.mark.parametrize("schedule", [AdaptiveSchedule(20), PhaseSchedule([Phase(20)])], ids=["adaptive", "paper"])
def test_the_benchmark_compares_tracked_responses_with_float64(schedule):
    import measurements

    x = torch.randn(2000, 10)
    assert max(measurements.accuracy(x, 8, schedule, 20)) < 1e-3


@pytest.mark.usefixtures("_benchmark_modules")
@pytest.mark.parametrize("is_natural", [False, True])
def test_the_benchmark_times_updates(is_natural):
    import measurements

    work = measurements.bare(
        GaussianKernel(1.0), torch.randn(100, 2), 4, Rates(0.01, 0.01, 0.1), updates=60, is_natural=is_natural
    )
    assert work() > 0


@pytest.mark.usefixtures("_benchmark_modules")
def test_the_plain_loop_of_the_benchmark_equals_the_learner():
    """Both start from the same weights and see the same batches, in float64."""
    import plain

    generator = torch.Generator().manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        x, W = torch.randn(30, 2, generator=generator), torch.randn(5, 2, generator=generator)
        for kernel, ours, eta_q in (
            (plain.gaussian, GaussianKernel(0.3), 0.02),
            (plain.power_cosine, PowerCosineKernel(3), 0.0),
        ):
            found = plain.train(x, W, kernel, 20, 0.01, eta_q, 0.1, batch=30)  # a batch of all points, in any order
            network = KSMNetwork(ours, 2, 5, plain.RIDGE, init=lambda *_: W.clone())
            Learner(network, PhaseSchedule([Phase(20, 0.01, eta_q, 0.1)])).learn(x.expand(20, *x.shape))
            for value, expected in zip(network.parameters(), found, strict=True):
                assert_close(value.detach(), expected, rtol=1e-9, atol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_board_scores_every_method_and_draws_them(tmp_path, capsys):
    assert run("benchmark/board.py", "--quick", "--folder", str(tmp_path)) == 0
    text = (tmp_path / "BOARD.md").read_text()
    assert "2 of 2 cells" in text
    assert "nan" not in text
    assert (tmp_path / "board.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (tmp_path / "board.jsonl").read_text().splitlines()]
    assert [row["data"] for row in rows] == ["wine", "wine"]
    assert "scikit-learn's Nystroem" in rows[0]
    for row in rows:
        methods = [name.partition(":")[0] for name in row if name.endswith(": fit")]
        assert len(methods) >= 14
        for name in methods:
            assert row["optimum"] <= row[name] < 1.5
            assert 0 <= row[f"{name}: score"] <= 1
        assert row["uniform landmarks"] > 1
    (tmp_path / "board.png").unlink()
    capsys.readouterr()
    assert run("benchmark/board.py", "--quick", "--draw", "--folder", str(tmp_path)) == 0
    assert (tmp_path / "board.png").exists()
    assert "board:" not in capsys.readouterr().err  # no cell was computed


def test_cells_of_a_benchmark_are_stored_and_continued(tmp_path, capsys):
    arguments = ["--quick", "--only", "updates", "--folder", str(tmp_path)]
    assert run("benchmark/features.py", *arguments) == 0
    text, cells = (tmp_path / "FEATURES.md").read_text(), tmp_path / "updates.jsonl"
    assert text.count("2 of 2 cells") == 1
    assert "nan" not in text
    first = cells.read_text().splitlines()
    cells.write_text(f"{first[0]}\n")
    capsys.readouterr()
    assert run("benchmark/features.py", *arguments) == 0
    printed = capsys.readouterr().err
    assert "updates: 100%" in printed
    assert "1/1" in printed, "the stored cell was computed again"
    assert cells.read_text().splitlines()[0] == first[0]


def test_the_board_of_defaults_is_stored_and_continued(tmp_path, capsys):
    arguments = ["--quick", "--folder", str(tmp_path)]
    assert run("benchmark/defaults.py", *arguments) == 0
    text, cells = (tmp_path / "DEFAULTS.md").read_text(), tmp_path / "cells.jsonl"
    assert "| iris | 1 |" in text
    assert "nan" not in text
    first = cells.read_text().splitlines()
    assert len(first) == 3
    cells.write_text("\n".join(first[:2]) + "\n")
    capsys.readouterr()
    assert run("benchmark/defaults.py", *arguments) == 0
    assert "1/1" in capsys.readouterr().err, "the stored cells were computed again"
    assert cells.read_text().splitlines()[:2] == first[:2]


@pytest.mark.parametrize("script", ["setup", "demo", "test", "reproduce/all", "../.ci/run"])
def test_shell_scripts_are_valid_and_executable(script):
    path = ROOT / "scripts" / script
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_benchmark_times_every_stage_of_the_start(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmark"))
    import start

    monkeypatch.setattr(start, "candidate_count", lambda *args: 1200)
    row = start.measure(20)
    assert row[:2] == ["20", "1,200"]
    assert len(row) == 2 + len(start.STAGES) + 2
    printed = capsys.readouterr().out
    assert all(f"  {stage}: " in printed for stage in start.STAGES)


def test_each_name_in_capitals_with_a_number_in_its_value_is_a_constant(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import count_constants

    source = (
        "A, _B = 1, 2.0\nC: dict[str, float] = {'a': 1e-3}\nD = tuple(10**p for p in range(3))\nE = f(-1)\n"
        "NAME, FLAG, lower = 'text', True, other\nclass Kernel:\n    F = 5\n    def f(self):\n        G = 6\n"
        "if TYPE_CHECKING:\n    H = 7\nelse:\n    H = 8\n"
    )
    found = [(each.name, each.line) for each in count_constants.constants_of("a.py", source)]
    assert found == [("A", 1), ("_B", 1), ("C", 2), ("D", 3), ("E", 4), ("F", 7), ("H", 11), ("H", 13)]


def test_there_are_few_constants_and_each_has_a_row_in_the_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import count_constants

    names = {each.name for each in count_constants.tuning_constants()}
    section = (ROOT / "ksm_lightning" / "README.md").read_text().partition("## Constants")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name.rpartition(".")[2] for row in rows for name in re.findall("`(.*?)`", row)} == names
    assert len(count_constants.tuning_constants()) <= 80


def test_constants_are_counted_by_file_and_folder(capsys):
    assert run("count_constants.py", "--lines") == 0
    text = capsys.readouterr().out
    assert "   1  kernels/width.py: _OF_MEDIAN\n          " in text
    assert re.search(r"^ +\d+  in all, without \d+ facts$", text, re.MULTILINE)
