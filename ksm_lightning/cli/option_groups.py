"""The options of the commands with a Trainer, in the order in which ``--help`` shows them: ours before Lightning's."""

import argparse
from collections.abc import Mapping
from typing import Any

import lightning as L

from ksm_lightning import callbacks
from ksm_lightning.cli.parser import KSMArgumentParser
from ksm_lightning.data import KSMDataModule
from ksm_lightning.module import KernelSimilarityMatching

_EVALUATIONS: dict[str, type[L.Callback]] = {
    "kernel_error": callbacks.KernelErrorEvaluation,
    "probe": callbacks.LinearProbe,
    "kmeans": callbacks.KMeansProbe,
}
CALLBACKS: dict[str, dict[str, type[L.Callback]]] = {
    "fit": {
        **_EVALUATIONS,
        "figures": callbacks.Figures,
        "guard": callbacks.DivergenceGuard,
        "checkpoint": callbacks.UpdateCheckpoint,
    },
    "validate": _EVALUATIONS,
    "test": _EVALUATIONS,
    "predict": {"features": callbacks.FeatureWriter},
}
"""The callbacks of each command, by the name of their options."""
_TITLES = {
    "model": "The network and its schedule (--model)",
    "data": "The data (--data): one of the datamodules listed below, or your own",
    "kernel_error": "Kernel error (--kernel_error): val/kernel_nrmse, test/kernel_nrmse, over all pairs of points",
    "probe": "Linear probe (--probe): val/probe_accuracy, test/probe_accuracy, with few labels per class",
    "kmeans": "KMeans (--kmeans): val/kmeans_accuracy_x, val/kmeans_accuracy_y, on x and on y",
    "figures": "Figures (--figures): landmarks, tuning of a few neurons, similarities, energy",
    "guard": "Divergence (--guard): what happens when a run diverges",
    "checkpoint": "Checkpoints (--checkpoint): checkpoints/last.ckpt in the run folder",
    "features": "The file of features (--features)",
    "trainer": "Lightning's Trainer (--trainer)",
}
_CKPT_PATH = {
    "fit": "The run to continue: its folder or a checkpoint. Unset options of the model are taken from it.",
    "other": "The trained network: a run folder or a checkpoint. Without --config, data and evaluations are those of "
    "its run.",
}
_SEED = "The seed of the start and of the batches: a number, or true for a random one."


def add_general_options(parser: KSMArgumentParser, seed: int) -> None:
    """Add the seed and the checkpoint."""
    help_of_path = _CKPT_PATH["fit" if parser.command == "fit" else "other"]
    parser.add_argument("--ckpt_path", type=str | None, default=None, help=help_of_path, metavar="RUN_OR_FILE")
    parser.add_argument("--seed_everything", type=bool | int, default=seed, help=_SEED, metavar="SEED")


def add_sections(parser: KSMArgumentParser, trainer: type[L.Trainer], trainer_defaults: Mapping[str, Any]) -> None:
    """Add the model, the data, the callbacks of the command and the trainer."""
    parser.add_lightning_class_args(KernelSimilarityMatching, "model")
    parser.add_lightning_class_args(KSMDataModule, "data", subclass_mode=True)
    own = CALLBACKS[str(parser.command)]
    for name, callback in own.items():
        parser.add_lightning_class_args(callback, name)
    # One file serves every command, such as the config.yaml of a run: accept the sections of other commands.
    for name in sorted({name for group in CALLBACKS.values() for name in group} - set(own)):
        parser.add_argument(f"--{name}", type=dict | None, default=None, help=argparse.SUPPRESS)
    parser.add_lightning_class_args(trainer, "trainer")
    parser.set_defaults({f"trainer.{name}": value for name, value in trainer_defaults.items() if name != "callbacks"})
    assert parser.groups is not None
    for name, title in _TITLES.items():
        if name in parser.groups:
            parser.groups[name].title = title
