"""Runs that end before their schedule say what they left out, in the summary and in the log."""

import logging

import pytest
from lightning.pytorch.callbacks import EarlyStopping, Timer

from helpers.commands import HALF_MOONS
from helpers.runs import model, moons, trainer
from ksm_lightning.cli import main
from ksm_lightning.learning import AdaptiveSchedule, Phase, PhaseSchedule, TightSchedule
from ksm_lightning.runs.cut_short import cut_short


class TimeIsUp(Timer):
    """A timer that ends the run after its first block of updates."""

    def __init__(self):
        super().__init__({"hours": 1})
        self.blocks = 0

    def on_train_batch_end(self, *args):
        self.blocks += 1
        super().on_train_batch_end(*args)

    def time_elapsed(self, stage="train"):
        return 7200.0 * self.blocks


TWO = PhaseSchedule([Phase(100, kernel_params={"alpha": 1}), Phase(50)])


@pytest.mark.parametrize(
    ("schedule", "done", "consolidates", "sentence"),
    [
        (AdaptiveSchedule(2000), 150, True, "150 of 2,000 updates: rates not annealed, L not consolidated."),
        (
            AdaptiveSchedule(2000),
            1300,
            True,
            "1,300 of 2,000 updates: rates annealed to 50 % only, L not consolidated.",
        ),
        (TightSchedule(1000), 900, False, "900 of 1,000 updates: rates annealed to 14 % only."),
        (PhaseSchedule([Phase(100)]), 40, False, "40 of 100 updates."),
        (PhaseSchedule([Phase(100)]), 40, True, "40 of 100 updates: L not consolidated."),
        (TWO, 40, False, "40 of 150 updates: 0 of 2 phases done, trained with another kernel (alpha=1)."),
        (TWO, 120, False, "120 of 150 updates: 1 of 2 phases done."),
    ],
)
def test_only_what_was_left_out_is_named(schedule, done, consolidates, sentence):
    assert cut_short(schedule, done, consolidates) == f"Stopped at {sentence}"


@pytest.mark.parametrize("schedule", [AdaptiveSchedule(20), TightSchedule(20), TWO])
def test_a_complete_schedule_leaves_nothing_out(schedule):
    assert cut_short(schedule, schedule.total_updates, True) is None


@pytest.mark.parametrize(
    ("options", "callbacks", "done"),
    [
        ({"max_steps": 30}, [], 30),
        ({"max_epochs": 2}, [], 40),
        ({}, [EarlyStopping("train/energy", patience=1, min_delta=100.0, check_on_train_epoch_end=True)], 40),
        ({}, [TimeIsUp()], 20),
    ],
    ids=["max_steps", "max_epochs", "EarlyStopping", "Timer"],
)
def test_every_way_to_end_early_is_logged(options, callbacks, done, caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero")
    run = trainer(callbacks, limit_val_batches=0, **options)
    run.fit(model(phases=None, updates=200), datamodule=moons(updates_per_epoch=20))
    assert run.global_step == done
    expected = f"Stopped at {done} of 200 updates: rates not annealed, L not consolidated."
    assert [text for text in caplog.messages if text.startswith("Stopped")] == [expected]


def test_a_complete_run_logs_nothing_about_it(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero")
    trainer().fit(model(phases=None, updates=20), datamodule=moons())
    assert [text for text in caplog.messages if text.startswith("Stopped")] == []


@pytest.mark.usefixtures("in_tmp_path")
def test_the_summary_says_it_too(capsys):
    options = ["--config", HALF_MOONS, "--data.num_points=100", "--model.num_neurons=4", "--trainer.logger=false",
               "--trainer.enable_progress_bar=false", "--trainer.max_steps=20"]  # fmt: skip
    main(["fit", *options, "--model.updates=30"])
    lines = capsys.readouterr().out.splitlines()
    assert "Stopped at 20 of 30 updates: rates annealed to 48 % only, L not consolidated." in lines
    main(["fit", *options, "--model.updates=20"])
    assert "Stopped at" not in capsys.readouterr().out
