"""Cropped MNIST from true idx files: small ones that the test writes, and the real ones where they are."""

import gzip
import hashlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from conftest import ROOT

from ksm_lightning.cli import main
from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.data import mnist as mnist_module

TRAIN, TEST = 60, 20
SHAPES = {
    "train-images-idx3-ubyte": (TRAIN, 28, 28),
    "train-labels-idx1-ubyte": (TRAIN,),
    "t10k-images-idx3-ubyte": (TEST, 28, 28),
    "t10k-labels-idx1-ubyte": (TEST,),
}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.RandomState(0)
    made = {name: rng.randint(0, 256, shape) for name, shape in SHAPES.items() if "images" in name}
    made |= {name: np.arange(shape[0]) % 10 for name, shape in SHAPES.items() if "labels" in name}
    return {name: made[name] for name in SHAPES}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """True idx files of few images, in torchvision's layout."""
    monkeypatch.setattr(mnist_module, "_FILES", SHAPES)
    monkeypatch.setattr(mnist_module, "_TRAIN", TRAIN)
    monkeypatch.setattr(mnist_module, "_TEST", TEST)
    for folder in ("MNIST", "FashionMNIST"):
        raw = tmp_path / folder / "raw"
        raw.mkdir(parents=True)
        for name, array in arrays().items():
            (raw / name).write_bytes(idx(array))
    return tmp_path


@pytest.mark.parametrize(("crop", "side"), [(4, 20), (0, 28), (13, 2)])
@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_images_are_cropped_and_scaled_by_all_pixels_left(small, dataset, crop, side):
    data = CroppedMNISTDataModule(dataset, crop=crop, data_dir=str(small))
    images = np.concatenate([arrays()["train-images-idx3-ubyte"], arrays()["t10k-images-idx3-ubyte"]])
    inside = images[:, crop : 28 - crop, crop : 28 - crop].reshape(TRAIN + TEST, -1).astype(np.float64)
    expected = torch.tensor(inside / inside.std(), dtype=torch.float32)
    torch.testing.assert_close(data.train_points.data, expected, rtol=1e-5, atol=1e-6)
    assert data.image_shape == (side, side)
    assert data.in_features == side * side


def test_the_test_images_can_be_left_out_of_training_at_the_same_scale(small):
    everything = CroppedMNISTDataModule(data_dir=str(small))
    without = CroppedMNISTDataModule(data_dir=str(small), include_test=False)
    assert (len(everything.train_points), len(without.train_points)) == (TRAIN + TEST, TRAIN)
    assert torch.equal(without.train_points.data, everything.train_points.data[:TRAIN])
    assert torch.equal(without.test_points.data, everything.train_points.data[TRAIN:])


def test_the_folder_comes_from_argument_environment_or_cache(small, monkeypatch):
    monkeypatch.setenv("KSM_DATA_DIR", "/somewhere")
    assert CroppedMNISTDataModule(data_dir="/mine").data_dir == Path("/mine")
    assert CroppedMNISTDataModule().data_dir == Path("/somewhere")
    monkeypatch.delenv("KSM_DATA_DIR")
    assert CroppedMNISTDataModule().data_dir == Path.home() / ".cache" / "ksm_lightning"


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("train-images-idx3-ubyte", lambda c: c[:-100], "bytes and should have"),
        ("train-labels-idx1-ubyte", lambda c: c + b"x", "bytes and should have"),
        ("t10k-images-idx3-ubyte", lambda c: idx(np.zeros((TEST + 1, 28, 28))), r"its shape is \(21, 28, 28\)"),
        ("t10k-images-idx3-ubyte", lambda c: idx(np.zeros((TEST, 28, 27))), r"its shape is \(20, 28, 27\)"),
        ("t10k-labels-idx1-ubyte", lambda c: b"<html>not found</html>", "does not start as an idx file"),
        ("train-images-idx3-ubyte", lambda c: b"", "does not start as an idx file"),
    ],
)
def test_damaged_files_are_refused_by_name(small, name, spoil, message):
    path = small / "MNIST" / "raw" / name
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        CroppedMNISTDataModule(data_dir=str(small)).setup()
    assert str(path) in str(caught.value)


def test_missing_files_say_where_to_put_what(small, tmp_path):
    (small / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        CroppedMNISTDataModule(data_dir=str(small), download=False).setup()
    text = str(caught.value)
    assert "MNIST lacks t10k-labels-idx1-ubyte" in text
    assert all(name in text for name in SHAPES)
    assert str(small / "MNIST" / "raw") in text


def test_a_failed_download_says_where_to_put_what(tmp_path, monkeypatch):
    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(FileNotFoundError, match="could not be downloaded") as caught:
        CroppedMNISTDataModule(data_dir=str(tmp_path)).prepare_data()
    assert all(name in str(caught.value) for name in SHAPES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dataset", "cls"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_torchvision_downloads_checks_and_unpacks(tmp_path, monkeypatch, dataset, cls):
    """The real download code, from a mirror on this machine, with the true format and checksums of its files."""
    import torchvision.datasets

    mirror = tmp_path / "mirror"
    mirror.mkdir()
    resources = []
    for name, array in arrays().items():
        packed = gzip.compress(idx(array))
        (mirror / f"{name}.gz").write_bytes(packed)
        resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
    target = getattr(torchvision.datasets, cls)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(mirror)))
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(target, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
    monkeypatch.setattr(target, "resources", resources)
    monkeypatch.setattr(mnist_module, "_FILES", SHAPES)
    monkeypatch.setattr(mnist_module, "_TRAIN", TRAIN)
    data = CroppedMNISTDataModule(dataset, data_dir=str(tmp_path / "data"))
    assert len(data.train_points) == TRAIN + TEST
    assert data.test_labels.tolist() == [i % 10 for i in range(TEST)]
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dataset": "emnist"}, "`dataset` must be"), ({"crop": 14}, "`crop` must be between 0 and 13")],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CroppedMNISTDataModule(**options)


@pytest.mark.parametrize("config", ["mnist", "fashion_mnist"])
def test_the_configs_train_with_alpha_as_one_override(small, tmp_path, monkeypatch, config):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KSM_DATA_DIR", str(small))
    monkeypatch.setattr(CroppedMNISTDataModule, "probe_indices", lambda self: {
        "train": torch.arange(40), "validation": torch.arange(40, TRAIN)})  # fmt: skip
    main(["fit", "--config", str(ROOT / "configs" / f"{config}.yaml"), "--model.kernel_params.alpha=2",
          "--model.num_neurons=6", "--trainer.max_steps=60", "--trainer.enable_progress_bar=false"])  # fmt: skip
    folder = tmp_path / "runs" / config / "version_0"
    names = {path.name for path in (folder / "figures").iterdir()}
    assert {"weights.png", "linearised.png", "responses.png", "spectra.png"} <= names
    from ksm_lightning.runs.checkpoint import read_checkpoint

    content = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert content["hyper_parameters"]["kernel_params"] == {"alpha": 2}
    assert content["state_dict"]["network.W"].shape == (6, 400)


# ---------------------------------------------------------------------- the real digits


@pytest.mark.mnist
def test_the_real_digits():
    data = CroppedMNISTDataModule()
    x = data.train_points.data
    assert x.shape == (70_000, 400)
    assert x.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert x.norm(dim=1).min() > 0  # no image is empty after the crop
    assert torch.bincount(data.train_labels).tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    sets = data.probe_sets()
    assert {name: len(labels) for name, (_, labels) in sets.items()} == {
        "train": 50_000,
        "validation": 10_000,
        "test": 10_000,
    }
    assert torch.equal(sets["test"][0], x[60_000:])
