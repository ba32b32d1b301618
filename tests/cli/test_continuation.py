"""A continued run has the data, the scaling and the seed of its checkpoint, and its config.yaml says so."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from helpers.commands import refused
from ksm_lightning.cli import main
from ksm_lightning.cli.continuation import use_conditions
from ksm_lightning.kernels import auto_width
from ksm_lightning.runs.checkpoint import read_checkpoint

COMMON = [
    "--data=ArrayDataModule", "--data.path=x.npy", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=0", "--figures.num_neurons=1",
]  # fmt: skip
CONDITIONS = [
    "--model.num_neurons=3", "--seed_everything=7", "--data.scaling=feature", "--data.centre=true",
    "--data.batch_size=16",
]  # fmt: skip
CHECKPOINT = "--ckpt_path=runs/ksm/version_0/checkpoints/last.ckpt"


def fit(*options: str, updates: int = 20, name: str = "ksm") -> None:
    main(["fit", *COMMON, f"--model.updates={updates}", f"--trainer.logger.name={name}", *options])


def versions() -> list[str]:
    return sorted(path.name for path in Path("runs/ksm").iterdir())


def config(folder: str) -> dict:
    return yaml.safe_load((Path(folder) / "config.yaml").read_text())


def weights(folder: str) -> dict[str, torch.Tensor]:
    return read_checkpoint(Path(folder) / "checkpoints" / "last.ckpt")["state_dict"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with points and a run of 10 updates on them, with a seed, a scaling and a batch size of its own."""
    folder = tmp_path_factory.mktemp("trained")
    x = np.random.RandomState(0).randn(60, 4) * [1, 2, 3, 4]
    arrays = {
        "x": x, "y": np.random.RandomState(1).randn(60, 4), "single": x.astype(np.float32),
        "longer": np.concatenate([x, x[:1]]),
    }  # fmt: skip
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # The schedule depends on its length, so the run is cut off by the trainer.
        fit(*CONDITIONS, "--trainer.max_steps=10")
    return folder


@pytest.fixture(autouse=True)
def _copy(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")


def test_options_that_contradict_the_run_are_refused_before_a_folder_is_made(capsys):
    cases = {
        "--data.path=y.npy": "was trained on other data (60 points of 4 features; their values differ): continue with",
        "--data.path=longer.npy": "other data (60 points of 4 features; now it is 61 points of 4 features): continue",
        "--data.scaling=none": "has data.scaling=feature, but none was given: remove the option to continue that run",
        "--data.centre=false": "has data.centre=True, but False was given: remove the option",
        "--seed_everything=8": "has seed_everything=7, but 8 was given: remove the option",
        "--seed_everything=true": "has seed_everything=7, but True was given: remove the option",
        "--model.init=normal": "has init=data, but normal was given: remove the option",
    }
    for option, sentence in cases.items():
        found = refused(capsys, "fit", *COMMON, "--model.updates=30", CHECKPOINT, option)
        assert found.startswith("The checkpoint runs/ksm/version_0/checkpoints/last.ckpt "), option
        assert sentence in found
    assert versions() == ["version_0"]


def test_a_continued_run_takes_unset_conditions_from_the_checkpoint_and_records_them():
    fit(CHECKPOINT)
    fit(*CONDITIONS, name="whole")
    found = config("runs/ksm/version_1")
    assert found["seed_everything"] == 7
    arguments = {name: found["data"]["init_args"][name] for name in ("scaling", "centre", "batch_size", "seed")}
    assert arguments == {"scaling": "feature", "centre": True, "batch_size": 16, "seed": None}
    whole, continued = weights("runs/whole/version_0"), weights("runs/ksm/version_1")
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_seeds_of_batches_and_seeds_that_lightning_refuses_are_recorded_as_they_are_in_force():
    content = read_checkpoint("runs/ksm/version_0/checkpoints/last.ckpt")
    large = 2**40
    for run, batches, given, recorded in (
        (7, 7, None, (7, None)), (7, 5, None, (7, 5)), (large, large, None, (False, large)), (7, 0, False, (7, 0))
    ):  # fmt: skip
        content["ksm_lightning"]["training"]["seed"], content["ArrayDataModule"]["seed"] = run, batches
        options = {
            "seed_everything": 0 if given is None else given,
            "data": {"class_path": "a.ArrayDataModule", "init_args": {"seed": None}},
        }
        use_conditions(options, {} if given is None else {"seed_everything": given}, content, "x.ckpt")
        assert (options["seed_everything"], options["data"]["init_args"]["seed"]) == recorded


def test_the_configuration_of_a_run_continues_it_on_the_same_points_in_another_dtype():
    options = ["--trainer.max_steps=-1", "--data.path=single.npy"]
    main(["fit", "--config", "runs/ksm/version_0/config.yaml", CHECKPOINT, *options])
    assert read_checkpoint("runs/ksm/version_1/checkpoints/last.ckpt")["global_step"] == 20


def test_other_batches_and_another_precision_are_announced_in_one_sentence():
    with pytest.warns(UserWarning, match="The run continues, but") as caught:
        fit(CHECKPOINT, "--data.batch_size=32", "--trainer.precision=64-true")
    assert [str(warning.message) for warning in caught] == [
        "The run continues, but not with the updates that it would have made: the points per "
        "update are 32 x 1 = 32 and were 16 x 1 = 16 (batch_size x processes), precision "
        "is 64-true and was 32-true."
    ]
    assert config("runs/ksm/version_1")["data"]["init_args"]["batch_size"] == 32
    assert weights("runs/ksm/version_1")["network.W"].dtype == torch.float64


def test_evaluation_on_other_data_is_allowed():
    main(["predict", *COMMON, CHECKPOINT, "--data.path=longer.npy", "--features.path=y.npz"])
    assert np.load("y.npz")["features"].shape == (61, 3)


def test_a_width_of_auto_is_a_number_that_a_continued_run_keeps(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    saved = read_checkpoint("runs/ksm/version_0/checkpoints/last.ckpt")["hyper_parameters"]["kernel_params"]
    x = np.load("x.npy")
    x = torch.tensor((x - x.mean(0)) / x.std(0))
    assert saved["sigma"] == pytest.approx(auto_width(x), rel=1e-3)
    assert config("runs/ksm/version_0")["model"]["kernel_params"] in (None, {"sigma": "auto"})
    capsys.readouterr()
    fit(*CONDITIONS, CHECKPOINT, "--model.kernel_params.sigma=auto")
    assert f"Kernel:             GaussianKernel(sigma={saved['sigma']})" in capsys.readouterr().out
    assert read_checkpoint("runs/ksm/version_1/checkpoints/last.ckpt")["hyper_parameters"]["kernel_params"] == saved
    sentence = refused(capsys, "fit", *COMMON, *CONDITIONS, CHECKPOINT, "--model.kernel_params.sigma=2.5")
    assert f"has kernel_params={saved}, but {{'sigma': 2.5}} was given" in sentence


@pytest.mark.filterwarnings("ignore:The network does not respond")  # landmarks between points, of a narrow kernel
@pytest.mark.parametrize(("sigma", "problem"), [(0.05, "too narrow for 3 features"), (500, "too wide")])
def test_the_end_says_if_a_kernel_is_too_narrow_or_too_wide(trained, tmp_path, monkeypatch, capsys, sigma, problem):
    shutil.copy(trained / "x.npy", tmp_path)
    monkeypatch.chdir(tmp_path)
    fit("--model.num_neurons=3", f"--model.kernel_params.sigma={sigma}", updates=3)
    sentence = f"GaussianKernel(sigma={float(sigma)}) is {problem}"
    assert sentence in capsys.readouterr().out
