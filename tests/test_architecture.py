"""The structure of the package: layers, imports, file names, file sizes, and tests that mirror it."""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import ksm_lightning
from helpers.imports import imports
from helpers.paths import ROOT
from helpers.processes import PATIENCE

PACKAGE, TESTS = ROOT / "ksm_lightning", ROOT / "tests"
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)

# A layer imports from itself and from the layers before it.
LAYERS = [
    "extras", "files", "private_apis", "kernels", "network", "learning", "sharding", "evaluation", "baselines", "data",
    "runs", "sklearn", "hub", "extractor", "export", "module", "figures", "callbacks", "report", "cli",
]  # fmt: skip
WITHOUT_LIGHTNING = ["kernels", "network", "learning", "sharding", "evaluation", "baselines", "files"]

# Modules that may share a name: the command is a front of the module or folder.
FRONTS = {("cli/export.py", "export.py"), ("cli/report.py", "report")}

# Private names of Lightning, jsonargparse and TensorBoard that must not even be mentioned elsewhere.
PRIVATE = [
    "_checkpoint_connector", "_every_n_train_steps", "_get_next_version", "_get_file_writer", "_parse_ckpt_path",
    "_add_subcommands", "_prepare_subcommand_parser", "_prepare_subcommand_kwargs", "_instantiate_trainer",
    "optim_step_progress", "_is_synced",
]  # fmt: skip


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def wrong_imports(source: str, layer: str, package: str) -> list[str]:
    """Imports from a later layer, or of Lightning in a layer that must do without it, as ``line: name``."""
    found = []
    for name, line in imports(source, package).items():
        first, *rest = name.split(".")
        if first == "ksm_lightning":
            # The top-level __init__ exports names of all layers, so it comes after all of them.
            is_later = not rest or rest[0] not in LAYERS or LAYERS.index(rest[0]) > LAYERS.index(layer)
            found += [f"{line}: {name}"] if is_later else []
        elif first in ("lightning", "pytorch_lightning", "lightning_fabric") and layer in WITHOUT_LIGHTNING:
            found.append(f"{line}: {name}")
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ksm_lightning.learning.exact", ["1: ksm_lightning.learning.exact"]),
        ("import torch, ksm_lightning.module as m", ["1: ksm_lightning.module"]),
        ("from ksm_lightning.learning import Phase", ["1: ksm_lightning.learning.Phase"]),
        ("from ksm_lightning import kernels, module", ["1: ksm_lightning.module"]),
        ("from ksm_lightning import (\n    kernels,\n    cli,\n)", ["1: ksm_lightning.cli"]),
        ("from ksm_lightning import Kernel", ["1: ksm_lightning.Kernel"]),
        ("import ksm_lightning", ["1: ksm_lightning"]),
        ("from ..report.page import Page", ["1: ksm_lightning.report.page.Page"]),
        ("from .. import (runs,\n kernels)", ["1: ksm_lightning.runs"]),
        ("def f():\n    from ksm_lightning.data import Points", ["2: ksm_lightning.data.Points"]),
        ("if TYPE_CHECKING:\n    import lightning as L", ["2: lightning"]),
        ("try:\n    from lightning.pytorch import Trainer\nexcept ImportError:\n    pass",
         ["2: lightning.pytorch.Trainer"]),
        ("import importlib\nimportlib.import_module('ksm_lightning.cli')", ["2: ksm_lightning.cli"]),
    ],
)  # fmt: skip
def test_the_import_check_finds_a_wrong_import_in_every_form(source, found):
    assert wrong_imports(source, "network", "ksm_lightning.network") == found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nfrom torch import nn",
        "from ksm_lightning.kernels import (\n    Kernel,\n)",
        "from .functional import energy\nfrom . import readout",
        "from ..kernels.base import Kernel",
        "from ksm_lightning import kernels",
        'text = "import lightning"',
    ],
)
def test_the_import_check_accepts_imports_of_the_same_and_of_earlier_layers(source):
    assert wrong_imports(source, "network", "ksm_lightning.network") == []


def test_imports_point_to_earlier_layers():
    wrong = {}
    for path in MODULES:
        if path == PACKAGE / "__init__.py":
            continue  # exports names of all layers
        package = ".".join(path.relative_to(ROOT).parent.parts)
        if found := wrong_imports(path.read_text(), layer_of(path), package):
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


def test_every_module_and_folder_belongs_to_a_layer():
    assert {layer_of(path) for path in MODULES} == {*LAYERS, "__init__"}


def test_the_layers_of_the_mathematics_import_without_lightning():
    packages = [name for name in WITHOUT_LIGHTNING if name != "files"]
    code = (
        "import sys, json, importlib\n"
        f"for name in {packages}:\n"
        "    importlib.import_module('ksm_lightning.' + name)\n"
        "print(json.dumps(sorted(m for m in sys.modules if m.split('.')[0].endswith(('lightning', 'fabric')))))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr
    loaded = json.loads(result.stdout)
    assert {f"ksm_lightning.{name}" for name in packages} <= set(loaded)
    assert [name for name in loaded if not name.startswith("ksm_lightning")] == []


def test_the_estimator_imports_neither_lightning_nor_anything_for_figures_and_images():
    heavy = ("lightning", "torchmetrics", "torchvision", "matplotlib", "tensorboard", "jsonargparse", "numba")
    code = (
        "import sys, json\nfrom ksm_lightning.sklearn import KSMTransformer\n"
        f"print(json.dumps([name for name in {heavy} if name in sys.modules] + [KSMTransformer.__name__]))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert json.loads(result.stdout) == ["KSMTransformer"], result.stderr


def test_every_public_name_resolves_and_is_listed():
    assert sorted(ksm_lightning.__all__) == list(ksm_lightning.__all__)
    for name in ksm_lightning.__all__:
        assert getattr(ksm_lightning, name) is not None
    assert set(ksm_lightning.__all__) <= set(dir(ksm_lightning))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ksm_lightning.no_such_name


def test_no_two_modules_share_a_name():
    places = defaultdict(list)
    for path in [*MODULES, *FOLDERS]:
        if path.stem not in ("__init__", "__main__"):
            places[path.stem].append(path.relative_to(PACKAGE).as_posix())
    shared = {tuple(sorted(paths)) for paths in places.values() if len(paths) > 1}
    assert shared == FRONTS


def test_files_are_short_and_few_modules_lie_outside_the_folders():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > 350} == {}
    assert len(list(PACKAGE.glob("*.py"))) <= 7


def test_tests_mirror_the_package():
    for folder in FOLDERS:
        mirror = TESTS / folder.relative_to(PACKAGE)
        assert list(mirror.glob("test_*.py")), f"{folder.relative_to(ROOT)} has no tests in {mirror.relative_to(ROOT)}/"
    folders = {path.parent for path in TESTS.rglob("test_*.py")} - {TESTS}
    assert {path.relative_to(TESTS) for path in folders} == {path.relative_to(PACKAGE) for path in FOLDERS}


def test_no_test_file_imports_another():
    tests = sorted(TESTS.rglob("test_*.py"))
    names = {path.stem for path in tests} | {"conftest"}
    for path in [*tests, TESTS / "conftest.py", *(TESTS / "helpers").glob("*.py")]:
        wrong = {name for name in imports(path.read_text(), "tests") if names & set(name.split("."))}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def own_names(source: str) -> set[str]:
    """Names that ``source`` defines: functions, classes, variables, and attributes of ``self``."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def foreign_private_names(source: str, own: set[str]) -> list[str]:
    """Private attributes and modules that ``source`` uses and that are not among the ``own`` names."""
    used = [node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    used += [part for name in imports(source, "ksm_lightning") for part in name.split(".")]
    public = {"_replace", "_asdict", "_fields"}  # of named tuples
    return [name for name in used if re.match(r"_[a-z]", name) and name not in own | public]


def test_the_check_of_private_names_finds_those_of_others():
    source = (
        "from torch._dynamo import config\nclass A:\n    def __init__(self):\n        self._x = 1\n"
        "def f(a, trainer):\n    trainer._state = a._x\n    return trainer._loop(), a._replace(), a.__class__"
    )
    assert foreign_private_names(source, own_names(source)) == ["_state", "_loop", "_dynamo"]


def test_private_names_of_libraries_are_used_in_one_file():
    used = re.compile(rf"\b({'|'.join(PRIVATE)})\b")
    own = set().union(*(own_names(path.read_text()) for path in MODULES))
    for path in MODULES:
        if path.name != "private_apis.py":
            text, name = path.read_text(), path.relative_to(ROOT)
            assert used.findall(text) == [], name
            assert foreign_private_names(text, own) == [], name
    assert "_checkpoint_connector" in foreign_private_names((PACKAGE / "private_apis.py").read_text(), own)
