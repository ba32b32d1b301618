"""The scripts beside the package."""

import runpy
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch.testing import assert_close

from ksm_lightning.kernels import GaussianKernel, PowerCosineKernel
from ksm_lightning.learning import learn
from ksm_lightning.network import KSMNetwork
from ksm_lightning.schedule import Phase, Schedule


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


@pytest.mark.parametrize(
    "script", ["probe_table.py", "benchmark/evaluation.py", "benchmark/update.py", "stress/run.py"]
)
def test_help_explains(script, capsys):
    assert run(script, "--help") == 0
    text = capsys.readouterr().out
    assert "usage:" in text
    assert ".venv/bin/python scripts/" in text


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
            learn(network, Schedule([Phase(20, 0.01, eta_q, 0.1)]), [x] * 20)
            for value, expected in zip(network.parameters(), found, strict=True):
                assert_close(value.detach(), expected, rtol=1e-9, atol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("script", ["setup", "demo", "test", "../.ci/run"])
def test_shell_scripts_are_valid_and_executable(script):
    path = ROOT / "scripts" / script
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True)
