"""The files of a release: what they hold, and that they work without the checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

from helpers.paths import ROOT
from helpers.processes import PATIENCE

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONFIGS = {f"ksm_lightning/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.yaml")}
MODULES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ksm_lightning").rglob("*.py")}


def build(source: Path, kind: str, folder: Path) -> Path:
    """Build an ``sdist`` or a ``wheel`` from a folder of sources; returns the file."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    [built] = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist of this checkout, and the wheel that is built from it."""
    source, folder = tmp_path_factory.mktemp("source") / "ksm", tmp_path_factory.mktemp("dist")
    kept = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
    source.mkdir()
    for name in kept:
        shutil.copy(ROOT / name, source)
    for name in ("ksm_lightning", "configs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    sdist = build(source, "sdist", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(source.parent / "unpacked", filter="data")
    [unpacked] = (source.parent / "unpacked").iterdir()
    return sdist, build(unpacked, "wheel", folder)


def test_the_wheel_holds_the_package_and_the_configurations_and_nothing_else(release):
    with zipfile.ZipFile(release[1]) as wheel:
        names = set(wheel.namelist())
        assert wheel.read("ksm_lightning/configs/half_moons.yaml") == (ROOT / "configs/half_moons.yaml").read_bytes()
    readmes = {"ksm_lightning/README.md", "ksm_lightning/report/README.md", "ksm_lightning/configs/README.md"}
    expected = MODULES | CONFIGS | readmes | {"ksm_lightning/py.typed", "ksm_lightning/report/style.css"}
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_the_metadata_is_complete(release):
    with zipfile.ZipFile(release[1]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith("METADATA")]
        found = message_from_string(wheel.read(name).decode())
    assert found["Name"] == "ksm-lightning"
    assert found["Author"] == "The ksm_lightning authors"
    assert found["License-Expression"] == "MIT"
    assert {url.partition(",")[0] for url in found.get_all("Project-URL")} >= {"Source", "Issues", "Changelog"}
    assert "Programming Language :: Python :: 3.11" in found.get_all("Classifier")
    assert found["Description-Content-Type"] == "text/markdown"


def test_every_folder_of_the_package_is_listed():
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "ksm_lightning").rglob("__init__.py")}
    places = PROJECT["tool"]["setuptools"]["package-dir"]
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders | set(places))
    assert {str(path.parent.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")} == set(places.values())


def test_the_citation_names_paper_and_version():
    citation = yaml.safe_load((ROOT / ".github" / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Source"]
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Luther", "Seung"]
    assert paper["title"].lower() in re.sub(r"\s+", " ", (ROOT / "README.md").read_text()).lower()


def test_the_workflow_runs_the_tests_with_the_oldest_and_newest_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    jobs = workflow["jobs"]
    pythons = {each["dependencies"]: each["python"] for each in jobs["test"]["strategy"]["matrix"]["include"]}
    assert PROJECT["project"]["requires-python"] == f">={pythons['oldest']}"
    versions = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if " :: 3." in line]
    assert pythons["newest"] == max(versions, key=lambda version: int(version.partition(".")[2]))
    assert {"run": "scripts/test"} in jobs["test"]["steps"]
    commands = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    assert all((ROOT / path).exists() for path in re.findall(r"\b(?:scripts|tests)/[\w./]+", commands))


def test_the_oldest_dependencies_are_the_lower_bounds():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "oldest")], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    oldest = dict(line.split("==") for line in done.stdout.splitlines())
    declared = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["fast"]]
    for each in declared:
        name, version = re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", each).groups()
        assert oldest[name] == f"{version}.*"
    assert "pytest" not in oldest


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(release, tmp_path):
    """Only the dependencies are those of this environment: a path in a ``.pth`` file, whose own ones are not read."""
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(release[1])], check=True, timeout=PATIENCE)
    [site] = environment.glob("lib/python*/site-packages")
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(paths) + "\n")
    folder = tmp_path / "elsewhere"
    folder.mkdir()

    def run(*command: str) -> str:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, env=clean, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    ksm = str(environment / "bin" / "ksm")
    listed = run(ksm, "configs")
    assert "\nhalf_moons\n    ksm fit --config half_moons\n" in listed
    assert f"The files are in {site}/ksm_lightning/configs." in listed
    assert run(ksm, "--version") == f"ksm {PROJECT['project']['version']}\n"
    short = ["--trainer.max_steps=8", "--trainer.enable_progress_bar=false", "--figures.num_neurons=1"]
    assert "Trained for 8 updates" in run(ksm, "fit", "--config", "half_moons", *short)
    assert (folder / "runs/half_moons/version_0/checkpoints/last.ckpt").is_file()
    assert "val/kernel_nrmse" in run(ksm, "validate", "--ckpt_path=runs/half_moons/version_0")
    code = (
        "import ksm_lightning, numpy as np\nfrom ksm_lightning.sklearn import KSMTransformer\n"
        "print(ksm_lightning.__file__)\n"
        "print(KSMTransformer(4, random_state=0).fit_transform(np.random.rand(50, 3)).shape)"
    )
    assert run(str(python), "-c", code).splitlines() == [f"{site}/ksm_lightning/__init__.py", "(50, 4)"]
