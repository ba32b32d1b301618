"""Your own data from the command line, as a new user tries it."""

import json

import numpy as np
import pytest

from helpers.commands import refused
from ksm_lightning.cli import main

FEW = ["--model.num_neurons=3", "--trainer.max_steps=4", "--trainer.enable_progress_bar=false",
       "--trainer.logger.name=own", "--figures.num_neurons=1", "--kernel_error.max_points=20"]  # fmt: skip
CLASSES = ("ant", "bee", "cat")


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A CSV file with an index, two columns of numbers and one of texts, in the current folder."""
    monkeypatch.chdir(tmp_path)
    x = np.random.RandomState(0).randn(30, 2)
    lines = [f"{i},{a:.17g},{b:.17g},{CLASSES[i % 3]}" for i, (a, b) in enumerate(x)]
    (tmp_path / "insects.csv").write_text("\n".join([",length,width,species", *lines]) + "\n")
    return x


def test_a_table_is_trained_on_after_the_question_about_its_labels_is_answered(table, tmp_path, capsys):
    options = ["--data=ArrayDataModule", "--data.path=insects.csv"]
    error = refused(capsys, "fit", *options, *FEW)
    assert error == (
        "Inputs must be numbers, but in insects.csv 'species' holds text ('ant'): set labels=species "
        "(--data.labels=species) if these are the labels, or ignore=species (--data.ignore=species) to leave it out."
    )
    assert not (tmp_path / "runs").exists()
    main(["fit", *options, "--data.labels=species", *FEW])
    printed = capsys.readouterr().out
    assert "on 30 points of 2 features" in printed
    assert "Linear probe:" in printed
    run = tmp_path / "runs" / "own" / "version_0"
    main(["predict", f"--config={run / 'config.yaml'}", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}",
          "--features.path=y.npz", "--trainer.enable_progress_bar=false"])  # fmt: skip
    written = np.load("y.npz")
    assert written["labels"].tolist() == [0, 1, 2] * 10
    assert json.loads(str(written["extractor"]))["label_names"] == list(CLASSES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.labels=kind"], "insects.csv has no column 'kind' for labels; it has length, width, species."),
        (["--data.ignore=[species,width,size]"], "insects.csv has no column 'size', which `ignore` names; it has "),
        (["--data.path=missing.csv"], "There is no data file missing.csv."),
    ],
)
def test_wrong_options_give_one_sentence(table, capsys, options, message):
    assert refused(capsys, "fit", "--data=ArrayDataModule", "--data.path=insects.csv", *options, *FEW).startswith(
        message
    )


def test_an_argument_that_a_datamodule_refuses_gives_its_own_sentence(table, capsys):
    options = ["--data=DatasetDataModule", "--data.dataset=insects", "--data.image_size=[3]"]
    assert refused(capsys, "fit", *options, *FEW) == (
        "`image_size` must be a height and a width in pixels, such as [28, 28], got [3]."
    )
