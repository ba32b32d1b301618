"""The fingerprint of training points: equal for equal values, cheap for large data, bounded for larger data."""

import time

import numpy as np
import pytest

from ksm_lightning.data import fingerprint
from ksm_lightning.data.fingerprint import Fingerprint


@pytest.fixture
def x() -> np.ndarray:
    return np.random.RandomState(0).randint(0, 100, (500, 3)).astype(np.float64)


def test_equal_values_have_one_fingerprint_in_every_dtype_and_layout(x):
    found = Fingerprint.of(x)
    assert (found.num_points, found.num_features, len(found.sha256)) == (500, 3, 64)
    for same in (x.astype(np.float32), x.astype(np.uint8), np.asfortranarray(x), x * (1 + 1e-15)):
        assert Fingerprint.of(same) == found


def test_other_values_another_order_and_another_shape_have_other_fingerprints(x):
    one = x.copy()
    one[317, 1] += 1e-4
    others = [one, x[::-1], x[:, ::-1], x[:-1], x.reshape(750, 2), x + 1]
    assert len({Fingerprint.of(each) for each in (x, *others)}) == 7


def test_a_memory_mapped_file_has_the_fingerprint_of_its_array(x, tmp_path):
    np.save(tmp_path / "x.npy", x)
    assert Fingerprint.of(np.load(tmp_path / "x.npy", mmap_mode="r")) == Fingerprint.of(x)


def test_of_larger_data_blocks_from_the_first_to_the_last_row_are_read(x, monkeypatch):
    monkeypatch.setattr(fingerprint, "BYTES_AT_ONCE", 960)  # 80 of the 500 rows of 12 bytes
    monkeypatch.setattr(fingerprint, "ROWS_AT_ONCE", 8)
    blocks = list(fingerprint._blocks(*x.shape))
    assert (len(blocks), blocks[0], blocks[-1]) == (10, (0, 8), (492, 500))
    assert all(stop - start == 8 for start, stop in blocks)
    found, first, last = Fingerprint.of(x), x.copy(), x.copy()
    first[0, 0] += 1
    last[-1, -1] += 1
    assert len({found, Fingerprint.of(first), Fingerprint.of(last), Fingerprint.of(x[:-1])}) == 4
    assert list(fingerprint._blocks(3, 1000)) == [(0, 1), (2, 3)]  # at least two rows, however long they are


def test_the_fingerprint_of_a_gigabyte_takes_less_than_a_second():
    x = np.zeros((2**21, 64))  # 0.5 GB in float32: the largest data that is read completely
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        Fingerprint.of(x)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1


def test_an_offset_hides_no_difference():
    """In float32, values near 1e8 are multiples of 8."""
    first, second = np.random.RandomState(0).randn(2, 50, 3) + 1e8
    assert Fingerprint.of(first) != Fingerprint.of(second)
    assert Fingerprint.of(first) == Fingerprint.of(first.copy())
