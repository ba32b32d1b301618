"""What the README says is so: every code block runs, commands in small."""

import os
import re
import runpy
import shlex
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from ksm_lightning.cli import main

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FENCES = set(re.findall(r"^```(\w+)$", README, re.MULTILINE))


def commands_of(block: str) -> list[str]:
    """The commands of a bash block, with continued lines joined and comments removed."""
    lines = block.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := line.partition(" #")[0].strip()) and not command.startswith("#")]


BASH = [commands_of(block) for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: re.sub(r"\W+", "_", code[:60]))
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


# What makes a command small enough for a test; nothing of what the README says is replaced but sizes and devices.
EVALUATION = [
    "--kernel_error.max_points=100",
    "--kmeans.max_points=200",
    "--kmeans.starts=1",
    "--probe.labels_per_class=5",
]
TRAINER = [
    *("--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--trainer.strategy=auto"),
    *("--trainer.devices=1", "--trainer.num_nodes=1"),
]
SMALL = {
    "fit": ["--trainer.max_steps=8", "--figures.max_points=50", "--figures.num_neurons=1", *TRAINER, *EVALUATION],
    "validate": [*TRAINER, *EVALUATION],
    "predict": TRAINER,
    "compare": [
        "--sizes=[4]",
        "--seeds=1",
        "--methods=[kernel_pca,nystroem_uniform]",
        "--max_points=100",
        "--progress=false",
    ],
    "export": [],
    "report": ["--max_points=100", "--progress=false"],
}
# Run whole elsewhere: what they start has tests of its own, and they would start this one again.
SCRIPTS = {
    "scripts/demo": "exec .venv/bin/ksm fit --config configs/half_moons.yaml",
    "scripts/test": "-m pytest",
    "scripts/reproduce/all": "run.py",
}


def run_command(command: str) -> None:
    words = shlex.split(command)
    if words[0] in ("torchrun", "srun"):  # what starts the processes is the machine's; what they are is ours
        start = words.index("ksm_lightning.cli") if words[0] == "torchrun" else words.index("ksm")
        words = ["ksm", *words[start + 1 :]]
    if words[0] == "ksm":
        is_mnist = "mnist" in command
        more = [*SMALL[words[1]], *(["--model.num_neurons=20"] if is_mnist and words[1] == "fit" else [])]
        if "fashion" in command and words[1] == "fit":  # there is no Fashion-MNIST to be had without a network
            more = ["--print_config"]
        code: object = 0
        try:
            main([*words[1:], *more])
        except SystemExit as stop:  # --print_config ends so, with code 0
            code = stop.code
        assert not code, command
    elif words[0].endswith("python"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [*words[1:], "--labels", "2", "--seeds", "1", "--no-pixels"])
            runpy.run_path(words[1], run_name="__main__")
    else:
        script = ROOT / words[0]
        assert SCRIPTS[words[0]] in script.read_text()
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the blocks run one after the other, as a reader would run them."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    np.save(folder / "mine.npy", np.random.RandomState(0).randn(150, 3))
    return folder


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param(block, marks=[pytest.mark.mnist] * any("mnist" in line for line in block), id=block[0][:50])
        for block in BASH
    ],
)
def test_commands_run(commands, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for command in commands:
        run_command(command)


def test_there_is_no_other_kind_of_block():
    """Text is what a program prints, and the map; everything else runs here."""
    assert not FENCES - {"python", "bash", "text"}
    assert len(BASH) >= 8


def test_the_engineers_commands_leave_what_they_say(place, monkeypatch, capsys):
    if not (place / "y.npz").exists():  # where this test runs by itself
        monkeypatch.chdir(place)
        for command in next(block for block in BASH if any("ksm report" in line for line in block)):
            run_command(command)
    run = place / "runs" / "half_moons_adaptive"
    made = sorted(path.name for path in run.glob("*/*") if path.suffix in (".onnx", ".pt2", ".html"))
    assert {"neural.onnx", "nystroem.pt2", "report.html"} <= set(made)
    assert sorted(np.load(place / "y.npz").files) == ["extractor", "features", "labels"]


def test_there_are_blocks_for_data_and_kernel():
    assert any("ArrayDataModule(" in code for code in BLOCKS)
    assert any("@register_kernel(" in code for code in BLOCKS)


def test_every_file_that_is_named_exists():
    for path in set(re.findall(r"(?:configs|scripts|\.github)/[\w./]*\w", README)):
        assert (ROOT / path).exists(), path


def test_the_map_names_every_module_and_nothing_else():
    package = ROOT / "ksm_lightning"
    listing = README.partition("## The map")[2].partition("```\n\n")[0]
    named = set(re.findall(r"^ +(\w+(?:\.py|/)) ", listing, re.MULTILINE))
    modules = {path.name for path in package.glob("*.py")} | {path.name for path in (package / "kernels").glob("*.py")}
    folders = {f"{path.name}/" for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert named == (modules - {"__init__.py"}) | folders


def test_imports_point_downward():
    """Nothing below the datamodules imports Lightning, and no module imports one above it."""
    order = [
        "kernels",
        "functional",
        "initialisation",
        "network",
        "schedule",
        "exact",
        "relocation",
        "rules",
        "updater",
        "learning",
        "metrics",
        "readout",
        "probe",
        "clustering",
        "files",
        "streaming",
        "preprocessing",
        "baselines",
        "tables",
        "comparison",
        "checkpoint",
        "estimator",
        "extractor",
        "export",
        "health",
        "diagnosis",
        "data",
        "module",
    ]
    order += ["figures", "callbacks", "run_folder", "run", "report", "commands", "cli"]
    for path in (ROOT / "ksm_lightning").rglob("*.py"):
        name = path.relative_to(ROOT / "ksm_lightning").parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        text = path.read_text()
        imported = re.findall(r"^ *from ksm_lightning(?:\.(\w+))?[\w.]* import ([\w, ]+)", text, re.MULTILINE)
        names = [
            module or part.strip() for module, parts in imported for part in (parts.split(",") if not module else [""])
        ]
        for other in names:
            assert order.index(other) <= order.index(name), f"{path.name} imports {other}"
        if order.index(name) < order.index("data"):
            assert not re.search(r"^ *(import|from) lightning", text, re.MULTILINE), path.name
