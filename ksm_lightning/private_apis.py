"""The private names of Lightning, torchmetrics and TensorBoard that this package cannot avoid, all in one file.

Each entry gives the reason, and ``tests/test_private_apis.py`` fails when its behaviour changes. Tried with lightning
2.6.6, torchmetrics 1.9.0, torch 2.15.0 and tensorboard 2.21.0. The command line uses no private names of LightningCLI
or jsonargparse (tried: 4.53.0). Lightning is not imported here, so that the layers below it can use this file.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch import Tensor
    from torch.nn import Module
    from torch.utils.tensorboard import SummaryWriter
    from torchmetrics import Metric


def attached_trainer(module: "L.LightningModule") -> "L.Trainer | None":
    """The trainer of a module, or None.

    Reason: the public property ``LightningModule.trainer`` raises an error when no trainer is attached.
    """
    return module._trainer


def count_updates(trainer: "L.Trainer", updates: int) -> None:
    """Add ``updates`` to ``trainer.global_step``.

    Reason: Lightning counts one step per call of ``optimizer.step``, and has no public way to count the further updates
    of a block. ``global_step`` decides about ``max_steps``, logging and checkpoints.
    """
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    for tracker in (progress.total, progress.current):
        tracker.ready += updates
        tracker.completed += updates
    done = trainer.global_step
    trainer._logger_connector.block = (done - updates - 1, done)  # type: ignore[attr-defined]  # see `log_by_updates`


def training_loader(trainer: "L.Trainer") -> Any:
    """The training loader as it was given to a trainer, before the trainer prepares it.

    Reason: ``trainer.train_dataloader`` is None until the optimizers exist, which need a network of the data's size.
    """
    return trainer.fit_loop._data_source.dataloader()


def log_by_updates(trainer: "L.Trainer") -> None:
    """Let everything that Lightning logs have the number of updates as its x axis.

    Callbacks such as LearningRateMonitor log after a block of updates that contains a multiple of
    ``log_every_n_steps``.

    Reason: Lightning counts calls of ``training_step`` for both, here blocks of updates, and reads these counts without
    calling a hook. A metric called ``step`` changes the axis too, but also the ``{step}`` of ``ModelCheckpoint``.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    if hasattr(connector, "block"):
        return

    def is_due(self: Any) -> bool:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or trainer._active_loop is not trainer.fit_loop:
            return bool(type(connector).__base__.should_update_logs.fget(self))  # type: ignore[union-attr]
        before, after = self.block
        return after // every > before // every or trainer.should_stop

    updates = property(lambda self: self.global_step, lambda self, value: None)
    loop.__class__ = _derived(type(loop), _batches_that_stepped=updates)
    connector.__class__ = _derived(type(connector), should_update_logs=property(is_due), block=(0, 0))


def _derived(base: type, **attributes: Any) -> type:
    """A subclass with the name of its base, which profilers show."""
    return type(base.__name__, (base,), {"__module__": base.__module__, **attributes})


def after_signal_registration(trainer: "L.Trainer", action: "Callable[[], object] | None") -> None:
    """Call ``action`` each time the trainer has registered its signal handlers, before it runs a loop; None ends this.

    Reason: Lightning's handler of SIGTERM writes to the log and, with several processes, waits for a broadcast inside
    the handler, so it has to be replaced at once. The first public hook after it comes later, after a barrier.
    """
    connector = trainer._signal_connector
    connector.__dict__.pop("register_signal_handlers", None)
    if action is None:
        return

    def register() -> None:
        type(connector).register_signal_handlers(connector)
        action()

    connector.register_signal_handlers = register  # type: ignore[method-assign]


def requeue_signal(trainer: "L.Trainer") -> int | None:
    """The signal by which SLURM asks a trainer to requeue its job; None outside of SLURM, or if it is switched off.

    Reason: only strategies with several processes publish their cluster environment.
    """
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal


def checkpoint_content(trainer: "L.Trainer") -> dict[str, Any]:
    """The complete content of a checkpoint. Every rank must call it.

    Reason: ``Trainer.save_checkpoint`` ends with a barrier, at which the other ranks would wait forever for a rank that
    failed to write its file.
    """
    content: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return content


def start_method(strategy: "DDPStrategy") -> str:
    """How DDP starts its processes: ``popen`` runs the script again; others return only the weights to the caller.

    Reason: Lightning does not publish it, and the strategies named ddp, ddp_spawn and ddp_notebook are one class.
    """
    return strategy._start_method


def move_to_cpu(trainer: "L.Trainer") -> None:
    """Let a trainer with one device use the CPU instead, before it has set up the device.

    Reason: ``Trainer()`` chooses Apple's GPU without asking, and Lightning publishes no way to change the device.
    """
    import torch
    from lightning.pytorch.accelerators import CPUAccelerator

    trainer.strategy.accelerator = CPUAccelerator()
    trainer.strategy._root_device = torch.device("cpu")  # type: ignore[attr-defined]


def add_event(writer: "SummaryWriter", summary: "Summary", step: int | None) -> None:
    """Write a summary with several scalars as one TensorBoard event.

    Reason: ``SummaryWriter.add_scalar`` writes one event per scalar, which takes longer than several updates, and the
    public ``file_writer`` is None after ``close``, although the writer may be used again.
    """
    writer._get_file_writer().add_summary(summary, step)  # type: ignore[no-untyped-call]


def keep_out_of_ddp(module: "Module", names: "Sequence[str]") -> None:
    """Keep DistributedDataParallel from making gradient buckets for parameters, and from copying them to all processes.

    Reason: nothing is back-propagated, so a bucket is memory as large as L that is never used. torch publishes no way
    to leave out some parameters, and refuses a module without any that need a gradient.
    """
    module._ddp_params_and_buffers_to_ignore = list(names)  # type: ignore[assignment]


def version_of(tensor: "Tensor") -> int:
    """A number that grows with every change of a tensor in place.

    Reason: torch counts these changes for autograd and publishes no other way to notice that weights were changed. A
    change through ``tensor.data`` is not counted.
    """
    return tensor._version


def checkpoint_interval(callback: "L.Callback") -> int:
    """Number of updates between two checkpoints of a ``ModelCheckpoint``; 0 if it does not count updates.

    Other callbacks give 0. Reason: a block of updates must end where a checkpoint is due, and ``ModelCheckpoint`` does
    not publish its ``every_n_train_steps``.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    return callback._every_n_train_steps if isinstance(callback, ModelCheckpoint) else 0


def is_synced(metric: "Metric") -> bool:
    """Whether a metric's states have been gathered from all processes, which is the case inside ``compute``.

    Reason: torchmetrics has no public way for ``compute`` to find out, and without the answer every process would
    compute the whole kernel matrix.
    """
    return metric._is_synced
