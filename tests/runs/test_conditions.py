"""Continuing with a Trainer from Python: on the same data only, with a warning about other batches."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from helpers.checkpoints import changed
from helpers.runs import fit, model, moons, trainer
from ksm_lightning.data import ArrayDataModule
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.runs.checkpoint import read_checkpoint
from ksm_lightning.runs.conditions import conditions_of


@pytest.fixture
def path(tmp_path):
    """A checkpoint after 5 of 10 updates."""
    fit(model(), max_steps=5).save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    return tmp_path / "x.ckpt"


def resume(path, data, **options):
    run = trainer(**options)
    run.fit(model(), **({"datamodule": data} if not isinstance(data, DataLoader) else {"train_dataloaders": data}),
            ckpt_path=path, weights_only=True)  # fmt: skip
    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_seed": 1}, r"^The checkpoint was trained on other data \(200 points of 2 features; their values diff"),
        ({"num_points": 300}, "200 points of 2 features; now it is 300 points of 2 features.: continue with the data"),
    ],
)
def test_fit_does_not_continue_on_other_data(path, options, message):
    with pytest.raises(ValueError, match=message):
        resume(path, moons(**options))
    trainer().validate(model(), datamodule=moons(**options), ckpt_path=path, weights_only=True, verbose=False)


def test_fit_does_not_continue_with_another_scaling(path, tmp_path):
    np.save(tmp_path / "x.npy", moons().load()[0].x)
    for options, message in (
        ({"centre": True, "scaling": "feature"}, "trained with scaling=none of the data, but scaling is feature: set"),
        ({"centre": False}, "trained with centre=True of the data, but centre is False: set it to True to continue"),
    ):
        with pytest.raises(ValueError, match=message):
            resume(path, ArrayDataModule(str(tmp_path / "x.npy"), batch_size=16, **options))
    same = ArrayDataModule(str(tmp_path / "x.npy"), batch_size=16, centre=True)  # the same points from a file
    assert resume(path, same).global_step == 10


def test_other_batches_and_processes_are_announced(path):
    were = r"it would have made: the points per update are 20 x 1 = 20 and were 16 x 1 = 16 \(batch_size x processes\)"
    with pytest.warns(UserWarning, match=were):
        resume(path, moons(batch_size=20))
    changed(path, lambda content: content["ksm_lightning"]["training"].update(processes=2))
    with pytest.warns(UserWarning, match="the points per update are 16 x 1 = 16 and were 16 x 2 = 32"):
        resume(path, moons())


def test_the_points_of_an_update_may_be_shared_by_another_number_of_processes(path):
    """Two processes of 8 points become one of 16: the same updates, except for rounding, and no warning."""
    changed(path, lambda content: content["ksm_lightning"]["training"].update(processes=2, batch_size=8))
    assert conditions_of(read_checkpoint(path)).global_batch == 16
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert resume(path, moons()).global_step == 10
    assert not [each for each in caught if "would have made" in str(each.message)]


def test_a_loader_of_the_users_own_is_not_compared(path):
    loader = DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=16)
    assert resume(path, loader, log_every_n_steps=1).global_step == 10


def test_a_trained_network_may_be_trained_further_on_other_data(path):
    """The way that the message leaves open: a new run, without ``ckpt_path``, from the weights of the checkpoint."""
    module = KernelSimilarityMatching.load_from_checkpoint(path)
    before = module.network.W.clone()
    assert fit(module, moons(data_seed=1)).global_step == 10
    assert not torch.equal(module.network.W, before)


def test_incomplete_conditions_are_refused(path):
    for change, message in (
        (lambda training: training.pop("seed"), "x is damaged: The conditions of the training are incomplete"),
        (lambda training: training.update(seed="7"), "The conditions of the training are incomplete"),
        (lambda training: training.update(data=[1]), "The fingerprint of the training data is incomplete"),
    ):
        content = read_checkpoint(path)
        change(content["ksm_lightning"]["training"])
        with pytest.raises(ValueError, match=message):
            conditions_of(content, "x")
    changed(path, lambda content: content["ksm_lightning"].update(training=None))
    with pytest.raises(ValueError, match="does not contain the conditions of its training"):
        read_checkpoint(path)
