"""The private names of Lightning, torchmetrics and TensorBoard that this package cannot avoid, all in one file.

Each entry gives the reason, and ``tests/test_private_apis.py`` fails when its behaviour changes. Tried with lightning
2.6.6, torchmetrics 1.9.0, torch 2.15.0 and tensorboard 2.21.0. The command line uses no private names of LightningCLI
or jsonargparse (tried: 4.53.0). Lightning is not imported here, so that the layers below it can use this file.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import lightning as L
    from tensorboard.compat.proto.summary_pb2 import Summary
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


def after_signal_registration(trainer: "L.Trainer", action: "Callable[[], object]") -> None:
    """Call ``action`` each time the trainer has registered its signal handlers, which it does before it runs a loop.

    Reason: Lightning's handler of SIGTERM writes to the log and, with several processes, waits for a broadcast inside
    the handler, so it has to be replaced at once. The first public hook after it comes later, after a barrier.
    """
    connector = trainer._signal_connector

    def register() -> None:
        type(connector).register_signal_handlers(connector)
        action()

    connector.register_signal_handlers = register  # type: ignore[method-assign]


def checkpoint_content(trainer: "L.Trainer") -> dict[str, Any]:
    """The complete content of a checkpoint. Every rank must call it.

    Reason: ``Trainer.save_checkpoint`` ends with a barrier, at which the other ranks would wait forever for a rank that
    failed to write its file.
    """
    content: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return content


def add_event(writer: "SummaryWriter", summary: "Summary", step: int | None) -> None:
    """Write a summary with several scalars as one TensorBoard event.

    Reason: ``SummaryWriter.add_scalar`` writes one event per scalar, which takes longer than several updates, and the
    public ``file_writer`` is None after ``close``, although the writer may be used again.
    """
    writer._get_file_writer().add_summary(summary, step)  # type: ignore[no-untyped-call]


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
