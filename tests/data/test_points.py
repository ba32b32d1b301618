"""Points in memory and in a memory-mapped file."""

import numpy as np
import pytest
import torch

from ksm_lightning.data import Points
from ksm_lightning.network.preprocessing import Preprocessing


def test_points_are_copied_to_a_device_once():
    points = Points(torch.zeros(3, 2))
    assert points.to("cpu") is points
    moved = points.to("meta")
    assert moved.data.device == torch.device("meta")
    assert points.to("meta") is moved


def test_points_larger_than_the_free_memory_of_a_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3_000_000_000, 8_000_000_000))
    points = Points(torch.empty(1, 1).expand(1_000_000, 1000))  # counts as 4 GB
    message = (
        r"The data needs 4 GB on cuda:0, which has 3 GB free: save it as a \.npy file and read it with "
        r"ArrayDataModule and memory_map=always, or use fewer points\."
    )
    with pytest.raises(ValueError, match=message):
        points.to("cuda:0")


def test_rows_of_a_memory_mapped_file_are_preprocessed_when_they_are_read(tmp_path):
    x = np.random.RandomState(0).randn(20, 3)
    np.save(tmp_path / "x.npy", x)
    preprocessing = Preprocessing.measure(x, centre=True, scaling="feature")
    points = Points(np.load(tmp_path / "x.npy", mmap_mode="r"), preprocessing)
    expected = torch.tensor(preprocessing.transform(x))
    assert torch.equal(points.slice(3, 9), expected[3:9])
    assert torch.equal(points.take(torch.tensor([7, 0, 7])), expected[[7, 0, 7]])
    assert torch.equal(points.to("cpu").slice(0, 20), expected)


def test_without_preprocessing_rows_are_cast_to_float32(tmp_path):
    np.save(tmp_path / "x.npy", x := np.random.RandomState(0).randn(5, 2))
    points = Points(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert torch.equal(points.slice(0, 5), torch.tensor(x, dtype=torch.float32))
