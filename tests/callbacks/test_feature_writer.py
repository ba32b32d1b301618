"""The files of ``ksm predict``: features in order, labels and the extractor, written completely or not at all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from helpers.commands import refused
from helpers.limits import file_size_limit
from helpers.processes import PATIENCE
from helpers.runs import fit, model, moons, trainer
from ksm_lightning import FeatureExtractor, files
from ksm_lightning.callbacks import FeatureWriter
from ksm_lightning.callbacks.feature_writer import write_archive
from ksm_lightning.callbacks.row_file import RowFile, create_array
from ksm_lightning.cli import main
from ksm_lightning.data import ArrayDataModule, DigitsDataModule
from ksm_lightning.files import draft_path, draft_tag
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.readout import READOUTS


@pytest.fixture(scope="module")
def module():
    trained = model(phases=None, updates=60)
    fit(trained, moons())
    return trained


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def extractor_of(module, data, readout="neural") -> FeatureExtractor:
    return FeatureExtractor.from_network(
        module.network, readout, preprocessing=data.preprocessing, sample=data.load()[0].x
    )


@pytest.mark.parametrize("readout", READOUTS)
def test_features_are_written_in_order_with_labels_and_their_extractor(module, tmp_path, capsys, readout):
    data, path = moons(eval_batch_size=64), tmp_path / "deep" / "f.npy"
    trainer([FeatureWriter(str(path), readout)]).predict(module, datamodule=data, return_predictions=False)
    assert names(path.parent) == ["f.json", "f.npy", "f_labels.npy"]
    x, extractor = data.test_points.data, extractor_of(module, data, readout)
    found = np.load(path)
    assert found.dtype == np.float32
    blocks = [extractor.features(part).to(torch.float32) for part in torch.split(x, 64)]
    if readout != "least_squares":  # its sample was converted to float32 and back
        assert np.array_equal(found, torch.cat(blocks).numpy())
    expected = module.features(x, readout, data.train_points.data)
    assert_close(torch.tensor(found), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert_close(torch.tensor(found), extractor(torch.tensor(data.load()[1].x)).float(), rtol=0, atol=1e-5)
    assert np.load(path.with_name("f_labels.npy")).tolist() == data.test_labels.tolist()
    about = json.loads((path.parent / "f.json").read_text())
    identity = about.pop("identity")
    assert about == {**extractor.metadata, "samples": 200, "label_names": ["upper", "lower"]}
    if readout != "least_squares":
        assert identity == extractor.identity
    assert f"Features of 200 points in 6 dimensions: {path} (extractor {identity})" in capsys.readouterr().out


@pytest.mark.parametrize("readout", ["nystroem", "least_squares"])
def test_compressed_features_have_one_column_per_feature(module, tmp_path, capsys, readout):
    data, path = moons(eval_batch_size=64), tmp_path / "f.npy"
    trainer([FeatureWriter(str(path), readout, num_features=2)]).predict(module, datamodule=data)
    found = np.load(path)
    assert found.shape == (200, 2)
    expected = module.features(data.test_points.data, readout, data.train_points.data, 2)
    assert_close(torch.tensor(found), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert json.loads((tmp_path / "f.json").read_text())["out_features"] == 2
    assert "Features of 200 points in 2 dimensions" in capsys.readouterr().out


def test_an_archive_holds_three_arrays_and_no_pickle(module, tmp_path):
    data, path = moons(eval_batch_size=64), tmp_path / "f.npz"
    trainer([FeatureWriter(str(path))]).predict(module, datamodule=data)
    assert names(tmp_path) == ["f.npz"]
    with np.load(path, allow_pickle=False) as archive:
        assert sorted(archive.files) == ["extractor", "features", "labels"]
        features, labels, about = archive["features"], archive["labels"], json.loads(str(archive["extractor"]))
    assert (features.dtype, labels.dtype) == (np.float32, np.int64)
    assert_close(torch.tensor(features), module(data.test_points.data), rtol=0, atol=1e-5)
    assert labels.tolist() == data.test_labels.tolist()
    assert about["identity"] == extractor_of(module, data).identity
    assert (about["readout"], about["kernel"], about["samples"]) == ("neural", "gaussian", 200)
    trainer([FeatureWriter(str(tmp_path / "g.npy"))]).predict(module, datamodule=data)
    assert np.array_equal(np.load(tmp_path / "g.npy"), features)


def test_an_archive_is_written_in_pieces(tmp_path):
    """An array larger than numpy's buffer, a transposed one and an empty one."""
    arrays = {"big": np.arange(3_000_000.0), "turned": np.arange(12).reshape(3, 4).T, "none": np.zeros((0, 3))}
    write_archive(tmp_path / "x.npz", arrays)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as archive:
        assert archive.files == list(arrays)
        for name, array in arrays.items():
            assert np.array_equal(archive[name], array)


def test_data_without_labels_gets_no_file_of_labels(module, tmp_path):
    np.save(tmp_path / "x.npy", np.random.RandomState(0).randn(40, 2))
    for name in ("f.npy", "f.npz"):
        data = ArrayDataModule(str(tmp_path / "x.npy"), eval_batch_size=16, memory_map="always")
        trainer([FeatureWriter(str(tmp_path / "out" / name))]).predict(module, datamodule=data)
    assert names(tmp_path / "out") == ["f.json", "f.npy", "f.npz"]
    with np.load(tmp_path / "out" / "f.npz") as archive:
        assert sorted(archive.files) == ["extractor", "features"]
        assert np.array_equal(archive["features"], np.load(tmp_path / "out" / "f.npy"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_another_loader_works(module, tmp_path, dtype):
    """Standardised points of another shape and dtype."""
    x = (4 * torch.rand(50, 2, generator=torch.Generator().manual_seed(0))).to(dtype)
    loader = DataLoader(TensorDataset(x.view(50, 1, 2), torch.arange(50) % 7), batch_size=16, shuffle=False)
    trainer([FeatureWriter(str(tmp_path / "f.npy"))]).predict(module, loader)
    found = np.load(tmp_path / "f.npy")
    assert found.dtype == np.float32
    assert_close(torch.tensor(found), module(x.float()), rtol=0, atol=1e-5)
    assert np.abs(found).max() > 0.1
    assert np.load(tmp_path / "f_labels.npy").tolist() == [i % 7 for i in range(50)]
    about = json.loads((tmp_path / "f.json").read_text())
    assert about["identity"] == FeatureExtractor.from_network(module.network).identity


def test_rows_keep_the_order_of_the_points_with_any_sampler(module, tmp_path):
    """A sampler in reverse order."""
    x = torch.rand(50, 2, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x), batch_size=16, sampler=list(range(49, -1, -1)))
    trainer([FeatureWriter(str(tmp_path / "f.npy"))]).predict(module, loader)
    assert_close(torch.tensor(np.load(tmp_path / "f.npy")), module(x), rtol=0, atol=1e-5)


def test_targets_that_are_not_labels_are_not_written(module, tmp_path):
    x = torch.rand(20, 2)
    for number, target in enumerate([torch.rand(20), torch.zeros(20, 3, dtype=torch.int64)]):
        path = tmp_path / str(number) / "f.npy"
        trainer([FeatureWriter(str(path))]).predict(module, DataLoader(TensorDataset(x, target), batch_size=8))
        assert names(path.parent) == ["f.json", "f.npy"]


def test_with_the_dynamics_the_features_are_the_settled_responses(tmp_path):
    settling = model(solver="dynamics")
    data = moons()
    fit(settling, data)
    for readout in ("neural", "nystroem"):
        trainer([FeatureWriter(str(tmp_path / f"{readout}.npy"), readout)]).predict(settling, datamodule=data)
    x = data.test_points.data
    assert np.array_equal(np.load(tmp_path / "neural.npy"), settling(x).numpy())
    assert_close(torch.tensor(np.load(tmp_path / "nystroem.npy")), settling.features(x, "nystroem"), rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- complete files only


@pytest.mark.parametrize("existing", ["f.npy", "f_labels.npy", "f.json", "f.npz"])
def test_no_existing_file_is_replaced(module, tmp_path, existing):
    (tmp_path / existing).write_bytes(b"precious")
    name = "f.npz" if existing == "f.npz" else "f.npy"
    with pytest.raises(FileExistsError, match=f"{existing} exists already: choose another file with --features.path"):
        trainer([FeatureWriter(str(tmp_path / name))]).predict(module, datamodule=moons())
    assert (tmp_path / existing).read_bytes() == b"precious"
    assert names(tmp_path) == [existing]


class Failing(KernelSimilarityMatching):
    """A model that fails at its third batch."""

    def predict_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise OSError("the device is on fire")
        return super().predict_step(batch, batch_idx)


@pytest.mark.parametrize("name", ["f.npy", "f.npz"])
def test_a_failure_leaves_no_file_and_no_encoder(tmp_path, name):
    failing = Failing(num_neurons=6, in_features=2, kernel_params={"sigma": 0.3}, init="normal")
    data = moons(eval_batch_size=64)
    writer = FeatureWriter(str(tmp_path / name), "nystroem")
    with pytest.raises(OSError, match="the device is on fire"):
        trainer([writer]).predict(failing, datamodule=data)
    assert names(tmp_path) == []
    x = data.test_points.data[:9]
    assert torch.equal(failing.predict_step(x, 0), failing(x))  # the responses, not another readout


@pytest.mark.parametrize("options", [{"limit_predict_batches": 2}, {"limit_predict_batches": 0.5}])
@pytest.mark.parametrize("is_foreign", [False, True])
def test_skipped_points_are_an_error(module, tmp_path, options, is_foreign):
    data = moons(eval_batch_size=64)
    loader = DataLoader(TensorDataset(data.test_points.data), batch_size=64)
    run = trainer([FeatureWriter(str(tmp_path / "f.npy"))], **options)
    with pytest.raises(ValueError, match="Only 128 of 200 points were predicted, and no features were written"):
        run.predict(module, **({"dataloaders": loader} if is_foreign else {"datamodule": data}))
    assert names(tmp_path) == []
    x = data.test_points.data[:9]
    assert torch.equal(module.predict_step(x, 0), module(x))


def test_a_repeated_point_does_not_replace_a_missing_one(module, tmp_path):
    x = torch.rand(50, 2, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x), batch_size=16, sampler=[*range(40), *range(10)])
    with pytest.raises(ValueError, match=r"Only 40 of 50 points were predicted.*samplers that skip points"):
        trainer([FeatureWriter(str(tmp_path / "f.npy"))]).predict(module, loader)
    assert names(tmp_path) == []


def test_a_full_disk_leaves_no_incomplete_set_of_files(module, tmp_path, monkeypatch):
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, torch.arange(20)), batch_size=16)
    link = os.link

    def full(source, target):
        if str(target).endswith("f.npy"):
            raise OSError(28, "No space left on device")
        link(source, target)

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match=r"f\.npy could not be written: No space left on device\.$"):
        trainer([FeatureWriter(str(tmp_path / "f.npy"))]).predict(module, loader)
    assert names(tmp_path) == []
    monkeypatch.undo()
    trainer([FeatureWriter(str(tmp_path / "f.npy"))]).predict(module, loader)
    assert names(tmp_path) == ["f.json", "f.npy", "f_labels.npy"]


@pytest.mark.parametrize("name", ["f.npy", "f.npz"])
def test_a_full_disk_names_the_file_before_the_features_are_computed(module, tmp_path, name):
    """The space is reserved before the features are computed."""
    x = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0))
    run = trainer([FeatureWriter(str(tmp_path / name))])
    with file_size_limit(50_000), pytest.raises(OSError, match="could not be written") as caught:
        run.predict(module, DataLoader(TensorDataset(x), batch_size=1000))
    assert str(caught.value) == f"{tmp_path / name} could not be written: File too large."
    assert names(tmp_path) == []
    path = tmp_path / "reserved.npy"
    create_array(path, np.float32, (1000, 100), path)
    assert path.stat().st_blocks * 512 >= 400_000


# ---------------------------------------------------------------------- two runs at once


class Racing(KernelSimilarityMatching):
    """A model that starts another run in the middle of its own."""

    def predict_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.other()
        return super().predict_step(batch, batch_idx)


def features_in(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path)
    with np.load(path) as archive:
        return archive["features"]


def no_links(source, target):
    raise OSError(1, "Operation not permitted")


def racing_models() -> tuple[Racing, KernelSimilarityMatching]:
    """Two networks with different features."""
    options = {"in_features": 2, "num_neurons": 6, "init": "normal"}
    return Racing(kernel_params={"sigma": 0.3}, **options), model(kernel_params={"sigma": 0.9})


@pytest.mark.parametrize("name", ["f.npy", "f.npz"])
def test_a_second_run_into_the_same_file_is_refused_and_changes_nothing(tmp_path, name):
    first, second = racing_models()
    path, data = tmp_path / name, moons(eval_batch_size=64)
    sentences = []

    def start_another() -> None:
        before = names(tmp_path)
        with pytest.raises(BlockingIOError) as caught:
            trainer([FeatureWriter(str(path))]).predict(second, datamodule=moons(eval_batch_size=64))
        sentences.append(str(caught.value))
        assert names(tmp_path) == before

    first.other = start_another
    trainer([FeatureWriter(str(path))]).predict(first, datamodule=data)
    (sentence,) = sentences
    assert re.fullmatch(
        rf"{path} is being written by process {os.getpid()} on \S+ since .*: choose another file with "
        r"--features\.path\.",
        sentence,
    )
    assert names(tmp_path) == (["f.npz"] if name == "f.npz" else ["f.json", "f.npy", "f_labels.npy"])
    assert_close(torch.tensor(features_in(path)), first(data.test_points.data), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["f.npy", "f.npz"])
@pytest.mark.parametrize("has_links", [True, False])
def test_without_locks_the_run_that_ends_first_wins(tmp_path, monkeypatch, name, has_links):
    """No file is mixed or replaced, and the run that loses leaves nothing behind."""
    monkeypatch.setattr(files, "fcntl", None)
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    first, second = racing_models()
    path, data = tmp_path / name, moons(eval_batch_size=64)
    first.other = lambda: trainer([FeatureWriter(str(path))]).predict(second, datamodule=moons(eval_batch_size=64))
    with pytest.raises(FileExistsError, match="was written by another process in the meantime and is left as it is"):
        trainer([FeatureWriter(str(path))]).predict(first, datamodule=data)
    assert names(tmp_path) == (["f.npz"] if name == "f.npz" else ["f.json", "f.npy", "f_labels.npy"])
    assert_close(torch.tensor(features_in(path)), second(data.test_points.data), rtol=0, atol=1e-5)


def test_what_a_killed_run_left_does_not_stop_the_next_one(module, tmp_path):
    """It was killed after its labels had appeared, and before its features."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    machine, _, number = draft_tag().split("-")
    for part in ("features", "labels", "about"):
        draft_path(tmp_path / "f.npy", f"{machine}-{ended.pid}-{number}", part).write_bytes(b"half")
    os.link(draft_path(tmp_path / "f.npy", f"{machine}-{ended.pid}-{number}", "labels"), tmp_path / "f_labels.npy")
    data = moons()
    trainer([FeatureWriter(str(tmp_path / "f.npy"))]).predict(module, datamodule=data)
    assert names(tmp_path) == ["f.json", "f.npy", "f_labels.npy"]
    assert np.load(tmp_path / "f_labels.npy").tolist() == data.test_labels.tolist()


def test_the_last_batch_is_never_dropped(module, tmp_path):
    x = moons().test_points.data
    loader = DataLoader(TensorDataset(x), batch_size=64, drop_last=True)  # Lightning ignores it in predict
    trainer([FeatureWriter(str(tmp_path / "f.npy"))]).predict(module, loader)
    assert_close(torch.tensor(np.load(tmp_path / "f.npy")), module(x), rtol=0, atol=1e-5)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(8, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(Endless(), batch_size=4), "needs the number of points"),
        (
            lambda: DataLoader([torch.zeros(5, 2)] * 3, batch_size=None),
            "The indices of the points in a batch are unknown",
        ),
    ],
    ids=["endless", "batches"],
)
def test_unsuitable_loaders_are_refused(module, tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        trainer([FeatureWriter(str(tmp_path / "f.npy"))]).predict(module, make())
    assert names(tmp_path) == []


def test_other_file_types_and_other_models_are_refused(module, tmp_path):
    import lightning

    class Other(lightning.LightningModule):
        def predict_step(self, batch, batch_idx):
            return batch[0]

    with pytest.raises(ValueError, match=r"written as .npy or .npz, got .*f.csv"):
        trainer([FeatureWriter(str(tmp_path / "f.csv"))]).predict(module, datamodule=moons())
    with pytest.raises(ValueError, match="There is no readout 'pca'"):
        FeatureWriter("f.npy", "pca")
    with pytest.raises(ValueError, match="needs a KernelSimilarityMatching model, got a Other"):
        trainer([FeatureWriter(str(tmp_path / "f.npy"))]).predict(Other(), datamodule=moons())
    assert names(tmp_path) == []


def test_nothing_is_written_in_other_stages(module, tmp_path):
    trainer([FeatureWriter(str(tmp_path / "f.npy"))]).validate(module, datamodule=moons(), verbose=False)
    assert names(tmp_path) == []


# ---------------------------------------------------------------------- ksm predict


def saved(data, sigma) -> Path:
    """A checkpoint, in the working folder, of a network trained on the data."""
    trained = model(in_features=data.in_features, kernel_params={"sigma": sigma}, phases=None, updates=40)
    fit(trained, data).save_checkpoint("x.ckpt", weights_only=False)
    return Path("x.ckpt")


def test_new_data_is_preprocessed_like_the_training_data(tmp_path, monkeypatch):
    """Two files with different means share the mean of the training data."""
    monkeypatch.chdir(tmp_path)
    random = np.random.RandomState(0)
    train, new = random.randn(200, 2) * [1, 5] + 10, random.randn(50, 2) * [1, 5] + [12, 10]
    np.save("train.npy", train)
    np.save("new.npy", new)
    checkpoint = saved(ArrayDataModule("train.npy", centre=True, scaling="feature", seed=0), sigma=1.5)
    main(["predict", "--data=ArrayDataModule", "--data.path=new.npy", "--data.centre=true", "--data.scaling=feature",
          f"--ckpt_path={checkpoint}", "--features.path=y.npz", "--trainer.enable_progress_bar=false"])  # fmt: skip
    extractor = FeatureExtractor.from_checkpoint(checkpoint)
    np.testing.assert_allclose(extractor.preprocessing.mean, train.mean(0), rtol=1e-12)
    with np.load("y.npz") as archive:
        found, about = archive["features"], json.loads(str(archive["extractor"]))
    np.testing.assert_allclose(found, extractor.transform(new), rtol=0, atol=1e-5)
    assert about["identity"] == extractor.identity
    assert not np.allclose(found, extractor.transform(new - new.mean(0) + train.mean(0)), atol=0.01)


def test_the_identity_equals_that_of_the_export_for_any_data(tmp_path, monkeypatch):
    """An array of digits has no image shape; the checkpoint of the network trained on digits has."""
    monkeypatch.chdir(tmp_path)
    checkpoint = saved(DigitsDataModule(seed=0), sigma=5.0)
    np.save("digits.npy", DigitsDataModule().load()[1].x)
    main(["predict", "--data=ArrayDataModule", "--data.path=digits.npy", f"--ckpt_path={checkpoint}",
          "--trainer.enable_progress_bar=false"])  # fmt: skip
    main(["export", f"--ckpt_path={checkpoint}"])
    about = json.loads(Path("features.json").read_text())
    assert about["identity"] == FeatureExtractor.load("neural.safetensors").identity
    assert about["image_shape"] == [8, 8]


@pytest.mark.slow
def test_two_ranks_write_the_same_features_as_one(tmp_path, monkeypatch):
    """Two gloo processes on the CPU, with an odd number of points; see also test_distributed."""
    monkeypatch.chdir(tmp_path)
    checkpoint = saved(moons(), sigma=0.3)
    options = ["predict", "--data=HalfMoonsDataModule", "--data.num_points=201", "--data.eval_batch_size=32",
               f"--ckpt_path={checkpoint}", "--trainer.enable_progress_bar=false", "--features.readout=nystroem",
               "--trainer.accelerator=cpu"]  # fmt: skip
    main([*options, "--features.path=one.npz"])
    command = [sys.executable, "-m", "ksm_lightning.cli", *options, "--features.path=two.npz", "--trainer.devices=2",
               "--trainer.strategy=ddp"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("Features of 201 points in 6 dimensions: two.npz") == 1
    with np.load("one.npz") as one, np.load("two.npz") as two:
        assert sorted(one.files) == sorted(two.files) == ["extractor", "features", "labels"]
        np.testing.assert_allclose(two["features"], one["features"], rtol=0, atol=1e-6)
        assert np.array_equal(two["labels"], one["labels"])
        assert str(two["extractor"]) == str(one["extractor"])
        assert np.abs(two["features"]).sum(1).min() > 0  # no row is missing
    assert names(tmp_path) == ["one.npz", "two.npz", "x.ckpt"]


def test_unwritable_features_get_one_sentence_and_leave_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--data=HalfMoonsDataModule", f"--ckpt_path={saved(moons(), sigma=0.3)}"]
    sentence = refused(capsys, "predict", *options, "--features.path=x.csv")
    assert sentence == "Features are written as .npy or .npz, got x.csv: change --features.path."
    sentence = refused(capsys, "predict", *options, "--features.num_features=3")
    assert sentence.startswith("The neural readout always has 6 features, one per neuron, but `num_features` is 3")
    sentence = refused(capsys, "predict", *options, "--features.num_features=9", "--features.readout=nystroem")
    assert sentence == "`num_features` must be between 1 and the number of landmarks, 6, got 9."
    sentence = refused(capsys, "predict", *options, "--trainer.fast_dev_run=true", "--data.eval_batch_size=100")
    assert sentence.startswith("Only 100 of 1600 points were predicted, and no features were written: remove")
    assert names(tmp_path) == ["x.ckpt"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
def test_no_process_maps_pages_of_the_shared_file_for_writing(module, tmp_path):
    """Two machines that share a page through a network file system would restore each other's old bytes."""
    maps: list[str] = []

    class Watched(FeatureWriter):
        def write_on_batch_end(self, *args):
            super().write_on_batch_end(*args)
            maps.extend(Path("/proc/self/maps").read_text().splitlines())

    trainer([Watched(str(tmp_path / "f.npy"))]).predict(module, datamodule=moons(eval_batch_size=64))
    assert np.load(tmp_path / "f.npy").shape == (200, 6)
    assert maps
    assert [line for line in maps if str(tmp_path) in line and "rw-s" in line] == []


def test_a_row_file_writes_the_bytes_of_its_rows_and_no_others(tmp_path, monkeypatch):
    path = tmp_path / "a.npy"
    create_array(path, np.float32, (10, 3), path)
    file, written = RowFile(path, path), []
    write = file._file.write

    class Recorder:
        closed = False

        def __getattr__(self, name):
            return getattr(file_on_disk, name)

        def write(self, data):
            part = bytes(data[: max(1, len(data) // 2)])  # an incomplete write is continued
            written.append((file_on_disk.tell(), len(part)))
            return write(part)

    file_on_disk, file._file = file._file, Recorder()
    values = np.arange(12, dtype=np.float64).reshape(4, 3)
    file.write([7, 2, 3, 9], values)
    file.write(slice(5, 6), -values[:1] - 1)
    file_on_disk.close()
    expected = np.zeros((10, 3), np.float32)
    expected[[7, 2, 3, 9]], expected[5] = values, -values[0] - 1
    assert np.array_equal(np.load(path), expected)
    start = path.stat().st_size - 10 * 12
    touched = {(place - start + byte) // 12 for place, length in written for byte in range(length)}
    assert touched == {2, 3, 5, 7, 9}
    assert sum(length for _, length in written) == 5 * 12
