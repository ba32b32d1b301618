"""The command ``ksm``: options of a short run, and the error message of a refused one."""

import pytest

from helpers.paths import ROOT
from ksm_lightning.cli import main

HALF_MOONS = str(ROOT / "configs" / "half_moons.yaml")
# The paper's phases, on top of the base file and under its name.
PAPER = ["--config", HALF_MOONS, "--config", str(ROOT / "configs" / "half_moons_paper.yaml"),
         "--trainer.logger.name=half_moons"]  # fmt: skip
QUICK = [*PAPER, "--model.num_neurons=4", "--data.num_points=200", "--data.updates_per_epoch=50"]
FEW = [*QUICK, "--trainer.max_steps=100", "--trainer.enable_progress_bar=false", "--figures.num_neurons=1"]
# A run that never ends by itself, so that a test can stop it in the middle on any machine.
ENDLESS = "--model.phases=[{updates: 1000000000, eta_w: 0.01, eta_q: 0.01, eta_l: 0.1}]"


def refused(capsys, command: str, *options: str) -> str:
    """Run a command that must fail with exit code 2; returns its one-line error message."""
    with pytest.raises(SystemExit) as stop:
        main([command, *options])
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ksm: error: ")
    return lines[0].removeprefix("ksm: error: ")
