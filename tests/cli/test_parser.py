"""Wrong options and files get one sentence; ``--help`` explains all options."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from helpers.commands import FEW, HALF_MOONS, refused
from ksm_lightning.cli import main
from ksm_lightning.cli.parser import KSMArgumentParser

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.kernel_params={sigma: -1}"], "`sigma` must be positive and finite, got -1.0"),
        (["--model.kernel_params={width: 1}"], "it has no parameter 'width'. Its parameters, which are"),
        (["--model.kernel=mine"], "No kernel is registered as 'mine'"),
        (["--model.ridge=0"], "`ridge` must be positive and finite, got 0.0"),
        (["--model.num_neurons=0"], "`num_neurons` must be at least 1, got 0"),
        (["--model.phases=[{updates: 5, eta_w: -1}]"], "`eta_w` must be finite and not negative, got -1.0"),
        (["--model.phases=[]"], "at least one phase"),
        (["--model.in_features=3"], "The data has 2 features, but the model has in_features=3"),
        (["--model.neurons=3"], "--model.neurons"),
        (["--model.num_neuron=3"], "--model.num_neuron=3, did you mean --model.num_neurons; see ksm fit --help."),
        (["--conf=half_moons"], "--conf=half_moons, did you mean --config; see"),
        (["--model.phases=mnist"], "model.phases: Expected list; Expected one of 'paper_half_moons', 'paper_mnist'"),
        (["--model.num_neurons=few"], "model.num_neurons: Expected int. Got value: few; see ksm fit --help."),
        (["--data.noises=1"], "data: Option 'noises' is not accepted; see ksm fit --help."),
        (["--config=null.yaml"], "The section `model` is empty"),
        (["--config=loop.yaml"], "loop.yaml is not valid YAML: it is nested too deeply."),
        (["--model.kernel=power_cosine", "--model.kernel_params={alpha: .inf}"], "`alpha` must be a whole number"),
        (["--model.kernel_params={sigma: abc}"], "model.kernel_params: "),
        (["--trainer.barebones=true"], "--trainer.barebones"),
        (["--data.noise=-1"], "`noise` must be finite and not negative"),
        (["--data.batch_size=0"], "`batch_size` must be at least 1"),
        (["--data.batch_size=auto"], "batch_size: Expected int. Got value: auto; see ksm fit --help."),
        (["--ckpt_path=missing.ckpt"], "There is no checkpoint missing.ckpt"),
        (["--ckpt_path=cut.ckpt"], "cut.ckpt is damaged"),
        (["--trainer.precision=bf16-mixed"], "full precision"),
        (["--trainer.logger.version=taken"], "exists already"),
        (["--figures.max_points=0"], "`max_points` of at least 2"),
        (["--kernel_error.num_features=5"], "between 1 and the number of landmarks, 4, got 5"),
        (["--probe.num_features=3"], "The neural readout always has 4 features, one per neuron"),
        (["--kmeans.readout=nystroem", "--kmeans.num_features=0"], "between 1 and the number of landmarks, 4, got 0"),
    ],
)
def test_bad_options_get_one_sentence_and_leave_nothing(capsys, options, message):
    Path("null.yaml").write_text("model: null\n")
    Path("loop.yaml").write_text("model: &a [*a]\n")
    Path("cut.ckpt").write_bytes(b"PK\x03\x04 half of a checkpoint")
    taken = Path("runs/half_moons/taken")
    taken.mkdir(parents=True)
    assert message in refused(capsys, "fit", *FEW, *options)
    assert [path.name for path in Path("runs").rglob("*")] == ["half_moons", "taken"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: {num_neuron: 3}", "overlay.yaml: Subcommand 'fit' does not accept option 'model.num_neuron'"),
        ("modle: {num_neurons: 3}", "overlay.yaml: Subcommand 'fit' does not accept option 'modle.num_neurons'"),
        ("model: {num_neurons: few}", "overlay.yaml: model.num_neurons: Expected int. Got value: few"),
        ("data: {init_args: {noises: 1}}", "overlay.yaml: data: Option 'noises' is not accepted"),
        ("trainer: {logger: {init_args: {nme: x}}}", "overlay.yaml: trainer.logger: Option 'nme' is not accepted"),
        ("model: {num_neurons: [", "The configuration overlay.yaml is not valid YAML: while parsing a flow node"),
        ("", "The configuration overlay.yaml must hold named options, such as `model: ...`, got nothing."),
        ("- model", "The configuration overlay.yaml must hold named options, such as `model: ...`, got a list."),
        (None, "There is no configuration overlay.yaml, neither as a file nor in the package"),
    ],
)
def test_the_error_names_the_file_at_fault(capsys, content, message):
    Path("good.yaml").write_text("model: {num_neurons: 3}")
    if content is not None:
        Path("overlay.yaml").write_text(content)
    for files in (["overlay.yaml"], ["good.yaml", "overlay.yaml"], ["overlay.yaml", "good.yaml"]):
        options = [f"--config={path}" for path in files]
        assert refused(capsys, "fit", "--config", HALF_MOONS, *options).startswith(message)
    assert not Path("runs").exists()


def test_the_error_names_no_file_if_the_command_line_is_at_fault(capsys):
    message = refused(capsys, "fit", "--config", HALF_MOONS, "--data.noises=1")
    assert message.startswith("data: Option 'noises' is not accepted")


def test_an_overlay_changes_single_options_of_the_base_file(capsys):
    Path("overlay.yaml").write_text(
        "model: {updates: null, phases: paper_half_moons}\n"
        "data: {init_args: {noise: 0.2}}\n"
        "trainer: {logger: {init_args: {name: other}}}\n"
    )
    with pytest.raises(SystemExit):
        main(["fit", "--config", HALF_MOONS, "--config", "overlay.yaml", "--data.num_points=100", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["model"]["updates"], config["model"]["phases"]) == (None, "paper_half_moons")
    assert config["model"]["kernel_params"] == {"sigma": 0.3}
    data, logger = config["data"], config["trainer"]["logger"]
    assert data["class_path"].endswith("HalfMoonsDataModule")
    assert [data["init_args"][name] for name in ("noise", "num_points", "batch_size")] == [0.2, 100, 64]
    assert logger["class_path"].endswith("RunLogger")
    assert (logger["init_args"]["name"], logger["init_args"]["save_dir"]) == ("other", "runs")


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


def test_a_run_without_data_is_refused(capsys):
    assert "No data set is chosen: give a complete file first" in refused(capsys, "fit", "--model.num_neurons=3")


# ---------------------------------------------------------------------- help


def test_help_lists_every_command_with_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for command in ("fit", "validate", "test", "predict", "export", "compare", "report", "configs"):
        assert f". ksm {command} " in text


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_explains_every_option_of_this_package(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Number of neurons n, the dimension of the representation." in text
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


def test_help_begins_with_examples_and_the_options_of_this_package(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:7] == [
        "usage: ksm fit [OPTIONS]", "", "Train a network and write a run folder.", "", "examples:",
        "  ksm fit --config half_moons", "  ksm fit --config half_moons --model.num_neurons=32 --seed_everything=1",
    ]  # fmt: skip
    assert max(map(len, lines)) <= 100
    sections = [match[1] for line in lines if (match := re.match(r"[A-Z].*\(--(\w+)\)", line))]
    assert sections == [
        "model", "data", "kernel_error", "probe", "kmeans", "figures", "guard", "checkpoint", "trainer"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["export"], "--ckpt_path is required; see ksm export --help."),
        (["report"], "RUN is required; see ksm report --help."),
        (["fit", "--data=ArrayDataModule"], "--data.path is required; see ksm fit --help."),
        (["compare", "--data=ArrayDataModule"], "--data.path is required; see ksm compare --help."),
    ],
    ids=str,
)
def test_a_missing_option_is_named_as_it_is_typed(capsys, command, sentence):
    assert refused(capsys, *command) == sentence


def test_help_of_a_datamodule(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--data.help=ArrayDataModule"])
    assert "File with the training points." in " ".join(capsys.readouterr().out.split())


def test_print_config_is_a_config(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", HALF_MOONS, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["kernel_params"] == {"sigma": 0.3}
    assert config["data"]["init_args"]["batch_size"] == 64


def test_a_configuration_is_written_completely_or_not_at_all(monkeypatch):
    parser = KSMArgumentParser(prog="ksm")
    parser.add_argument("--a", type=int)
    parser.save(parser.parse_object({"a": 1}), "x.yaml")
    assert yaml.safe_load(Path("x.yaml").read_text()) == {"a": 1}
    with pytest.raises(FileExistsError, match=r"x\.yaml was written by another process in the meantime"):
        parser.save(parser.parse_object({"a": 2}), "x.yaml")
    monkeypatch.setattr(parser, "dump", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        parser.save(parser.parse_object({"a": 3}), "y.yaml")
    assert not Path("y.yaml").exists()
    assert yaml.safe_load(Path("x.yaml").read_text()) == {"a": 1}
