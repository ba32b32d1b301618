"""Lightning's own callbacks, loggers and trainer options on short runs: what each of them must show."""

import csv
import io
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from helpers.runs import Recorder, fit, model, moons, trainer
from ksm_lightning.callbacks import Figures, KernelErrorEvaluation
from ksm_lightning.data.loaders import UPDATES_AT_ONCE
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.runs.checkpoint import read_checkpoint

PHASES = [Phase(60, 0.01, 0.02, 0.1)]
NO_STATE = pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")


class Notes(Callback):
    """Notes the updates after which blocks and validations end, and the weights there."""

    def __init__(self):
        self.blocks: list[int] = []
        self.validations: list[int] = []
        self.weights: dict[int, torch.Tensor] = {}

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.blocks.append(trainer.global_step)
        self.weights[trainer.global_step] = pl_module.network.W.detach().clone()

    def on_validation_end(self, trainer, pl_module):
        self.validations.append(trainer.global_step)


def run(callbacks=(), updates_per_epoch=20, logger=False, phases=PHASES, **options) -> tuple[Notes, object]:
    notes = Notes()
    enabled = {"enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks), **options}
    fitted = trainer([notes, *callbacks], logger, **enabled)
    fitted.fit(model(phases=phases), datamodule=moons(updates_per_epoch=updates_per_epoch))
    return notes, fitted


def held(folder: Path) -> dict[str, int]:
    """The update that each checkpoint in a folder holds."""
    return {path.name: read_checkpoint(path)["global_step"] for path in sorted(folder.glob("*.ckpt"))}


# ---------------------------------------------------------------------- ModelCheckpoint


@NO_STATE
@pytest.mark.parametrize("evaluations", [[], [KernelErrorEvaluation()]], ids=["energy", "kernel_error"])
def test_every_checkpoint_is_named_by_the_update_that_it_holds(tmp_path, evaluations):
    """Validations after 20, 40 and 60 updates come between the checkpoints."""
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=15, save_top_k=-1)
    notes, fitted = run([saving, *evaluations])
    assert notes.validations == [20, 40, 60]
    assert held(tmp_path) == {f"step={update}.ckpt": update for update in (15, 30, 45, 60)}
    for update in (15, 30, 45, 60):
        saved = read_checkpoint(tmp_path / f"step={update}.ckpt")["state_dict"]["network.W"]
        assert torch.equal(saved, notes.weights[update])
    assert "step" not in fitted.callback_metrics


def test_the_default_names_of_checkpoints_show_epoch_and_update(tmp_path):
    run([ModelCheckpoint(tmp_path, save_top_k=-1)])
    assert held(tmp_path) == {"epoch=0-step=20.ckpt": 20, "epoch=1-step=40.ckpt": 40, "epoch=2-step=60.ckpt": 60}


@NO_STATE
def test_the_best_checkpoints_are_those_with_the_lowest_energies(tmp_path):
    """`train/energy` is up to date at every checkpoint, also if no update of the block is logged."""
    saving = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=5, monitor="train/energy", save_top_k=3, mode="min"
    )
    seen = {}

    class Energies(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step % 5 == 0:
                seen[trainer.global_step] = pl_module.run_state.log.epoch_energy()

    run([Energies(), saving], log_every_n_steps=1000)
    assert len(seen) == 12
    assert len({round(energy, 4) for energy in seen.values()}) == 12
    best = sorted(seen, key=seen.get)[:3]
    assert held(tmp_path) == {f"step={update}.ckpt": update for update in sorted(best)}
    scores = {held(tmp_path)[Path(path).name]: float(score) for path, score in saving.best_k_models.items()}
    assert scores == pytest.approx({update: seen[update] for update in best}, rel=1e-5)


def test_a_checkpoint_that_monitors_the_kernel_error_has_the_score_of_its_weights(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="{step}", monitor="val/kernel_nrmse", save_top_k=-1)
    recorder = Recorder()
    run([KernelErrorEvaluation(["neural"]), saving], logger=recorder)
    assert held(tmp_path) == {f"step={update}.ckpt": update for update in (20, 40, 60)}
    scores = {step: values["val/kernel_nrmse"] for step, values in recorder.metrics.items() if "val/energy" in values}
    assert sorted(scores) == [20, 40, 60]
    for path, score in saving.best_k_models.items():
        assert float(score) == pytest.approx(scores[held(tmp_path)[Path(path).name]], rel=1e-6)


# ---------------------------------------------------------------------- the x axis of everything that is logged


def test_the_learning_rate_monitor_logs_the_rates_of_the_update_on_its_axis():
    recorder = Recorder()
    phases = [Phase(25, 0.01, 0.02, 0.1), Phase(35, 0.001, 0.002, 0.01)]
    run([LearningRateMonitor("step")], logger=recorder, phases=phases, log_every_n_steps=20)
    name = "lr-HebbianOptimizer/W"
    seen = {step: values[name] for step, values in recorder.metrics.items() if name in values}
    assert seen == {20: 0.01, 40: 0.001}  # at the start of the next block; the one after 60 does not exist


def test_metrics_of_a_callback_have_the_update_as_their_axis():
    class Norm(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            pl_module.log("norm", float(trainer.global_step))

    recorder = Recorder()
    run([Norm()], logger=recorder, log_every_n_steps=1)
    seen = {step: values["norm"] for step, values in recorder.metrics.items() if "norm" in values}
    assert seen == {update: float(update) for update in (1, 2, 4, 8, 16, 20, 32, 40, 60)}  # the ends of blocks


def test_the_device_monitor_logs_at_the_updates(monkeypatch):
    monkeypatch.setattr("lightning.pytorch.accelerators.cpu._PSUTIL_AVAILABLE", True)
    monkeypatch.setattr(CPUAccelerator, "get_device_stats", lambda self, device: {"cpu_percent": 5.0})
    recorder = Recorder()
    run([DeviceStatsMonitor(cpu_stats=True)], logger=recorder, log_every_n_steps=20)
    steps = {step for step, values in recorder.metrics.items() if any("cpu_percent" in name for name in values)}
    assert steps == {20, 40, 60}


def test_a_csv_logger_has_one_row_per_logged_update(tmp_path):
    run(logger=CSVLogger(tmp_path, name="", version=""), log_every_n_steps=10)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["train/energy"]] == [10, 20, 30, 40, 50, 60]
    assert [int(row["step"]) for row in rows if row["val/energy"]] == [20, 40, 60]


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_loggers_of_services_get_the_updates(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = MLFlowLogger(save_dir=str(tmp_path)) if name == "mlflow" else WandbLogger(save_dir=tmp_path, offline=True)
    seen = {}
    log_metrics = type(logger).log_metrics
    monkeypatch.setattr(
        type(logger), "log_metrics", lambda self, metrics, step=None: (seen.setdefault(step, metrics),
                                                                       log_metrics(self, metrics, step))
    )  # fmt: skip
    run(logger=logger, log_every_n_steps=10)
    assert sorted(seen) == [10, 20, 30, 40, 50, 60]


# ---------------------------------------------------------------------- callbacks that end a run


@pytest.mark.parametrize(
    ("callback", "options", "done"),
    [
        (EarlyStopping("val/energy", patience=1, min_delta=100.0), {}, 40),
        (EarlyStopping("val/energy", stopping_threshold=1e9), {}, 20),
        (Timer({"seconds": 0}), {}, 0),
        (None, {"max_time": {"seconds": 0}}, 0),
    ],
    ids=["patience", "threshold", "Timer", "max_time"],
)
def test_a_callback_ends_the_run_after_a_block(callback, options, done, caplog):
    """What was left out is tested in test_cut_short.py."""
    _, fitted = run([] if callback is None else [callback], **options)
    assert fitted.global_step == done


def test_a_second_run_with_the_same_callbacks_evaluates_and_draws_as_the_first():
    """Neither the last evaluation nor the energies of an earlier run belong to it."""
    evaluation, figures, times = KernelErrorEvaluation(["neural"], min_updates_between=20), Figures(), []
    for _ in range(2):
        recorder = Recorder()
        run([evaluation, figures], logger=recorder, log_every_n_steps=20)
        times.append(sorted(step for step, values in recorder.metrics.items() if "val/kernel_nrmse" in values))
    assert times == [[0, 1, 2, 4, 8, 16, 20, 32, 40, 60]] * 2
    assert figures.state_dict()["updates"] == [20, 40, 60]


# ---------------------------------------------------------------------- options of the trainer

LONG = 3 * UPDATES_AT_ONCE
TWO_EPOCHS = [Phase(2 * LONG, 0.01, 0.02, 0.1)]


@pytest.mark.parametrize(
    ("options", "blocks", "validations"),
    [
        ({}, [1, 2, 3, 4, 5, 6], [3, 6]),
        ({"val_check_interval": 1}, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
        ({"val_check_interval": 2, "check_val_every_n_epoch": None}, [1, 2, 3, 4, 5, 6], [2, 4, 6]),
        ({"limit_val_batches": 0}, [1, 2, 3, 4, 5, 6], []),
    ],
    ids=["default", "val_check_interval", "across epochs", "no validation"],
)
def test_intervals_of_the_trainer_count_blocks_of_updates(options, blocks, validations):
    notes, _ = run(updates_per_epoch=LONG, phases=TWO_EPOCHS, **options)
    assert notes.blocks == [UPDATES_AT_ONCE * block for block in blocks]
    assert notes.validations == [UPDATES_AT_ONCE * block for block in validations]


def test_a_limit_of_batches_is_a_number_of_blocks():
    """An epoch that was cut short goes on where it stopped, as the batches are a function of the update."""
    notes, fitted = run(updates_per_epoch=LONG, phases=TWO_EPOCHS, limit_train_batches=2, max_epochs=2)
    assert fitted.global_step == notes.blocks[-1]
    whole, _ = run(updates_per_epoch=LONG, phases=TWO_EPOCHS)
    for update, weights in notes.weights.items():
        assert torch.equal(weights, whole.weights[update])


def test_one_update_of_a_fast_dev_run_touches_every_part(tmp_path):
    notes, fitted = run([KernelErrorEvaluation(["neural"])], fast_dev_run=True, default_root_dir=tmp_path)
    assert (notes.blocks, notes.validations) == ([1], [1])
    assert 0 < fitted.callback_metrics["val/kernel_nrmse"].item() < 10
    assert list(tmp_path.iterdir()) == []


def test_overfit_batches_of_another_loader_repeats_its_first_batches():
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    seen = []

    class Inputs(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(batch[0])

    module = model(phases=[Phase(8, 0.01, 0.02, 0.1)])
    trainer([Inputs()], overfit_batches=2, limit_val_batches=0).fit(module, DataLoader(TensorDataset(x), batch_size=16))
    assert len(seen) == 8
    for index, batch in enumerate(seen):
        assert torch.equal(batch, x[16 * (index % 2) :][:16])


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_profilers_show_the_training_step(profiler, tmp_path):
    from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler

    kind = SimpleProfiler if profiler == "simple" else AdvancedProfiler
    run(profiler=kind(dirpath=tmp_path, filename="profile"))
    text = (tmp_path / "fit-profile.txt").read_text()
    calls = "_TrainingEpochLoop].train_dataloader_next" if profiler == "simple" else "training_step"
    assert calls in text


def test_the_rich_progress_bar_counts_blocks(monkeypatch):
    pytest.importorskip("rich")
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    _, fitted = run([RichProgressBar()], enable_progress_bar=True)
    assert fitted.global_step == 60
    assert re.search(r"Epoch 2", out.getvalue())
    assert "train/energy" in out.getvalue()


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "callback", [StochasticWeightAveraging(0.01), EMAWeightAveraging()], ids=lambda each: type(each).__name__
)
def test_averages_of_weights_are_refused_in_one_sentence(callback):
    module = model()
    before = module.network.W.detach().clone()
    with pytest.raises(ValueError, match="Averaging cannot be used here, because averages of W, q and L") as error:
        trainer([callback], max_epochs=3).fit(module, datamodule=moons())
    assert str(error.value).startswith(type(callback).__name__)
    assert str(error.value).count(". ") == 0
    assert torch.equal(module.network.W, before)
    trainer([callback]).validate(module, datamodule=moons(), verbose=False)  # averages nothing


# ---------------------------------------------------------------------- what belongs to an earlier run


def test_a_second_fit_starts_as_a_new_run_on_the_same_weights():
    """Best weights, a failed factorisation and halved rates of the first run must not reach the second one."""
    module, twin = (model(phases=None, updates=60) for _ in range(2))
    fit(module, moons(seed=1))
    twin.load_state_dict(module.state_dict())
    twin.learner.stage, twin.network.ridge = "learning", module.network.ridge
    module.learner.responses.failed.fill_(1)
    module.learner.halve_rates()
    module.learner.best.lowest = -1.0  # better than anything on the data of the second run
    for each in (module, twin):
        fit(each, moons(seed=2))
    assert module.learner.rate_factor == 1.0
    for found, expected in zip(module.network.parameters(), twin.network.parameters(), strict=True):
        assert torch.equal(found, expected)
