"""A run folder that comes from somebody else: nothing that it names is imported or run."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from helpers.checkpoints import changed
from helpers.commands import refused
from helpers.runs import fit, model
from ksm_lightning.cli import main
from ksm_lightning.data import ArrayDataModule, Dataset, HalfMoonsDataModule, KSMDataModule
from ksm_lightning.runs.finished_run import FinishedRun, imported_datamodule

BOMB = "import pathlib\npathlib.Path('imported').touch()\nfrom ksm_lightning import HalfMoonsDataModule as Evil\n"


class OwnDataModule(KSMDataModule):
    """A user's datamodule, imported because this file is."""

    def __init__(self, rows=30, transform=None, **kwargs):
        super().__init__(**kwargs)
        self.rows, self.transform = rows, transform

    def load(self):
        return Dataset(np.random.RandomState(0).randn(self.rows, 2)), None


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder of half moons with a least-squares readout to export, without events."""
    folder = tmp_path / "version_0"
    (folder / "checkpoints").mkdir(parents=True)
    fit(model()).save_checkpoint(folder / "checkpoints" / "last.ckpt", weights_only=False)
    write(folder, {"class_path": "ksm_lightning.HalfMoonsDataModule", "init_args": {"num_points": 200}})
    return folder


def write(folder: Path, data: object) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed_everything": 0, "data": data}))


def test_commands_do_not_import_what_a_run_folder_names(run, tmp_path, monkeypatch, capsys):
    """Both commands imported the module, and would have run any code in it."""
    (tmp_path / "evil.py").write_text(BOMB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    write(run, {"class_path": "evil.Evil", "init_args": {"num_points": 200}})
    for arguments in (
        ["report", "version_0"],
        ["export", "--ckpt_path=version_0/checkpoints/last.ckpt", "--readout=least_squares"],
    ):
        found = refused(capsys, *arguments)
        assert "evil.Evil is not a datamodule of ksm_lightning, and nothing that a run folder names is imp" in found
        assert "give it with --data=evil.Evil" in found
    assert ("evil" in sys.modules, Path("imported").exists()) == (False, False)
    # An option of the user is another matter.
    main(["export", *arguments[1:], "--data=evil.Evil", "--data.num_points=200"])
    assert Path("imported").exists()
    assert Path("version_0/least_squares.safetensors").is_file()
    del sys.modules["evil"]


def test_datamodules_of_the_package_are_found_under_all_their_names(run):
    for name in ("HalfMoonsDataModule", "ksm_lightning.HalfMoonsDataModule", "ksm_lightning.data.HalfMoonsDataModule",
                 "ksm_lightning.data.builtin.HalfMoonsDataModule"):  # fmt: skip
        write(run, {"class_path": name, "init_args": {"num_points": 200, "batch_size": 7}})
        data = FinishedRun(run).data()
        assert (type(data), data.num_points, data.batch_size, data.seed) == (HalfMoonsDataModule, 200, 7, 3)
    write(run, {"class_path": "ArrayDataModule", "init_args": {"path": "x.npy", "scaling": "feature"}})
    assert FinishedRun(run).data().scaling == "feature"
    assert type(FinishedRun(run).data()) is ArrayDataModule


def test_a_users_datamodule_is_made_if_it_is_imported_and_its_arguments_are_not_looked_up(run, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text(BOMB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = {"rows": 20, "transform": {"class_path": "evil.Evil"}}
    write(run, {"class_path": f"{__name__}.OwnDataModule", "init_args": arguments})
    data = FinishedRun(run).data()
    assert (type(data), data.rows, data.transform) == (OwnDataModule, 20, {"class_path": "evil.Evil"})
    assert not (tmp_path / "imported").exists()
    assert imported_datamodule("OwnDataModule") is None  # a name alone is enough for the package's own


def test_a_given_datamodule_replaces_the_one_of_the_configuration(run):
    write(run, {"class_path": "evil.Evil"})
    data = OwnDataModule()
    assert FinishedRun(run).data(data) is data
    assert data.preprocessing.mean.tolist() == HalfMoonsDataModule(200).preprocessing.mean.tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {class_path: os.system}", "os.system is not a datamodule of ksm_lightning"),
        ("data: {class_path: evil.Evil}", "evil.Evil is not a datamodule"),
        ("data: {class_path: 'HalfMoonsDataModule ', init_args: {}}", "is not a datamodule"),
        ("data: {class_path: ''}", "is not a datamodule"),
        ("data: {class_path: KSMDataModule}", "is not a datamodule"),
        ("data: {class_path: 7}", "its section `data` needs a class_path, and init_args with names"),
        ("data: {class_path: HalfMoonsDataModule, init_args: [1]}", "needs a class_path, and init_args with names"),
        ("data: {class_path: HalfMoonsDataModule, init_args: {num_points: many}}", "does not describe any data: .*int"),
        ("data: {class_path: HalfMoonsDataModule, init_args: {num_points: 1}}", "`num_points` must be at least 2"),
        ("data: {class_path: HalfMoonsDataModule, init_args: {class_path: os.system}}", "does not describe any data"),
        ("data: {class_path: DigitsDataModule, init_args: {seed: {class_path: os.system}}}", "not describe any data"),
        ("data: !!python/object/apply:os.system ['touch imported']", "is not valid YAML: could not determine a const"),
        ("data: " + "[" * 10_000 + "]" * 10_000, "it is not valid YAML: it is nested too deeply"),
        ("data: &a {class_path: *a}", "nested too deeply"),
        ("data: &a [*a]", "nested too deeply"),
        ("a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
         "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ndata: [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]", "more than 100,000 values"),
        ("data: 2001-99-99", "it is not valid YAML: month must be in 1..12"),
        (f"data: {'9' * 5000}", "it is not valid YAML: Exceeds the limit"),
    ],
)  # fmt: skip
def test_a_damaged_or_hostile_configuration_is_refused_in_one_sentence(run, tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (run / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        FinishedRun(run).data()
    assert "\n" not in str(caught.value)
    assert "config.yaml" in str(caught.value)
    assert not Path("imported").exists()


def test_deep_nesting_is_refused_at_once(run):
    """PyYAML needs minutes for 100,000 levels, as its time grows with their square."""
    (run / "config.yaml").write_text("data: " + "[" * 100_000)
    started = time.perf_counter()
    with pytest.raises(ValueError, match="nested too deeply"):
        _ = FinishedRun(run).config
    assert time.perf_counter() - started < 5


def test_the_help_says_that_a_configuration_is_code(capsys):
    for options, text in ((["--help"], "A configuration file is code"), (["fit", "--help"], "A configuration is code")):
        with pytest.raises(SystemExit):
            main(options)
        assert text in " ".join(capsys.readouterr().out.split())


def test_a_damaged_checkpoint_of_a_run_is_refused(run):
    changed(run / "checkpoints" / "last.ckpt", lambda c: c["HalfMoonsDataModule"].update(seed=8), is_sealed=False)
    with pytest.raises(ValueError, match="does not match its digest"):
        FinishedRun(run).data()
