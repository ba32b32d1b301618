"""Each private name of a library behaves as :mod:`ksm_lightning.private_apis` expects."""

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from ksm_lightning import private_apis


@pytest.mark.parametrize(
    ("callback", "interval"),
    [
        (ModelCheckpoint(every_n_train_steps=7), 7),
        (ModelCheckpoint(every_n_epochs=3), 0),
        (ModelCheckpoint(), 0),
        (Callback(), 0),
    ],
    ids=["steps", "epochs", "default", "other"],
)
def test_the_checkpoint_interval_is_that_of_model_checkpoint(callback, interval):
    assert private_apis.checkpoint_interval(callback) == interval
