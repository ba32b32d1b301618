"""The documentation is true: code and commands run (in small), links and named files exist, the map is the tree."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from helpers.paths import ROOT
from helpers.processes import PATIENCE
from ksm_lightning.cli import main

PACKAGE = ROOT / "ksm_lightning"
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        ROOT / "README.md",
        ROOT / "configs" / "README.md",
        PACKAGE / "README.md",
        PACKAGE / "report" / "README.md",
        ROOT / "scripts" / "benchmark" / "README.md",
        ROOT / "scripts" / "reproduce" / "README.md",
        ROOT / ".github" / "CONTRIBUTING.md",
    ]
}
README, CONFIGS, INSIDE = (DOCUMENTS[name] for name in ("README.md", "configs/README.md", "ksm_lightning/README.md"))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands_of(block: str) -> list[str]:
    """The commands of a bash block, with continued lines joined and comments removed."""
    lines = block.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := line.partition(" #")[0].strip()) and not command.startswith("#")]


PYTHON = [(name, block) for name, text in DOCUMENTS.items() for block in blocks(text, "python")]
BASH = [(name, commands_of(block)) for name, text in DOCUMENTS.items() for block in blocks(text, "bash")]


def test_all_code_is_python_or_bash():
    """Blocks of text hold the output of a program or the map; everything else runs here."""
    for name, text in DOCUMENTS.items():
        assert set(re.findall(r"^```(\w+)$", text, re.MULTILINE)) <= {"python", "bash", "text"}, name
    assert len(PYTHON) >= 10
    assert len(BASH) >= 12


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(
    ("name", "code"), PYTHON, ids=[f"{name}-{re.sub(r'[^a-zA-Z]+', '_', code[-60:])}" for name, code in PYTHON]
)
def test_python_blocks_run(name, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name, "exec"), {"__name__": "readme"})


def test_there_are_examples_for_your_own_data_and_kernel():
    assert any("ArrayDataModule(" in code for code in blocks(CONFIGS, "python"))
    assert any("@register_kernel(" in code for code in blocks(CONFIGS, "python"))


# ---------------------------------------------------------------------- commands

# Options that make a command small enough for a test. They replace sizes and devices only.
EVALUATION = [
    *("--kernel_error.max_points=100", "--kmeans.max_points=200", "--kmeans.starts=1", "--probe.labels_per_class=5"),
]
TRAINER = [
    *("--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--trainer.strategy=auto"),
    *("--trainer.devices=1", "--trainer.num_nodes=1"),
]
SHORT = ["--trainer.max_steps=8", "--figures.max_points=50", "--figures.num_neurons=1", *EVALUATION]
SMALL = {
    "fit": [*SHORT, *TRAINER],
    "validate": [*TRAINER, *EVALUATION],
    "predict": TRAINER,
    "configs": [],
    "compare": ["--sizes=[4]", "--seeds=1", "--methods=[kernel_pca,nystroem_uniform]", "--max_points=100",
                "--show_progress=false"],
    "export": [],
    "report": ["--max_points=100", "--show_progress=false"],
}  # fmt: skip
# These start what has tests of its own, or this test.
SCRIPTS = {"scripts/demo": "ksm fit", "scripts/test": "-m pytest", "scripts/reproduce/all": "run.py"}


def run_ksm(words: list[str]) -> None:
    command, options = words[0], SMALL[words[0]]
    files = " ".join(words)
    if command == "fit" and "mnist" in files:
        is_there = (Path(os.environ.get("KSM_DATA_DIR", "/nowhere")) / "MNIST" / "raw").is_dir()
        is_trained = is_there and not any(word in files for word in ("fashion", "--trainer.devices", "num_nodes"))
        options = [*options, "--model.num_neurons=20"] if is_trained else ["--print_config"]
    code: object = 0
    try:
        main([*words, *options])
    except SystemExit as stop:  # --print_config ends with code 0
        code = stop.code
    assert not code, files


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for extra in re.findall(r"\.\[(\w+)\]", " ".join(words)):
        assert extra in extras


def check_pytest(words: list[str]) -> None:
    for word in words:
        if word.startswith("tests"):
            assert (ROOT / word).exists(), word


def run_command(command: str) -> None:
    words = shlex.split(command)
    program = Path(words[0]).name
    if program in ("torchrun", "srun"):  # the launcher belongs to the machine; the process it starts is ours
        start = words.index("ksm_lightning.cli" if program == "torchrun" else "ksm")
        program, words = "ksm", words[start:]
    if program == "ksm":
        run_ksm(words[1:])
    elif program in ("pip", "pre-commit"):
        for part in command.split("&&"):
            if "pip install" in part:
                check_pip(shlex.split(part)[1:])
    elif program == "python" and words[1:3] == ["-m", "pytest"]:
        check_pytest(words[3:])
    elif program == "python":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [*words[1:], "--labels", "2", "--seeds", "1", "--no-pixels"])
            runpy.run_path(words[1], run_name="__main__")
    else:
        script = ROOT / words[0]
        assert SCRIPTS[words[0]] in script.read_text()
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)


def new_folder(path: Path) -> Path:
    for name in ("configs", "scripts"):
        (path / name).symlink_to(ROOT / name)
    np.save(path / "mine.npy", np.random.RandomState(0).randn(150, 3))
    rows = [f"{a:.3f},{b:.3f},{'setosa' if a > 0 else 'iris'}" for a, b in np.random.RandomState(0).randn(60, 2)]
    (path / "flowers").mkdir()
    for table in ("flowers.csv", "flowers/train.csv", "flowers/test.csv"):
        (path / table).write_text("\n".join(["length,width,species", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder per document, in which its commands run in order, as a reader would run them."""
    return {name: new_folder(tmp_path_factory.mktemp("document")) for name in DOCUMENTS}


def needs_mnist(commands: list[str]) -> bool:
    """Whether a command other than ``ksm fit``, which can print its configuration instead, needs the MNIST files."""
    return any("mnist" in command and "ksm fit" not in command and " fit " not in command for command in commands)


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        pytest.param(name, block, marks=[pytest.mark.mnist] * needs_mnist(block), id=f"{name}-{block[0][:50]}")
        for name, block in BASH
    ],
)
def test_commands_run(name, commands, folders, monkeypatch, capsys):
    monkeypatch.chdir(folders[name])
    if any("DatasetDataModule" in command for command in commands):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folders[name] / "cache")
    for command in commands:
        run_command(command)


def test_exported_and_predicted_files_are_as_described(folders, monkeypatch, capsys):
    folder = folders["configs/README.md"]
    monkeypatch.chdir(folder)
    if not (folder / "y.npz").exists():  # this test runs alone
        for command in next(
            commands for _, commands in BASH if "export" in " ".join(commands) and "ksm fit" in commands[0]
        ):
            run_command(command)
    made = {path.name for path in (folder / "runs" / "half_moons").glob("*/*")}
    assert {"neural.onnx", "nystroem.pt2", "report.html"} <= made
    assert sorted(np.load(folder / "y.npz").files) == ["extractor", "features", "labels"]


def test_the_demo_ends_with_the_table_that_the_readme_shows(tmp_path):
    """The whole script, with few updates, in a folder where the environment is already set up."""
    (tmp_path / "scripts").mkdir()
    for name, text in {"demo": (ROOT / "scripts" / "demo").read_text(), "setup": "#!/bin/sh\n"}.items():
        (tmp_path / "scripts" / name).write_text(text)
        (tmp_path / "scripts" / name).chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    result = subprocess.run(
        [tmp_path / "scripts" / "demo", *SHORT], capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert result.returncode == 0, result.stderr
    header, paper, ours = result.stdout.splitlines()[-3:]
    assert header.split() == blocks(README, "text")[0].splitlines()[0].split()
    for name, row, folder in [("paper", paper, "half_moons_paper"), ("ours", ours, "half_moons")]:
        words = row.split()
        assert words[0] == name
        assert all(0 < float(number) < 10 for number in words[1:3])
        assert words[5] == "8"
        assert words[-1] == f"runs/{folder}/version_0/figures"
        assert any((tmp_path / words[-1]).glob("*.png"))


# ---------------------------------------------------------------------- names


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Where files of this repository are shown, and where pictures of it are.
PAGES = f"{PROJECT['urls']['Source']}/blob/main/"
PICTURES = f"{PROJECT['urls']['Source'].replace('//github.com', '//raw.githubusercontent.com')}/main/"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_to_a_file_and_a_heading(name):
    for link in re.findall(r"\]\(([^)]+)\)", DOCUMENTS[name]):
        place = (ROOT / name).parent
        if link.startswith((PAGES, PICTURES)):
            link, place = link.removeprefix(PAGES).removeprefix(PICTURES), ROOT
        elif link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        path = place / file if file else ROOT / name
        assert path.exists(), link
        assert not anchor or anchor in anchors(path.read_text()), link


def test_links_of_the_readme_work_on_a_package_index():
    """It shows the README without the files of the repository."""
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", README)
    assert len(links) > 15
    for is_picture, link in links:
        assert link.startswith(PICTURES if is_picture else (PAGES, "#")), link
    for url in PROJECT["urls"].values():
        assert url.startswith(PROJECT["urls"]["Source"])
        assert not url.startswith(PAGES) or (ROOT / url.removeprefix(PAGES)).is_file()


@pytest.mark.parametrize("name", [*DOCUMENTS, "CHANGELOG.md"])
def test_every_file_that_is_named_exists(name):
    text = (ROOT / name).read_text()
    places = [ROOT, (ROOT / name).parent, PACKAGE, ROOT / "configs"]
    paths = set(re.findall(r"(?<![\w/.])(?:configs|scripts|tests|ksm_lightning|\.github)/[\w./]*\w", text))
    paths |= {path for path in re.findall(r"`([\w./]+\.(?:py|md|yaml|png))`", text) if path != "config.yaml"}
    missing = {path for path in paths if not any((place / path).exists() for place in places)}
    assert not missing


def test_every_config_is_listed():
    table = CONFIGS.partition("\n## ")[0]
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert str(path.relative_to(ROOT / "configs")) in table


def test_quoted_error_messages_are_those_of_the_package():
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    rows = re.findall(r"^\| `([^`|]+)` ", DOCUMENTS["ksm_lightning/report/README.md"], re.MULTILINE)
    assert len(rows) >= 4
    for message in rows:
        assert re.split(r"\.\.\.|\d", message)[0].strip() in source, message


# ---------------------------------------------------------------------- the package from the inside


def test_the_map_names_every_folder_and_module_and_nothing_else():
    named, folder = set(), ""
    for line in blocks(INSIDE, "text")[0].splitlines():
        indent, name, description = re.fullmatch(r"( *)(\S+) +(\S.*)", line).groups()
        assert description
        folder = (name if name.endswith("/") else "") if not indent else folder
        named.add(name if not indent else folder + name)
    files = [path for path in PACKAGE.rglob("*.*") if path.suffix in (".py", ".css") and path.name != "__init__.py"]
    modules = {str(path.relative_to(PACKAGE)) for path in files}
    folders = {f"{path.parent.relative_to(PACKAGE)}/" for path in PACKAGE.glob("*/__init__.py")}
    assert named == modules | folders


def test_the_layers_are_those_of_the_import_check():
    listed = re.search(r"^LAYERS = \[(.*?)\]", (ROOT / "tests" / "test_architecture.py").read_text(), re.M | re.S)[1]
    assert blocks(INSIDE, "text")[1].replace("<", " ").split() == re.findall(r'"(\w+)"', listed)


@pytest.mark.parametrize("title", ["One update", "One validation", "One checkpoint"])
def test_the_walk_throughs_name_files_and_what_they_define(title):
    section = INSIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d\. (.*(?:\n   .*)*)", section, re.MULTILINE)
    assert 0 < len(steps) <= 4
    for step in steps:
        names = re.findall(r"`([\w./]+)`", step)
        files = [name for name in names if name.endswith(".py")]
        text = "".join((PACKAGE / file).read_text() for file in files)
        for name in names:
            if "/" not in name and not name.endswith(".py"):
                assert name.rpartition(".")[2] in text, f"{name} in {files}"


def test_the_readme_can_be_read_to_the_end():
    assert (ROOT / "README.md").stat().st_size <= 14 * 1024
