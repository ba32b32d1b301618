"""The commands with a Trainer: fit, validate, test and predict, from YAML files and options."""

import errno
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import lazy_instance  # type: ignore[attr-defined]
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ksm_lightning import callbacks, data  # noqa: F401  (so that datamodules can be named without a path)
from ksm_lightning.cli.continuation import continued_job, refuse_other_network, use_conditions
from ksm_lightning.cli.option_groups import CALLBACKS, add_general_options, add_sections
from ksm_lightning.cli.parser import KSMArgumentParser, add_config_option
from ksm_lightning.cli.run_options import checkpoint_of
from ksm_lightning.cli.summary import print_summary
from ksm_lightning.cli.user_error import UserError
from ksm_lightning.data import KSMDataModule
from ksm_lightning.learning.hyperparameters import HyperParameters
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.runs.checkpoint import preprocessing_of, read_checkpoint
from ksm_lightning.runs.conditions import TrainingConditions, conditions_of
from ksm_lightning.runs.logger import RunLogger
from ksm_lightning.runs.stop import stopping_by
from ksm_lightning.runs.strategy import MPS_NOTICE, check_strategy

# Defaults of the trainer: one device, and no limit of epochs.
_TRAINER_DEFAULTS = {"devices": 1, "max_epochs": -1, "num_sanity_val_steps": 0, "enable_model_summary": False}


class Interrupted(Exception):
    """A signal ended the command; the message says where."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class KSMCLI(LightningCLI):
    """``LightningCLI`` for this package: checks everything before it makes a run folder, and ends with a summary."""

    parser: KSMArgumentParser
    subcommand: str

    def __init__(self, args: ArgsType = None) -> None:
        self._ckpt_path: str | None = None
        self._resumed_at = 0
        self._needs_finish = False
        self._preprocessing: Preprocessing | None = None
        self._conditions: TrainingConditions | None = None
        self._has_folder = True
        commands = {name: {"command": name} for name in CALLBACKS}
        super().__init__(
            KernelSimilarityMatching,
            KSMDataModule,
            subclass_mode_data=True,
            trainer_defaults={"logger": lazy_instance(RunLogger), **_TRAINER_DEFAULTS},
            seed_everything_default=0,
            parser_class=KSMArgumentParser,
            parser_kwargs={"prog": "ksm", **commands},
            auto_configure_optimizers=False,
            # It would write the name of a function into checkpoints, for loading to import and call.
            load_from_checkpoint_support=False,
            args=args,
        )

    # ------------------------------------------------------------------ options

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The commands, each with the arguments of the Trainer's method that are not options here."""
        hidden = {"ckpt_path", "weights_only", "verbose", "return_predictions"}
        return {name: arguments | hidden for name, arguments in LightningCLI.subcommands().items()}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """The main parser, or that of a command."""
        parser = KSMArgumentParser(**{"dump_header": [f"lightning.pytorch=={L.__version__}"], **kwargs})
        add_config_option(parser)
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        assert isinstance(parser, KSMArgumentParser)
        add_general_options(parser, seed=0)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        assert isinstance(parser, KSMArgumentParser)
        add_sections(parser, L.Trainer, self.trainer_defaults)

    # ------------------------------------------------------------------ configuration

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the options; the model's unset ones are taken from the checkpoint."""
        with warnings.catch_warnings():
            # Only tests and notebooks pass `args`, and they mean it.
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
            super().parse_arguments(parser, args)
        command = self.config["subcommand"]
        for section in ("model", "trainer", "data", *CALLBACKS[command]):
            if self.config[command].get(section) is None:
                raise UserError(f"The section `{section}` is empty: remove it, or give it values.")
        given = self.config[command].get("ckpt_path") or continued_job(command, self.config[command])
        if given is not None:
            self._ckpt_path = checkpoint_of(given)
            self._use_checkpoint(command, list(args) if isinstance(args, list) else sys.argv[1:])
        elif command != "fit":
            raise UserError(f"`ksm {command}` needs a trained network: give its run folder as --ckpt_path.")

    def _use_checkpoint(self, command: str, args: list[str]) -> None:
        """Take the model's options from the checkpoint, except those that the user has set.

        Lightning would let the checkpoint override YAML and command line. Here explicit options win, and changing the
        network, the seed or the scaling of the data is an error.
        """
        path = str(self._ckpt_path)
        checkpoint = read_checkpoint(path, with_panels=False)
        self._resumed_at = int(checkpoint["global_step"])
        self._needs_finish = bool(checkpoint["ksm_lightning"]["run"]["needs_finish"])
        self._preprocessing = preprocessing_of(checkpoint)
        saved = checkpoint["hyper_parameters"]
        given = self.parser.parse_args(args, defaults=False)[command].as_dict()
        explicit, options = given.get("model") or {}, self.config[command].as_dict()
        if command == "fit":
            refuse_other_network(explicit, saved, path)
            use_conditions(options, given, checkpoint, path)
            self._conditions = conditions_of(checkpoint)
            kept = set(explicit) - set(HyperParameters.fixed_names())
            if {"phases", "updates"} & kept:  # each of them defines the schedule
                kept |= {"phases", "updates"}
        else:
            changed = [arg for arg in args if arg.startswith("--model.") and not arg.startswith("--model.solver")]
            if changed:
                raise UserError(f"`ksm {command}` takes the model from the checkpoint: remove {changed[0]}.")
            kept = {"solver"} & set(explicit)
        options["model"].update({name: value for name, value in saved.items() if name not in kept})
        # LightningCLI would merge the checkpoint's hyper-parameters once more, so it gets the path later.
        options["ckpt_path"] = None
        self.config = self.parser.parse_object({"subcommand": command, command: options})

    def before_instantiate_classes(self) -> None:
        """Choose the callbacks. Only `fit` with a logger makes a run folder."""
        config = self.config[self.subcommand]
        config["ckpt_path"], trainer = self._ckpt_path, config["trainer"]
        if trainer["barebones"]:
            raise UserError("--trainer.barebones measures Lightning itself and disables logging: remove it.")
        _choose_accelerator(trainer)
        _choose_run_folder(trainer)
        if self.subcommand != "fit":
            trainer["logger"] = False
        unused = set()
        self._has_folder = trainer["logger"] is not False
        if not self._has_folder:
            self.save_config_callback = None
            trainer["enable_checkpointing"] = False
            unused.add("figures")
        if trainer["enable_checkpointing"] is False:
            unused.add("checkpoint")
        assert self.parser.commands is not None
        parser = self.parser.commands.parsers[self.subcommand]
        parser.callback_keys = [name for name in parser.callback_keys if name not in unused]
        if trainer["enable_progress_bar"] is not False:
            self.trainer_defaults["callbacks"] = [callbacks.UpdateProgressBar()]

    # ------------------------------------------------------------------ commands

    def _check_data(self) -> None:
        """Load the data and compare it with the model, before anything is written."""
        check_strategy(self.trainer.strategy)
        if self.trainer.precision not in ("32-true", "64-true"):
            raise UserError(
                "The network solves linear systems and needs full precision: set --trainer.precision to 32-true or "
                f"64-true, got {self.trainer.precision}."
            )
        if self._preprocessing is not None:
            self.datamodule.use(self._preprocessing)
        self.datamodule.setup(self.subcommand)
        if self._conditions is not None:
            now = TrainingConditions.of(self.trainer, self.datamodule)
            self._conditions.require_same_data(now, f"The checkpoint {self._ckpt_path}")
        expected, found = self.model.hparams["in_features"], self.datamodule.in_features
        if expected is not None and expected != found:
            raise UserError(
                f"The data has {found} features, but the model has in_features={expected}: set "
                f"--model.in_features={found}, or remove it."
            )

    before_validate = before_test = before_predict = _check_data

    def validate(self, **kwargs: Any) -> None:
        """Evaluate on the training points."""
        self._run(self.trainer.validate, **kwargs)

    def test(self, **kwargs: Any) -> None:
        """Evaluate on the test points."""
        self._run(self.trainer.test, **kwargs)

    def predict(self, **kwargs: Any) -> None:
        """Write the features of the test points. They are not collected in memory."""
        self._run(self.trainer.predict, **kwargs, return_predictions=False)

    def _run(self, function: Callable[..., Any], **kwargs: Any) -> None:
        """Call a method of the trainer. A signal ends it between two batches or parts of an evaluation."""
        stop = self.model.run_state.stop
        with stopping_by(stop, self.trainer):
            try:
                function(**kwargs, ckpt_path=self._ckpt_path, weights_only=True)
            except SystemExit as error:
                if self.trainer.interrupted:
                    raise Interrupted("stopped.", _exit_code(error)) from error
                raise
        if stop.number is not None:
            raise Interrupted("stopped after all was done.", 128 + stop.number)

    def before_fit(self) -> None:
        """Check everything before the run folder exists."""
        end = self.model.schedule.total_updates
        end = min(end, self.trainer.max_steps) if self.trainer.max_steps >= 0 else end
        # At `max_steps` Lightning would not even start, so nothing could be finished.
        can_finish = self._needs_finish and end != self.trainer.max_steps
        if end < self._resumed_at or (end == self._resumed_at and not can_finish):
            raise UserError(
                f"No update is left to do: the run ends with update {end:,}, and {self._resumed_at:,} are done; raise "
                "--model.updates or --trainer.max_steps, or lengthen --model.phases."
            )
        self._check_data()
        if self.trainer.is_global_zero:
            points, neurons = self.datamodule.train_points, self.model.hparams["num_neurons"]
            print(
                f"Training {neurons} neurons with {self.model.kernel_text} on {len(points):,} points of "
                f"{points.num_features} features, on {self._devices()}, seed "
                f"{self.config[self.subcommand]['seed_everything']}."
            )

    def _devices(self) -> str:
        """The devices of a run, with the points of an update on each of them and in all."""
        count, batch = self.trainer.world_size, self.datamodule.batch_size
        points = f"{batch:,} points" if count == 1 else f"{batch:,} points per device and {count * batch:,}"
        if self.model.hparams["parallel"] == "neurons" and count > 1:
            points = f"{-(-self.model.hparams['num_neurons'] // count):,} neurons each and {batch:,} points"
        return f"{count} x {self.trainer.strategy.root_device.type} with {points} per update"

    def fit(self, **kwargs: Any) -> None:
        """Train. A run that fails before its first update leaves no folder behind."""
        stop = self.model.run_state.stop
        with stopping_by(stop, self.trainer):
            try:
                self.trainer.fit(**kwargs, ckpt_path=self._ckpt_path, weights_only=True)
            except BaseException as error:
                self._remove_unused_folder()
                if self.trainer.interrupted and isinstance(error, SystemExit):
                    raise Interrupted(self._interruption(), _exit_code(error)) from error
                if (failure := self._full_disk(error)) is not None:
                    raise failure from error
                raise
            print_summary(self.trainer, self.model, self._has_folder)
        if stop.number is not None:
            raise Interrupted(
                f"stopped after update {self.trainer.global_step:,}, the last one; figures that were not drawn yet are "
                "missing.",
                128 + stop.number,
            )

    def _full_disk(self, error: BaseException) -> OSError | None:
        """An error about the run folder in place of one that names no file, such as that of TensorBoard's writer."""
        logger, full = self.trainer.logger, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not isinstance(logger, RunLogger) or not isinstance(error, OSError):
            return None
        if error.errno not in full or error.filename is not None or error.strerror is None:
            return None
        return OSError(f"The run folder {logger.log_dir} could not be written: {error.strerror}.")

    def _interruption(self) -> str:
        stopped, logger = f"stopped at update {self.trainer.global_step:,}", self.trainer.logger
        if (path := self.model.run_state.stop.requeued_from) is not None:
            return f"{stopped}; SLURM has requeued the job, which will continue from {path}."
        if self.model.run_state.needs_finish:
            stopped += ", the last one, before L was consolidated"
        checkpoint = Path(logger.log_dir) / "checkpoints" / "last.ckpt" if isinstance(logger, RunLogger) else None
        if checkpoint is not None and checkpoint.is_file():
            return f"{stopped}; continue from the last checkpoint with --ckpt_path={checkpoint}."
        return f"{stopped}, before the first checkpoint."

    def _remove_unused_folder(self) -> None:
        logger = self.trainer.logger
        if isinstance(logger, RunLogger) and logger.is_claimed and self.trainer.is_global_zero:
            folder = Path(logger.log_dir)
            if not self.model.run_state.has_updated and not any(folder.glob("checkpoints/*.ckpt")):
                logger.finalize("failed")
                shutil.rmtree(folder, ignore_errors=True)


def _choose_accelerator(trainer: dict[str, Any]) -> None:
    """Use the CPU where ``auto`` would be Apple's GPU, which cannot be chosen either."""
    if MPSAccelerator.is_available() and trainer["accelerator"] == "auto":
        rank_zero_warn(MPS_NOTICE)
        warnings.filterwarnings("ignore", message="GPU available but not used")  # Lightning's advice to choose it
        trainer["accelerator"] = "cpu"
    elif MPSAccelerator.is_available() and trainer["accelerator"] in ("mps", "gpu"):
        raise UserError("Apple's GPU (MPS) has no float64, which training needs: set --trainer.accelerator=cpu.")


def _choose_run_folder(trainer: dict[str, Any]) -> None:
    """Put run folders below ``default_root_dir``, if it is given, unless ``save_dir`` is there or absolute."""
    root, logger = trainer["default_root_dir"], trainer["logger"]
    options = getattr(logger, "init_args", None) or {}
    if root is not None and "save_dir" in options and Path(root) not in Path(options["save_dir"]).parents:
        options["save_dir"] = str(Path(root) / options["save_dir"])


def _exit_code(error: SystemExit) -> int:
    """The exit code of a shell for a run that a signal has ended."""
    return 143 if isinstance(error, SIGTERMException) else 130
