"""The network as a LightningModule: Lightning's hooks, and what is logged. Learning itself is in the Learner."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from ksm_lightning.data.datamodule import datamodule_of, training_inputs
from ksm_lightning.data.loaders import batches_of, has_length, inputs_of, next_milestone
from ksm_lightning.learning import HyperParameters
from ksm_lightning.learning.learner import Stage
from ksm_lightning.learning.units import sample_size
from ksm_lightning.network import KSMNetwork
from ksm_lightning.network.readout import read_out
from ksm_lightning.private_apis import attached_trainer, count_updates, keep_out_of_ddp
from ksm_lightning.runs import metric_names as names
from ksm_lightning.runs.checkpoint import check_content, read_checkpoint
from ksm_lightning.runs.conditions import add_section, check_continuation
from ksm_lightning.runs.cut_short import cut_short
from ksm_lightning.runs.logger import log_final_scores
from ksm_lightning.runs.neuron_parallel import NeuronParallelModule, make_learner
from ksm_lightning.runs.optimizer import HebbianOptimizer
from ksm_lightning.runs.other_callbacks import saves_after
from ksm_lightning.runs.stop import StoppedEarly


class KernelSimilarityMatching(NeuronParallelModule):
    """Trains a KSMNetwork: W and q descend the energy, L ascends it, one batch per update.

    The gradients have closed forms and nothing is back-propagated. Lightning's loop gets blocks of batches; each batch
    is one update and counts as one in ``trainer.global_step``. Step sizes and kernel parameters are a function of that
    count, so a resumed run continues exactly. Training ends with the schedule.

    The default schedule is adaptive: natural steps, a start and an end at the optimal scale with the exact L, and
    idle landmarks moved (:class:`~ksm_lightning.learning.AdaptiveSchedule`). ``phases`` apply the paper's rules only.

    Args:
        options: The hyper-parameters, see :class:`ksm_lightning.learning.HyperParameters`, which also checks them.

    Example:
        >>> model = KernelSimilarityMatching(num_neurons=16, in_features=2, kernel_params={"sigma": 0.3})
        >>> model(torch.zeros(5, 2)).shape
        torch.Size([5, 16])
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        unknown = sorted(set(options) - set(HyperParameters.names()))
        if unknown:
            raise TypeError(f"There is no option {unknown[0]!r}; the options are {', '.join(HyperParameters.names())}.")
        hyper = HyperParameters(**options)
        self.save_hyperparameters(hyper.as_primitives())
        self._preprocessing: dict[str, Any] | None = None
        self._given = {"ridge": hyper.ridge if "ridge" in options else None, "kernel_params": hyper.kernel_params}
        # Without `in_features` this network is a placeholder.
        is_placed = hyper.in_features is not None and hyper.init == "normal"
        is_placed = is_placed and hyper.parallel == "data"
        self.use_network(self.first_network(hyper), None if is_placed else "unplaced")

    def use_network(self, network: KSMNetwork, stage: Stage | None = None) -> None:
        hyper = HyperParameters.of(self.hparams)
        self.network = network
        self.kernel, self.schedule = network.kernel, hyper.make_schedule()
        self.learner = make_learner(network, self.schedule, hyper, stage, self)
        self.learner.set_kernel_for(0)
        own = {f"network.{name}": parameter.numel() for name, parameter in network.named_parameters(recurse=False)}
        # All but the smallest: DDP needs one, unless it leaves the module as it is.
        keep_out_of_ddp(self, sorted(own, key=own.__getitem__)[0 if self.shares_neurons else 1 :])

    # ------------------------------------------------------------------ a run from start to end

    def configure_model(self) -> None:
        """Check the model against the data. At the first fit, build and start the network."""
        data, hparams = datamodule_of(self.trainer), self.hparams
        is_fit = self.trainer.state.fn == "fit"
        if data is None and is_fit:
            self.read_first_batches()
        points = self.starting_points
        if hparams["in_features"] is not None and points is not None and points.in_features != hparams["in_features"]:
            raise ValueError(
                f"The data has {points.in_features} features, but the model was made for in_features="
                f"{hparams['in_features']}: set `in_features` to {points.in_features}, or leave it out."
            )
        if points is not None and is_fit:
            self.choose_width_from(points)
        if hparams["parallel"] == "neurons":
            self.prepare_neurons(data)
        learner = self.learner
        if learner.stage == "learning" or (hparams["in_features"] is not None and not is_fit):
            return
        if points is None:
            raise ValueError("The network has no weights yet: call `fit` first, or load a checkpoint.")
        with torch.device("cpu"):  # Lightning's default here is the training device
            self.place_and_start(points)

    def on_fit_start(self) -> None:
        """Check that the precision is full, and give all processes the same weights, which DDP leaves alone."""
        if self.trainer.precision not in ("32-true", "64-true"):
            raise ValueError(
                f"The update solves linear systems and needs full precision: set `precision` to 32-true or 64-true, "
                f"got {self.trainer.precision}."
            )
        self.share_weights()
        data, self.run_state.batch_choice = datamodule_of(self.trainer), ""
        if data is not None and data.chooses_batch_size:
            self.choose_batch_size(data)

    def on_train_start(self) -> None:
        self.leave_if_stopped()
        self.run_state.start(self.global_step)
        if self.global_step == 0:
            self.learner.restart()
            self.log_bound()
            self.warn_if_silent()
        self.run_state.needs_finish &= self.global_step >= self.schedule.total_updates  # unless it is longer now

    def on_train_epoch_start(self) -> None:
        self.run_state.log.start_epoch()

    def on_train_epoch_end(self) -> None:
        self._log_epoch_energy(is_due=True)  # a continued run may end the epoch of its checkpoint without an update

    def on_validation_end(self) -> None:
        self.run_state.measure(self.global_step)  # includes the time of the validation
        self.leave_if_stopped()

    def on_train_end(self) -> None:
        """Say what was left out, and log hyper-parameters and final scores for TensorBoard's hparams tab."""
        log_final_scores(self.trainer.loggers, self.hparams, self.trainer.callback_metrics, self.global_step)
        if missing := cut_short(self.schedule, self.global_step, self.hparams["consolidate"]):
            rank_zero_info(missing)
        self.learner.drop_recordings()
        self._first_batches = None
        self.end_run()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimizer with the groups W, q and L. Each ``lr`` is the step size of the last update."""
        groups = [{"name": name, "params": [parameter]} for name, parameter in self.network.named_parameters()]
        return HebbianOptimizer(groups, {"lr": 0.0})

    # ------------------------------------------------------------------ one block of updates

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """One update per batch of a block, or for the single batch of another loader.

        Returns the ``energy`` of the last batch of this process (None if the block was left before) and
        ``logged_energies``, pairs of an update counted from 1 and its energy.
        """
        batches = batches_of(batch)  # (updates, batch, m)
        self.network.check_input(batches[0])
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        first = self.global_step
        batches = batches[: max(0, self.schedule.total_updates - first)]
        log, stop = self.run_state.log, self.run_state.stop
        log_every: int = getattr(self.trainer, "log_every_n_steps", 0)  # 0 in a barebones trainer
        log.start_block(range(first, first + len(batches)), log_every)
        is_alone = self.is_alone  # several processes must end a block together
        made = optimizer.step(
            lambda: self.learner.learn(
                batches, first, sample=self.points_for_idle_landmarks, observe=log.observes,
                on_observation=log.add, should_stop=lambda: is_alone and stop.is_set,
            )
        )  # fmt: skip
        log.end_block(self.learner.collectives, self.loggers)
        count_updates(self.trainer, made - 1)
        self._log_epoch_energy(bool(log.logged))
        rates = self.learner.rates(first + made - 1, batches.shape[1])
        for group in optimizer.param_groups:
            group["lr"] = getattr(rates, group["name"] if group["name"] in "WL" else "q")
        self.run_state.measure(self.global_step)
        if not self.run_state.is_guarded:
            self._check_finite()  # before any checkpoint or evaluation
        self.learner.set_kernel_for(first + made)
        is_last = first + made >= self.schedule.total_updates
        if is_last:
            self.finish()
            self.trainer.should_stop = not self.run_state.needs_finish
        self.run_state.is_milestone = not is_last and first + made >= next_milestone(first)
        if is_last or self.run_state.is_milestone:
            self.log_bound()
        if is_last:
            self.warn_if_silent()
        self.agree_to_stop()  # and leave after the callbacks, which save a checkpoint
        return {"energy": log.energy, "logged_energies": log.logged}

    def points_for_idle_landmarks(self, update: int, batch: Tensor) -> Tensor:
        """Points for idle landmarks: the same on every process, and the same in a resumed run."""
        data = datamodule_of(self.trainer)
        if data is not None:
            return data.sample(update, sample_size(self.network.num_landmarks)).to(batch)
        different: Tensor = torch.unique(self.learner.collectives.gather(batch), dim=0)
        return different

    def _log_epoch_energy(self, is_due: bool) -> None:
        """Give callbacks the mean energy of the epoch so far: if it is due, may be monitored, or the epoch ends."""
        trainer, done = self.trainer, self.global_step
        is_last = trainer.is_last_batch or done >= self.schedule.total_updates or done == trainer.max_steps
        energy = self.run_state.log.epoch_energy() if is_due or is_last or saves_after(trainer, done) else None
        if energy is not None and not trainer.barebones:
            self.log(names.TRAIN_ENERGY, energy, prog_bar=True, logger=False)

    def _check_finite(self) -> None:
        bad = self.learner.not_finite()
        if bad:
            raise FloatingPointError(
                f"Training diverged at or before update {self.global_step}: {', '.join(bad)} not finite. Leave out "
                "`phases` for the adaptive schedule, start W at data points (init=data), or lower the rates; the "
                "callback DivergenceGuard gives details."
            )

    # ------------------------------------------------------------------ the exact end

    def finish(self) -> None:
        """End the schedule: :meth:`consolidate`, if that is set and the data ends."""
        if self.learner.not_finite():
            return
        if not self.hparams["consolidate"]:
            return
        if datamodule_of(self.trainer) is None and not has_length(self.trainer.train_dataloader):
            rank_zero_warn(
                "The training data has no length, so L stays as it was learned: call `consolidate` with a sample of "
                "the data, or set `consolidate=False`."
            )
            return
        self.run_state.needs_finish = True
        blocks = training_inputs(self.trainer)
        try:
            self.consolidate(self.run_state.stop.until_set(blocks) if self.is_alone else blocks)
        except StoppedEarly:
            return
        self.run_state.needs_finish = False

    def consolidate(self, blocks: Iterable[Tensor] | None = None) -> float:
        """Set the best common scale of W (or q) and the exact L for all training points; returns the bound J.

        A tight network gets the exact Q and L. One float64 pass over the data, which all processes share and must all
        call. ``blocks`` is this process's share of the inputs, one block (samples, m) at a time. Default: the trainer's
        data.
        """
        return self.learner.finish(training_inputs(self.trainer) if blocks is None else blocks)

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the learner's state, how the data was preprocessed, and a digest; Lightning calls this hook last."""
        learner, run = self.learner.state_dict(), self.run_state.state()
        panels = self.share_out(checkpoint, learner)
        add_section(checkpoint, self.trainer, learner, run, self._preprocessing, panels)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the ridge, the kernel of the phase and the learner's state; Lightning restores the weights.

        Raises:
            ValueError: If the checkpoint is damaged or of another network, or `fit` would continue it on other data.
        """
        check_content(checkpoint, "The checkpoint")
        check_continuation(checkpoint, attached_trainer(self))
        saved = checkpoint["hyper_parameters"]
        HyperParameters.check_same_network({**self.hparams, **self._given}, saved)
        if saved["kernel_params"] != self.hparams["kernel_params"]:
            self.use_width(saved["kernel_params"]["sigma"])
        self.use_rows(checkpoint)
        self.network.ridge = self.hparams["ridge"] = float(saved["ridge"])
        self._preprocessing = checkpoint["ksm_lightning"]["preprocessing"]
        self.learner.load_state_dict(checkpoint["ksm_lightning"]["learner"])
        self.learner.set_kernel_for(checkpoint["global_step"])
        self.run_state.load_state(checkpoint["ksm_lightning"].get("run", {}))

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: torch.device | str | None = None, **changes: Any
    ) -> Self:
        """The trained model of a checkpoint. Nothing that the file names is imported or run.

        Args:
            checkpoint_path: A ``.ckpt`` file of this package, or a run folder, which stands for its last checkpoint.
            map_location: Device of the model. Default: the CPU.
            changes: Hyper-parameters to change, such as ``solver="dynamics"``.

        Raises:
            ValueError: If the file is not such a checkpoint, its kernel is not registered, or a change would make it
                another network.
        """
        checkpoint = read_checkpoint(checkpoint_path)
        model = cls(**{**checkpoint["hyper_parameters"], **changes})
        if model.network.W.is_meta:
            model.build_for_loading(checkpoint["hyper_parameters"]["in_features"])
        model.on_load_checkpoint(checkpoint)
        model.to(map_location or "cpu", checkpoint["state_dict"]["network.W"].dtype)
        model.load_state_dict(checkpoint["state_dict"])
        return model

    # ------------------------------------------------------------------ evaluation

    def forward(self, x: Tensor) -> Tensor:
        """Responses y (batch, n) to inputs x (batch, m)."""
        y: Tensor = self._built_network()(x)
        return y

    def _built_network(self) -> KSMNetwork:
        if self.hparams["in_features"] is None or self.network.W.is_meta:
            raise ValueError("The input size is known after `fit` only: give `in_features` to use the model before.")
        return self.network

    def features(
        self, x: Tensor, readout: str = "neural", sample: Tensor | None = None, num_features: int | None = None
    ) -> Tensor:
        """Features (samples, k) of any number of inputs (samples, m), computed in blocks.

        The other arguments are those of :func:`ksm_lightning.network.readout.read_out`.
        """
        self._built_network()
        return read_out(self.network_for(readout), readout, x, sample=sample, num_features=num_features)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Responses to a block of points; logs their energy."""
        return self._evaluation_step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._evaluation_step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Features of a block of points: responses, or what the run state's encoder computes."""
        if self.is_alone:
            self.leave_if_stopped()
        x, encoder = inputs_of(batch), self.run_state.encoder
        return self.forward(x) if encoder is None else encoder(x).to(self.network.W.dtype)

    def _evaluation_step(self, batch: Any, stage: names.Stage) -> Tensor:
        x, skips = inputs_of(batch), self.skips_work()
        y = self.forward(x[:0] if skips else x)
        energy = y.new_tensor(torch.nan) if skips else self.network.energy_of(x, y).to(y.dtype)
        self.log(names.energy(stage), energy, batch_size=len(x), sync_dist=True)
        return y
