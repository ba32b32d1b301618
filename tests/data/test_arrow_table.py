"""Parquet, Feather and Arrow files: the same points as arrays, and one sentence about bad values."""

import decimal
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from ksm_lightning.data import ArrayDataModule, memory

FORMATS = ["x.parquet", "x.feather", "x.arrow"]


def write(table: pa.Table, path: Path) -> ArrayDataModule:
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".feather":
        feather.write_feather(table, path, chunksize=7)
    else:  # the stream format, as Hugging Face datasets writes it
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return path


def load(table: pa.Table, path: Path, **options) -> ArrayDataModule:
    data = ArrayDataModule(str(write(table, path)), **options)
    data.setup()
    return data


@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_the_features_of_the_same_array_and_texts_are_labels(tmp_path, name):
    x = np.random.RandomState(0).randn(20, 3)
    texts = np.array(["v", "u"])[np.arange(20) % 2]
    table = pa.table({"a": x[:, 0], "k": texts, "b": x[:, 1], "c": x[:, 2]})
    data = load(table, tmp_path / name, labels="k")
    assert np.array_equal(data.load()[0].x, x)
    np.save(tmp_path / "x.npy", x)
    assert data.fingerprint == ArrayDataModule(str(tmp_path / "x.npy")).fingerprint
    assert data.train_labels.tolist() == [1, 0] * 10
    assert data.label_names == ("u", "v")


@pytest.mark.parametrize("name", FORMATS)
def test_lists_are_vectors_and_images_keep_their_small_dtype(tmp_path, name):
    images = np.random.RandomState(0).randint(0, 256, (20, 4, 3)).astype(np.uint8)
    flat = images.reshape(20, -1)
    columns = {
        "fixed": pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), 12),
        "lists": pa.array(flat.tolist(), pa.list_(pa.uint8())),
        "nested": pa.array(images.tolist(), pa.large_list(pa.list_(pa.uint8()))),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
    }
    for kind, column in columns.items():
        x = load(pa.table({"image": column, "n": pa.array(range(20), pa.int32())}), tmp_path / name).load()[0].x
        assert np.array_equal(x, np.column_stack([flat, np.arange(20)])), kind
        x = load(pa.table({"image": column}), tmp_path / name).load()[0].x
        assert x.dtype == np.uint8


def test_other_numbers_become_the_smallest_common_dtype(tmp_path):
    table = pa.table({
        "flag": [True, False], "price": [decimal.Decimal("1.25"), decimal.Decimal("2.5")],
        "code": pa.array([3, 4]).dictionary_encode(), "half": pa.array(np.float16([0.5, 1])),
    })  # fmt: skip
    assert load(table, tmp_path / "x.parquet").load()[0].x.tolist() == [[1.0, 1.25, 3.0, 0.5], [0.0, 2.5, 4.0, 1.0]]


def test_the_index_of_a_data_frame_is_left_out(tmp_path):
    pd.DataFrame({"a": [1.0, 2.0], "y": ["u", "v"]}, index=[7, 9]).to_parquet(tmp_path / "x.parquet")
    data = ArrayDataModule(str(tmp_path / "x.parquet"), labels="y")
    assert data.train_points.data.tolist() == [[1.0], [2.0]]


def test_names_with_dots_are_columns_of_their_own(tmp_path):
    table = pa.table({"sepal.length": [1.0, 2.0], "sepal": [3.0, 4.0]})
    assert load(table, tmp_path / "x.parquet", columns="sepal").train_points.data.tolist() == [[3.0], [4.0]]
    assert load(table, tmp_path / "x.parquet", columns="sepal.length").train_points.data.tolist() == [[1.0], [2.0]]


def test_a_table_is_read_in_parts(tmp_path):
    """16 MB in 100 row groups: besides the array itself, little memory is used at any time."""
    count = 200_000
    schema = pa.schema({f"c{i}": pa.float32() for i in range(20)})
    with parquet.ParquetWriter(tmp_path / "x.parquet", schema) as writer:
        for _ in range(100):
            columns = [pa.array(np.zeros(count // 100, np.float32)) for _ in schema]
            writer.write_table(pa.table(columns, schema=schema))
    data = ArrayDataModule(str(tmp_path / "x.parquet"))
    pool = pa.default_memory_pool()
    before, peak = pool.bytes_allocated(), pool.max_memory()
    tracemalloc.start()
    try:
        x = data.load()[0].x
        assert x.nbytes == count * 20 * 4
        assert tracemalloc.get_traced_memory()[1] < 1.6 * x.nbytes
    finally:
        tracemalloc.stop()
    assert max(pool.max_memory() - max(before, peak), 0) < 0.5 * x.nbytes


# ---------------------------------------------------------------------- what cannot be used

BAD = {
    r"'k' holds values of the type string: set labels=k \(--data.labels=k\)": {"a": [1.0] * 9, "k": ["u"] * 9},
    r"The column 'target' of .* may hold labels.*: set labels=target": {"a": [1.5] * 9, "target": [0, 1, 2] * 3},
    r"row 8 \(counted from 0\), column 'b': the value is missing; fill it or remove the row": {"b": [1.0] * 8 + [None]},
    r"row 8 \(counted from 0\), column 'b': the value is missing \(NaN\)": {"b": [1.0] * 8 + [float("nan")]},
    r"row 8 \(counted from 0\), column 'v': the value is missing": {"v": [[1, 2]] * 8 + [[1, None]]},
    r"row 8 \(counted from 0\), column 'v': the list has 1 values and another one 2": {"v": [[1, 2]] * 8 + [[1]]},
    r"row 7 \(counted from 0\), column 'v': the list has 3 values and another one 2": {
        "v": [[1, 2]] * 7 + [[1] * 3] * 2
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_bad_columns_are_named_in_one_sentence(tmp_path, name):
    for message, columns in BAD.items():
        with pytest.raises(ValueError, match=message) as caught:
            load(pa.table(columns), tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"row 7 \(counted from 0\), column 'k': the label is missing"):
        load(pa.table({"a": [1.0] * 9, "k": ["u"] * 7 + [None] * 2}), tmp_path / name, labels="k")
    with pytest.raises(ValueError, match=r"row 8 \(counted from 0\), column 'k': the label is missing"):
        load(pa.table({"a": [1.0] * 9, "k": [1] * 8 + [None]}), tmp_path / name, labels="k")


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_refused_in_one_sentence(tmp_path, name):
    path = write(pa.table({"a": np.random.RandomState(0).randn(400)}), tmp_path / name)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"a,b\n1,2\n" * 20, whole[:4]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is damaged or not a Parquet, Feather or Arrow file") as caught:
            ArrayDataModule(str(path)).setup()
        assert "\n" not in str(caught.value)


def test_a_table_larger_than_the_free_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 999.0)
    with pytest.raises(
        ValueError, match=r"x.parquet is too large: an array of shape \(100, 1\) needs 1,600 bytes .* 999"
    ):
        load(pa.table({"a": np.zeros(100)}), tmp_path / "x.parquet")


def test_without_the_extra_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    write(pa.table({"a": [1.0]}), tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "ksm_lightning.data.arrow_table", raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        ArrayDataModule(str(tmp_path / "x.parquet")).setup()
    assert str(caught.value) == (
        "Parquet, Feather and Arrow files need the package pyarrow: run pip install 'ksm-lightning[arrow]'."
    )
    assert isinstance(caught.value, ValueError)  # which `ksm` prints as one sentence
