"""What all datamodules share: arguments, preprocessing, loaders, samples and the seed of the batches."""

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from helpers.commands import refused
from helpers.mnist_files import arrays
from helpers.runs import moons, trainer
from ksm_lightning.callbacks import UpdateCheckpoint
from ksm_lightning.cli import main
from ksm_lightning.data import (
    ArrayDataModule,
    CroppedMNISTDataModule,
    Dataset,
    DigitsDataModule,
    HalfMoonsDataModule,
    KSMDataModule,
)
from ksm_lightning.network.preprocessing import Preprocessing

RANDOM = np.random.RandomState(0)
MEAN, SCALE = RANDOM.randn(6), 0.5 + RANDOM.rand(6)
DATAMODULES = ["HalfMoonsDataModule", "DigitsDataModule", "CroppedMNISTDataModule", "ArrayDataModule"]
# The arguments of KSMDataModule with the start of their help.
SHARED = {
    "batch_size": "Number of points per batch on each device",
    "updates_per_epoch": "Number of updates between two validations",
    "eval_batch_size": "Number of points per batch in validation",
    "seed": "Seed of the batches",
}


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize("name", DATAMODULES)
def test_the_help_of_every_datamodule_lists_the_shared_arguments(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main(["fit", f"--data.help={name}"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for argument, description in SHARED.items():
        assert f"--data.{argument} {argument.upper()} {description}" in text


@pytest.mark.parametrize("name", DATAMODULES)
def test_the_command_line_sets_the_shared_arguments_of_every_datamodule(capsys, name):
    options = [f"--data.{argument}={32 + i}" for i, argument in enumerate(SHARED)]
    path = ["--data.path=x.npy"] if name == "ArrayDataModule" else []
    with pytest.raises(SystemExit) as stop:
        main(["fit", f"--data={name}", *path, *options, "--print_config"])
    assert stop.value.code == 0
    found = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    assert [found[argument] for argument in SHARED] == [32, 33, 34, 35]


@pytest.mark.parametrize("name", DATAMODULES)
def test_a_misspelt_argument_is_refused_in_one_sentence(capsys, name):
    assert "'batchsize' is not accepted" in refused(capsys, "fit", f"--data={name}", "--data.batchsize=32")


@pytest.mark.parametrize("name", ["batch_size", "updates_per_epoch", "eval_batch_size"])
def test_sizes_below_1_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        HalfMoonsDataModule(**{name: 0})


@pytest.mark.parametrize(("name", "size"), [("batch_size", "auto"), ("updates_per_epoch", 2.5)])
def test_sizes_that_are_no_whole_numbers_are_refused(name, size):
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number, got {size!r}"):
        HalfMoonsDataModule(**{name: size})


def test_a_datamodule_without_load_is_refused_by_name():
    class Incomplete(KSMDataModule):
        pass

    with pytest.raises(TypeError, match=r"abstract class Incomplete .*load"):
        Incomplete()


# ---------------------------------------------------------------------- preprocessing


def compare(data, raw: np.ndarray, points) -> None:
    """Check that the preprocessing of a datamodule gives its points from raw input."""
    found = data.preprocessing(torch.tensor(raw)).float()
    torch.testing.assert_close(found, points.slice(0, len(points)), rtol=1e-6, atol=1e-6)


def test_preprocessing_of_half_moons():
    data = moons()
    train, test = data.load()
    compare(data, train.x, data.train_points)
    compare(data, test.x, data.test_points)
    np.testing.assert_allclose(data.preprocessing.mean.numpy(), train.x.mean(0), rtol=1e-12)
    assert (data.preprocessing.scale == 1).all()


def test_preprocessing_of_digits():
    data = DigitsDataModule()
    train, test = data.load()
    compare(data, train.x, data.train_points)
    compare(data, test.x.reshape(-1, 8, 8), data.test_points)
    np.testing.assert_allclose(data.preprocessing.scale.numpy(), train.x.std(), rtol=1e-12)
    assert (data.preprocessing.image_shape, data.preprocessing.crop) == ((8, 8), 0)


def test_preprocessing_of_cropped_mnist(small_mnist):
    data = CroppedMNISTDataModule(data_dir=str(small_mnist), crop=9, include_test=False)
    compare(data, arrays()["train-images-idx3-ubyte"], data.train_points)
    compare(data, arrays()["t10k-images-idx3-ubyte"].reshape(-1, 784), data.test_points)
    assert (data.preprocessing.image_shape, data.preprocessing.crop) == ((10, 10), 9)


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("scaling", ["none", "global", "feature"])
@pytest.mark.parametrize("memory_map", ["always", "never"])
def test_preprocessing_of_arrays(tmp_path, centre, scaling, memory_map):
    raw = RANDOM.randn(50, 3) * [1, 10, 0] + [5, -5, 2]  # the last feature is constant
    np.save(tmp_path / "x.npy", raw)
    data = ArrayDataModule(str(tmp_path / "x.npy"), centre=centre, scaling=scaling, memory_map=memory_map)
    compare(data, raw, data.train_points)
    expected = raw - raw.mean(0) if centre else raw
    scale = {"none": 1, "global": raw.std(), "feature": np.where(raw.std(0) > 0, raw.std(0), 1)}[scaling]
    np.testing.assert_allclose(data.preprocessing(torch.tensor(raw)).numpy(), expected / scale, rtol=0, atol=1e-12)


def test_a_subclass_declares_its_preprocessing():
    class Images(KSMDataModule):
        centre, scaling, image_shape, crop = True, "feature", (1, 2), 3

        def load(self):
            return Dataset(np.array([[0.0, 1.0], [4.0, 3.0]])), None

    data = Images()
    assert data.train_points.data.tolist() == [[-1.0, -1.0], [1.0, 1.0]]
    assert data.preprocessing.state()["image_shape"] == [1, 2]
    assert data.preprocessing.raw_shape == (7, 8)


def test_a_scale_of_zero_is_refused_before_the_data_is_divided():
    class Bad(HalfMoonsDataModule):
        def standardise(self, x):
            return Preprocessing(torch.zeros(2), torch.zeros(2))

    with pytest.raises(ValueError, match="a scale that is not positive"):
        Bad().setup()


@pytest.mark.parametrize("memory_map", ["always", "never"])
def test_the_preprocessing_of_a_trained_network_replaces_the_measured_one(tmp_path, memory_map):
    np.save(tmp_path / "x.npy", raw := RANDOM.randn(50, 6) + 100)
    np.save(tmp_path / "y.npy", raw[:9] + 1)
    data = ArrayDataModule(
        str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), centre=True, scaling="feature", memory_map=memory_map
    )
    given = Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE), image_shape=(2, 3), crop=1)
    data.use(given)
    expected = torch.tensor((raw - MEAN) / SCALE, dtype=torch.float32)
    torch.testing.assert_close(data.train_points.slice(0, 50), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        data.test_points.slice(0, 9), torch.tensor((raw[:9] + 1 - MEAN) / SCALE, dtype=torch.float32)
    )
    # The datamodule returns a copy, including the image shape, which is not in the file.
    found = data.preprocessing
    assert found.state()["image_shape"] == [2, 3]
    assert torch.equal(found.mean, given.mean)
    found.mean += 1
    assert torch.equal(given.mean, torch.tensor(MEAN))
    assert torch.equal(data.preprocessing.mean, torch.tensor(MEAN))
    with pytest.raises(RuntimeError, match="The data has already been loaded: call `use` before `setup`"):
        data.use(given)


def test_the_preprocessing_of_data_with_other_features_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", RANDOM.randn(50, 5))
    data = ArrayDataModule(str(tmp_path / "x.npy"))
    data.use(Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE)))
    with pytest.raises(ValueError, match="The data has 5 features, but the preprocessing is for 6"):
        data.setup()


# ---------------------------------------------------------------------- loaders and samples


def test_validation_uses_training_points_and_test_uses_test_points():
    data = HalfMoonsDataModule(num_points=10, eval_batch_size=4)
    x, labels = zip(*data.val_dataloader(), strict=True)
    assert torch.equal(torch.cat(x), data.train_points.data)
    assert torch.equal(torch.cat(labels), data.train_labels)
    assert torch.equal(torch.cat([x for x, _ in data.test_dataloader()]), data.test_points.data)
    assert torch.equal(torch.cat([x for x, _ in data.predict_dataloader()]), data.test_points.data)


def test_blocks_end_where_callbacks_write_checkpoints():
    data = moons(updates_per_epoch=50)
    callbacks = [ModelCheckpoint(every_n_train_steps=15), UpdateCheckpoint(every_n_updates=20)]
    data.trainer = trainer(callbacks, enable_checkpointing=True)
    assert [first for first, _ in data.train_dataloader().blocks(0)] == [0, 15, 20, 30, 40, 45]


def test_a_sample_has_different_points_and_is_a_function_of_seed_and_update():
    data = moons(num_points=100)
    sample = data.sample(5, 30)
    assert torch.equal(moons(num_points=100).sample(5, 30), sample)
    assert not torch.equal(data.sample(6, 30)[:5], sample[:5])
    assert len(torch.unique(sample, dim=0)) == len(sample) <= 30
    assert torch.equal(data.sample(5, 100), data.train_points.data)


def test_every_readout_but_the_neural_one_gets_the_same_sample():
    data = moons(num_points=12_000)
    assert data.readout_sample("neural") is None
    sample = data.readout_sample("nystroem")
    assert torch.equal(data.readout_sample("least_squares"), sample)
    assert torch.equal(sample, data.sample(0, 5_000))
    assert 4_000 < len(sample) <= 5_000


def test_the_batch_seed_is_that_of_the_run_and_is_kept():
    torch.manual_seed(5)
    data = HalfMoonsDataModule()
    assert data.state_dict() == {"seed": 5}
    torch.manual_seed(6)
    assert data.state_dict() == {"seed": 5}
    other = HalfMoonsDataModule()
    other.load_state_dict({"seed": 5})
    assert torch.equal(next(iter(other.train_dataloader())).x, next(iter(data.train_dataloader())).x)


def test_a_seed_other_than_that_of_the_saved_run_is_refused():
    with pytest.raises(ValueError, match="draws its batches with seed 5, but `seed` is 3: leave `seed`"):
        moons().load_state_dict({"seed": 5})
