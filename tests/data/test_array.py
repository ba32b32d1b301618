"""Your own arrays from .npy, .npz and .csv files, good and bad."""

import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ksm_lightning.data import ArrayDataModule, memory


@pytest.fixture
def table() -> np.ndarray:
    return np.random.RandomState(0).randn(30, 3)


def test_npy_npz_and_csv_give_the_same_points(tmp_path, table):
    labels = np.arange(30) % 3
    np.save(tmp_path / "x.npy", table)
    np.save(tmp_path / "labels.npy", labels)
    np.savez(tmp_path / "x.npz", x=table, label=labels)
    both = np.column_stack([table, labels])
    np.savetxt(tmp_path / "x.csv", both, delimiter=",", header="a,b,c,label", comments="", fmt="%.17g")
    expected = torch.tensor((table - table.mean(0)) / table.std(0), dtype=torch.float32)
    for name, source in (("x.npy", str(tmp_path / "labels.npy")), ("x.npz", "label"), ("x.csv", "label")):
        data = ArrayDataModule(str(tmp_path / name), labels=source, centre=True, scaling="feature")
        assert_close(data.train_points.data, expected, rtol=1e-5, atol=1e-6)
        assert data.train_labels.tolist() == labels.tolist()
        assert data.in_features == 3


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_csv_without_header_and_with_other_delimiters(tmp_path, table, delimiter):
    np.savetxt(tmp_path / "x.csv", table, delimiter=delimiter, fmt="%.17g")
    data = ArrayDataModule(str(tmp_path / "x.csv"))
    assert_close(data.train_points.data, torch.tensor(table, dtype=torch.float32))
    assert data.train_labels is None


def test_test_points_have_a_separate_file_and_the_preprocessing_of_the_training_points(tmp_path, table):
    np.save(tmp_path / "x.npy", table)
    np.save(tmp_path / "t.npy", table[:5] + 1)
    data = ArrayDataModule(str(tmp_path / "x.npy"), test_path=str(tmp_path / "t.npy"), centre=True)
    assert_close(data.test_points.data, torch.tensor(table[:5] + 1 - table.mean(0), dtype=torch.float32))


def test_an_unknown_memory_map_is_refused():
    with pytest.raises(ValueError, match="`memory_map` must be one of auto, always, never, got 'perhaps'"):
        ArrayDataModule("x.npy", memory_map="perhaps")


# ---------------------------------------------------------------------- memory-mapped files


def test_a_memory_mapped_file_gives_the_same_batches_as_data_in_memory(tmp_path, table):
    path = str(tmp_path / "x.npy")
    np.save(path, table)
    mapped = ArrayDataModule(path, centre=True, scaling="global", memory_map="always", seed=1)
    loaded = ArrayDataModule(path, centre=True, scaling="global", memory_map="never", seed=1)
    assert isinstance(mapped.train_points.data, np.memmap)
    assert isinstance(loaded.train_points.data, torch.Tensor)
    assert torch.equal(next(iter(mapped.train_dataloader())).x, next(iter(loaded.train_dataloader())).x)
    assert torch.equal(next(iter(mapped.val_dataloader())), next(iter(loaded.val_dataloader())))


def test_a_file_larger_than_the_free_memory_is_mapped(tmp_path, table, monkeypatch):
    np.save(tmp_path / "x.npy", table)
    monkeypatch.setattr("ksm_lightning.data.memory.free_memory", lambda: 1000.0)
    assert isinstance(ArrayDataModule(str(tmp_path / "x.npy")).train_points.data, np.memmap)


def test_data_far_from_the_origin_is_centred_before_the_cast_to_float32(tmp_path):
    x = np.random.RandomState(0).randn(200, 2)
    np.save(tmp_path / "x.npy", 1e9 + x)
    data = ArrayDataModule(str(tmp_path / "x.npy"), centre=True, scaling="feature")
    expected = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    assert_close(data.train_points.data, expected, rtol=0, atol=1e-5)
    mapped = ArrayDataModule(str(tmp_path / "x.npy"), centre=True, scaling="feature", memory_map="always")
    assert torch.equal(mapped.train_points.slice(0, 200), data.train_points.data)


# ---------------------------------------------------------------------- bad files


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the pickle ran')",))


def bad_files(folder, table):
    """Paths of bad files by the message that each should give."""

    def write(name, content):
        (folder / name).write_bytes(content)
        return str(folder / name)

    def save(name, array, **options):
        np.save(folder / name, array, **options)
        return str(folder / name)

    with_nan, with_inf = table.copy(), table.copy()
    with_nan[7, 1], with_inf[3, 2] = np.nan, 1e300
    np.save(folder / "whole.npy", table)
    whole = (folder / "whole.npy").read_bytes()
    np.savez(folder / "two.npz", a=table, b=table)
    np.savez(folder / "one.npz", x=table)
    flipped = bytearray((folder / "one.npz").read_bytes())
    flipped[300] ^= 0xFF
    np.savez(folder / "bomb.npz", x=np.array([Bomb()], dtype=object))
    with zipfile.ZipFile(folder / "text.npz", "w") as archive:
        archive.writestr("a.txt", "1 2 3")
    with zipfile.ZipFile(folder / "named.npz", "w") as archive:
        archive.writestr("x.npy", "1 2 3")
    with zipfile.ZipFile(folder / "none.npz", "w"):
        pass
    return {
        r"'a.txt' in .*text.npz is not an array: write the file with numpy.savez": str(folder / "text.npz"),
        r"'x' in .*named.npz is not an array": str(folder / "named.npz"),
        r"`key` must be the name .*none.npz has no arrays": str(folder / "none.npz"),
        "is empty": write("empty.csv", b""),
        "There is no data file": str(folder / "missing.npy"),
        "must be a file of one of the types .npy, .npz, .csv, .tsv, .parquet": write("x.txt", b"1,2"),
        "line 3: 'x' is not a number": write("text.csv", b"a,b\n1,2\n3,x\n"),
        "line 2: the row has 1 fields, but the first line has 2": write("ragged.csv", b"1,2\n3\n"),
        "is empty: its shape is \\(0, 2\\)": write("header.csv", b"a,b\n"),
        "holds nan at row 7, column 1": save("nan.npy", with_nan),
        "holds inf at row 3, column 2": save("inf.npy", with_inf),
        "is empty: its shape is": save("zero.npy", np.zeros((0, 3))),
        "two dimensions": save("flat.npy", np.zeros(3)),
        r"two dimensions \(samples, features\), got shape \(\)": save("scalar.npy", np.array(1.0)),
        "must hold numbers, but its dtype is <U1": save("words.npy", np.array([["a", "b"]])),
        "holds pickled objects, which could run code": save(
            "bomb.npy", np.array([Bomb()], dtype=object), allow_pickle=True
        ),
        "is damaged or not a NumPy file": write("cut.npy", whole[: len(whole) // 2]),
        "`key` must be the name of the array with the points; .* has a, b": str(folder / "two.npz"),
        "not a .npz archive: rename it to .npy": write("single.npz", whole),
        "bomb.npz is refused": str(folder / "bomb.npz"),
        "crc.npz is damaged": write("crc.npz", flipped),
    }


def test_bad_files_are_refused_in_one_sentence(tmp_path, table):
    for message, path in bad_files(tmp_path, table).items():
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            ArrayDataModule(path).setup()
        assert "\n" not in str(caught.value)


def claim(shape: tuple[int, ...], length: int | None = None) -> bytes:
    """The start of a ``.npy`` file of version 2 that claims a shape, and a length of its header."""
    text = repr({"descr": "<f8", "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + (length or len(text)).to_bytes(4, "little") + text


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            claim((2**40, 2)),
            r"bomb.npz is too large: its array 'x' of shape \(1099511627776, 2\) needs 35,184,372,088,832 bytes of "
            r"memory, and [\d,]+ are free; save it as .npy, which is read in parts\.",
        ),
        (
            claim((2**20, 4)),
            r"too large: its array 'x' of shape \(1048576, 4\) needs 67,108,864 bytes .* 9,999,999",
        ),
        (claim((2, 2), length=2**31), "bomb.npz is damaged or not a NumPy file: the header of the array 'x' has 2,147"),
    ],
    ids=["claimed", "true", "header"],
)
def test_an_archive_that_expands_to_more_than_the_memory_is_refused_before_it_is_read(
    tmp_path, monkeypatch, start, message
):
    """32 MB of zeros in 33 KB."""
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", start + bytes(2**25))
    monkeypatch.setattr(memory, "free_memory", lambda: 9_999_999.0)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            ArrayDataModule(str(tmp_path / "bomb.npz")).setup()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_an_archive_whose_array_claims_less_than_it_holds_is_refused(tmp_path):
    """NumPy reads the smaller array, and the archive never compares the checksum. It was loaded with 1,200 points."""
    np.savez(tmp_path / "x.npz", x=np.random.RandomState(0).randn(1600, 2))
    content = (tmp_path / "x.npz").read_bytes()
    for old, new in ((b"(1600, 2)", b"(1200, 2)"), (b"<f8", b"<f4")):
        (tmp_path / "y.npz").write_bytes(content.replace(old, new))
        with pytest.raises(ValueError, match=r"y.npz is damaged .*: the array 'x' is larger than its header says"):
            ArrayDataModule(str(tmp_path / "y.npz")).setup()


def test_labels_that_claim_more_than_their_file_holds_are_refused(tmp_path, table):
    np.save(tmp_path / "x.npy", table)
    (tmp_path / "l.npy").write_bytes(claim((2**40,)) + bytes(100))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"l\.npy is damaged or not a NumPy file"):
            ArrayDataModule(str(tmp_path / "x.npy"), labels=str(tmp_path / "l.npy")).setup()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("colour", "has no column 'colour' for labels; it has a, b"),
        ("b", "must be whole numbers or texts, but some are fractions"),
        ("7", "no column"),
        ("missing.npy", "There is no data file missing.npy"),
    ],
)
def test_bad_labels_are_refused(tmp_path, labels, message):
    (tmp_path / "x.csv").write_text("a,b\n1,2.5\n2,3\n")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ArrayDataModule(str(tmp_path / "x.csv"), labels=labels).setup()


@pytest.mark.parametrize("labels", ["label", "1"])
def test_a_label_column_is_given_by_name_or_index(tmp_path, labels):
    (tmp_path / "x.csv").write_text('"a","label"\n\n"1.5","2"\n"2.5","3"\n')
    data = ArrayDataModule(str(tmp_path / "x.csv"), labels=labels)
    assert data.train_points.data.flatten().tolist() == [1.5, 2.5]
    assert data.train_labels.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.full(30, 1j), "must be whole numbers or texts, but they are of dtype complex128"),
        (np.full(30, np.nan), "must be whole numbers or texts, but some are fractions, NaN or infinite"),
        (np.arange(4), "30 points but labels of shape"),
    ],
    ids=["complex", "nan", "length"],
)
def test_bad_label_files_are_refused(tmp_path, table, labels, message):
    np.save(tmp_path / "x.npy", table)
    np.save(tmp_path / "l.npy", labels)
    with pytest.raises(ValueError, match=message):
        ArrayDataModule(str(tmp_path / "x.npy"), labels=str(tmp_path / "l.npy")).setup()


def test_labels_of_a_npy_file_must_be_a_file(tmp_path, table):
    np.save(tmp_path / "x.npy", table)
    with pytest.raises(ValueError, match=r"must be the path of a .npy file .* got 'label'"):
        ArrayDataModule(str(tmp_path / "x.npy"), labels="label").setup()
