"""SLURM's requeue signal in an imitated SLURM: what is saved, what SLURM is asked, and how the next job continues."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment

from helpers.commands import HALF_MOONS, refused
from helpers.paths import ROOT
from helpers.processes import PATIENCE
from helpers.runs import model, moons, trainer
from ksm_lightning.callbacks import Figures, KernelErrorEvaluation
from ksm_lightning.cli import main
from ksm_lightning.learning import Phase
from ksm_lightning.learning.responses import ResponseSolver
from ksm_lightning.learning.updates import Updates
from ksm_lightning.network import KSMNetwork
from ksm_lightning.runs.checkpoint import read_checkpoint
from ksm_lightning.runs.logger import RunLogger
from ksm_lightning.runs.requeue import checkpoint_of_requeued_job, hpc_checkpoints

UPDATES = 24
RUN = [
    "--config", HALF_MOONS, "--data.num_points=200", "--data.updates_per_epoch=8", "--data.eval_batch_size=50",
    "--model.num_neurons=4", f"--model.updates={UPDATES}", "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--probe.min_updates_between=100",
]  # fmt: skip
HPC = Path("hpc_ckpt_1.ckpt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The checkpoints of an undisturbed run: one per block of updates, and the last one."""
    folder = tmp_path_factory.mktemp("whole")
    main(["fit", *RUN, f"--trainer.logger.save_dir={folder}", "--checkpoint.every_n_updates=8",
          "--checkpoint.keep_all=true"])  # fmt: skip
    return folder / "half_moons" / "version_0" / "checkpoints"


@pytest.fixture
def slurm(tmp_path, monkeypatch, in_tmp_path) -> Path:
    """A job of SLURM in a temporary folder; returns the file in which the calls of `scontrol` are noted."""
    commands, calls = tmp_path / "bin", tmp_path / "calls.txt"
    commands.mkdir()
    (commands / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {calls}\n[ -z "$REFUSED" ] || exit 3\n')
    (commands / "scontrol").chmod(0o755)
    for name, value in {"NTASKS": 1, "JOB_NAME": "fit", "JOB_ID": 77, "PROCID": 0, "LOCALID": 0, "NODEID": 0}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr(Figures, "_draw", lambda *args, **kwargs: None)  # slow, and not needed here
    return calls


def signal_at(monkeypatch, owner, name: str, call: int, count: int = 1) -> None:
    """Raise the signal in the n-th call of a function."""
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            for _ in range(count):
                signal.raise_signal(signal.SIGUSR1)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(path)["state_dict"]


def last(name: str) -> Path:
    return Path(f"runs/{name}/version_0/checkpoints/last.ckpt")


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("owner", "name", "call", "update"),
    [
        (Updates, "run", 5, 16),  # in the block after update 8; landmarks are moved before
        (RunLogger, "log_metrics", 14, 8),  # while updates are logged
        (KSMNetwork, "energy_of", 3, 8),  # in a validation batch; the guard makes the first call
    ],
    ids=["update", "logging", "validation"],
)
def test_a_requeued_job_continues_to_the_weights_of_an_undisturbed_one(
    owner, name, call, update, whole, slurm, capsys, monkeypatch
):
    """Five signals at once: Lightning's handler would save in the middle of a block, or wait for a lock for ever."""
    before = signal.getsignal(signal.SIGUSR1)
    with monkeypatch.context() as patch:
        signal_at(patch, owner, name, call, count=5)
        with pytest.raises(SystemExit) as stop:
            main(["fit", *RUN, "--trainer.logger.name=first"])
    assert stop.value.code == 143
    expected = f"ksm: stopped at update {update}; SLURM has requeued the job, which will continue from {HPC.resolve()}."
    assert capsys.readouterr().err.strip().splitlines()[-1] == expected
    assert slurm.read_text() == "requeue 77\n"
    assert [path.name for path in hpc_checkpoints(Path())] == [HPC.name]
    assert read_checkpoint(HPC)["global_step"] == update
    assert equal(weights(HPC), weights(last("first")))
    assert signal.getsignal(signal.SIGUSR1) is before

    main(["fit", *RUN, "--trainer.logger.name=second"])
    assert f"Continuing from {HPC}, the state of a requeued SLURM job" in capsys.readouterr().out
    assert equal(weights(HPC), weights(whole / f"update-{update:07d}.ckpt"))
    assert equal(weights(last("second")), weights(whole / "last.ckpt"))
    assert slurm.read_text() == "requeue 77\n"


def test_the_next_run_in_the_folder_makes_the_checks_of_a_continued_one(slurm, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        signal_at(patch, Updates, "run", 4)
        with pytest.raises(SystemExit):
            main(["fit", *RUN])
    capsys.readouterr()
    runs = sorted(Path("runs").rglob("*"))
    assert refused(capsys, "fit", *RUN, "--model.kernel_params.sigma=0.5") == (
        f"The checkpoint {HPC} has kernel_params={{'sigma': 0.3}}, but {{'sigma': 0.5}} was given: remove the option "
        "to continue that run, or delete that file, the state of a requeued SLURM job, to start a new one."
    )
    assert "was trained on other data" in refused(capsys, "fit", *RUN, "--data.num_points=300")
    assert "No update is left to do" in refused(capsys, "fit", *RUN, "--model.updates=8")
    HPC.write_bytes(HPC.read_bytes()[:1000])
    assert f"{HPC} is damaged or incomplete" in refused(capsys, "fit", *RUN)
    assert sorted(Path("runs").rglob("*")) == runs
    monkeypatch.delenv("SLURM_NTASKS")
    assert checkpoint_of_requeued_job(None) is None


def test_a_job_that_slurm_does_not_requeue_goes_on_undisturbed(whole, slurm, monkeypatch):
    monkeypatch.setenv("REFUSED", "yes")
    signal_at(monkeypatch, Updates, "run", 4)
    with pytest.warns(
        UserWarning, match=r"SLURM did not requeue the job \(scontrol ended with 3\), so the run goes on"
    ):
        main(["fit", *RUN, "--trainer.logger.name=first"])
    assert read_checkpoint(HPC)["global_step"] == 8
    assert equal(weights(last("first")), weights(whole / "last.ckpt"))


def test_a_machine_without_scontrol_is_reported(slurm, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    run = trainer()
    signal_at(monkeypatch, ResponseSolver, "solve", 3)
    with pytest.warns(UserWarning, match=r"did not requeue the job \(.*No such file or directory: 'scontrol'\)"):
        run.fit(model(acceleration="none"), datamodule=moons(updates_per_epoch=5))
    assert run.global_step == 10


def test_a_signal_after_the_last_update_requeues_nothing(slurm, capsys, monkeypatch):
    signal_at(monkeypatch, KernelErrorEvaluation, "evaluate", 3)  # the validation after the last update
    main(["fit", *RUN, "--kernel_error.min_updates_between=0"])
    assert f"Trained for {UPDATES} updates" in capsys.readouterr().out
    assert not slurm.exists()
    assert hpc_checkpoints(Path()) == []


def test_a_script_with_a_trainer_is_requeued_and_continued_by_lightning(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    phases = [Phase(60, 0.01, 0.02, 0.1)]
    with monkeypatch.context() as patch:
        signal_at(patch, ResponseSolver, "solve", 25)
        with pytest.raises(SystemExit):
            trainer().fit(model(phases=phases, acceleration="none"), datamodule=moons(updates_per_epoch=20))
    assert slurm.read_text() == "requeue 70_4\n"
    assert read_checkpoint(HPC)["global_step"] == 40
    rest = model(phases=phases, acceleration="none")
    trainer().fit(rest, datamodule=moons(updates_per_epoch=20))
    HPC.unlink()
    whole = model(phases=phases, acceleration="none")
    trainer().fit(whole, datamodule=moons(updates_per_epoch=20))
    assert equal(rest.state_dict(), whole.state_dict())


def test_handlers_of_the_user_and_other_clusters_are_left_alone(slurm, monkeypatch):
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        signal_at(monkeypatch, ResponseSolver, "solve", 3)
        trainer().fit(model(acceleration="none"), datamodule=moons())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]
    assert not slurm.exists()
    switched_off = trainer(plugins=[SLURMEnvironment(auto_requeue=False)])
    switched_off.fit(model(), datamodule=moons())
    assert signal.getsignal(signal.SIGUSR1) is before


def test_checkpoints_are_ordered_by_their_number(tmp_path):
    for number in (2, 10, 9):
        (tmp_path / f"hpc_ckpt_{number}.ckpt").touch()
    (tmp_path / "hpc_ckpt_x.ckpt").touch()
    assert [path.name for path in hpc_checkpoints(tmp_path)] == [f"hpc_ckpt_{number}.ckpt" for number in (2, 9, 10)]


@pytest.mark.slow
def test_a_few_requeue_signals_at_random_moments_of_one_and_two_processes(tmp_path):
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "stress" / "run.py"), "--quick", "--only", "requeue"],
        capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "not equal to the undisturbed run at their update: 0." in result.stdout, result.stdout
    assert "not equal to the undisturbed run at the end: 0." in result.stdout
    assert "Hung: 0." in result.stdout
    for fault in ("WRONG", "LOST", "HUNG"):
        assert f"| {fault}" not in result.stdout
