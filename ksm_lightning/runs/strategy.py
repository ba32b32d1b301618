"""The devices and strategies that a run can use: others are refused in one sentence, and Apple's GPU is not used."""

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities import rank_zero_warn

from ksm_lightning.private_apis import move_to_cpu, start_method

MPS_NOTICE = "Apple's GPU (MPS) has no float64, which the exact L and all scores need: the run uses the CPU."


def prepare_strategy(trainer: L.Trainer) -> None:
    """Refuse strategies that do not work here, and let a trainer that has chosen Apple's GPU use the CPU.

    Must be called before the trainer sets up its devices.

    Raises:
        ValueError: If the strategy shards the network, or starts its processes in a way that loses the result.
    """
    check_strategy(trainer.strategy)
    if trainer.strategy.root_device.type == "mps":
        rank_zero_warn(MPS_NOTICE)
        move_to_cpu(trainer)


def keep_unwrapped(strategy: Strategy, is_unwrapped: bool) -> None:
    """Let DDP leave a module as it is, or wrap it again: its wrapper would make the weights of all processes equal."""
    if isinstance(strategy, DDPStrategy):
        vars(strategy).pop("configure_ddp", None)
        if is_unwrapped:
            strategy.configure_ddp = lambda: None  # type: ignore[method-assign]


def check_strategy(strategy: Strategy) -> None:
    """Raise ValueError unless a strategy is one device, or DDP with processes that run the whole script."""
    shards = isinstance(strategy, DeepSpeedStrategy | XLAStrategy | SingleDeviceXLAStrategy)
    if shards or not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise ValueError(
            f"{type(strategy).__name__} is not supported, because every process needs the whole W, q and L: use "
            "strategy='ddp', or one device."
        )
    if isinstance(strategy, DDPStrategy) and (method := start_method(strategy)) != "popen":
        raise ValueError(
            f"Processes that are started by {method} (ddp_spawn, ddp_notebook) would return the weights without the "
            "ridge and the state of learning: use strategy='ddp' in a script, or devices=1 in a notebook."
        )
