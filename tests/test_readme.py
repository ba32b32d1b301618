"""What the README says is so."""

import re

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: re.sub(r"\W+", "_", code[:60]))
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


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
        "baselines",
        "tables",
        "comparison",
        "checkpoint",
        "data",
        "module",
    ]
    order += ["figures", "callbacks", "run_folder", "commands", "cli"]
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
