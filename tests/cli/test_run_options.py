"""A run folder wherever a checkpoint is accepted, and evaluations that find the configuration of their run."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from helpers.commands import FEW, HALF_MOONS, refused
from ksm_lightning import FeatureExtractor, KernelSimilarityMatching
from ksm_lightning.cli import main
from ksm_lightning.cli.front import COMMANDS
from ksm_lightning.cli.run_options import options_of_run
from ksm_lightning.runs.checkpoint import read_checkpoint

RUN = "runs/half_moons/version_0"
QUIET = "--trainer.enable_progress_bar=false"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a finished run of 20 updates."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", *FEW, "--trainer.max_steps=20", "--kernel_error.max_points=50", "--data.noise=0.2"])
    return folder


@pytest.fixture
def _in_folder_of_run(trained, monkeypatch):
    monkeypatch.chdir(trained)


def scores(out: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+/\w+)[ │]+([-\d.e]+)", out)}


@pytest.mark.usefixtures("_in_folder_of_run")
def test_validate_and_test_take_data_and_evaluations_from_the_run(capsys):
    main(["validate", f"--ckpt_path={RUN}", QUIET])
    alone = scores(capsys.readouterr().out)
    main(["validate", "--config", f"{RUN}/config.yaml", "--ckpt_path", f"{RUN}/checkpoints/last.ckpt"])
    assert alone == scores(capsys.readouterr().out)
    assert {"val/energy", "val/kernel_nrmse"} <= set(alone)
    main(["test", f"--ckpt_path={RUN}", QUIET, "--kernel_error.max_points=200"])
    assert scores(capsys.readouterr().out)["test/kernel_nrmse"] > 0
    taken = yaml.safe_load(options_of_run(["validate", f"--ckpt_path={RUN}"]).text)
    assert taken["data"]["init_args"]["noise"] == 0.2
    assert taken["kernel_error"]["max_points"] == 50
    assert set(taken) == {"seed_everything", "data", "kernel_error", "probe", "kmeans"}, "the trainer names classes"


@pytest.mark.usefixtures("_in_folder_of_run")
def test_predict_takes_the_data_from_the_run(tmp_path, capsys):
    main(["predict", "--ckpt_path", RUN, f"--features.path={tmp_path / 'y.npy'}", QUIET])
    model = KernelSimilarityMatching.load_from_checkpoint(RUN)
    y = np.load(tmp_path / "y.npy")
    assert y.shape == (200, model.network.num_neurons)


@pytest.mark.usefixtures("_in_folder_of_run")
def test_options_win_over_those_of_the_run(capsys):
    taken = options_of_run(["validate", f"--ckpt_path={RUN}", "--data=DigitsDataModule"])
    assert "data" not in yaml.safe_load(taken.text)
    message = refused(capsys, "validate", f"--ckpt_path={RUN}", "--data=DigitsDataModule", QUIET)
    assert message.startswith("The data has 64 features, but the preprocessing is for 2")
    assert options_of_run(["fit", f"--ckpt_path={RUN}"]) is None


@pytest.mark.usefixtures("_in_folder_of_run")
def test_a_run_folder_stands_for_its_last_checkpoint_in_python():
    expected = read_checkpoint(f"{RUN}/checkpoints/last.ckpt")["state_dict"]["network.W"]
    assert torch.equal(read_checkpoint(RUN)["state_dict"]["network.W"], expected)
    assert torch.equal(KernelSimilarityMatching.load_from_checkpoint(Path(RUN)).network.W, expected)
    x = np.zeros((3, 2), np.float32)
    ours, theirs = (FeatureExtractor.from_checkpoint(path) for path in (RUN, f"{RUN}/checkpoints/last.ckpt"))
    assert ours.identity == theirs.identity
    assert ours.transform(x).shape == (3, 4)


@pytest.mark.usefixtures("_in_folder_of_run")
def test_fit_export_and_report_accept_a_run_folder(tmp_path, capsys):
    main(["fit", *FEW, "--data.noise=0.2", "--trainer.max_steps=30", f"--ckpt_path={RUN}", "--trainer.logger=false"])
    assert "Trained for 30 updates" in capsys.readouterr().out
    main(["export", f"--ckpt_path={RUN}"])
    assert (Path(RUN) / "neural.safetensors").is_file()
    main(["report", RUN, f"--ckpt_path={RUN}", f"--out={tmp_path / 'r.html'}", "--max_points=50"])
    assert (tmp_path / "r.html").is_file()


@pytest.mark.parametrize(
    "example", [example for name in ("fit", "validate", "predict", "compare") for example in COMMANDS[name].examples]
)
@pytest.mark.usefixtures("_in_folder_of_run")
def test_the_examples_of_the_help_are_accepted(capsys, example):
    with pytest.raises(SystemExit) as stop:
        main([*example.split()[1:], "--print_config"])
    assert stop.value.code in (0, None), capsys.readouterr().err
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["data"]["class_path"].endswith("DataModule")


@pytest.mark.parametrize(
    ("command", "word"),
    [("fit", "last"), ("validate", "last"), ("test", "best"), ("export", "hpc"), ("export", "registry:m:version:v2")],
)
@pytest.mark.usefixtures("_in_folder_of_run")
def test_the_words_of_lightning_are_refused_with_the_newest_run(capsys, command, word):
    options = ["--config", HALF_MOONS] if command == "fit" else []
    assert refused(capsys, command, *options, f"--ckpt_path={word}") == (
        f"--ckpt_path={word} is a word of Lightning that ksm does not know: give a checkpoint or a run folder, such as "
        f"--ckpt_path={RUN}, the newest here."
    )


@pytest.mark.usefixtures("_in_folder_of_run")
def test_folders_without_a_checkpoint_get_one_sentence(capsys, tmp_path):
    assert refused(capsys, "validate", f"--ckpt_path={tmp_path}") == (
        f"{tmp_path} is a folder without checkpoints/last.ckpt: give that of a run, such as runs/half_moons/version_0."
    )
    sentence = refused(capsys, "export", "--ckpt_path=runs/half_moons")
    assert sentence.endswith("give that of a run, such as runs/half_moons/version_0.")


def test_nothing_that_a_run_folder_names_is_imported(trained, tmp_path, capsys, monkeypatch):
    """An evaluation without ``--config`` reads the folder as data."""
    folder = tmp_path / "runs" / "foreign" / "version_0"
    (folder / "checkpoints").mkdir(parents=True)
    source = trained / RUN
    (folder / "checkpoints" / "last.ckpt").write_bytes((source / "checkpoints" / "last.ckpt").read_bytes())
    config = yaml.safe_load((source / "config.yaml").read_text())
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for class_path in ("trap.Data", "torch.nn.Linear"):
        config["data"]["class_path"] = class_path
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        assert refused(capsys, "validate", f"--ckpt_path={folder}") == (
            f"{folder}/config.yaml names the data {class_path}, which is not of ksm_lightning, and nothing that a run "
            f"folder names is imported: if you trust the file, give it with --config={folder}/config.yaml."
        )
    config["data"] = {"class_path": "ksm_lightning.HalfMoonsDataModule", "init_args": {"num_points": 200}}
    config["trainer"]["callbacks"] = [{"class_path": "trap.Callback"}]
    config["kernel_error"]["max_points"] = {"class_path": "trap.Number"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    sentence = refused(capsys, "validate", f"--ckpt_path={folder}")
    assert sentence.startswith(f"{folder}/config.yaml: kernel_error.max_points: Expected int.")


@pytest.mark.usefixtures("_in_folder_of_run")
def test_help_offers_no_words_for_a_checkpoint(capsys):
    with pytest.raises(SystemExit):
        main(["validate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--ckpt_path RUN_OR_FILE The trained network: a run folder or a checkpoint." in text
    assert "registry:" not in text
    assert '"best"' not in text
