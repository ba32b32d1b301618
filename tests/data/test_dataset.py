"""Hugging Face and PyTorch datasets as points, good and bad."""

import sys

import datasets
import lightning as L
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from helpers.commands import refused
from ksm_lightning import ArrayDataModule, DatasetDataModule, KernelSimilarityMatching
from ksm_lightning.cli import main
from ksm_lightning.data import memory
from ksm_lightning.runs.finished_run import FinishedRun

NAMES = ["ant", "bee", "cat"]
LABELS = [2, 0, 1, 1, 0, 2]


@pytest.fixture(autouse=True)
def _offline(tmp_path_factory, monkeypatch):
    """A cache of its own, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (6, 4, 5)).astype(np.uint8)


@pytest.fixture
def images(pixels) -> datasets.Dataset:
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    columns = {"image": [Image.fromarray(each) for each in pixels], "label": LABELS}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def loaded(*args, **options) -> DatasetDataModule:
    data = DatasetDataModule(*args, **options)
    data.setup()
    return data


def assert_images(data: DatasetDataModule, pixels: np.ndarray) -> None:
    assert data.load()[0].x.dtype == np.uint8
    assert data.train_points.data.tolist() == pixels.reshape(len(pixels), -1).tolist()
    assert data.preprocessing.image_shape == (4, 5)


# ---------------------------------------------------------------------- Hugging Face


def test_images_are_inputs_and_the_class_label_is_the_label(images, pixels):
    data = loaded(images)
    assert_images(data, pixels)
    assert (data.train_labels.tolist(), data.label_names) == (LABELS, tuple(NAMES))
    assert data.test_points is None


def test_a_dataset_on_disk_has_its_splits(images, pixels, tmp_path):
    images.save_to_disk(tmp_path / "one")
    assert_images(loaded(str(tmp_path / "one")), pixels)
    splits = datasets.DatasetDict(train=images, test=images.select([3, 0]), other=images.select([5]))
    splits.save_to_disk(tmp_path / "three")
    data = loaded(str(tmp_path / "three"))
    assert_images(data, pixels)
    assert data.test_points.data.tolist() == pixels[[3, 0]].reshape(2, -1).tolist()
    assert data.test_labels.tolist() == [1, 2]
    assert loaded(str(tmp_path / "three"), test_split="other").test_labels.tolist() == [2]
    assert loaded(splits, test_split="none").test_points is None
    assert len(loaded(splits, split="other").train_points) == 1
    assert len(loaded(images, test=splits).test_points) == 2


def test_a_folder_of_images_is_loaded_with_its_folders_as_classes(pixels, tmp_path):
    for split, rows in {"train": range(6), "test": range(2)}.items():
        for index in rows:
            path = tmp_path / split / NAMES[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[index]).save(path)
    data = loaded(str(tmp_path))
    assert_images(data, pixels[[0, 2, 4, 1, 3, 5]])
    assert (data.train_labels.tolist(), data.label_names) == ([0] * 3 + [1] * 3, ("ant", "bee"))
    assert data.test_labels.tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["parquet", "json", "csv"])
def test_folders_of_tables_give_the_points_of_an_array(kind, tmp_path):
    x = np.random.RandomState(0).randn(20, 2)
    table = datasets.Dataset.from_dict({"a": x[:, 0], "b": x[:, 1], "kind": ["v", "u"] * 10})
    (tmp_path / "folder").mkdir()
    getattr(table, f"to_{kind}")(str(tmp_path / "folder" / f"train.{kind}"))
    data = loaded(str(tmp_path / "folder"), labels="kind", centre=True, scaling="feature", seed=3)
    np.save(tmp_path / "x.npy", x)
    array = ArrayDataModule(str(tmp_path / "x.npy"), centre=True, scaling="feature", seed=3)
    assert data.fingerprint == array.fingerprint
    assert torch.equal(next(iter(data.train_dataloader())).x, next(iter(array.train_dataloader())).x)
    assert data.train_labels.tolist() == [1, 0] * 10


def test_vectors_selections_and_formats_give_the_same_rows():
    x = np.random.RandomState(0).randn(30, 2, 3).astype(np.float32)
    features = {"v": datasets.Array2D((2, 3), "float32"), "n": datasets.Value("int8")}
    table = datasets.Dataset.from_dict({"v": x, "n": [i % 3 for i in range(30)]}, features=datasets.Features(features))
    for each in (table, table.with_format("torch"), table.with_format("numpy")):
        data = loaded(each, labels="n")
        assert np.array_equal(data.load()[0].x, x.reshape(30, -1))
        assert data.train_labels.tolist() == [0, 1, 2] * 10
    order = [7, 0, 20]
    assert np.array_equal(loaded(table.select(order), labels="n").load()[0].x, x.reshape(30, -1)[order])
    doubled = table.with_transform(lambda rows: {"v": [2 * np.array(each) for each in rows["v"]], "n": rows["n"]})
    assert np.array_equal(loaded(doubled, labels="n").load()[0].x, 2 * x.reshape(30, -1))
    both = loaded(table, columns=["n", "v"], labels="none").load()[0].x
    assert np.array_equal(both, np.column_stack([np.arange(30) % 3, x.reshape(30, -1)]))


def test_images_are_resized_and_converted_on_demand(pixels):
    sizes = [Image.fromarray(pixels[0]), Image.fromarray(np.full((8, 8, 3), 7, np.uint8))]
    table = datasets.Dataset.from_dict({"image": sizes}, features=datasets.Features({"image": datasets.Image()}))
    wanted = r"Row 1 .*, column 'image', .*\(8, 8, 3\) and that of row 0 \(4, 5\); set `image_size` and `image_mode`"
    with pytest.raises(ValueError, match=wanted):
        loaded(table)
    grey = loaded(table, image_size=[2, 3], image_mode="L")
    assert (grey.in_features, grey.preprocessing.image_shape) == (6, (2, 3))
    assert grey.train_points.data[1].tolist() == [7.0] * 6
    colour = loaded(table, image_size=[2, 3], image_mode="RGB")
    assert (colour.in_features, colour.preprocessing.image_shape) == (18, None)


def test_labels_of_minus_one_mean_that_a_split_has_no_labels(images):
    hidden = images.select([0, 1]).map(lambda row: {"label": -1})
    assert loaded(images, test=hidden).test_labels is None
    mixed = datasets.concatenate_datasets([images, hidden])
    with pytest.raises(ValueError, match=r"row 6 \(counted from 0\), column 'label': the label is missing"):
        loaded(mixed)


def test_test_data_with_other_classes_is_refused(images):
    other = images.cast_column("label", datasets.ClassLabel(names=NAMES[::-1]))
    with pytest.raises(ValueError, match="has the classes cat, bee, ant, but the training data ant, bee, cat"):
        loaded(images, test=other)
    with pytest.raises(
        ValueError, match="The labels of the list are texts, but those of the training data are numbers"
    ):
        loaded([(1.0, 0), (2.0, 1)], test=[(1.0, "u")])
    with pytest.raises(ValueError, match="the list has the labels 'w', which the training data lacks: it has u, v"):
        loaded([(1.0, "v"), (2.0, "u")], test=[(1.0, "w")])
    names = images.select([0, 1]).map(lambda row: {"name": NAMES[row["label"]]}).remove_columns("label")
    assert loaded(images, test=names.rename_column("name", "label")).test_labels.tolist() == LABELS[:2]


# ---------------------------------------------------------------------- PyTorch


class Pictures(Dataset):
    """Tuples of a PIL image and a text, as datasets of torchvision have them."""

    def __init__(self, pixels):
        self.pixels = pixels

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return Image.fromarray(self.pixels[index]), NAMES[LABELS[index]]


def test_tuples_are_inputs_and_labels_and_the_test_data_has_the_same_classes(pixels):
    data = loaded(Pictures(pixels), test=Subset(Pictures(pixels), [1, 4]))
    assert_images(data, pixels)
    assert (data.train_labels.tolist(), data.label_names) == (LABELS, tuple(NAMES))
    assert data.test_labels.tolist() == [0, 0]
    assert loaded(Pictures(pixels), labels="none").train_labels is None


def test_tensors_arrays_lists_and_numbers_are_rows(pixels):
    x = torch.tensor(pixels, dtype=torch.float32)
    for dataset in (TensorDataset(x), list(x), list(x.numpy()), x.numpy(), x.tolist(), x.bfloat16(),
                    [{"pixels": each} for each in x], TensorDataset(x, torch.tensor(LABELS), x)):  # fmt: skip
        data = loaded(dataset)
        assert torch.equal(data.train_points.data, x.flatten(1))
    assert data.train_labels.tolist() == LABELS
    assert data.image_shape is None
    assert loaded(TensorDataset(x[:, None])).image_shape == (4, 5)
    assert loaded([1, 2.5, 3]).train_points.data.tolist() == [[1.0], [2.5], [3.0]]
    assert loaded(TensorDataset(x, torch.tensor(LABELS)), test=TensorDataset(x[:2])).test_labels is None


def test_a_run_on_a_dataset_equals_the_run_on_the_same_array(tmp_path):
    x = np.random.RandomState(0).randn(100, 3).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    networks = []
    for data in (
        DatasetDataModule(TensorDataset(torch.tensor(x)), seed=1),
        ArrayDataModule(str(tmp_path / "x.npy"), seed=1),
    ):
        L.seed_everything(0, verbose=False)
        model = KernelSimilarityMatching(num_neurons=4, updates=20)
        trainer = L.Trainer(max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                            enable_model_summary=False, num_sanity_val_steps=0)  # fmt: skip
        trainer.fit(model, datamodule=data)
        networks.append(model.network)
    assert torch.equal(networks[0].W, networks[1].W)
    assert torch.equal(networks[0].L, networks[1].L)


# ---------------------------------------------------------------------- what cannot be used


class Broken(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            raise OSError("the file\nis gone")
        return torch.zeros(2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])


BAD = [
    (Broken(), {}, r"Row 2 \(counted from 0\) of the Broken cannot be used: the file is gone\."),
    ([np.zeros(2), None], {}, r"Row 1 .* of the list cannot be used: the value is missing"),
    ([np.zeros(2), np.zeros(3)], {}, r"Row 1 .*: its shape is \(3,\) and that of row 0 \(2,\)"),
    ([[[1, 2], [3]]], {}, r"Row 0 .*: its lists have different lengths"),
    (["a", "b"], {}, r"Row 0 .*: numbers, arrays or images are wanted, got str"),
    ([(np.zeros(2), 0.5)], {}, r"Row 0 .*: its label must be a whole number or a text, got 0.5; train without "
                               r"labels by labels=none"),
    ([(np.zeros(2), np.zeros(3))], {}, r"Row 0 .*: its label must .* got an array of shape \(3,\)"),
    ([{"x": 1.0, "y": 0}] * 3, {}, r"The column 'y' of the list may hold labels.*: set labels=y "),
    ([{"x": 1.0, "name": "Bob"}] * 3, {}, r"in the list 'name' holds what is not numbers .*: set labels=name"),
    ([{"x": 1.0}, {"z": 1.0}], {}, r"Row 1 .* cannot be used: 'x'"),
    ([np.zeros(2), np.full(2, np.nan)], {}, r"holds nan at row 1, column 0"),
    ([], {}, "the list has no rows"),
    (iter([1]), {}, "A dataset with a length and rows by number is wanted, got the list_iterator"),
    (Stream(), {}, "A dataset with a length and rows by number is wanted, got the Stream"),
    ({"train": [1.0]}, {"split": "x"}, "has no split 'x': set `split` to one of train"),
    ([1.0], {"image_mode": "grey"}, "`image_mode` must be one of keep, L, RGB, got 'grey'"),
    ([1.0], {"image_size": [3]}, r"`image_size` must be a height and a width in pixels, such as \[28, 28\], got \[3\]"),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "options", "message"), BAD)
def test_what_cannot_be_used_is_named_in_one_sentence(dataset, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        loaded(dataset, **options)
    assert "\n" not in str(caught.value)


def test_columns_of_hugging_face_that_may_be_labels_are_asked_about(images):
    plain = images.cast_column("label", datasets.Value("int64"))
    with pytest.raises(ValueError, match=r"The column 'label' of the Dataset may hold labels.*: set labels=label "):
        loaded(plain)
    assert loaded(plain, labels="label").train_labels.tolist() == LABELS
    assert loaded(plain, labels="none").train_labels is None
    two = images.add_column("kind", LABELS).cast_column("kind", datasets.ClassLabel(names=NAMES))
    with pytest.raises(ValueError, match="has several columns of labels, label, kind: choose one with labels=label"):
        loaded(two)
    missing = datasets.Dataset.from_dict({"a": [1.0, None]})
    with pytest.raises(ValueError, match=r"the Dataset, row 1 \(counted from 0\), column 'a': the value is missing"):
        loaded(missing)


def test_a_dataset_larger_than_the_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 99.0)
    with pytest.raises(ValueError, match=r"the Tensor is too large: an array of shape \(100, 3\) needs 3,600 bytes"):
        loaded(torch.zeros(100, 3))


@pytest.mark.parametrize(("name", "message"), [
    ("nobody/nothing", r"The dataset nobody/nothing could not be loaded \(Couldn't reach .*\): give a folder"),
    ("folder", r"The dataset folder could not be loaded \(.*\): give a folder written by `save_to_disk`, a folder of"),
    ("saved", r"The dataset saved could not be loaded \(.*\): give a folder"),
    ("x.csv", r"x.csv is a file: read a table with ArrayDataModule, or give a folder written by"),
])  # fmt: skip
def test_what_cannot_be_loaded_is_named_in_one_sentence(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{")
    (tmp_path / "x.csv").write_text("1,2\n")
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        loaded(name)
    assert "\n" not in str(caught.value)


def test_a_name_on_the_hub_is_loaded_with_its_subset_and_revision_and_offline_on_demand(images, monkeypatch):
    calls = []

    def load(*args, **options):
        calls.append((args, options, datasets.config.HF_HUB_OFFLINE))
        return datasets.DatasetDict(train=images)

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(loaded("me/insects", subset="small", revision="v1").train_points) == 6
    loaded("me/insects", download=False)
    assert calls == [
        (("me/insects", "small"), {"revision": "v1"}, False), (("me/insects", None), {"revision": None}, True)
    ]  # fmt: skip
    assert datasets.config.HF_HUB_OFFLINE is False
    with pytest.raises(FileNotFoundError, match="hf://datasets/me/insects is not on this machine"):
        loaded("hf://datasets/me/insects", download=False)


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    wanted = r"Datasets of Hugging Face need the package datasets: run pip install 'ksm-lightning\[datasets\]'\."
    with pytest.raises(ModuleNotFoundError, match=wanted):
        loaded("mnist")


# ---------------------------------------------------------------------- the command line


def test_the_command_line_trains_on_a_folder_and_reads_the_run_back(images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images.save_to_disk("pictures")
    few = ["--model.num_neurons=2", "--trainer.max_steps=4", "--trainer.enable_progress_bar=false",
           "--trainer.logger.name=pictures", "--figures.num_neurons=1", "--data.scaling=global"]  # fmt: skip
    main(["fit", "--data=DatasetDataModule", "--data.dataset=pictures", *few])
    run = FinishedRun("runs/pictures/version_0")
    assert run.config["data"]["init_args"]["dataset"] == "pictures"
    data = run.data()
    assert data.download is False
    data.setup()
    assert (data.train_labels.tolist(), data.label_names) == (LABELS, tuple(NAMES))
    assert data.train_points.data.std(correction=0).item() == pytest.approx(1, rel=1e-5)
    assert "on 6 points of 20 features" in capsys.readouterr().out
    error = refused(capsys, "fit", "--data=DatasetDataModule", "--data.dataset=pictures", "--data.split=x", *few)
    assert error == "pictures has no splits, but `split` is 'x': remove it."


def test_a_run_folder_cannot_name_a_class_as_its_dataset(tmp_path):
    """A run folder is data: whatever its configuration names is not imported or called."""
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    section = {"class_path": "trap.Trap", "init_args": {"x": 1}}
    data = {"class_path": "ksm_lightning.DatasetDataModule", "init_args": {"dataset": section}}
    run = FinishedRun.__new__(FinishedRun)
    run.folder = tmp_path
    run.__dict__["config"] = {"data": data}
    sys.path.insert(0, str(tmp_path))
    try:
        for dataset in (section, [section], {"train": section}):
            data["init_args"] = {"dataset": dataset}
            with pytest.raises(
                ValueError, match="an argument of its data names a class, and nothing that a run folder"
            ):
                run.data()
    finally:
        sys.path.remove(str(tmp_path))
