"""The scripts beside the package."""

import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch.testing import assert_close

from ksm_lightning.kernels import GaussianKernel, PowerCosineKernel
from ksm_lightning.learning.schedule import Phase, PhaseSchedule
from ksm_lightning.learning.train import learn
from ksm_lightning.network.ksm_network import KSMNetwork


def run(script: str, *arguments: str) -> int:
    """Exit code of a script, run in this process: importing everything anew would take longer than all it does."""
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
        "probe_table.py",
        "benchmark/evaluation.py",
        "benchmark/update.py",
        "stress/run.py",
        *(f"reproduce/{name}.py" for name in ["run", *FIGURES]),
    ],
)
def test_help_explains(script, capsys):
    assert run(script, "--help") == 0
    text = capsys.readouterr().out
    assert "usage:" in text
    assert f"scripts/{script.replace('run.py', 'all') if 'reproduce' in script else script}" in text


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Results of the figure scripts go to a folder of the test."""
    monkeypatch.syspath_prepend(str(REPRODUCE))
    import figure_script

    monkeypatch.setattr(figure_script, "ROOT", tmp_path)
    return tmp_path / "runs" / "reproduce_quick"


def test_a_figure_is_computed_to_a_file_and_drawn_from_it(elsewhere, capsys):
    assert run("reproduce/half_moons_overview.py", "--quick") == 0
    said = capsys.readouterr().out
    assert "- the features tile the input space:" in said
    results, picture = elsewhere / "half_moons_overview.npz", elsewhere / "figures" / "half_moons_overview.png"
    with np.load(results) as file:
        assert file["W"].shape == (16, 2)
        assert file["y"].shape == (1600, 16)
    written = results.stat().st_mtime_ns
    picture.unlink()
    assert run("reproduce/half_moons_overview.py", "--quick") == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert results.stat().st_mtime_ns == written, "nothing was computed again"
    assert run("reproduce/half_moons_overview.py", "--quick", "--again") == 0
    assert results.stat().st_mtime_ns > written


def test_damaged_results_are_named(elsewhere, capsys):
    assert run("reproduce/half_moons_overview.py", "--quick") == 0
    results = elsewhere / "half_moons_overview.npz"
    results.write_bytes(results.read_bytes()[:1000])
    capsys.readouterr()
    assert run("reproduce/half_moons_overview.py", "--quick") == 1
    said = capsys.readouterr().err.strip()
    assert said == f"half_moons_overview: error: {results} is damaged: remove it, and it is computed again."


def test_the_report_has_a_section_for_every_figure():
    text = (REPRODUCE / "REPORT.md").read_text()
    for name in FIGURES:
        assert f"(figures/{name}.png)" in text
        assert (REPRODUCE / "figures" / f"{name}.png").is_file()


@pytest.mark.slow
@pytest.mark.mnist
def test_everything_is_reproduced_in_small_and_goes_on_where_it_stopped(elsewhere, capsys):
    assert run("reproduce/run.py", "--quick") == 0
    report = (elsewhere / "REPORT.md").read_text()
    rows = [line for line in report.splitlines() if re.match(r"\| (?!the paper says|---)", line)]
    assert len(rows) > 50
    assert all(line.count(" | ") == 3 for line in rows)
    for name in FIGURES:
        assert (elsewhere / "figures" / f"{name}.png").is_file()
        assert f"(figures/{name}.png)" in report
    assert f"{len(FIGURES)} figures, {len(FIGURES)} to compute" in capsys.readouterr().out
    (elsewhere / "mnist_spectra.npz").unlink()
    assert run("reproduce/run.py", "--quick") == 0
    said = capsys.readouterr().out
    assert f"{len(FIGURES)} figures, 1 to compute" in said
    assert said.count("computed before") == len(FIGURES) - 1
    assert (elsewhere / "REPORT.md").read_text() == report


def test_without_mnist_its_figures_are_left_out(elsewhere, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KSM_DATA_DIR", str(tmp_path))
    assert run("reproduce/run.py", "--quick", "--only", "mnist_weights", "half_moons_overview") == 0
    said = capsys.readouterr().out
    assert "MNIST is not there" in said
    assert "1 figures, 1 to compute" in said
    assert "No report was written" in said
    assert not (elsewhere / "REPORT.md").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("x:missing.ckpt", "There is no checkpoint missing.ckpt."), ("x", "--run takes NAME:CKPT")]
)
def test_the_probe_table_answers_bad_input_with_a_sentence(name, message, capsys):
    assert run("probe_table.py", "--run", name) == 1
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1


def test_the_plain_loop_of_the_benchmark_is_the_papers_algorithm(monkeypatch):
    """Our update from the same batches, in float64, ends where the plain loop does."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmark"))
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
            learn(network, PhaseSchedule([Phase(20, 0.01, eta_q, 0.1)]), [x] * 20)
            for value, expected in zip(network.parameters(), found, strict=True):
                assert_close(value.detach(), expected, rtol=1e-9, atol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("script", ["setup", "demo", "test", "reproduce/all", "../.ci/run"])
def test_shell_scripts_are_valid_and_executable(script):
    path = ROOT / "scripts" / script
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True)
