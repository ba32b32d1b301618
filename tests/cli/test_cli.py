"""The command ``ksm``, as a user types it."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ksm_lightning.cli import main
from ksm_lightning.runs.checkpoint import read_checkpoint

HALF_MOONS = str(ROOT / "configs" / "half_moons.yaml")
QUICK = ["--config", HALF_MOONS, "--model.num_neurons=4", "--data.num_points=200", "--data.updates_per_epoch=50"]
FEW = [*QUICK, "--trainer.max_steps=100", "--trainer.enable_progress_bar=false", "--figures.num_neurons=1"]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(command: str, *options: str) -> None:
    main([command, *options])


def refused(capsys, command: str, *options: str) -> str:
    """The one sentence on standard error, after checking that the exit code says failure."""
    with pytest.raises(SystemExit) as stop:
        main([command, *options])
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ksm: error: ")
    return lines[0].removeprefix("ksm: error: ")


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(Path(folder) / "checkpoints" / "last.ckpt")["state_dict"]


def test_a_run_folder_holds_config_checkpoint_events_and_figures(capsys):
    run("fit", *FEW)
    folder = Path("runs/half_moons/version_0")
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "checkpoints", "figures", "hparams.yaml"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    out = capsys.readouterr().out
    assert "Training 4 neurons with GaussianKernel(sigma=0.3) on 200 points of 2 features" in out
    assert re.search(r"Trained for 100 updates, [\d,]+ a second\.", out)
    printed = float(re.search(r"Final kernel NRMSE: ([\d.]+)", out)[1])
    scalars = EventAccumulator(str(folder)).Reload().Scalars("val/kernel_nrmse")
    assert len(scalars) == 2
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


def test_the_seed_decides_start_and_batches():
    for seed in (1, 2):
        run("fit", *FEW, f"--seed_everything={seed}", f"--trainer.logger.name=seed_{seed}")
    first, second = weights("runs/seed_1/version_0"), weights("runs/seed_2/version_0")
    assert not torch.equal(first["network.W"], second["network.W"])


def test_configs_compose():
    Path("more.yaml").write_text("model: {num_neurons: 3}\ntrainer: {max_steps: 50}\n")
    run("fit", *FEW[:2], "--config", "more.yaml", "--data.num_points=100")
    saved = yaml.safe_load(Path("runs/half_moons/version_0/config.yaml").read_text())
    assert saved["model"]["num_neurons"] == 3
    assert saved["model"]["kernel_params"] == {"sigma": 0.3}
    assert saved["trainer"]["max_steps"] == 50
    assert saved["data"]["init_args"]["num_points"] == 100


def test_validate_test_and_predict_use_the_checkpoint_and_leave_no_run(capsys):
    run("fit", *FEW)
    printed = float(re.search(r"Final kernel NRMSE: ([\d.]+)", capsys.readouterr().out)[1])
    checkpoint = "runs/half_moons/version_0/checkpoints/last.ckpt"
    # The data comes from the file, the model from the checkpoint, though the file says 16 neurons.
    data = ["--config", HALF_MOONS, "--data.num_points=200", "--trainer.enable_progress_bar=false"]
    run("validate", *data, "--ckpt_path", checkpoint)
    out = capsys.readouterr().out
    assert float(re.search(r"val/kernel_nrmse\s+│?\s*([\d.]+)", out)[1]) == pytest.approx(printed, abs=1e-4)
    # The run's own configuration serves as well.
    run("validate", "--config", "runs/half_moons/version_0/config.yaml", "--ckpt_path", checkpoint)
    assert float(re.search(r"val/kernel_nrmse\s+│?\s*([\d.]+)", capsys.readouterr().out)[1]) == pytest.approx(
        printed, abs=1e-4
    )
    run("test", *data, "--ckpt_path", checkpoint)
    assert "test/kernel_nrmse" in capsys.readouterr().out
    run("predict", *data, "--ckpt_path", checkpoint, "--features.path=y.npy")
    assert np.load("y.npy").shape == (200, 4)
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


def test_the_digits_config_trains():
    run("fit", "--config", str(ROOT / "configs" / "digits.yaml"), "--trainer.max_steps=20", "--model.num_neurons=5")
    assert weights("runs/digits/version_0")["network.W"].shape == (5, 64)
    assert Path("runs/digits/version_0/figures/weights.png").is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_opens_with_its_command(path):
    first = path.read_text().splitlines()[0]
    command = "compare" if path.parent.name == "compare" else "fit"
    assert first.startswith(f"# ksm {command} --config {path.relative_to(ROOT)} ")
    assert re.search(r"\d+ s|\d+ min", first)


# ---------------------------------------------------------------------- continuing a run


def test_continuing_takes_the_model_from_the_checkpoint():
    run("fit", *FEW, "--trainer.max_steps=60")
    # Nothing of the model is said, and neither are its phases: both come from the file.
    run(
        "fit",
        "--data=HalfMoonsDataModule",
        "--data.num_points=200",
        "--ckpt_path=runs/half_moons/version_0/checkpoints/last.ckpt",
        "--trainer.max_steps=100",
        "--trainer.logger.name=continued",
    )
    run("fit", *FEW, "--trainer.logger.name=whole")
    whole, continued = weights("runs/whole/version_0"), weights("runs/continued/version_0")
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_continuing_with_another_network_is_refused(capsys):
    run("fit", *FEW)
    capsys.readouterr()
    checkpoint = "--ckpt_path=runs/half_moons/version_0/checkpoints/last.ckpt"
    message = refused(capsys, "fit", *FEW, checkpoint, "--model.num_neurons=5")
    assert "has num_neurons=4, but 5 was asked for: drop the option" in message
    message = refused(capsys, "fit", *FEW, checkpoint, "--model.kernel_params={sigma: 0.4}")
    assert "has kernel_params={'sigma': 0.3}, but {'sigma': 0.4} was asked for" in message
    assert [path.name for path in Path("runs/half_moons").iterdir()] == ["version_0"]


def test_what_the_user_says_of_the_phases_counts_when_continuing():
    run("fit", *FEW)
    run(
        "fit",
        *FEW,
        "--ckpt_path=runs/half_moons/version_0/checkpoints/last.ckpt",
        "--model.phases=[{updates: 130, eta_w: 0.0, eta_q: 0.0, eta_l: 0.1}]",
        "--trainer.max_steps=-1",
    )
    first, second = weights("runs/half_moons/version_0"), weights("runs/half_moons/version_1")
    assert torch.equal(first["network.W"], second["network.W"])
    assert not torch.equal(first["network.L"], second["network.L"])
    assert read_checkpoint("runs/half_moons/version_1/checkpoints/last.ckpt")["global_step"] == 130


def test_a_killed_run_continues_to_the_same_bits():
    """SIGKILL, then ``--ckpt_path``: the weights equal those of a run that nobody stopped."""
    command = [
        sys.executable,
        "-m",
        "ksm_lightning.cli",
        "fit",
        *QUICK,
        "--checkpoint.every_n_updates=70",
    ]
    command += ["--trainer.enable_progress_bar=false", "--trainer.max_steps=4000"]
    checkpoint = Path("runs/killed/version_0/checkpoints/last.ckpt")
    process = subprocess.Popen(
        [*command, "--trainer.logger.name=killed"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not checkpoint.is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    stopped_at = read_checkpoint(checkpoint)["global_step"]
    assert 0 < stopped_at < 4000
    assert stopped_at % 70 == 0 or stopped_at % 50 == 0  # every 70 updates, and before each validation
    options = ["--trainer.enable_progress_bar=false", "--trainer.max_steps=4000"]
    run("fit", *QUICK, *options, f"--ckpt_path={checkpoint}", "--trainer.logger.name=continued")
    run("fit", *QUICK, *options, "--trainer.logger.name=whole")
    whole, continued = weights("runs/whole/version_0"), weights("runs/continued/version_0")
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.kernel_params={sigma: -1}"], "`sigma` must be positive and finite, got -1.0"),
        (["--model.kernel_params={width: 1}"], "cannot be made from {'width': 1.0}"),
        (["--model.kernel=mine"], "No kernel is registered as 'mine'"),
        (["--model.ridge=0"], "`ridge` must be positive and finite, got 0.0"),
        (["--model.num_neurons=0"], "`num_neurons` must be at least 1, got 0"),
        (["--model.phases=[{updates: 5, eta_w: -1}]"], "`eta_w` must be finite and not negative, got -1.0"),
        (["--model.phases=[]"], "at least one phase"),
        (["--model.in_features=3"], "The data has 2 features, but the model was made for in_features=3"),
        (["--model.neurons=3"], "--model.neurons"),
        (["--config=missing.yaml"], "missing.yaml"),
        (["--config=typo.yaml"], "num_neuron"),
        (["--config=broken.yaml"], "broken.yaml"),
        (["--config=null.yaml"], "`model`"),
        (["--config=loop.yaml"], "RecursionError"),
        (["--model.kernel=power_cosine", "--model.kernel_params={alpha: .inf}"], "`alpha` must be a whole number"),
        (["--model.kernel_params={sigma: abc}"], "model.kernel_params: "),
        (["--trainer.barebones=true"], "--trainer.barebones"),
        (["--data.noise=-1"], "`noise` must be finite and not negative"),
        (["--data.batch_size=0"], "`batch_size` must be at least 1"),
        (["--ckpt_path=missing.ckpt"], "There is no checkpoint missing.ckpt"),
        (["--ckpt_path=cut.ckpt"], "cut.ckpt is damaged"),
        (["--trainer.precision=bf16-mixed"], "full precision"),
        (["--trainer.logger.version=taken"], "exists already"),
        (["--figures.max_points=0"], "`max_points` of at least 2"),
    ],
)
def test_bad_options_get_one_sentence_and_leave_nothing(capsys, options, message):
    Path("typo.yaml").write_text("model: {num_neuron: 3}\n")
    Path("broken.yaml").write_text("model: {num_neurons: [\n")
    Path("null.yaml").write_text("model: null\n")
    Path("loop.yaml").write_text("model: &a [*a]\n")
    Path("cut.ckpt").write_bytes(b"PK\x03\x04 half of a checkpoint")
    taken = Path("runs/half_moons/taken")
    taken.mkdir(parents=True)
    assert message in refused(capsys, "fit", *FEW, *options)
    assert [path.name for path in Path("runs").rglob("*")] == ["half_moons", "taken"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nan.npy", np.array([[1.0, np.nan]]), "holds nan at row 0, column 1"),
        ("empty.npy", np.zeros((0, 2)), "is empty"),
        ("empty.csv", b"", "is empty"),
        ("text.csv", b"1,2\n3,four\n", "line 2: 'four' is not a number"),
        ("missing.npy", None, "There is no data file missing.npy"),
    ],
)
def test_bad_data_gets_one_sentence_and_leaves_nothing(capsys, name, content, message):
    if isinstance(content, bytes):
        Path(name).write_bytes(content)
    elif content is not None:
        np.save(name, content)
    assert message in refused(capsys, "fit", "--data=ArrayDataModule", f"--data.path={name}")
    assert not Path("runs").exists()


def test_evaluation_without_a_checkpoint_is_refused(capsys):
    for command in ("validate", "test", "predict"):
        assert "needs a trained network: give --ckpt_path" in refused(capsys, command, "--config", HALF_MOONS)


def test_no_data_is_refused(capsys):
    assert "data" in refused(capsys, "fit", "--model.num_neurons=3")


def test_a_divergence_keeps_the_last_checkpoint(capsys):
    options = [*FEW, "--checkpoint.every_n_updates=1", "--trainer.log_every_n_steps=10"]
    message = refused(capsys, "fit", *options, "--model.phases=[{updates: 100, eta_w: 1e30, eta_q: 1e30}]")
    assert "Training diverged at update 2: the energy became non-finite." in message
    assert "The last good checkpoint is runs/half_moons/version_0/checkpoints/last.ckpt." in message
    assert all(value.isfinite().all() for value in weights("runs/half_moons/version_0").values())


def test_a_divergence_between_two_logged_updates_is_seen_too(capsys):
    options = [*FEW, "--trainer.log_every_n_steps=100000", "--trainer.max_steps=30"]
    message = refused(capsys, "fit", *options, "--model.phases=[{updates: 100, eta_w: 1e30, eta_q: 1e30}]")
    assert "Training diverged at update 2: the energy" in message


def test_nothing_left_to_do_is_refused(capsys):
    run("fit", *FEW)
    checkpoint = "--ckpt_path=runs/half_moons/version_0/checkpoints/last.ckpt"
    capsys.readouterr()
    assert "Nothing is left to do" in refused(capsys, "fit", *FEW, checkpoint)
    assert "Nothing is left to do" in refused(capsys, "fit", *FEW, "--trainer.max_steps=0")
    shorter = "--model.phases=[{updates: 90}]"
    assert "ends with update 90 and 100 are done" in refused(capsys, "fit", *QUICK, checkpoint, shorter)
    assert [path.name for path in Path("runs/half_moons").iterdir()] == ["version_0"]


def test_the_error_printed_says_of_which_update_it_is(capsys):
    run("fit", *FEW, "--trainer.max_steps=150", "--kernel_error.min_updates_between=1000")
    assert "Final kernel NRMSE" in capsys.readouterr().out
    run("fit", *FEW, "--trainer.max_steps=150", "--trainer.check_val_every_n_epoch=2")
    assert "Kernel NRMSE at update 100:" in capsys.readouterr().out


def test_without_a_logger_nothing_is_written(capsys):
    before = set(Path().iterdir())
    run("fit", *FEW, "--trainer.logger=false")
    assert set(Path().iterdir()) == before
    assert "Nothing was saved" in capsys.readouterr().out


def test_evaluation_takes_no_other_model(capsys):
    run("fit", *FEW)
    capsys.readouterr()
    checkpoint = "--ckpt_path=runs/half_moons/version_0/checkpoints/last.ckpt"
    message = refused(capsys, "validate", "--config", HALF_MOONS, checkpoint, "--model.ridge=1")
    assert "takes the model from the checkpoint: drop --model.ridge=1" in message


def test_another_seed_for_the_batches_of_a_run_is_refused(capsys):
    run("fit", *FEW)
    capsys.readouterr()
    checkpoint = "--ckpt_path=runs/half_moons/version_0/checkpoints/last.ckpt"
    message = refused(capsys, "fit", *FEW, checkpoint, "--trainer.max_steps=150", "--data.seed=77")
    assert "draws its batches with seed 0, but 77 was asked for" in message


def test_a_failure_before_the_first_update_leaves_no_folder(capsys, monkeypatch):
    def fail(*args):
        raise OSError("the device is on fire")

    monkeypatch.setattr("ksm_lightning.module.KernelSimilarityMatching.on_fit_start", fail)
    assert "the device is on fire" in refused(capsys, "fit", *FEW)
    assert list(Path("runs").rglob("*")) == [Path("runs/half_moons")]


# ---------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_explains_every_option_of_ours(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Neurons n, the dimension of the representation." in text
    assert "The paper's lambda, positive." in text
    text_of_options = text.partition("options: ")[2]
    ours = re.findall(
        r"(--(?:model|kernel_error|figures|checkpoint|features)\.[a-z_]+)(?:\+)? [A-Z{][^ ,]* (.{12})", text_of_options
    )
    assert {option for option, _ in ours} >= {"--model.num_neurons", "--model.phases", "--model.kernel_params"}
    for option, explanation in ours:
        assert not explanation.startswith(("(type", "--")), option
    has = {name: f"--{name}." in text for name in ("figures", "checkpoint", "features")}
    assert has == {"figures": command == "fit", "checkpoint": command == "fit", "features": command == "predict"}


def test_help_of_a_datamodule(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--data.help=ArrayDataModule"])
    assert "The file with the training points." in " ".join(capsys.readouterr().out.split())


def test_print_config_is_a_config(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", HALF_MOONS, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["kernel_params"] == {"sigma": 0.3}
    assert config["data"]["init_args"]["batch_size"] == 64


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_understood(config, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(config), "--print_config"])
    assert stop.value.code in (0, None)
    written, understood = yaml.safe_load(config.read_text()), yaml.safe_load(capsys.readouterr().out)
    for name, value in written["model"].items():
        assert understood["model"][name] == value or name == "phases", name


@pytest.mark.parametrize("config", sorted((ROOT / "configs" / "compare").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_of_a_comparison_is_understood(config, monkeypatch):
    from ksm_lightning.cli import compare as command

    given = {}
    monkeypatch.setattr(command, "compare", _like(command.compare, given))
    main(["compare", "--config", str(config), "--seeds=7"])
    written = yaml.safe_load(config.read_text())
    assert type(given.pop("data")).__name__ == written.pop("data")["class_path"]
    assert given["seeds"] == 7
    del written["seeds"]
    assert {name: given[name] for name in written} == written


def _like(function, given):
    """A function with the same options that keeps them."""

    @functools.wraps(function)
    def keep(**options):
        given.update(options)

    return keep
