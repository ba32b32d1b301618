"""The files in configs/: every one is accepted and opens with its command."""

import functools
import re
from pathlib import Path

import pytest
import yaml

from helpers.commands import refused
from helpers.paths import ROOT
from ksm_lightning.cli import main
from ksm_lightning.runs.checkpoint import read_checkpoint


def header(path: Path) -> tuple[list[str], str]:
    """The words of the command in a configuration's first line, and the text after it."""
    first, second = path.read_text().splitlines()[:2]
    command, _, expected = first.removeprefix("# ").partition("      ")
    return command.split(), expected or second


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_opens_with_its_command_and_what_to_expect(path):
    words, expected = header(path)
    command = "compare" if path.parent.name == "compare" else "fit"
    assert words[:3] == ["ksm", command, "--config"]
    assert words[-2:] == ["--config", str(path.relative_to(ROOT))]
    assert re.search(r"\d+ s |\d+ min ", expected)


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_accepted_after_the_files_it_builds_on(config, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        main([*header(config)[0][1:], "--print_config"])
    assert stop.value.code in (0, None)
    written, understood = yaml.safe_load(config.read_text()), yaml.safe_load(capsys.readouterr().out)
    for section in ("model", "trainer"):
        for name, value in written.get(section, {}).items():
            if name not in ("phases", "logger"):
                assert understood[section][name] == value, name
    for name, value in written.get("data", {}).get("init_args", {}).items():
        assert understood["data"]["init_args"][name] == value, name


OVERLAYS = ["fashion_mnist", "half_moons_paper", "mnist_multi_gpu", "mnist_paper", "mnist_released"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_without_a_complete_file_is_refused_in_one_sentence(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = f"configs/{name}.yaml"
    assert len(header(ROOT / path)[0]) == 6  # its own command has two files
    sentence = refused(capsys, "fit", "--config", path)
    assert sentence.startswith(
        f"{path}: No data set is chosen: give a complete file first, such as --config half_moons"
    )


@pytest.mark.parametrize("command", ["fit", "compare"])
@pytest.mark.parametrize("options", [[], ["--data.batch_size=3"]], ids=str)
def test_a_command_without_data_is_refused_in_one_sentence(command, options, capsys):
    sentence = refused(capsys, command, *options)
    assert sentence == (
        "No data set is chosen: give a complete file first, such as --config half_moons, or a datamodule, such as "
        "--data=HalfMoonsDataModule."
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["bound=tight", "phases=paper_half_moons"],
            "`phases` are rates of the paper's rules: leave them out with bound=tight.",
        ),
        (
            ["bound=tight", "acceleration=compile"],
            "`acceleration` compile exists for the paper's bound only: set it to auto with bound=tight.",
        ),
        (
            ["bound=tight", "num_neurons=8", "num_landmarks=7"],
            "`num_landmarks` must be at least the number of neurons, 8, got 7: p landmarks cannot determine more than "
            "p responses.",
        ),
        (
            ["num_neurons=8", "num_landmarks=9"],
            "With the paper's bound every neuron has one landmark, but `num_landmarks` is 9 and `num_neurons` is "
            "8: leave `num_landmarks` out, or choose bound=tight.",
        ),
    ],
    ids=["phases", "acceleration", "few landmarks", "many landmarks"],
)
def test_impossible_options_of_a_bound_are_refused_in_one_sentence(options, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["--config", str(ROOT / "configs" / "half_moons.yaml"), *(f"--model.{option}" for option in options)]
    assert refused(capsys, "fit", *command).endswith(sentence)
    assert not Path("runs").exists()


@pytest.mark.parametrize("config", sorted((ROOT / "configs" / "compare").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_of_a_comparison_is_accepted(config, monkeypatch):
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
    """A function with the same options, which stores them in ``given``."""

    @functools.wraps(function)
    def keep(**options):
        given.update(options)

    return keep


def test_the_digits_config_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", str(ROOT / "configs" / "digits.yaml"), "--trainer.max_steps=20", "--model.num_neurons=5"])
    folder = Path("runs/digits/version_0")
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]["network.W"].shape == (5, 64)
    assert (folder / "figures" / "weights.png").is_file()
