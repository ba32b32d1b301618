"""The commands with a Trainer, as a user types them: run folders, continued runs, evaluation."""

import errno
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.commands import ENDLESS, FEW, HALF_MOONS, QUICK, refused
from helpers.processes import PATIENCE, started, wait_until
from ksm_lightning.cli import main
from ksm_lightning.runs.checkpoint import read_checkpoint

pytestmark = pytest.mark.usefixtures("in_tmp_path")

CHECKPOINT = "--ckpt_path=runs/half_moons/version_0/checkpoints/last.ckpt"


def run(command: str, *options: str) -> None:
    main([command, *options])


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(Path(folder) / "checkpoints" / "last.ckpt")["state_dict"]


def test_importing_the_command_is_cheap():
    code = "import ksm_lightning.cli, sys; print({'torch', 'lightning', 'jsonargparse'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert result.stdout.strip() == "set()"


def test_a_full_disk_names_the_run_folder_if_the_writer_names_no_file(capsys, monkeypatch):
    def fail(writer, summary, step):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ksm_lightning.runs.logger.add_event", fail)
    sentence = refused(capsys, "fit", *FEW, "--trainer.log_every_n_steps=10")
    assert sentence == "The run folder runs/half_moons/version_0 could not be written: No space left on device."


def test_a_run_folder_holds_config_checkpoint_events_and_figures(capsys):
    run("fit", *FEW)
    folder = Path("runs/half_moons/version_0")
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "checkpoints", "figures", "hparams.yaml"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    out = capsys.readouterr().out
    assert "Training 4 neurons with GaussianKernel(sigma=0.3) on 200 points of 2 features" in out
    assert re.search(r"Trained for 100 updates, [\d,]+ per second\.", out)
    printed = float(re.search(r"Final kernel NRMSE: ([\d.]+)", out)[1])
    scalars = EventAccumulator(str(folder)).Reload().Scalars("val/kernel_nrmse")
    assert [scalar.step for scalar in scalars] == [0, 1, 2, 4, 8, 16, 32, 50, 64, 100]
    assert printed == pytest.approx(scalars[-1].value, abs=1e-4)
    assert f"Figures:      {folder}/figures" in out


def test_runs_never_overwrite_each_other():
    run("fit", *FEW)
    before = Path("runs/half_moons/version_0/checkpoints/last.ckpt").stat().st_mtime_ns
    run("fit", *FEW)
    assert Path("runs/half_moons/version_0/checkpoints/last.ckpt").stat().st_mtime_ns == before
    assert Path("runs/half_moons/version_1/checkpoints/last.ckpt").is_file()


def test_a_saved_config_repeats_the_run_bitwise():
    run("fit", *FEW, "--seed_everything=7")
    run("fit", "--config", "runs/half_moons/version_0/config.yaml")
    first, second = weights("runs/half_moons/version_0"), weights("runs/half_moons/version_1")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_seed_determines_start_and_batches():
    for seed in (1, 2):
        run("fit", *FEW, f"--seed_everything={seed}", f"--trainer.logger.name=seed_{seed}")
    first, second = weights("runs/seed_1/version_0"), weights("runs/seed_2/version_0")
    assert not torch.equal(first["network.W"], second["network.W"])


def test_validate_test_and_predict_use_the_checkpoint_and_make_no_run_folder(capsys):
    run("fit", *FEW)
    printed = float(re.search(r"Final kernel NRMSE: ([\d.]+)", capsys.readouterr().out)[1])
    checkpoint = "runs/half_moons/version_0/checkpoints/last.ckpt"
    # The data comes from the file; the model comes from the checkpoint, although the file has 16 neurons.
    data = ["--config", HALF_MOONS, "--data.num_points=200", "--trainer.enable_progress_bar=false"]
    run("validate", *data, "--ckpt_path", checkpoint)
    out = capsys.readouterr().out
    assert float(re.search(r"val/kernel_nrmse\s+│?\s*([\d.]+)", out)[1]) == pytest.approx(printed, abs=1e-4)
    # The run's own configuration works too.
    run("validate", "--config", "runs/half_moons/version_0/config.yaml", "--ckpt_path", checkpoint)
    assert float(re.search(r"val/kernel_nrmse\s+│?\s*([\d.]+)", capsys.readouterr().out)[1]) == pytest.approx(
        printed, abs=1e-4
    )
    run("test", *data, "--ckpt_path", checkpoint)
    assert "test/kernel_nrmse" in capsys.readouterr().out
    run("predict", *data, "--ckpt_path", checkpoint, "--features.path=y.npy")
    assert np.load("y.npy").shape == (200, 4)
    compressed = ["--features.path=z.npy", "--features.readout=nystroem", "--features.num_features=3"]
    run("predict", *data, "--ckpt_path", checkpoint, *compressed)
    assert np.load("z.npy").shape == (200, 3)
    assert [path.name for path in Path("runs/half_moons").iterdir()] == ["version_0"]


def test_a_users_own_array_needs_no_input_size():
    np.save("x.npy", np.random.RandomState(0).randn(50, 7))
    run(
        "fit",
        "--data=ArrayDataModule",
        "--data.path=x.npy",
        "--data.scaling=feature",
        "--model.num_neurons=3",
        "--trainer.max_steps=20",
        "--trainer.enable_progress_bar=false",
    )
    assert weights("runs/ksm/version_0")["network.W"].shape == (3, 7)


def test_the_printed_error_names_its_update_unless_it_is_the_last(capsys):
    run("fit", *FEW, "--trainer.max_steps=150", "--kernel_error.min_updates_between=1000")
    assert "Final kernel NRMSE" in capsys.readouterr().out
    run("fit", *FEW, "--trainer.max_steps=150", "--trainer.check_val_every_n_epoch=2")
    assert "Kernel NRMSE at update 100:" in capsys.readouterr().out


def test_without_a_logger_nothing_is_written(capsys):
    before = set(Path().iterdir())
    run("fit", *FEW, "--trainer.logger=false")
    assert set(Path().iterdir()) == before
    assert "Nothing was saved" in capsys.readouterr().out


def test_a_failure_before_the_first_update_leaves_no_folder(capsys, monkeypatch):
    def fail(*args):
        raise OSError("the device is on fire")

    monkeypatch.setattr("ksm_lightning.module.KernelSimilarityMatching.on_fit_start", fail)
    assert "the device is on fire" in refused(capsys, "fit", *FEW)
    assert list(Path("runs").rglob("*")) == [Path("runs/half_moons")]


def test_a_divergence_keeps_the_last_checkpoint(capsys):
    options = [*FEW, "--checkpoint.every_n_updates=1", "--trainer.log_every_n_steps=10"]
    message = refused(capsys, "fit", *options, "--model.phases=[{updates: 100, eta_w: 1e30, eta_q: 1e30}]")
    assert "Training diverged at update 2: the energy became non-finite." in message
    assert "The last good checkpoint is runs/half_moons/version_0/checkpoints/last.ckpt." in message
    assert all(value.isfinite().all() for value in weights("runs/half_moons/version_0").values())


def test_a_divergence_between_two_logged_updates_is_found(capsys):
    options = [*FEW, "--trainer.log_every_n_steps=100000", "--trainer.max_steps=30"]
    message = refused(capsys, "fit", *options, "--model.phases=[{updates: 100, eta_w: 1e30, eta_q: 1e30}]")
    assert "Training diverged at update 2: the energy" in message


# ---------------------------------------------------------------------- continuing a run


def test_continuing_takes_the_model_from_the_checkpoint():
    run("fit", *FEW, "--trainer.max_steps=60")
    # No option of the model is set: all of them come from the checkpoint.
    run(
        "fit",
        "--data=HalfMoonsDataModule",
        "--data.num_points=200",
        CHECKPOINT,
        "--trainer.max_steps=100",
        "--trainer.logger.name=continued",
    )
    run("fit", *FEW, "--trainer.logger.name=whole")
    whole, continued = weights("runs/whole/version_0"), weights("runs/continued/version_0")
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_continuing_with_another_network_is_refused(capsys):
    run("fit", *FEW)
    capsys.readouterr()
    message = refused(capsys, "fit", *FEW, CHECKPOINT, "--model.num_neurons=5")
    assert "has num_neurons=4, but 5 was given: remove the option to continue that run" in message
    message = refused(capsys, "fit", *FEW, CHECKPOINT, "--model.kernel_params={sigma: 0.4}")
    assert "has kernel_params={'sigma': 0.3}, but {'sigma': 0.4} was given" in message
    message = refused(capsys, "fit", *FEW, CHECKPOINT, "--model.ridge=0.1")
    assert "has ridge=0.001, but 0.1 was given" in message
    assert [path.name for path in Path("runs/half_moons").iterdir()] == ["version_0"]


def test_explicit_phases_override_those_of_the_checkpoint():
    run("fit", *FEW)
    run(
        "fit",
        *FEW,
        CHECKPOINT,
        "--model.phases=[{updates: 130, eta_w: 0.0, eta_q: 0.0, eta_l: 0.1}]",
        "--trainer.max_steps=-1",
    )
    first, second = weights("runs/half_moons/version_0"), weights("runs/half_moons/version_1")
    assert torch.equal(first["network.W"], second["network.W"])
    assert not torch.equal(first["network.L"], second["network.L"])
    assert read_checkpoint("runs/half_moons/version_1/checkpoints/last.ckpt")["global_step"] == 130


def test_a_killed_run_continues_to_the_same_bits():
    """SIGKILL, then ``--ckpt_path``: the weights equal those of an uninterrupted run."""
    options = [*QUICK, ENDLESS, "--trainer.enable_progress_bar=false"]
    checkpoint = Path("runs/killed/version_0/checkpoints/last.ckpt")
    endless = ["--trainer.max_steps=-1", "--checkpoint.every_n_updates=70", "--trainer.logger.name=killed"]
    with started([sys.executable, "-m", "ksm_lightning.cli", "fit", *options, *endless]) as process:
        wait_until(checkpoint.is_file, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE) == -signal.SIGKILL
    stopped_at = read_checkpoint(checkpoint)["global_step"]
    assert stopped_at >= 50
    assert stopped_at % 70 == 0 or stopped_at % 50 == 0  # every 70 updates, and before each validation
    options.append(f"--trainer.max_steps={stopped_at + 300}")
    run("fit", *options, f"--ckpt_path={checkpoint}", "--trainer.logger.name=continued")
    run("fit", *options, "--trainer.logger.name=whole")
    whole, continued = weights("runs/whole/version_0"), weights("runs/continued/version_0")
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_a_run_without_updates_to_do_is_refused(capsys):
    run("fit", *FEW)
    capsys.readouterr()
    assert "No update is left to do" in refused(capsys, "fit", *FEW, CHECKPOINT)
    assert "No update is left to do" in refused(capsys, "fit", *FEW, "--trainer.max_steps=0")
    shorter = "--model.phases=[{updates: 90}]"
    assert "ends with update 90, and 100 are done" in refused(capsys, "fit", *QUICK, CHECKPOINT, shorter)
    assert [path.name for path in Path("runs/half_moons").iterdir()] == ["version_0"]


def test_evaluation_accepts_no_options_of_the_model(capsys):
    run("fit", *FEW)
    capsys.readouterr()
    message = refused(capsys, "validate", "--config", HALF_MOONS, CHECKPOINT, "--model.ridge=1")
    assert "takes the model from the checkpoint: remove --model.ridge=1" in message


def test_another_seed_for_the_batches_of_a_continued_run_is_refused(capsys):
    run("fit", *FEW)
    capsys.readouterr()
    message = refused(capsys, "fit", *FEW, CHECKPOINT, "--trainer.max_steps=150", "--data.seed=77")
    assert "draws its batches with seed 0, but `seed` is 77" in message


def test_evaluation_without_a_checkpoint_is_refused(capsys):
    for command in ("validate", "test", "predict"):
        sentence = refused(capsys, command, "--config", HALF_MOONS)
        assert sentence.endswith("needs a trained network: give its run folder as --ckpt_path.")


def test_the_cpu_is_used_where_auto_would_be_apples_gpu(capsys, monkeypatch):
    monkeypatch.setattr("lightning.fabric.accelerators.mps.MPSAccelerator.is_available", lambda: True)
    with pytest.warns(UserWarning, match="^Apple's GPU .MPS. has no float64.* the run uses the CPU.$") as caught:
        run("fit", *FEW, "--trainer.max_steps=20")
    assert len([each for each in caught if "MPS" in str(each.message) or "GPU" in str(each.message)]) == 1
    out = capsys.readouterr().out
    assert "200 points of 2 features, on 1 x cpu with 64 points per update, seed 0." in out
    assert "Trained for 20 updates" in out
    for accelerator in ("mps", "gpu"):
        sentence = refused(capsys, "fit", *FEW, f"--trainer.accelerator={accelerator}")
        assert sentence.endswith("set --trainer.accelerator=cpu.")


def trainers(monkeypatch, read, *options: list[str]) -> list:
    """What ``read`` finds in ``ksm fit`` with each of the options, before anything is loaded or written."""
    found = []

    def stop(cli):
        found.append(read(cli))
        raise KeyboardInterrupt

    monkeypatch.setattr("ksm_lightning.cli.lightning_cli.KSMCLI.before_fit", stop)
    for more in options:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run("fit", *FEW, *more)
    return found


def test_run_folders_go_below_default_root_dir(monkeypatch):
    below, absolute = "--trainer.default_root_dir=elsewhere", str(Path("absolute").absolute())
    found = trainers(
        monkeypatch, lambda cli: cli.trainer.logger.root_dir, [], [below],
        [below, "--trainer.logger.save_dir=elsewhere/runs"],  # as config.yaml of that run has it
        [below, f"--trainer.logger.save_dir={absolute}"],
    )  # fmt: skip
    inside = "elsewhere/runs/half_moons"
    assert found == ["runs/half_moons", inside, inside, f"{absolute}/half_moons"]
    assert trainers(monkeypatch, lambda cli: cli.trainer.logger, [below, "--trainer.logger=false"]) == [None]


def test_one_gpu_is_used_unless_more_are_asked_for(monkeypatch):
    """With eight GPUs, as Lightning sees them."""
    for package in ("fabric", "pytorch"):
        monkeypatch.setattr(f"lightning.{package}.accelerators.cuda.num_cuda_devices", lambda: 8)
    found = trainers(
        monkeypatch, lambda cli: cli._devices(), [], ["--trainer.devices=auto"],
        ["--trainer.devices=4", "--trainer.num_nodes=2", "--data.batch_size=8"],
    )  # fmt: skip
    assert found == [
        "1 x cuda with 64 points per update",
        "8 x cuda with 64 points per device and 512 per update",
        "8 x cuda with 8 points per device and 64 per update",
    ]


@pytest.mark.parametrize(
    "options", [FEW, ["--config", HALF_MOONS], ["--config", HALF_MOONS, "--model.bound=tight"]],
    ids=["phases", "adaptive", "tight"],
)  # fmt: skip
def test_a_width_out_of_range_is_refused_in_one_sentence(capsys, options):
    """It was "value cannot be converted to type float without overflow"."""
    sentence = refused(capsys, "fit", *options, "--model.kernel_params.sigma=1e-30")
    assert "GaussianKernel(sigma=1e-30) is out of the range of torch.float32" in sentence
    assert not list(Path("runs").rglob("version_*"))
