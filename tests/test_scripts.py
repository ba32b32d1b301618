"""The scripts beside the package."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize("script", ["probe_table.py", "benchmark/evaluation.py", "stress/run.py"])
def test_help_explains(script):
    command = [sys.executable, str(ROOT / "scripts" / script), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "usage:" in text
    assert ".venv/bin/python scripts/" in text


@pytest.mark.parametrize(
    ("run", "message"), [("x:missing.ckpt", "There is no checkpoint missing.ckpt."), ("x", "--run takes NAME:CKPT")]
)
def test_the_probe_table_answers_bad_input_with_a_sentence(run, message):
    command = [sys.executable, str(ROOT / "scripts" / "probe_table.py"), "--run", run]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("script", ["setup", "demo", "test", "../.ci/run"])
def test_shell_scripts_are_valid_and_executable(script):
    path = ROOT / "scripts" / script
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True)
