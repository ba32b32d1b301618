"""What ``ksm`` answers at once: its help, its version, misspelt commands and configurations."""

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import ksm_lightning
from helpers.commands import refused
from helpers.processes import PATIENCE
from ksm_lightning.cli import front, main
from ksm_lightning.cli.own_commands import OWN_COMMANDS
from ksm_lightning.cli.packaged_configs import find, names, with_found_files

pytestmark = pytest.mark.usefixtures("in_tmp_path")

# Runs `ksm` and prints its exit code and the slow libraries that it imported.
RUN = """
import json, sys
from ksm_lightning.cli import main
code = 0
try:
    main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
slow = {"torch", "numpy", "lightning", "jsonargparse", "sklearn", "yaml"} & set(sys.modules)
print(json.dumps([code, sorted(slow)]))
"""


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ([], 0), (["--help"], 0), (["--version"], 0), (["fti"], 2), (["--nonsense=3"], 2), (["configs"], 0),
        (["fit", "--config", "half_mons"], 2),
    ],
    ids=str,
)  # fmt: skip
def test_quick_answers_import_nothing_slow(args, code):
    done = subprocess.run(
        [sys.executable, "-c", RUN, *args], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [code, []]


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        ("fti", "ksm has no command 'fti', did you mean fit?"),
        ("predcit", "ksm has no command 'predcit', did you mean predict?"),
        ("train", "ksm has no command 'train', did you mean fit?"),
        ("help", "ksm has no command 'help', did you mean --help?"),
        ("xyzzy", f"ksm has no command 'xyzzy'; the commands are {', '.join(front.COMMANDS)}"),
        ("--verison", "ksm has no option --verison, did you mean --version?"),
        ("--model.updates=3", "ksm has no option --model.updates: a command comes first, such as ksm fit --config "
         "half_moons."),
    ],
)  # fmt: skip
def test_a_misspelt_command_gets_one_sentence_with_the_nearest(capsys, first, sentence):
    assert refused(capsys, first) == sentence


def printed(capsys, *args: str) -> str:
    with suppress(SystemExit):
        main(list(args))
    printed = capsys.readouterr()
    assert not printed.err
    return printed.out


def test_the_main_help_fits_a_terminal_and_lists_commands_that_exist(capsys):
    text = printed(capsys, "--help")
    assert text == printed(capsys)
    assert max(map(len, text.splitlines())) <= 100
    listed = re.findall(r"^  (\w+) +[A-Z]", text, re.MULTILINE)
    assert listed == ["fit", "validate", "test", "predict", *OWN_COMMANDS, "configs"] == list(front.COMMANDS)


def test_the_version_is_that_of_the_package(capsys):
    assert printed(capsys, "--version") == f"ksm {ksm_lightning.__version__}\n"
    assert re.match(r"\d+", ksm_lightning.__version__)
    assert "__version__" in dir(ksm_lightning)


# ---------------------------------------------------------------------- configurations by name


def test_configs_lists_every_configuration_with_its_command(capsys):
    text = printed(capsys, "configs")
    blocks = dict(re.findall(r"^(\S+)\n    (ksm .*)\n    .+$", text, re.MULTILINE))
    assert list(blocks) == names()
    assert blocks["half_moons_paper"] == "ksm fit --config half_moons --config half_moons_paper"
    assert blocks["compare/mnist"] == "ksm compare --config mnist"
    assert f"The files are in {find('half_moons').parent}." in text
    for command in blocks.values():
        assert all(Path(path).is_file() for path in with_found_files(command.split()[1:])[2::2])


def test_configs_prints_one_that_can_be_copied(capsys):
    assert printed(capsys, "configs", "half_moons") == find("half_moons").read_text()
    assert printed(capsys, "configs", "compare/half_moons").startswith("# ksm compare")
    assert refused(capsys, "configs", "halfmoons") == (
        "There is no configuration halfmoons, neither as a file nor in the package, did you mean half_moons or "
        "half_moons_tight or half_moons_paper?"
    )


def test_a_file_wins_over_a_configuration_of_the_package():
    Path("half_moons").write_text("model: {num_neurons: 3}")
    Path("mnist.yaml").write_text("")
    assert with_found_files(["fit", "--config", "half_moons", "-c", "mnist.yaml", "--config=mine: {a: 1}"]) == [
        "fit", "--config", "half_moons", "-c", "mnist.yaml", "--config=mine: {a: 1}"
    ]  # fmt: skip
    found = find("mnist")
    assert with_found_files(["fit", "-c", "mnist", "-c=mnist"]) == ["fit", "-c", str(found), f"-c={found}"]
    assert (found.name, found.is_absolute()) == ("mnist.yaml", True)
    for given in ("digits", "digits.yaml", "configs/digits.yaml"):
        assert find(given) == found.with_name("digits.yaml")


def test_compare_has_configurations_of_its_own():
    for given in ("half_moons", "compare/half_moons", "configs/compare/half_moons.yaml"):
        assert find(given, "compare").parent.name == "compare"
    assert find("compare/half_moons", "fit").parent.name == "compare"


@pytest.mark.parametrize(
    ("command", "given", "hint"),
    [
        ("fit", "digts", ", did you mean digits?"),
        ("compare", "half_mons.yaml", ", did you mean half_moons?"),
        ("fit", "runs/nothing/config.yaml", "; ksm configs lists those of the package."),
    ],
)
def test_a_configuration_that_does_not_exist_gets_one_sentence(capsys, command, given, hint):
    sentence = f"There is no configuration {given}, neither as a file nor in the package{hint}"
    assert refused(capsys, command, f"--config={given}") == sentence
    assert refused(capsys, command, "--config", given) == sentence
