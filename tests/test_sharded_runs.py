"""Whole runs of shared neurons with gloo processes: scores, checkpoints in panels, resuming, export."""

import json
import subprocess
import sys
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch

from helpers.ddp_sharded import make_data, make_model, make_trainer
from helpers.paths import ROOT
from helpers.processes import PATIENCE
from ksm_lightning.extractor import FeatureExtractor
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.runs.checkpoint import network_of, read_checkpoint


def launch(folder: Path, devices: int, name: str, *more: str) -> subprocess.CompletedProcess:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "ddp_sharded.py"), str(folder), str(devices), name]
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=PATIENCE, check=False)


def run(folder: Path, devices: int, name: str, *more: str) -> tuple[dict, list[dict]]:
    """The weights of all neurons, and the scores of each rank."""
    result = launch(folder, devices, name, *more)
    assert result.returncode == 0, result.stderr[-3000:]
    parts = [torch.load(folder / f"{name}_{rank}.pt", weights_only=True) for rank in range(devices)]
    assert [len(part["L"]) for part in parts] == [len(part["W"]) for part in parts]
    weights = {each: torch.cat([part[each] for part in parts]) for each in parts[0]}
    return weights, [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(devices)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, *run(folder, 2, "two", "-", "again")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run on one process without shards, and its trainer."""
    lightning.seed_everything(5)
    model = make_model(parallel="data", acceleration="none")
    trainer = make_trainer(str(tmp_path_factory.mktemp("one")), 1, "one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        trainer.fit(model, datamodule=make_data())
    return model, trainer


def differences(found: dict, model: KernelSimilarityMatching) -> dict[str, float]:
    weights = {name: value.detach() for name, value in model.network.named_parameters()}
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in weights.items()}


def test_a_run_on_two_ranks_is_that_of_a_whole_network(two, whole):
    """L is that of the exact end, which shards compute to 1e-4."""
    _, weights, scores = two
    model, trainer = whole
    found = differences(weights, model)
    assert max(found["W"], found["q"]) < 1e-6
    assert found["L"] < 2e-4
    for rank in scores:
        expected = {name: float(value) for name, value in trainer.callback_metrics.items()}
        assert {"val/kernel_nrmse", "val/kernel_nrmse_nystroem", "val/energy", "test/probe_accuracy"} <= set(expected)
        for name, value in expected.items():
            assert rank[name] == pytest.approx(value, rel=1e-3), name


def test_a_run_continued_by_the_same_number_of_ranks_is_bitwise_equal(two):
    assert [rank["again"] for rank in two[2]] == [1.0, 1.0]


def test_ranks_write_panels_and_a_run_folder_like_any_other(two):
    folder = two[0] / "run" / "two"
    assert {path.name for path in (folder / "checkpoints").glob("*.ckpt")} == {
        "last.ckpt", "update-0000020.ckpt", "update-0000030.ckpt", "update-0000040.ckpt", "update-0000060.ckpt"
    }  # fmt: skip
    panels = [path.name.split(".") for path in sorted((folder / "checkpoints" / "panels").iterdir())]
    assert [(name[0], name[-2]) for name in panels] == [
        (f"update-00000{update}", f"rank-{rank}-of-2") for update in (20, 30, 40, 60) for rank in (0, 1)
    ]
    assert (folder / "figures" / "overview.png").is_file()
    index = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert [each["rows"] for each in index["ksm_lightning"]["panels"]["files"]] == [[0, 13], [13, 26]]
    assert not any(name.startswith("network.") for name in index["state_dict"])


def test_panels_and_whole_checkpoints_become_the_same_extractor(two):
    folder, weights, _ = two
    panels, whole = folder / "run" / "two" / "checkpoints" / "last.ckpt", folder / "two.ckpt"
    network = network_of(read_checkpoint(panels))
    for name, value in weights.items():
        assert torch.equal(network.get_parameter(name), value), name
    extractors = [FeatureExtractor.from_checkpoint(path, readout="nystroem") for path in (panels, whole)]
    x = make_data().load()[0].x[:20]
    np.testing.assert_array_equal(*(extractor.transform(x) for extractor in extractors))
    assert extractors[0].identity == extractors[1].identity
    model = KernelSimilarityMatching.load_from_checkpoint(panels)
    assert torch.equal(model.network.L, weights["L"])
    assert model(torch.zeros(3, 2, dtype=torch.float64)).shape == (3, 26)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_another_number_of_ranks_continues_to_the_same_weights(two, tmp_path, devices):
    folder, weights, _ = two
    half = folder / "run" / "two" / "checkpoints" / "update-0000020.ckpt"
    found, _ = run(tmp_path, devices, "other", str(half))
    for name in ("W", "q"):
        assert (found[name] - weights[name]).norm() < 1e-5 * weights[name].norm(), name
    assert (found["L"] - weights["L"]).norm() < (2e-4 if devices == 1 else 1e-5) * weights["L"].norm()


@pytest.mark.slow
def test_a_killed_run_is_continued_bitwise(two, tmp_path):
    _, weights, _ = two
    result = launch(tmp_path, 2, "killed", "-", "40")
    assert result.returncode != 0
    checkpoints = tmp_path / "run" / "killed" / "checkpoints"
    assert len(list((checkpoints / "panels").glob("*.pt"))) == 2  # replaced ones are removed
    found, _ = run(tmp_path, 2, "continued", str(checkpoints / "last.ckpt"))
    for name, value in weights.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
def test_a_divergence_stops_all_ranks_with_the_same_message(tmp_path):
    assert launch(tmp_path, 2, "wild", "-", "wild").returncode != 0
    messages = {path.name: path.read_text() for path in tmp_path.glob("error_*.txt")}
    assert set(messages) == {"error_0.txt", "error_1.txt"}
    assert messages["error_0.txt"] == messages["error_1.txt"]
    assert messages["error_0.txt"].startswith("Training diverged at update ")
    saved = network_of(read_checkpoint(tmp_path / "run" / "wild" / "checkpoints" / "last.ckpt"))
    assert all(value.isfinite().all() for value in saved.parameters())
