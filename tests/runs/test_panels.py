"""Checkpoints in panels: rows by any number of ranks, damage, and files that are missing."""

import copy
import re

import pytest
import torch

from helpers.thread_ranks import RankCollectives, ThreadRanks
from ksm_lightning.runs.digest import digest_of
from ksm_lightning.runs.panels import FOLDER, PanelName, has_panels, put_rows, read_rows, restrict_rows, take_rows
from ksm_lightning.sharding import Shard

N = 10


def whole() -> dict:
    """The parts of a checkpoint of 10 neurons that panels are about."""
    rows = {"W": torch.randn(N, 3), "q": torch.randn(N), "L": torch.randn(N, N)}
    learner = {
        "rate_factor": 1.0, "rule": {},
        "inverse": {"inverse": torch.randn(N, N), "ridge": 0.1, "drift": 0.15, "age": 3},
    }  # fmt: skip
    state = {f"network.{name}": value for name, value in rows.items()} | {"own": torch.ones(2)}
    return {"state_dict": state, "hyper_parameters": {"num_neurons": N}, "ksm_lightning": {"learner": learner}}


def shards(size: int) -> list[slice]:
    ranks = ThreadRanks(size)
    return [Shard(N, RankCollectives(ranks, rank)).rows for rank in range(size)]


def write(folder, content: dict, size: int) -> dict:
    """The files of ``size`` ranks, and the content of their index."""
    name, digests = PanelName("last.ckpt", "token"), []
    (folder / FOLDER).mkdir()
    for rank, rows in enumerate(shards(size)):
        index = copy.deepcopy(content)
        restrict_rows(index, rows)
        own = take_rows(index, index["ksm_lightning"]["learner"])
        torch.save(own, folder / FOLDER / name.of(rank, size))
        digests.append(digest_of(own))
    index["ksm_lightning"]["panels"] = name.index_of(shards(size), digests)
    return index


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_any_number_of_ranks_reads_what_any_number_has_written(tmp_path, writers, readers):
    content = whole()
    index = write(tmp_path, content, writers)
    assert has_panels(index)
    assert list(index["state_dict"]) == ["own"]
    for rows in shards(readers):
        found, expected = copy.deepcopy(index), copy.deepcopy(content)
        read_rows(found, tmp_path, rows)
        restrict_rows(expected, rows)
        assert not has_panels(found)
        assert digest_of(found) == digest_of(expected)
    read_rows(index, tmp_path)
    assert digest_of(index) == digest_of(content)


def test_a_learner_without_inverse_has_smaller_panels(tmp_path):
    content = whole()
    content["ksm_lightning"]["learner"]["inverse"] = {}
    index = write(tmp_path, content, 2)
    read_rows(index, tmp_path)
    assert digest_of(index) == digest_of(content)


def files(tmp_path) -> list:
    return sorted((tmp_path / FOLDER).iterdir())


def test_only_the_files_with_the_wanted_rows_are_opened(tmp_path):
    index = write(tmp_path, whole(), 2)
    files(tmp_path)[1].unlink()
    read_rows(copy.deepcopy(index), tmp_path, slice(0, 5))
    with pytest.raises(ValueError, match=r"rank-1-of-2.pt of the checkpoint is missing: keep the folder panels beside"):
        read_rows(index, tmp_path, slice(0, 6))


def flip(path) -> None:
    """Change one bit of L."""
    data = bytearray(path.read_bytes())
    data[data.index(torch.load(path, weights_only=True)["L"].numpy().tobytes()) + 40] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flip, lambda path: path.write_bytes(path.read_bytes()[:100]), lambda path: path.write_bytes(b""),
        lambda path: torch.save({"W": torch.zeros(5, 3)}, path), lambda path: torch.save([1], path),
        lambda path: path.write_text("import os"),
    ],
    ids=["one bit", "cut off", "empty", "of another run", "not a mapping", "text"],
)  # fmt: skip
def test_a_damaged_panel_is_refused_in_one_sentence(tmp_path, damage):
    index = write(tmp_path, whole(), 2)
    damage(files(tmp_path)[0])
    message = (
        f"The panel {files(tmp_path)[0]} is damaged, or belongs to another checkpoint: use an older one of the run."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_rows(index, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.pop(), "do not have the rows of all 10 neurons"),
        (lambda files: files.pop(0), "do not have the rows 0 to 5"),
        (lambda files: files[0].pop("digest"), "is damaged"),
        (lambda files: files.append(3), "is damaged"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, change, message):
    index = write(tmp_path, whole(), 2)
    change(index["ksm_lightning"]["panels"]["files"])
    with pytest.raises(ValueError, match=message):
        read_rows(index, tmp_path)


def test_panels_outside_of_their_folder_are_not_read(tmp_path):
    index = write(tmp_path, whole(), 1)
    files(tmp_path)[0].rename(tmp_path / "elsewhere.pt")
    index["ksm_lightning"]["panels"]["files"][0]["name"] = "../elsewhere.pt"
    with pytest.raises(ValueError, match=r"panels/elsewhere\.pt of the checkpoint is missing"):
        read_rows(index, tmp_path)


def test_rows_that_were_taken_can_be_put_back():
    content = whole()
    before = digest_of(content)
    put_rows(content, take_rows(content, content["ksm_lightning"]["learner"]))
    assert digest_of(content) == before
