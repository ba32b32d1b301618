"""CSV tables: separators, headers, labels, and one sentence about what cannot be used."""

import numpy as np
import pytest

from ksm_lightning.data import ArrayDataModule
from ksm_lightning.data.csv_table import CsvTable
from ksm_lightning.data.table import coded_labels

IRIS = "length,width,species\n5.1,3.5,setosa\n6.7,3.1,virginica\n4.9,3.0,setosa\n"


@pytest.fixture
def read(tmp_path):
    """A function that loads a CSV text with some options."""

    def load(text: str | bytes, test: str | None = None, **options) -> ArrayDataModule:
        (tmp_path / "x.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
        if test is not None:
            (tmp_path / "t.csv").write_text(test)
            options["test_path"] = str(tmp_path / "t.csv")
        data = ArrayDataModule(str(tmp_path / "x.csv"), **options)
        data.setup()
        return data

    return load


def rows(data: ArrayDataModule) -> list[list[float]]:
    return data.train_points.data.tolist()


# ---------------------------------------------------------------------- separator and header


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1.5,2\n3,4\n",
        "a;b\n1.5;2\n3;4\n",
        "a\tb\n1.5\t2\n3\t4\n",
        "a|b\n1.5|2\n3|4\n",
        "1.5,2\n3,4\n",
        "1.5 2\n3 4\n",
        "1.500e+00  2.0\n 3.0  4.0\n",
        "# a b\n1.5 2\n3 4\n",
        "# made by hand\n# a,b\n1.5,2\n\n3,4\n",
        '"a, of the left",b\n"1.5",2\n3,"4"\n',
        "a , b\r\n 1.5, 2\r\n3 ,4\r\n",
        ",a,b\n0,1.5,2\n1,3,4\n",
        '"","a","b"\n"first",1.5,2\n"second",3,4\n',
        "a,b,\n1.5,2,\n3,4,\n",
        "\ufeffa,b\n1.5,2\n3,4\n",
        "a,b\n1.5,2\n3,4\n".encode("utf-16"),
    ],
    ids=["comma", "semicolon", "tab", "bar", "no header", "spaces", "savetxt", "comment", "comments", "quotes",
         "padded", "index", "row names", "last separator", "mark", "utf-16"],
)  # fmt: skip
def test_usual_files_are_read_as_their_writers_meant_them(read, text):
    assert rows(read(text)) == [[1.5, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0,1,2\n1.5,2,3\n", ["0", "1", "2"]),  # pandas, columns without names
        ("label,1,2\n7,0.5,0.5\n", ["label", "1", "2"]),
        ("label,0,1\n7,0.5,0.5\n", ["label", "0", "1"]),
        ("1x1,1x2\n0.5,0.5\n", ["1x1", "1x2"]),
    ],
)
def test_a_header_may_hold_numbers(tmp_path, text, names):
    (tmp_path / "x.csv").write_text(text)
    table = CsvTable(tmp_path / "x.csv")
    assert (table.names, table.has_names) == (names, True)
    assert table.numbers([1, 0]).shape == (1, 2)


@pytest.mark.parametrize("text", ["0,1\n1,0\n", "1,2,3\n4,5,6\n", "2,1.5\n3,1\n", "5.1,setosa\n4.9,virginica\n"])
def test_a_first_row_of_data_is_not_a_header(tmp_path, text):
    (tmp_path / "x.csv").write_text(text)
    table = CsvTable(tmp_path / "x.csv")
    assert not table.has_names
    assert len(table.numbers([0])) == 2


def test_many_rows_are_the_same_as_numpy_reads_them(tmp_path):
    x = np.random.RandomState(0).randn(10_000, 3)
    np.savetxt(tmp_path / "x.csv", x, delimiter=",", fmt="%.17g")
    assert np.array_equal(CsvTable(tmp_path / "x.csv").numbers([0, 1, 2]), x)


# ---------------------------------------------------------------------- labels


def test_texts_are_numbered_by_name_and_the_test_file_has_the_same_numbers(read):
    data = read(IRIS, test="species,width,length\nvirginica,1,2\n", labels="species")
    assert data.label_names == ("setosa", "virginica")
    assert data.train_labels.tolist() == [0, 1, 0]
    assert data.test_labels.tolist() == [1]
    assert data.test_points.data.tolist() == [[2.0, 1.0]]  # columns are found by name


def test_numbers_among_texts_are_texts_in_both_files(read):
    data = read("a,k\n1,10\n2,x\n3,9\n", test="a,k\n1,9\n2,10\n", labels="k")
    assert data.label_names == ("10", "9", "x")
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == ([0, 2, 1], [1, 0])


def test_a_test_file_may_lack_the_labels_and_have_further_columns(read):
    data = read(IRIS, test="id,length,width\n7,2,1\n", labels="species")
    assert data.test_points.data.tolist() == [[2.0, 1.0]]
    assert data.test_labels is None


@pytest.mark.parametrize("labels", ["species", "2", "-1", 2, -1])
def test_the_label_column_has_a_name_and_a_number(read, labels):
    assert read(IRIS, labels=labels).train_labels.tolist() == [0, 1, 0]


ASKED = "may hold labels, which must not be inputs: set labels={0} (--data.labels={0}) if it does, or labels=none"


@pytest.mark.parametrize(
    "name", ["label", "Labels", "target", "class", "y", "class_label", "target.name", "true-label", "label_id"]
)
def test_a_column_named_like_labels_is_asked_about(read, name):
    with pytest.raises(ValueError, match="may hold labels") as caught:
        read(f"a,{name},b\n1.5,0,2\n2.5,1,3\n")
    assert f"The column {name!r} of" in str(caught.value)
    assert ASKED.format(name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["classic", "yy", "mylabels2", "targeted", "x"])
def test_other_names_are_not_asked_about(read, name):
    assert rows(read(f"a,{name}\n1.5,0\n2.5,1\n")) == [[1.5, 0.0], [2.5, 1.0]]


def test_an_answer_makes_the_column_an_input_or_labels_or_leaves_it_out(read):
    text = "a,label\n1.5,0\n2.5,1\n"
    assert rows(read(text, labels="none")) == rows(read(text, columns=["a", "label"])) == [[1.5, 0.0], [2.5, 1.0]]
    assert rows(read(text, columns="label,a")) == [[0.0, 1.5], [1.0, 2.5]]
    for options in ({"labels": "label"}, {"ignore": "label"}, {"columns": "a"}):
        assert rows(read(text, **options)) == [[1.5], [2.5]]


def test_coordinates_x_and_y_are_inputs_unless_y_holds_whole_numbers(read):
    assert rows(read("x,y\n1,0.5\n2,1\n")) == [[1.0, 0.5], [2.0, 1.0]]
    with pytest.raises(ValueError, match=r"The column 'y' of .* may hold labels"):
        read("x,y\n1,0\n2,1\n")


def test_few_whole_numbers_at_the_end_of_a_file_without_header_are_asked_about(read):
    table = np.random.RandomState(0).randn(30, 2)
    classes = np.column_stack([table, np.arange(30) % 3])
    text = "\n".join(",".join(f"{value:g}" for value in row) for row in classes)
    with pytest.raises(ValueError, match=r"The column '2' of .* may hold labels.*: set labels=2 "):
        read(text)
    assert read(text, labels="2").train_labels.tolist() == [0, 1, 2] * 10
    assert len(rows(read(text, labels="none"))[0]) == 3
    assert len(rows(read(text.replace("\n", ".25\n")))[0]) == 3  # fractions


# ---------------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (IRIS, {}, r"Inputs must be numbers, but in .*x.csv 'species' holds text \('setosa'\): set labels=species "
                   r"\(--data.labels=species\) if these are the labels, or ignore=species"),
        ("name,a,city\nBob,1,Rome\nAnn,2,Oslo\n", {}, r"'name' holds text \('Bob'\), 'city' holds text \('Rome'\): set "
         "`labels` to the column with the labels, such as labels=city .*, and leave out the others, such as ignore=na"),
        ("name,a,city\nBob,1,Rome\nAnn,2,Oslo\n", {"labels": "city"}, "'name' holds text .*: encode as numbers what is "
         r"an input, and leave out the rest with ignore=name \(--data.ignore=name\)"),
        ("a,b\n1,2\n3,x\n5,6\n", {}, "x.csv, line 3: 'x' is not a number in column 'b'"),
        ("a,b\n1,2\n\n3,\n", {}, "x.csv, line 4, column 'b': the value is missing; fill it or remove the row "
                                 r"\(1 of 2 values of this column are missing\)"),
        ("a,b\n1,N/A\n3,4\n", {}, "line 2, column 'b': the value is missing"),
        ("a,b\n1,nan\n3,4\n", {}, "line 2, column 'b': the value is missing"),
        ("a,k\n1,u\n3,\n", {"labels": "k"}, "line 3, column 'k': the label is missing"),
        ("a;b\n1,5;2\n3,5;4\n", {}, "line 2: '1,5' is not a number in column 'a'; write numbers with a decimal point"),
        ("a,a\n1,2\n", {"labels": "a"}, "has 2 columns 'a': give the number of one of them in `labels`"),
        ("a,b\n1,2\n", {"columns": "a,c"}, "has no column 'c', which `columns` names; it has a, b"),
        ("a,b\n1,2\n", {"ignore": ["a", "b"]}, "No input column of .* is left: it has a, b"),
        ("a,b\n1,2\n", {"columns": "a", "labels": "a"}, "`columns` and `labels` both name the column 'a'"),
        (b"a,b\n1,\0\0\n", {}, "x.csv is not a CSV file: it holds binary data"),
        ('a,b\n1,"' + "2\n" * 70_000, {}, "the line cannot be read .field larger than field limit"),
        (",".join(f"c{i}" for i in range(40)) + "\n" + ",".join("x" * 40) + "\n", {"labels": "c0"}, "and 19 more"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_in_one_sentence(read, text, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(text, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("length,species\n1,setosa\n", "t.csv lacks the columns width of .*x.csv"),
        ("length,width,species\n1,2,rose\n", "t.csv has the labels 'rose', which the training data lacks: it has "
                                             "setosa, virginica"),
        ("1.5,2\n", "t.csv has 2 columns and .*x.csv 3"),
        ("length,width,species\n1,wide,setosa\n", "t.csv 'width' holds text"),
    ],
)  # fmt: skip
def test_a_test_file_that_does_not_fit_is_refused(read, test, message):
    with pytest.raises(ValueError, match=message):
        read(IRIS, test=test, labels="species")


def test_texts_as_labels_of_an_archive_are_numbered_too(tmp_path):
    for name, labels in (("x.npz", ["b", "a", "b"]), ("t.npz", ["b", "b", "b"]), ("n.npz", [1, 1, 1])):
        np.savez(tmp_path / name, x=np.zeros((3, 2)), k=labels)
    data = ArrayDataModule(str(tmp_path / "x.npz"), test_path=str(tmp_path / "t.npz"), labels="k")
    data.setup()
    assert (data.train_labels.tolist(), data.test_labels.tolist(), data.label_names) == ([1, 0, 1], [1] * 3, ("a", "b"))
    for train, test, message in [
        ("x.npz", "n.npz", r"n.npz are numbers, but those of the training data are texts"),
        ("n.npz", "x.npz", r"x.npz are texts, but those of the training data are numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            ArrayDataModule(str(tmp_path / train), test_path=str(tmp_path / test), labels="k").setup()


def test_arrays_may_be_said_to_have_no_labels_too(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 2)))
    for name in ("x.npy", "x.npz"):
        assert ArrayDataModule(str(tmp_path / name), labels="none").evaluation_labels("val") is None
        assert ArrayDataModule(str(tmp_path / name), labels="none").in_features == 2


def test_columns_belong_to_tables(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))
    with pytest.raises(ValueError, match="`columns` and `ignore` name columns of a table"):
        ArrayDataModule(str(tmp_path / "x.npy"), ignore="a").setup()


def test_bytes_are_texts():
    assert coded_labels(np.array([b"v", b"u"]), None, "x")[0].tolist() == [1, 0]
