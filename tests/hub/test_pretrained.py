"""Extractors in folders and repositories of the Hugging Face Hub, with a model card of their run."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants

from helpers.commands import FEW
from helpers.extractors import extractor_of, raw_points
from helpers.processes import PATIENCE
from ksm_lightning import FeatureExtractor
from ksm_lightning.cli import main
from ksm_lightning.runs.checkpoint import read_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The checkpoint of a short run."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", *FEW, "--kernel_error.max_points=50"])
    return folder / "runs" / "half_moons" / "version_0" / "checkpoints" / "last.ckpt"


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def rows_of(folder) -> dict[str, str]:
    """The table of a model card."""
    return dict(re.findall(r"^\| ([a-zA-Z ]+) \| (.+) \|$", (folder / "README.md").read_text(), re.MULTILINE))


# ---------------------------------------------------------------------- folders


def test_a_folder_gives_back_the_same_extractor(tmp_path):
    extractor = extractor_of(readout="nystroem")
    folder = extractor.save_pretrained(tmp_path / "new" / "mine")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]  # no drafts
    assert (folder / "model.safetensors").read_bytes() == extractor.to_bytes()
    for name in (folder, str(folder)):
        same = FeatureExtractor.from_pretrained(name)
        assert isinstance(same, FeatureExtractor)
        assert same.identity == extractor.identity
        assert np.array_equal(same.transform(raw_points()), extractor.transform(raw_points()))
        assert same.provenance is None
    about = json.loads((folder / "config.json").read_text())
    assert about == {**extractor.description, "training": None}


def test_an_extractor_without_a_run_has_a_card_about_itself(tmp_path):
    extractor = extractor_of(readout="nystroem")
    folder = extractor.save_pretrained(tmp_path / "mine")
    assert rows_of(folder) == {
        "kernel": "gaussian, sigma = 0.7",
        "features": "7, readout nystroem of 7 landmarks",
        "input": "4 numbers per point (2 x 2 pixels)",
        "extractor": f"{extractor.identity}, written by ksm_lightning {extractor.metadata['version']}",
    }
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "ksm_lightning"
    assert card.data.pipeline_tag == "feature-extraction"


def test_the_card_of_a_run_names_its_data_training_and_errors(checkpoint, tmp_path):
    extractor = FeatureExtractor.from_checkpoint(checkpoint, "nystroem")
    folder = extractor.save_pretrained(tmp_path / "moons")
    rows = rows_of(folder)
    assert rows["kernel"] == "gaussian, sigma = 0.3"
    assert rows["data"] == "HalfMoonsDataModule: 200 points of 2 features, centred, not scaled"
    assert rows["training"] == "4 neurons, paper bound, 100 updates of 64 points, seed 0"
    errors = extractor.provenance["kernel_nrmse"]
    assert sorted(errors) == ["neural", "nystroem"]
    assert 0 < errors["nystroem"] <= errors["neural"] < 2
    assert rows["kernel NRMSE on the training data"] == (
        f"{errors['nystroem']:.4g} (nystroem), {errors['neural']:.4g} (neural)"
    )
    same = FeatureExtractor.from_pretrained(folder)
    assert same.provenance == extractor.provenance
    again = same.save_pretrained(tmp_path / "again", name="moons")
    assert (again / "README.md").read_text() == (folder / "README.md").read_text()
    text = "".join(path.read_text() for path in (folder / "README.md", folder / "config.json"))
    assert str(checkpoint.parents[3]) not in text  # a card is public, and a path may be private


def test_the_example_of_a_card_runs(checkpoint, tmp_path, monkeypatch):
    FeatureExtractor.from_checkpoint(checkpoint).save_pretrained(tmp_path / "moons")
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", (tmp_path / "moons" / "README.md").read_text(), re.DOTALL)[1]
    values: dict = {}
    exec(code, values)
    assert values["y"].shape == (10, 4)


def test_a_moved_checkpoint_has_a_card_without_names_and_errors(checkpoint, tmp_path):
    shutil.copy(checkpoint, tmp_path / "x.ckpt")
    extractor = FeatureExtractor.from_checkpoint(tmp_path / "x.ckpt")
    assert extractor.provenance["updates"] == read_checkpoint(checkpoint)["global_step"] == 100
    assert (extractor.provenance["data"], extractor.provenance["kernel_nrmse"]) == (None, {})
    rows = rows_of(extractor.save_pretrained(tmp_path / "moons"))
    assert rows["data"].startswith("200 points of 2 features")
    assert "kernel NRMSE on the training data" not in rows


def test_errors_of_other_numbers_of_features_are_not_claimed(checkpoint, tmp_path):
    few = FeatureExtractor.from_checkpoint(checkpoint, "nystroem", sample=torch.randn(50, 2), num_features=2)
    assert "kernel NRMSE on the training data" not in rows_of(few.save_pretrained(tmp_path / "few"))


# ---------------------------------------------------------------------- the Hub


def test_push_uploads_the_same_files_with_the_name_of_the_repository(tmp_path, monkeypatch):
    calls = {}

    def create(self, repo_id, **options):
        calls["create"] = (repo_id, options["private"])
        return SimpleNamespace(repo_id=repo_id)

    def upload(self, *, folder_path, **options):
        shutil.copytree(folder_path, tmp_path / "pushed")
        calls["upload"] = (options["repo_id"], options["revision"], options["commit_message"])
        return "address of the commit"

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    extractor = extractor_of()
    assert (
        extractor.push_to_hub("me/moons", private=True, branch="v1", commit_message="First") == "address of the commit"
    )
    assert calls == {"create": ("me/moons", True), "upload": ("me/moons", "v1", "First")}
    assert FeatureExtractor.from_pretrained(tmp_path / "pushed").identity == extractor.identity
    assert 'from_pretrained("me/moons")' in (tmp_path / "pushed" / "README.md").read_text()


def test_a_repository_is_downloaded_with_its_revision(tmp_path, monkeypatch):
    extractor = extractor_of()
    folder = extractor.save_pretrained(tmp_path / "mine")
    calls = []

    def download(repo_id, filename, **options):
        calls.append((repo_id, filename, options["revision"], options["local_files_only"]))
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
    made = FeatureExtractor.from_pretrained("me/moons", revision="v1", local_files_only=True)
    assert made.identity == extractor.identity
    assert calls == [("me/moons", name, "v1", True) for name in ("config.json", "model.safetensors")]


# ---------------------------------------------------------------------- what cannot be used


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    extractor_of().save_pretrained(tmp_path / "mine")  # empty
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("of another model")
    for name in ("mine", "other"):
        with pytest.raises(FileExistsError, match=f"{name} exists already: choose another folder"):
            extractor_of().save_pretrained(tmp_path / name)
    assert (tmp_path / "other" / "config.json").read_text() == "of another model"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "other"]


def damage(folder, name: str, content: str | bytes | None):
    """A copy of a folder with another content of a file, or without it."""
    other = folder.with_name("damaged")
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(folder, other)
    (other / name).unlink()
    if content is not None:
        (other / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return other


def test_damaged_and_foreign_folders_are_refused_in_one_sentence(tmp_path):
    folder = extractor_of().save_pretrained(tmp_path / "mine")
    other = extractor_of(readout="nystroem").to_bytes()
    about = json.loads((folder / "config.json").read_text())
    cases = [
        (
            "model.safetensors",
            None,
            r"damaged could not be loaded \(it has no model.safetensors\): give a folder written",
        ),
        ("model.safetensors", b"abc", "model.safetensors is damaged or not a safetensors file"),
        ("model.safetensors", other, "damaged is damaged: its config.json does not belong to its model.safetensors"),
        ("config.json", "{", r"damaged is damaged: its config.json is not JSON"),
        ("config.json", '{"model_type": "bert"}', "its config.json does not belong to its model.safetensors"),
        ("config.json", "[]", "damaged could not be loaded"),
        ("config.json", json.dumps({**about, "training": [1]}), "`training` in its config.json must hold named values"),
    ]
    for name, content, message in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            FeatureExtractor.from_pretrained(damage(folder, name, content))
        assert "\n" not in str(caught.value)
    assert FeatureExtractor.from_pretrained(damage(folder, "config.json", None)).provenance is None


def test_an_unknown_name_and_a_failed_upload_give_one_sentence():
    for name in ("nobody/nothing", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=rf"^{name} could not be loaded \(.*\): give a folder written by"):
            FeatureExtractor.from_pretrained(name)
    with pytest.raises(ConnectionError, match=r"could not be uploaded to me/moons \(.*\): log in with `hf auth login`"):
        extractor_of().push_to_hub("me/moons")


def test_the_extractor_needs_the_library_only_for_these_methods(tmp_path):
    code = (
        "import sys\nsys.modules['huggingface_hub'] = None\n"
        "from ksm_lightning import FeatureExtractor, GaussianKernel, KSMNetwork\n"
        "made = FeatureExtractor.from_network(KSMNetwork(GaussianKernel(), 2, 3))\n"
        "assert 'lightning' not in sys.modules\n"
        "for call in (lambda: made.save_pretrained('x'), lambda: made.push_to_hub('x'),\n"
        "             lambda: FeatureExtractor.from_pretrained('x')):\n"
        "    try:\n        call()\n"
        "    except ModuleNotFoundError as error:\n        print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    sentence = (
        "save_pretrained, from_pretrained and push_to_hub need the package huggingface_hub: run pip install "
        "'ksm-lightning[hub]'."
    )
    assert result.stdout.splitlines() == [sentence] * 3, result.stderr
    assert list(tmp_path.iterdir()) == []
