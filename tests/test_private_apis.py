"""Each private name of a library behaves as :mod:`ksm_lightning.private_apis` expects."""

import signal
import subprocess
import sys

import lightning
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.summary_pb2 import Summary
from torch._dynamo.utils import get_static_address_type
from torchmetrics import Metric

from helpers.processes import PATIENCE
from ksm_lightning import private_apis
from ksm_lightning.module import KernelSimilarityMatching


class Counting(lightning.LightningModule):
    """Counts four further updates per step of its optimizer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.counts = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(6, 1), batch_size=1)

    def training_step(self, batch, batch_idx):
        self.optimizers().step()
        private_apis.count_updates(self.trainer, 4)
        self.counts.append(self.global_step)


def fitted(**options) -> tuple[Counting, lightning.Trainer]:
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1, **options}
    run = lightning.Trainer(enable_progress_bar=False, enable_model_summary=False, **options)
    module = Counting()
    run.fit(module)
    return module, run


def test_the_file_imports_no_library_it_describes():
    code = (
        "import ksm_lightning.private_apis, sys; print({'lightning', 'tensorboard', 'torchmetrics'} & {*sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert result.stdout.strip() == "set()"


def test_counted_updates_move_the_global_step_and_end_the_run():
    module, run = fitted()
    assert module.counts == [5, 10, 15, 20, 25, 30]
    assert run.global_step == 30
    module, run = fitted(max_steps=12)
    assert run.global_step == module.counts[-1] == 15


def test_counted_updates_are_in_the_checkpoint(tmp_path):
    _, run = fitted()
    run.save_checkpoint(tmp_path / "x.ckpt")
    resumed = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=2
    )
    resumed.fit(module := Counting(), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert module.counts[0] == 35


def test_logged_steps_are_updates_and_loggers_are_due_by_updates():
    """Each block has 5 updates; with an interval of 10, every second block is logged."""
    seen = []

    class Look(Callback):
        def setup(self, trainer, pl_module, stage):
            for _ in range(2):  # the second time changes nothing
                private_apis.log_by_updates(trainer)

        def on_train_batch_end(self, trainer, pl_module, *args):
            due = trainer._logger_connector.should_update_logs
            seen.append((trainer.fit_loop.epoch_loop._batches_that_stepped, due))

    _, run = fitted(callbacks=[Look()], log_every_n_steps=10)
    assert seen == [(5, False), (10, True), (15, False), (20, True), (25, False), (30, True)]
    assert run.fit_loop.epoch_loop._batches_that_stepped == 30
    assert type(run.fit_loop.epoch_loop).__name__ == "_TrainingEpochLoop"


def test_a_tensor_counts_its_changes_in_place():
    weight = torch.nn.Parameter(torch.zeros(3))
    first = private_apis.version_of(weight)
    _ = weight + 1, weight.clone(), weight.detach().clone()
    assert private_apis.version_of(weight) == first
    with torch.no_grad():
        weight.add_(1)
    second = private_apis.version_of(weight)
    weight.detach().copy_(torch.ones(3))
    assert first < second < private_apis.version_of(weight)


def test_a_tensor_can_be_said_to_keep_its_address():
    value = torch.zeros(2)
    assert get_static_address_type(value) is None
    private_apis.keep_address(value)
    assert get_static_address_type(value) == "unguarded"


def test_a_module_has_a_trainer_only_after_it_was_attached():
    assert private_apis.attached_trainer(Counting()) is None
    module, run = fitted()
    assert private_apis.attached_trainer(module) is run


def test_the_checkpoint_content_is_that_of_save_checkpoint(tmp_path):
    _, run = fitted()
    content = private_apis.checkpoint_content(run)
    run.save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert set(content) == set(saved)
    assert content["global_step"] == saved["global_step"] == 30
    assert torch.equal(content["state_dict"]["weight"], saved["state_dict"]["weight"])


def test_one_event_holds_several_scalars_also_after_the_writer_was_closed(tmp_path):
    writer = TensorBoardLogger(tmp_path, name="", version="").experiment
    for step in (3, 4):
        values = [Summary.Value(tag=tag, simple_value=value * step) for tag, value in (("a", 1.0), ("b", 2.0))]
        private_apis.add_event(writer, Summary(value=values), step)
        writer.close()
        assert writer.file_writer is None
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(3, 3.0), (4, 4.0)]
    assert [(event.step, event.value) for event in events.Scalars("b")] == [(3, 6.0), (4, 8.0)]


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


class SyncedSum(Metric):
    """Returns whether its state is synchronised, and its sum."""

    def __init__(self, **options):
        super().__init__(**options)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value):
        self.total += value

    def compute(self):
        return private_apis.is_synced(self), float(self.total)


def test_a_metric_is_synced_inside_compute_of_several_processes():
    alone = SyncedSum()
    alone.update(2.0)
    assert alone.compute() == (False, 2.0)
    shared = SyncedSum(distributed_available_fn=lambda: True, dist_sync_fn=lambda value, group: [value, value])
    shared.update(2.0)
    assert shared.compute() == (True, 4.0)
    assert not private_apis.is_synced(shared)


def test_the_requeue_signal_is_that_of_slurm(monkeypatch):
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    assert private_apis.requeue_signal(lightning.Trainer(**options)) is None
    for name, value in {"NTASKS": "1", "JOB_NAME": "fit", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert private_apis.requeue_signal(lightning.Trainer(**options)) == signal.SIGUSR1
    for plugin, expected in [
        (SLURMEnvironment(requeue_signal=signal.SIGHUP), signal.SIGHUP),
        (SLURMEnvironment(auto_requeue=False), None),
    ]:
        assert private_apis.requeue_signal(lightning.Trainer(plugins=[plugin], **options)) == expected


def test_an_action_follows_the_registration_of_signal_handlers():
    """Without it, Lightning's own handler of SIGTERM would be in place while a loop runs."""
    handlers = []

    def note() -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))

    class Look(Callback):
        def setup(self, trainer, pl_module, stage):
            note()
            private_apis.after_signal_registration(trainer, note)

        def on_train_start(self, trainer, pl_module):
            note()

    fitted(callbacks=[Look()])
    before, registered, later = handlers
    assert type(registered).__name__ == "_HandlersCompose"
    assert later is registered, "nothing is registered between the action and the loop"
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_action_after_the_registration_can_be_removed():
    trainer, calls = lightning.Trainer(logger=False, enable_checkpointing=False), []
    private_apis.after_signal_registration(trainer, lambda: calls.append(1))
    private_apis.after_signal_registration(trainer, None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        trainer._signal_connector.register_signal_handlers()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert calls == []


def test_ddp_names_how_it_starts_its_processes():
    expected = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}
    runs = {name: lightning.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False) for name in expected}
    assert {name: private_apis.start_method(run.strategy) for name, run in runs.items()} == expected


def test_a_trainer_on_apples_gpu_can_be_moved_to_the_cpu(monkeypatch):
    monkeypatch.setattr("lightning.fabric.accelerators.mps.MPSAccelerator.is_available", lambda: True)
    run = lightning.Trainer(logger=False, enable_checkpointing=False, max_epochs=1, enable_progress_bar=False)
    assert str(run.strategy.root_device) == "mps:0"
    private_apis.move_to_cpu(run)
    assert type(run.accelerator).__name__ == "CPUAccelerator"
    run.fit(Counting())
    assert run.global_step == 30


def test_ddp_makes_no_buckets_for_parameters_that_are_kept_out(tmp_path):
    """The gradients of a module with a process group of one process; L would be 40,000 numbers."""
    from torch.nn.parallel import DistributedDataParallel

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = KernelSimilarityMatching(num_neurons=200, in_features=3, init="normal")
        data = DistributedDataParallel(model)._get_ddp_logging_data()
        assert data["num_parameter_tensors"] == 1
        assert data["total_parameter_size_bytes"] == 4 * 200
        tight = KernelSimilarityMatching(num_neurons=50, num_landmarks=70, bound="tight", in_features=3, init="normal")
        data = DistributedDataParallel(tight)._get_ddp_logging_data()
        assert data["total_parameter_size_bytes"] == 4 * 70 * 3
    finally:
        torch.distributed.destroy_process_group()
