"""What Lightning's own callbacks and loggers need of a run, and the callbacks that are refused."""

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from ksm_lightning.private_apis import checkpoint_interval, log_by_updates


def prepare_for_callbacks(trainer: L.Trainer) -> None:
    """Let a trainer log by updates, and refuse callbacks that would replace the weights by their averages.

    Raises:
        ValueError: If the trainer fits with such a callback.
    """
    log_by_updates(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if trainer.state.fn == "fit" and isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} cannot be used here, because averages of W, q and L do not belong together "
                "and would replace the exact L of the end: remove the callback; step sizes are annealed instead."
            )


def saves_after(trainer: L.Trainer, update: int) -> bool:
    """Whether a ModelCheckpoint saves after this number of updates, and may need a metric."""
    intervals = [checkpoint_interval(callback) for callback in trainer.checkpoint_callbacks]
    return any(interval and update % interval == 0 for interval in intervals)
