"""The mean energy of an epoch, which callbacks monitor, and the energies of single updates in the loggers."""

import statistics

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from helpers.runs import Recorder, model, moons, trainer
from ksm_lightning.callbacks import UpdateCheckpoint
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.runs.update_log import UpdateLog

PHASES = [Phase(60, 0.01, 0.02, 0.1)]


class Monitor(Callback):
    """Notes what a callback sees as ``train/energy`` at the end of each epoch."""

    def __init__(self):
        self.seen: list[float] = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append(float(trainer.callback_metrics["train/energy"]))


def run(log_every: int, callbacks=(), **options) -> tuple[list[float], dict[int, float], object]:
    """Energies that callbacks saw in three epochs of 20 updates, and the logged ones by update."""
    monitor, recorder = Monitor(), Recorder()
    fitted = trainer([monitor, *callbacks], recorder, log_every_n_steps=log_every, **options)
    fitted.fit(model(phases=PHASES), datamodule=moons(updates_per_epoch=20))
    logged = {step: values["train/energy"] for step, values in recorder.metrics.items() if "train/energy" in values}
    return monitor.seen, logged, fitted


def epoch_means(logged: dict[int, float], length: int = 20) -> list[float]:
    epochs = sorted({(step - 1) // length for step in logged})
    return [statistics.fmean(logged[step] for step in logged if (step - 1) // length == epoch) for epoch in epochs]


def test_callbacks_see_the_mean_of_the_epoch_and_loggers_each_update():
    seen, logged, _ = run(log_every=1)
    assert sorted(logged) == list(range(1, 61))
    assert seen == pytest.approx(epoch_means(logged), rel=1e-6)
    assert abs(seen[0] - logged[20]) > 1e-4, "a single batch"


def test_every_epoch_observes_an_update_even_if_none_is_logged():
    seen, logged, _ = run(log_every=1000)
    _, each, _ = run(log_every=1)
    assert logged == {}
    ends_of_blocks = [[1, 2, 4, 8, 16, 20], [32, 40], [60]]
    assert seen == pytest.approx([statistics.fmean(each[end] for end in ends) for ends in ends_of_blocks], rel=1e-6)


def test_early_stopping_and_checkpoints_monitor_the_mean(tmp_path):
    stopping = EarlyStopping("train/energy", patience=100, check_on_train_epoch_end=True)
    saving = ModelCheckpoint(tmp_path, monitor="train/energy", save_on_train_epoch_end=True)
    seen, _, _ = run(1, [stopping, saving], enable_checkpointing=True)
    assert float(stopping.best_score) == pytest.approx(min(seen), rel=1e-6)
    assert float(saving.best_model_score) == pytest.approx(min(seen), rel=1e-6)


def test_a_resumed_epoch_has_the_mean_of_an_undisturbed_one(tmp_path):
    whole, _, _ = run(log_every=1)
    saving = UpdateCheckpoint(every_n_updates=30, keep_all=True)
    first = trainer([saving], log_every_n_steps=1, default_root_dir=tmp_path, enable_checkpointing=True)
    first.fit(model(phases=PHASES), datamodule=moons(updates_per_epoch=20))
    monitor = Monitor()
    rest = trainer([monitor, UpdateCheckpoint()], log_every_n_steps=1, default_root_dir=tmp_path / "rest",
                   enable_checkpointing=True)  # fmt: skip
    path = str(tmp_path / "checkpoints" / "update-0000030.ckpt")
    rest.fit(model(phases=PHASES), datamodule=moons(updates_per_epoch=20), ckpt_path=path, weights_only=True)
    assert monitor.seen == pytest.approx(whole[1:], rel=1e-6)


def test_early_stopping_finds_the_energy_when_a_run_that_ended_is_continued(tmp_path):
    """Lightning first ends the epoch of the checkpoint, without a new update."""
    first = trainer([UpdateCheckpoint()], max_steps=30, default_root_dir=tmp_path, enable_checkpointing=True)
    first.fit(model(phases=PHASES), datamodule=moons(updates_per_epoch=20))
    stopping = EarlyStopping("train/energy", patience=100, check_on_train_epoch_end=True)
    rest = trainer([stopping, UpdateCheckpoint()], default_root_dir=tmp_path / "rest", enable_checkpointing=True)
    path = str(tmp_path / "checkpoints" / "last.ckpt")
    rest.fit(model(phases=PHASES), datamodule=moons(updates_per_epoch=20), ckpt_path=path, weights_only=True)
    assert rest.global_step == 60


def test_a_value_that_is_not_finite_is_left_out_of_the_mean():
    log = UpdateLog()
    assert log.epoch_energy() is None
    for value in (1.0, torch.nan, 3.0, torch.inf):
        log._count(torch.tensor(value, dtype=torch.float64))
    assert log.epoch_energy() == 2.0
    assert log.state() == [4.0, 2.0]
    log.start_epoch()
    assert log.epoch_energy() is None
