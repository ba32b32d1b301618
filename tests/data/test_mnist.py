"""Cropped MNIST from idx files: small ones written by the tests, and the real ones if they are available."""

import gzip
import hashlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread, local

import numpy as np
import pytest
import torch

from helpers.mnist_files import SHAPES, TEST, TRAIN, arrays, idx
from helpers.paths import ROOT
from ksm_lightning.cli import main
from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.data import mnist as mnist_module
from ksm_lightning.runs.checkpoint import read_checkpoint


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.mark.parametrize(("crop", "side"), [(4, 20), (0, 28), (13, 2)])
@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_images_are_cropped_and_scaled_by_all_remaining_pixels(small_mnist, dataset, crop, side):
    data = CroppedMNISTDataModule(dataset, crop=crop, data_dir=str(small_mnist))
    images = np.concatenate([arrays()["train-images-idx3-ubyte"], arrays()["t10k-images-idx3-ubyte"]])
    inside = images[:, crop : 28 - crop, crop : 28 - crop].reshape(TRAIN + TEST, -1).astype(np.float64)
    expected = torch.tensor(inside / inside.std(), dtype=torch.float32)
    torch.testing.assert_close(data.train_points.data, expected, rtol=1e-5, atol=1e-6)
    assert data.image_shape == (side, side)
    assert data.in_features == side * side


def test_training_without_the_test_images_keeps_the_scale(small_mnist):
    everything = CroppedMNISTDataModule(data_dir=str(small_mnist))
    without = CroppedMNISTDataModule(data_dir=str(small_mnist), include_test=False)
    assert (len(everything.train_points), len(without.train_points)) == (TRAIN + TEST, TRAIN)
    assert torch.equal(without.train_points.data, everything.train_points.data[:TRAIN])
    assert torch.equal(without.test_points.data, everything.train_points.data[TRAIN:])


def test_the_folder_is_the_argument_the_environment_variable_or_the_cache(small_mnist, monkeypatch):
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
def test_damaged_files_are_refused_by_name(small_mnist, name, spoil, message):
    path = small_mnist / "MNIST" / "raw" / name
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        CroppedMNISTDataModule(data_dir=str(small_mnist)).setup()
    assert str(path) in str(caught.value)


def test_the_error_for_missing_files_names_files_and_folder(small_mnist, tmp_path):
    (small_mnist / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        CroppedMNISTDataModule(data_dir=str(small_mnist), download=False).setup()
    text = str(caught.value)
    assert "MNIST lacks t10k-labels-idx1-ubyte" in text
    assert all(name in text for name in SHAPES)
    assert str(small_mnist / "MNIST" / "raw") in text


def test_the_error_for_a_failed_download_names_the_files(tmp_path, monkeypatch):
    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(FileNotFoundError, match="could not be downloaded") as caught:
        CroppedMNISTDataModule(data_dir=str(tmp_path)).prepare_data()
    assert all(name in str(caught.value) for name in SHAPES)
    assert "\n" not in str(caught.value)


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A local mirror of both datasets, with small files of the real format and checksums; lists what it has served."""
    import torchvision.datasets

    folder, resources, served = tmp_path / "mirror", [], []
    folder.mkdir()
    for name, array in arrays().items():
        packed = gzip.compress(idx(array))
        (folder / f"{name}.gz").write_bytes(packed)
        resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))

    class Handler(QuietHandler):
        def do_GET(self):
            if "Method" not in self.headers:  # torchvision first asks where the file is
                served.append(Path(self.path).name)
            super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    for cls in (torchvision.datasets.MNIST, torchvision.datasets.FashionMNIST):
        monkeypatch.setattr(cls, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(cls, "resources", resources)
    monkeypatch.setattr(mnist_module, "_FILES", SHAPES)
    monkeypatch.setattr(mnist_module, "_TRAIN", TRAIN)
    yield served
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("dataset", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_torchvision_downloads_checks_and_unpacks(tmp_path, mirror, dataset, folder):
    """Runs torchvision's download code."""
    data = CroppedMNISTDataModule(dataset, data_dir=str(tmp_path / "data"))
    assert len(data.train_points) == TRAIN + TEST
    assert data.test_labels.tolist() == [i % 10 for i in range(TEST)]
    assert [path.name for path in (tmp_path / "data" / folder).iterdir()] == ["raw"]  # no drafts
    assert {path.name for path in (tmp_path / "data" / folder / "raw").iterdir()} == set(SHAPES)


def test_one_process_per_machine_downloads_and_the_others_wait_for_whole_files(tmp_path, mirror, monkeypatch):
    """Three ranks in threads; each file appears under its name only when it is complete."""
    rank, raw, sizes, found = local(), tmp_path / "data" / "MNIST" / "raw", [], {}
    monkeypatch.setattr(mnist_module, "local_rank", lambda: rank.number, raising=False)
    whole = {name: len(idx(array)) for name, array in arrays().items()}

    def load(number):
        rank.number = number
        found[number] = len(CroppedMNISTDataModule(data_dir=str(tmp_path / "data")).train_points)

    threads = [Thread(target=load, args=(number,)) for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sizes += [(path.name, path.stat().st_size) for path in raw.iterdir()] if raw.exists() else []
    assert found == dict.fromkeys(range(3), TRAIN + TEST)
    assert sorted(mirror) == sorted(f"{name}.gz" for name in SHAPES)
    assert {(name, size) for name, size in sizes if whole.get(name) != size} == set()


def test_a_process_that_waits_in_vain_for_a_download_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist_module, "_PATIENCE", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(FileNotFoundError, match="MNIST was not downloaded by the process with local rank 0 within 0 s"):
        CroppedMNISTDataModule(data_dir=str(tmp_path)).prepare_data()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "rank"),
    [({}, 0), ({"LOCAL_RANK": "3"}, 3), ({"SLURM_LOCALID": "2"}, 2), ({"LOCAL_RANK": "0", "SLURM_LOCALID": "2"}, 0)],
)
def test_the_local_rank_is_that_of_the_launcher(monkeypatch, variables, rank):
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert mnist_module.local_rank() == rank


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dataset": "emnist"}, "`dataset` must be"), ({"crop": 14}, "`crop` must be between 0 and 13")],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CroppedMNISTDataModule(**options)


@pytest.mark.parametrize("configs", [["mnist"], ["mnist", "fashion_mnist"]], ids=["mnist", "fashion_mnist"])
def test_the_configs_train_with_alpha_overridden(small_mnist, tmp_path, monkeypatch, configs):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KSM_DATA_DIR", str(small_mnist))
    monkeypatch.setattr(CroppedMNISTDataModule, "probe_indices", lambda self: {
        "train": torch.arange(40), "validation": torch.arange(40, TRAIN)})  # fmt: skip
    main(["fit", *(f"--config={ROOT / 'configs' / config}.yaml" for config in configs),
          "--model.kernel_params.alpha=2", "--model.num_neurons=6", "--trainer.max_steps=60",
          "--trainer.enable_progress_bar=false"])  # fmt: skip
    folder = tmp_path / "runs" / configs[-1] / "version_0"
    names = {path.name for path in (folder / "figures").iterdir()}
    assert {"weights.png", "linearised.png", "responses.png", "spectra.png"} <= names
    content = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert content["hyper_parameters"]["kernel_params"] == {"alpha": 2}
    assert content["state_dict"]["network.W"].shape == (6, 400)


# ---------------------------------------------------------------------- the real files


@pytest.mark.mnist
def test_the_real_images():
    data = CroppedMNISTDataModule()
    x = data.train_points.data
    assert x.shape == (70_000, 400)
    assert x.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert x.norm(dim=1).min() > 0  # no image is blank after cropping
    assert torch.bincount(data.train_labels).tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    sets = data.probe_sets()
    assert {name: len(labels) for name, (_, labels) in sets.items()} == {
        "train": 50_000,
        "validation": 10_000,
        "test": 10_000,
    }
    assert torch.equal(sets["test"][0], x[60_000:])
