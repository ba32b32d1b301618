"""The command ``ksm``: fit, validate, test, predict, compare and report from YAML files and options."""

import argparse
import importlib
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import yaml
from jsonargparse import ActionConfigFile, lazy_instance  # type: ignore[attr-defined]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ksm_lightning import callbacks, data  # noqa: F401  (their classes can be named without a path)
from ksm_lightning.callbacks import (
    DivergenceGuard,
    FeatureWriter,
    Figures,
    KernelErrorEvaluation,
    KMeansProbe,
    LinearProbe,
    UpdateCheckpoint,
    UpdateProgressBar,
)
from ksm_lightning.data import KSMDataModule
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.runs.checkpoint import preprocessing_of, read_checkpoint
from ksm_lightning.runs.logger import RunLogger

_DESCRIPTION = "Kernel similarity matching with Hebbian neural networks: train, evaluate and use a network."
_COMMANDS = {
    "fit": "Train a network: ksm fit --config configs/half_moons.yaml",
    "validate": "Kernel error and energy on the training points: ksm validate --config ... --ckpt_path ...",
    "test": "Kernel error and energy on the test points: ksm test --config ... --ckpt_path ...",
    "predict": "Write the features of the test points to a file: ksm predict --config ... --ckpt_path ...",
}
# Commands that need no Trainer, by the function that does them.
_OWN_COMMANDS = {
    "export": (
        "ksm_lightning.cli.export",
        "Write the feature extractor for other programs: ksm export --ckpt_path=... --format=onnx",
    ),
    "compare": (
        "ksm_lightning.cli.compare",
        "Errors of all methods against the number of features: ksm compare --data=HalfMoonsDataModule "
        "--kernel_params.sigma=0.3",
    ),
    "report": (
        "ksm_lightning.cli.report",
        "One page about a run, with what to try next: ksm report runs/half_moons/version_0",
    ),
}
# Those of them that take what has no default without an option's name.
_POSITIONAL = {"report"}
_EVALUATIONS: dict[str, type[L.Callback]] = {
    "kernel_error": KernelErrorEvaluation,
    "probe": LinearProbe,
    "kmeans": KMeansProbe,
}
_CALLBACKS: dict[str, dict[str, type[L.Callback]]] = {
    "fit": {**_EVALUATIONS, "figures": Figures, "guard": DivergenceGuard, "checkpoint": UpdateCheckpoint},
    "validate": _EVALUATIONS,
    "test": _EVALUATIONS,
    "predict": {"features": FeatureWriter},
}
# What makes a network what it is: a run that continues cannot change these.
_FIXED = ("num_neurons", "in_features", "kernel", "kernel_params", "ridge")


class UserError(Exception):
    """Something the user can put right, in one sentence."""


class Interrupted(Exception):
    """A signal ended the training: where it stood, and the exit code that says so."""

    def __init__(self, where: str, code: int) -> None:
        super().__init__(where)
        self.code = code


class KSMArgumentParser(LightningArgumentParser):
    """A parser that answers a mistake with one sentence instead of a page of usage."""

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        self.commands = super().add_subcommands(*args, **kwargs)
        return self.commands

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # Of a value that may be one of several types, the first complaint is about the type that was meant.
        union = re.search(r"Errors:\s*- (.*?)\s+- Expected", message, re.DOTALL)
        key = re.search(r'Parser key "([^"]+)"', message)
        sentence = _in_one_line(union[1] if union else message).rstrip(".")
        if union and key:
            sentence = f"{key[1]}: {sentence}"
        command = self.prog.replace(" [options]", "")
        raise UserError(sentence if "--help" in sentence else f"{sentence}; see {command} --help.") from ex


def _run_own_command(name: str, args: Sequence[str]) -> None:
    """Parse the options of a function, which are its arguments, and call it."""
    module, _ = _OWN_COMMANDS[name]
    function = getattr(importlib.import_module(module), name)
    description = (function.__doc__ or "").partition("Args:")[0].strip()
    parser = KSMArgumentParser(prog=f"ksm {name}", description=description)
    parser.add_argument("--config", action=ActionConfigFile, help="A YAML file with options.")
    parser.add_function_arguments(function, fail_untyped=True, as_positional=name in _POSITIONAL)
    _check_config_files(args)
    options = parser.instantiate_classes(parser.parse_args(list(args)))
    options.pop("config", None)
    function(**options)


class KSMCLI(LightningCLI):
    """``LightningCLI`` for this package: checks everything before it makes a run folder, and ends with a summary."""

    def __init__(self, args: ArgsType = None) -> None:
        defaults = {
            "logger": lazy_instance(RunLogger),
            "max_epochs": -1,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
        }
        super().__init__(
            KernelSimilarityMatching,
            KSMDataModule,
            subclass_mode_data=True,
            trainer_defaults=defaults,
            seed_everything_default=0,
            parser_class=KSMArgumentParser,
            parser_kwargs={
                "description": _DESCRIPTION,
                "prog": "ksm",
                **{name: {"description": text} for name, text in _COMMANDS.items()},
            },
            auto_configure_optimizers=False,
            # It would write the name of a function into checkpoints, for loading to import and call.
            load_from_checkpoint_support=False,
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The commands, without the options of theirs that this package decides."""
        hidden = {"weights_only", "verbose", "return_predictions"}
        return {name: options | hidden for name, options in LightningCLI.subcommands().items()}

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        assert isinstance(parser, KSMArgumentParser)
        for name, (_, text) in _OWN_COMMANDS.items():  # to be listed by --help; they never come to be parsed here
            parser.commands.add_subcommand(name, KSMArgumentParser(description=text), help=text)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        self._preparing = subcommand
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The callbacks that a command always has, each with its own group of options."""
        own = _CALLBACKS[self._preparing]
        for name, callback in own.items():
            parser.add_lightning_class_args(callback, name)
        # A file serves every command, the config.yaml of a run above all: sections of other commands are passed over.
        for name in sorted({name for group in _CALLBACKS.values() for name in group} - set(own)):
            parser.add_argument(f"--{name}", type=dict | None, default=None, help=argparse.SUPPRESS)

    # ------------------------------------------------------------------ configuration

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and remember what was really said as opposed to what is a default."""
        self._args = args if isinstance(args, list) else sys.argv[1:]
        self._resumed_at = 0
        self._preprocessing: Preprocessing | None = None
        _check_config_files(self._args)
        with warnings.catch_warnings():
            # Only tests and notebooks pass `args`, and they mean it.
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
            super().parse_arguments(parser, args)
        self._given = parser.parse_args(args if isinstance(args, list) else None, defaults=False)

    def _parse_ckpt_path(self) -> None:
        """Take the model from the checkpoint, without overruling in silence what the user says.

        Lightning lets the checkpoint's hyper-parameters replace those of YAML and command line. Here a checkpoint
        decides what the user left open; what the user says counts; and what contradicts the network is an error.
        """
        command = self.config["subcommand"]
        for section in ("model", "trainer", "data", *_CALLBACKS[command]):
            if self.config[command].get(section) is None:
                raise UserError(f"The section `{section}` is empty: leave it out, or give it values.")
        path = self.config[command].get("ckpt_path")
        if path is None:
            if command != "fit":
                raise UserError(f"`ksm {command}` needs a trained network: give --ckpt_path=.../checkpoints/last.ckpt.")
            return
        checkpoint = read_checkpoint(path)
        self._resumed_at = int(checkpoint["global_step"])
        self._preprocessing = preprocessing_of(checkpoint)
        saved = checkpoint["hyper_parameters"]
        overruled = [arg for arg in self._args if arg.startswith("--model.") and not arg.startswith("--model.solver")]
        if command != "fit" and overruled:
            raise UserError(f"`ksm {command}` takes the model from the checkpoint: drop {overruled[0]}.")
        given = self._given.get(f"{command}.model")
        said = given.as_dict() if given is not None else {}
        for name in _FIXED:
            if command == "fit" and not _agrees(said.get(name), saved[name]):
                raise UserError(
                    f"The checkpoint {path} has {name}={saved[name]}, but {said[name]} was asked for: drop the option "
                    "to continue that run, or drop --ckpt_path to start a new one."
                )
        keep = set(said) - set(_FIXED) if command == "fit" else {"solver"} & set(said)
        if {"phases", "updates"} & keep:  # both say how long and how fast: one said leaves no room for the other
            keep |= {"phases", "updates"}
        for name, value in saved.items():
            if name not in keep:
                self.config[command]["model"][name] = value
        self.config = self.parser.parse_object({"subcommand": command, command: self.config[command].as_dict()})

    def before_instantiate_classes(self) -> None:
        """Only training makes a run folder, and without a logger there is none."""
        trainer = self.config[self.subcommand]["trainer"]
        if trainer["barebones"]:
            raise UserError("--trainer.barebones is for measuring Lightning itself, and leaves out what ksm is about.")
        if self.subcommand != "fit":
            trainer["logger"] = False
        self._has_folder = trainer["logger"] is not False
        if not self._has_folder:
            self.save_config_callback = None

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The trainer with the callbacks of the command at hand."""
        config = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        assert self.subcommand is not None
        names = list(_CALLBACKS[self.subcommand])
        if not self._has_folder:
            config["enable_checkpointing"] = False
            names = [name for name in names if name != "figures"]
        if config.get("enable_checkpointing") is False:
            names = [name for name in names if name != "checkpoint"]
        wanted: list[L.Callback] = [self._get(self.config_init, name) for name in names]
        if config.get("enable_progress_bar") is not False:
            wanted.append(UpdateProgressBar())
        return self._instantiate_trainer(config, wanted)

    # ------------------------------------------------------------------ commands

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        kwargs["weights_only"] = True
        return kwargs | ({"return_predictions": False} if subcommand == "predict" else {})

    def _check_data(self) -> None:
        """Load the data, and hold it against the model, before anything is written."""
        if self.trainer.precision not in ("32-true", "64-true"):
            raise UserError(
                f"The network solves linear systems and needs full precision: set --trainer.precision to 32-true or "
                f"64-true, got {self.trainer.precision}."
            )
        if self._preprocessing is not None:
            self.datamodule.use(self._preprocessing)
        self.datamodule.setup(self.subcommand)
        wanted, found = self.model.hparams["in_features"], self.datamodule.in_features
        if wanted is not None and wanted != found:
            raise UserError(
                f"The data has {found} features, but the model was made for in_features={wanted}: set "
                f"--model.in_features={found}, or leave it out."
            )

    before_validate = before_test = before_predict = _check_data

    def before_fit(self) -> None:
        """Checks before the run folder exists."""
        end = self.model.schedule.total_updates
        end = min(end, self.trainer.max_steps) if self.trainer.max_steps >= 0 else end
        if end <= self._resumed_at:
            raise UserError(
                f"Nothing is left to do: the run ends with update {end:,} and {self._resumed_at:,} are done; give "
                "more --model.updates, longer --model.phases or more --trainer.max_steps."
            )
        self._check_data()
        if self.trainer.is_global_zero:
            points, neurons = self.datamodule.train_points, self.model.hparams["num_neurons"]
            print(
                f"Training {neurons} neurons with {self.model.kernel} on {len(points):,} points of "
                f"{points.num_features} features, on {self.trainer.num_devices} x "
                f"{self.trainer.strategy.root_device.type}, seed {self._get(self.config, 'seed_everything')}."
            )

    def fit(self, **kwargs: Any) -> None:
        """Train; a run that fails before its first update leaves no folder behind."""
        try:
            self.trainer.fit(**kwargs)
        except BaseException as error:
            self._remove_unused_folder()
            if self.trainer.interrupted and isinstance(error, SystemExit):
                is_terminated = isinstance(error, SIGTERMException)
                raise Interrupted(self._where_to_go_on(), 143 if is_terminated else 130) from error
            raise
        self._print_summary()

    def _where_to_go_on(self) -> str:
        sentence = f"stopped at update {self.trainer.global_step:,}"
        logger = self.trainer.logger
        checkpoint = Path(logger.log_dir) / "checkpoints" / "last.ckpt" if isinstance(logger, RunLogger) else None
        if checkpoint is not None and checkpoint.is_file():
            return f"{sentence}; continue from the last checkpoint with --ckpt_path={checkpoint}."
        return f"{sentence}, before the first checkpoint."

    def _remove_unused_folder(self) -> None:
        logger = self.trainer.logger
        if isinstance(logger, RunLogger) and logger.is_claimed and self.trainer.is_global_zero:
            folder = Path(logger.log_dir)
            if not self.model.has_updated and not any(folder.glob("checkpoints/*.ckpt")):
                logger.finalize("failed")
                shutil.rmtree(folder, ignore_errors=True)

    def _print_summary(self) -> None:
        folder = self.trainer.log_dir  # asks the first rank, so that every rank has to ask
        if not self.trainer.is_global_zero:
            return
        done = self.trainer.global_step
        error = self.trainer.callback_metrics.get("val/kernel_nrmse")
        active: list[L.Callback] = getattr(self.trainer, "callbacks", [])
        scored = [callback.last_update for callback in active if isinstance(callback, KernelErrorEvaluation)]
        lines = [f"Trained for {done:,} updates, {self.model.updates_per_second:,.0f} a second."]
        if error is not None:
            when = "Final kernel NRMSE:" if done in scored else f"Kernel NRMSE at update {scored[0]:,}:"
            lines.append(f"{when} {float(error):.4f}")
        nystroem = self.trainer.callback_metrics.get("val/kernel_nrmse_nystroem")
        if nystroem is not None:
            lines.append(f"Nystroem readout:   {float(nystroem):.4f}")
        probe = self.trainer.callback_metrics.get("test/probe_accuracy")
        if probe is not None:
            lines.append(f"Linear probe:       {100 * float(probe):.2f} % of the test labels")
        if self._has_folder and folder:
            places = {"Run folder": "", "Figures": "figures", "Checkpoint": "checkpoints/last.ckpt"}
            for name, place in places.items():
                if (Path(folder) / place).exists():
                    lines.append(f"{name + ':':13} {Path(folder) / place}")
            lines.append(f"TensorBoard:  tensorboard --logdir {folder}")
        else:
            lines.append("Nothing was saved, as --trainer.logger=false asks.")
        print("\n" + "\n".join(lines))


def _agrees(said: Any, saved: Any) -> bool:
    """Whether what was said, possibly a part only, fits what was saved."""
    if said is None:
        return True
    if isinstance(said, dict) and isinstance(saved, dict):
        return all(name in saved and _agrees(value, saved[name]) for name, value in said.items())
    return bool(said == saved)


def _check_config_files(args: Sequence[str]) -> None:
    """Name the file when a configuration is no YAML: the parser would say where in it, but not in which."""
    paths = [arg.partition("=")[2] for arg in args if arg.startswith("--config=")]
    paths += [path for option, path in pairwise(args) if option in ("--config", "-c")]
    for path in paths:
        if Path(path).is_file():
            try:
                yaml.safe_load(Path(path).read_text())
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise UserError(f"The configuration {path} is no valid YAML: {error}") from error


def _in_one_line(message: str) -> str:
    return " ".join(message.split())


def main(args: Sequence[str] | None = None) -> None:
    """Run ``ksm``; what goes wrong ends it with one sentence on standard error and exit code 2.

    With the environment variable KSM_DEBUG set, an error shows its traceback.
    """
    _quieten()
    given = list(args) if args is not None else sys.argv[1:]
    try:
        if given and given[0] in _OWN_COMMANDS:
            _run_own_command(given[0], given[1:])
        else:
            KSMCLI(list(args) if args is not None else None)
    except Interrupted as stop:
        print(f"ksm: {stop}", file=sys.stderr)
        sys.exit(stop.code)
    except KeyboardInterrupt:
        print("ksm: stopped.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if os.environ.get("KSM_DEBUG"):
            raise
        sentence = _in_one_line(str(error)) or "no more is known"
        if not isinstance(error, UserError | ValueError | OSError | FloatingPointError | MisconfigurationException):
            sentence = f"{type(error).__name__}: {sentence[:500]} (KSM_DEBUG=1 shows where)"
        print(f"ksm: error: {sentence}", file=sys.stderr)
        sys.exit(2)


def _quieten() -> None:
    """Leave out Lightning's notices, which ``ksm`` replaces by its own, and warnings that users cannot act on."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
    warnings.filterwarnings("ignore", message="Couldn't infer the batch indices")
    # Scores are the same on every rank before they are logged.
    warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist=True")


if __name__ == "__main__":
    main()
