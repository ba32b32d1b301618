"""The network as a LightningModule: manual optimisation on two time scales, logging."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from ksm_lightning.data import KSMDataModule, UpdateBlock
from ksm_lightning.kernels import full_precision, make_kernel
from ksm_lightning.learning import rules
from ksm_lightning.learning import train as learning
from ksm_lightning.learning.schedule import PaperPhases, Phase, PhaseSchedule, Rates, make_schedule
from ksm_lightning.learning.updater import Acceleration, Collectives, Inverse, Observation, Updater
from ksm_lightning.network import functional
from ksm_lightning.network.initialisation import DataInit, Initialiser, NormalInit
from ksm_lightning.network.ksm_network import KSMNetwork, Solver
from ksm_lightning.network.readout import read_out
from ksm_lightning.runs.checkpoint import FORMAT, check_content, read_checkpoint

Init = Literal["normal", "data"]


class Snapshot(NamedTuple):
    """A copy of what learns."""

    W: Tensor
    q: Tensor
    L: Tensor


class HebbianOptimizer(torch.optim.Optimizer):
    """Holds W, q and L as named groups for those who look at them; the closure makes the updates of a block."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()


class KernelSimilarityMatching(L.LightningModule):
    """Trains a :class:`KSMNetwork`: W and q descend the energy, L ascends it, each update from one batch.

    The gradients have closed forms, so nothing is back-propagated. Lightning's loop is handed blocks of batches; each
    batch is one update and counts as one in ``trainer.global_step``. Rates and kernel parameters are a function of that
    count, so that a resumed run continues exactly; training ends with the schedule.

    Two kinds of schedule: the adaptive one (the default) takes steps in natural units, begins at the optimal scale with
    the exact L, moves landmarks that explain nothing, and ends with the exact L again; see
    :class:`ksm_lightning.learning.schedule.AdaptiveSchedule` for what of this is provable. ``phases`` are the paper's rules and
    nothing else.

    Args:
        num_neurons: Neurons n, the dimension of the representation.
        in_features: Input features m; taken from the data when training starts unless given.
        kernel: Registered name of the kernel: gaussian, laplacian, cauchy, linear, polynomial, power_cosine,
            arc_cosine, or your own.
        kernel_params: The kernel's numbers, such as ``{sigma: 0.3}``; its defaults unless given.
        ridge: The paper's lambda, positive. Unless given it is the paper's 0.001 with ``phases``, and
            ``0.005 <f(x, x)> / n`` in the adaptive schedule, which does not depend on the similarity's scale.
        init: Start of W: ``normal`` is the paper's, ``data`` draws data points by kernel k-means++.
        init_scale: Standard deviation of the normal start; the paper has 1, which loses neurons on half moons.
        solver: ``closed_form`` or, to see the recurrent network settle, ``dynamics`` (validation and prediction).
        updates: Length of the adaptive schedule; 5,000 unless given.
        phases: Phases of constant rates instead: a list, or ``paper_half_moons`` or ``paper_mnist``.
        consolidate: Whether a finished schedule ends with the exact L for all data; the adaptive one does unless told
            otherwise, phases do not.
        inverse: How responses are solved for in training: ``exact`` factorises L for every batch, ``tracked`` keeps
            the inverse up to date by low-rank updates, ``auto`` takes what is faster
            (:class:`ksm_lightning.learning.updater.Updater`).
        acceleration: ``compile`` has torch.compile fuse the update, which needs a C++ compiler and a minute at the
            start; ``cuda_graph`` records it and replays it, on one GPU; ``none`` does neither.

    Raises:
        ValueError: If a value is impossible, or the kernel's name is not registered.

    Example:
        >>> model = KernelSimilarityMatching(num_neurons=16, in_features=2, kernel_params={"sigma": 0.3})
        >>> model(torch.zeros(5, 2)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        num_neurons: int = 16,
        in_features: int | None = None,
        kernel: str = "gaussian",
        kernel_params: dict[str, float] | None = None,
        ridge: float | None = None,
        init: Init = "data",
        init_scale: float = 0.5,
        solver: Solver = "closed_form",
        updates: int | None = None,
        phases: list[Phase] | PaperPhases | None = None,
        consolidate: bool | None = None,
        inverse: Inverse = "auto",
        acceleration: Acceleration = "none",
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.schedule = make_schedule(phases, updates)
        self.kernel = make_kernel(kernel, **(kernel_params or {}))
        for phase in self.schedule.phases if isinstance(self.schedule, PhaseSchedule) else ():
            self.kernel.with_params(**phase.kernel_params)
        if init not in ("normal", "data"):
            raise ValueError(f"`init` must be 'normal' or 'data', got {init!r}.")
        if inverse not in ("auto", "exact", "tracked"):
            raise ValueError(f"`inverse` must be 'auto', 'exact' or 'tracked', got {inverse!r}.")
        if acceleration not in ("none", "compile", "cuda_graph"):
            raise ValueError(f"`acceleration` must be 'none', 'compile' or 'cuda_graph', got {acceleration!r}.")
        self.save_hyperparameters(
            {
                "num_neurons": num_neurons,
                "in_features": in_features,
                "kernel": kernel,
                "kernel_params": self.kernel.params(),
                "ridge": learning.PAPER_RIDGE if ridge is None and not self.schedule.is_natural else ridge,
                "init": init,
                "init_scale": init_scale,
                "solver": solver,
                "updates": self.schedule.total_updates if self.schedule.is_natural else None,
                "phases": self.schedule.as_primitives() if isinstance(self.schedule, PhaseSchedule) else None,
                "consolidate": self.schedule.is_natural if consolidate is None else consolidate,
                "inverse": inverse,
                "acceleration": acceleration,
            }
        )
        # Without `in_features` this one is a stand-in: it refuses impossible values now, not when the data is there.
        self.network = self._make_network(1 if in_features is None else in_features, NormalInit(init_scale))
        self._knows_features = in_features is not None
        self._awaits_data = in_features is None or init == "data"
        self._awaits_start = self.schedule.is_natural
        self.has_updated = False
        self.rate_factor = 1.0
        """What every rate is multiplied with; the divergence guard halves it."""
        self.is_guarded = False
        """Whether a guard looks after divergence, so that this module need not."""
        self.should_pause = False
        """Set to leave a block of updates early; the trainer is told by whoever sets it."""
        self._reader: Callable[[Tensor], Tensor] | None = None
        self._updater: Updater | None = None
        self._tracked: dict[str, Any] = {}
        self._preprocessing: dict[str, Any] | None = None
        self._changes: dict[str, float] | None = None
        self.logged_energies: list[tuple[int, float]] = []
        """Updates of the last block that were logged, counted from 1, and the energies of their batches."""
        self.updates_per_second = 0.0
        """Of this run, from its start to its last update or validation; everything that happened between is in it."""
        self._started: float | None = None
        self._first = 0
        self.energy: Tensor | None = None
        """Energy of the last batch of the last block, before its update; float64, this process's own."""
        self.set_kernel_for(0)

    def _make_network(
        self, in_features: int, init: Initialiser, generator: torch.Generator | None = None
    ) -> KSMNetwork:
        hparams = self.hparams
        ridge = learning.PAPER_RIDGE if hparams["ridge"] is None else hparams["ridge"]
        return KSMNetwork(self.kernel, in_features, hparams["num_neurons"], ridge, init, hparams["solver"], generator)

    # ------------------------------------------------------------------ life of a run

    def configure_model(self) -> None:
        """Check the model against the data; at the first fit, make the network that waited for it.

        Raises:
            ValueError: If data and model do not fit, or the data needed is not there.
        """
        data = self._data()
        if self._knows_features and data is not None and data.in_features != self.network.in_features:
            raise ValueError(
                f"The data has {data.in_features} features, but the model was made for in_features="
                f"{self.network.in_features}: set `in_features` to {data.in_features}, or leave it out."
            )
        if self._knows_features and self.trainer.state.fn != "fit":
            return
        # Lightning makes the training device the default here; points and random streams are still the CPU's.
        with torch.device("cpu"):
            # A stream of its own from the seed of the run: how far the global one has come depends on the strategy.
            generator = torch.Generator().manual_seed(torch.initial_seed())
            candidates = self._candidates(data, generator) if data is not None and self._wants_candidates() else None
            if self._awaits_data:
                self._build_network(data, candidates, generator)
            if self._awaits_start and candidates is not None:
                self._start(candidates)

    def _data(self) -> KSMDataModule | None:
        """The trainer's datamodule, if it is one of ours."""
        data = getattr(self.trainer, "datamodule", None)
        return data if isinstance(data, KSMDataModule) else None

    def _wants_candidates(self) -> bool:
        return self._awaits_start or (self._awaits_data and self.hparams["init"] == "data")

    def _build_network(self, data: KSMDataModule | None, candidates: Tensor | None, generator: torch.Generator) -> None:
        """Make the network that waited for the data."""
        if data is None:
            raise ValueError(
                "Only a datamodule of ksm_lightning can tell the model its input size and starting points: "
                "give `in_features` and `init='normal'`, or use ArrayDataModule."
            )
        init: Initialiser = NormalInit(self.hparams["init_scale"])
        if self.hparams["init"] == "data":
            assert candidates is not None
            init = DataInit(candidates)
        self.network = self._make_network(data.in_features, init, generator)
        self.hparams["in_features"] = data.in_features
        self._knows_features, self._awaits_data, self._changes = True, False, None
        self.set_kernel_for(self.trainer.global_step)

    def _candidates(self, data: KSMDataModule, generator: torch.Generator) -> Tensor:
        points = data.train_points
        count = learning.candidate_count(int(self.hparams["num_neurons"]))
        return points.take(torch.randperm(len(points), generator=generator)[:count])

    def _start(self, x: Tensor) -> None:
        """Begin the adaptive schedule from a sample (samples, m) that is the same on every process."""
        x = x.to(self.network.W)
        if self.hparams["ridge"] is None:
            self.network.ridge = learning.natural_ridge(self.network.kernel, x, self.network.num_neurons)
            self.hparams["ridge"] = self.network.ridge
        learning.start(self.network, x)
        self._awaits_start = False

    def on_fit_start(self) -> None:
        """Refuse precisions that the update cannot have."""
        self.should_pause = False
        if self.trainer.precision not in ("32-true", "64-true"):
            raise ValueError(
                f"The update solves linear systems and needs full precision: set `precision` to 32-true or 64-true, "
                f"got {self.trainer.precision}."
            )

    def on_train_start(self) -> None:
        """Start the clock."""
        self._started, self._first = time.perf_counter(), self.global_step
        self.updates_per_second = 0.0

    def on_validation_end(self) -> None:
        """Let what validation takes count, too."""
        self._update_throughput()

    def _update_throughput(self) -> None:
        if self._started is not None:
            self.updates_per_second = (self.global_step - self._first) / (time.perf_counter() - self._started)

    def on_train_end(self) -> None:
        """Write hyper-parameters beside the final scores, for TensorBoard's hparams tab."""
        scores = {
            f"final/{name.partition('/')[2]}": float(self.trainer.callback_metrics[name])
            for name in ("val/kernel_nrmse", "test/probe_accuracy", "val/energy")
            if name in self.trainer.callback_metrics
        }
        for logger in self.trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and scores:
                logger.log_hyperparams(dict(self.hparams), scores)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimizer with the groups W, q and L, whose ``lr`` is the rate of the last update."""
        groups = [{"name": name, "params": [parameter]} for name, parameter in self.network.named_parameters()]
        return HebbianOptimizer(groups, {"lr": 0.0})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up where the checkpoint was saved: the ridge, the phase's kernel, and steps that a guard has halved.

        Raises:
            ValueError: If the checkpoint is not of this version, or of another network.
        """
        check_content(checkpoint, "The checkpoint")
        saved = checkpoint["hyper_parameters"]
        for name in ("num_neurons", "in_features", "kernel", "kernel_params"):
            if self.hparams[name] not in (None, saved[name]):
                raise ValueError(
                    f"The checkpoint is of another network: it has {name}={saved[name]}, and the model "
                    f"{self.hparams[name]}."
                )
        self.network.ridge = self.hparams["ridge"] = float(saved["ridge"])
        self._awaits_data = self._awaits_start = False
        self.rate_factor = float(checkpoint["ksm_lightning"]["rate_factor"])
        self._tracked = checkpoint["ksm_lightning"].get("tracked", {})
        self._preprocessing = checkpoint["ksm_lightning"]["preprocessing"]
        self.set_kernel_for(checkpoint["global_step"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say what wrote this, what the update count does not tell, and what was done to the data before."""
        tracked = self._tracked if self._updater is None else self._updater.state_dict()
        data = self._data()
        checkpoint["ksm_lightning"] = {
            "format": FORMAT,
            "rate_factor": self.rate_factor,
            "tracked": tracked,
            "preprocessing": self._preprocessing if data is None else data.preprocessing.state(),
        }

    def set_kernel_for(self, update: int) -> None:
        """Set the kernel for the update with this number."""
        changes = self.schedule.kernel_params(update)
        if changes == self._changes:
            return
        kernel = self.kernel.with_params(**changes) if changes else self.kernel
        if self.network.kernel.params() != kernel.params():
            self.network.kernel = kernel
        self._changes = changes

    # ------------------------------------------------------------------ one update

    @property
    def updater(self) -> Updater:
        """What makes the updates of the run."""
        if self._updater is None or self._updater.network is not self.network:
            size = self.trainer.world_size
            ranks = (
                Collectives(size, lambda value: self.over_ranks(value, "mean"), self._of_all_ranks)
                if size > 1
                else None
            )
            self._updater = Updater(
                self.network,
                self.schedule.is_natural,
                inverse=self.hparams["inverse"],
                acceleration=self.hparams["acceleration"],
                ranks=ranks,
            )
            self._updater.load_state_dict(self._tracked)
        return self._updater

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One update for each batch of a block, or for the one batch of another loader."""
        batches = batches_of(batch)  # (updates, batch, m)
        self.network.check_input(batches[0])
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        update = self.global_step
        self.logged_energies = []
        self.begin(batch)
        batches = batches[: max(0, self.schedule.total_updates - update)]
        made = optimizer.step(closure=lambda: self._make_updates(batches, update))
        self._count(made - 1)
        self._update_throughput()
        if self.logged_energies:
            self.log("train/energy", self.logged_energies[-1][1], prog_bar=True, logger=False)
        for group in optimizer.param_groups:
            group["lr"] = getattr(self._rates(update + made - 1, batches.shape[1]), group["name"])
        self.has_updated = True
        if not self.is_guarded:
            # Once a block, so that neither a checkpoint nor an evaluation ever sees what has diverged.
            self._check_finite()
        self.set_kernel_for(update + made)
        if update + made >= self.schedule.total_updates:
            self.finish()
            self.trainer.should_stop = True

    def _make_updates(self, batches: Tensor, update: int) -> int:
        """An update for each batch of a block; returns how many, as it may be left early."""
        log_every: int = getattr(self.trainer, "log_every_n_steps", 0)  # 0 in a barebones trainer
        last, schedule, until, rates = len(batches) - 1, self.schedule, 0.0, Rates(0.0, 0.0, 0.0)
        with self.updater.block(batches):
            for place in range(len(batches)):
                if update >= until:
                    self.set_kernel_for(update)
                    rates, until = self._rates(update, batches.shape[1]), schedule.constant_until(update)
                is_logged = bool(log_every) and (update + 1) % log_every == 0
                observation = self.make_update(place, batches, update, rates, observe=is_logged or place == last)
                if observation is not None:
                    self.energy = observation.energy.total
                    if is_logged:
                        self._log_update(observation, update, rates)
                update += 1
                if self.should_pause:
                    return place + 1
        return len(batches)

    def make_update(
        self, place: int, batches: Tensor, update: int, rates: Rates | None = None, *, observe: bool = False
    ) -> Observation | None:
        """The update with a number, from the batch at a place of a block that the updater has been given.

        Idle landmarks are moved before, where the schedule says so. Rates and kernel are the schedule's; whoever gives
        the rates has applied it.
        """
        if rates is None:
            self.set_kernel_for(update)
            rates = self._rates(update, batches.shape[1])
        if self.schedule.relocates_before(update):
            learning.relocate(self.network, self._sample(batches[place], update))
            self.updater.forget()
        return self.updater.update(place, rates, observe=observe, factorise=self.schedule.is_settling(update))

    def _rates(self, update: int, batch: int) -> Rates:
        network, ranks = self.network, self.updater.ranks
        batch *= 1 if ranks is None else ranks.size
        rates = rules.rates_at(self.schedule, network.kernel, update, network.num_neurons, batch)
        return rates if self.rate_factor == 1 else rates.scaled(self.rate_factor)

    def _count(self, updates: int) -> None:
        """Let Lightning count updates that were made within one of its own steps."""
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        for tracker in (progress.total, progress.current):
            tracker.ready += updates
            tracker.completed += updates

    def begin(self, batch: Any) -> None:
        """Start the adaptive schedule from the first block or batch, where no datamodule of ours has done so before."""
        if self._awaits_start:
            self._start(self._of_all_ranks(batches_of(batch).flatten(0, 1)))

    def _sample(self, x: Tensor, update: int) -> Tensor:
        """Points among which idle landmarks find a place: the same on every process, and when the run is resumed."""
        data = self._data()
        if data is not None:
            return data.sample(update, learning.sample_size(self.network.num_neurons)).to(x)
        different: Tensor = torch.unique(self._of_all_ranks(x), dim=0)
        return different

    def _of_all_ranks(self, x: Tensor) -> Tensor:
        """The points (samples, m) of all processes."""
        if self.trainer.world_size == 1:
            return x
        gathered = self.all_gather(x)
        assert isinstance(gathered, Tensor)
        return gathered.flatten(0, 1)

    def _log_update(self, seen: Observation, update: int, rates: Rates) -> None:
        """Energy, rates and health; everything comes from what the update computed anyway."""
        values = {f"energy/{name}": value for name, value in seen.energy._asdict().items()}
        values |= {f"gradient_norm/{name}": norm for name, norm in zip("WqL", seen.gradient_norms, strict=True)}
        values["health/min_abs_q"] = seen.smallest_gain
        values["health/condition_L"] = seen.condition
        # One stack and one reduction instead of one for each of them.
        stacked = torch.stack([value.double() for value in (seen.energy.total, *values.values())])
        energy, *others = self.over_ranks(stacked, "mean").tolist()
        if not all(map(math.isfinite, (energy, *others))):
            return  # whoever guards the run says so at the end of the block
        self.logged_energies.append((update + 1, energy))
        # At once, and counted in updates: a call of `self.log` for each would cost more than the update.
        logged = {"train/energy": energy, **dict(zip(values, others, strict=True))}
        logged |= {f"rate/{name}": rate for name, rate in rates._asdict().items()}
        for logger in self.loggers:
            logger.log_metrics(logged, step=update + 1)

    # ------------------------------------------------------------------ safety

    def snapshot(self) -> Snapshot:
        """A copy of W, q and L, on their device."""
        network = self.network
        return Snapshot(*(parameter.detach().clone() for parameter in (network.W, network.q, network.L)))

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a copy."""
        self.network.W.copy_(snapshot.W)
        self.network.q.copy_(snapshot.q)
        self.network.L.copy_(snapshot.L)
        if self._updater is not None:
            self._updater.reset()

    def health(self) -> Tensor:
        """Sums of W, q and L, which no value that is not finite escapes, and NaN if a factorisation failed: (4,)."""
        sums = [p.detach().sum(dtype=torch.float64) for p in self.network.parameters()]
        failed = torch.zeros_like(sums[0]) if self._updater is None else self._updater.failed
        return torch.stack([*sums, torch.where(failed == 0, 0.0, torch.nan).to(sums[0])])

    def _is_finite(self) -> bool:
        return all(map(math.isfinite, self.health().tolist()))

    def _check_finite(self) -> None:
        names = [*(name for name, _ in self.network.named_parameters()), "the factorisation of L + ridge I"]
        bad = [name for name, total in zip(names, self.health().tolist(), strict=True) if not math.isfinite(total)]
        if bad:
            raise FloatingPointError(
                f"Training diverged at or before update {self.global_step}: {', '.join(bad)} not finite. Leave out "
                "`phases` for the adaptive schedule, start W at data points (init=data), or lower the rates; the "
                "callback DivergenceGuard tells more."
            )

    def finish(self) -> None:
        """End the schedule: with the exact L, if that is wanted and can be had."""
        if not self.hparams["consolidate"] or not self._is_finite():
            return
        if self._data() is None:
            try:
                len(self.trainer.train_dataloader)  # type: ignore[arg-type]
            except TypeError:
                rank_zero_warn(
                    "The training data has no length, so L is left as it was learned: call `consolidate` with a sample "
                    "of the data, or set `consolidate=False`."
                )
                return
        self.consolidate()

    def consolidate(self, blocks: Iterable[Tensor] | None = None) -> float:
        """Give L its exact value for W, q and all training points; returns the bound J(W, q).

        One float64 pass over the data, shared by all processes, which must all call it.

        Args:
            blocks: This process's share of the inputs, (samples, m) at a time; from the trainer's data unless given.
        """
        bound = learning.consolidate(
            self.network,
            self._training_blocks() if blocks is None else blocks,
            lambda value: self.over_ranks(value, "sum"),
        )
        if self._trainer is not None:
            for logger in self.loggers:
                logger.log_metrics({"train/bound": bound}, step=self.global_step)
        return bound

    def over_ranks(self, value: Tensor, operation: Literal["mean", "sum"]) -> Tensor:
        """A tensor's mean or sum over all processes, which must all call it; itself without a trainer."""
        if self._trainer is None or self.trainer.world_size == 1:
            return value
        reduced = self.trainer.strategy.reduce(value, reduce_op=operation)
        assert isinstance(reduced, Tensor)
        return reduced

    def _training_blocks(self) -> Iterator[Tensor]:
        """This process's share of the training points."""
        data = self._data()
        if data is not None:
            for block in data.val_dataloader():
                yield inputs_of(block)
            return
        assert self.trainer.train_dataloader is not None
        for batch in self.trainer.train_dataloader:
            yield inputs_of(self.trainer.strategy.batch_to_device(batch))

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: torch.device | str | None = None, **changes: Any
    ) -> Self:
        """The trained model of a checkpoint; nothing that the file names is imported or run.

        Args:
            checkpoint_path: A ``.ckpt`` file of this package.
            map_location: Where to put the model; the CPU unless given.
            changes: Hyper-parameters to change, such as ``solver="dynamics"``.

        Raises:
            ValueError: If the file is no such checkpoint, or its kernel is not registered.
        """
        checkpoint = read_checkpoint(checkpoint_path)
        model = cls(**{**checkpoint["hyper_parameters"], **changes})
        model.on_load_checkpoint(checkpoint)
        model.load_state_dict(checkpoint["state_dict"])
        return model.to(map_location or "cpu", checkpoint["state_dict"]["network.W"].dtype)

    # ------------------------------------------------------------------ evaluation

    def forward(self, x: Tensor) -> Tensor:
        """Responses y (batch, n) to inputs x (batch, m)."""
        self._check_ready()
        y: Tensor = self.network(x)
        return y

    def _check_ready(self) -> None:
        if not self._knows_features:
            raise ValueError("The model learns its input size in `fit`; give it `in_features` to use it before.")

    def features(self, x: Tensor, readout: str = "neural", sample: Tensor | None = None) -> Tensor:
        """Features (samples, n) of any number of inputs (samples, m), a block at a time.

        Args:
            x: The inputs.
            readout: ``neural`` is the network's own response; ``nystroem`` and ``least_squares`` make other features of
                the same landmarks (:mod:`ksm_lightning.network.readout`).
            sample: A sample of the data for ``least_squares``; the inputs themselves unless given.
        """
        self._check_ready()
        return read_out(self.network, readout, x, sample=sample)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Responses to a block of points; logs their energy."""
        return self._evaluation_step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Responses to a block of points; logs their energy."""
        return self._evaluation_step(batch, "test")

    def set_reader(self, reader: Callable[[Tensor], Tensor] | None) -> None:
        """Choose what ``predict`` computes of points (batch, m); the network's responses again when None."""
        self._reader = reader

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Features of a block of points: responses, unless :meth:`set_reader` says otherwise."""
        x = inputs_of(batch)
        return self.forward(x) if self._reader is None else self._reader(x).to(self.network.W.dtype)

    def _evaluation_step(self, batch: Any, stage: str) -> Tensor:
        x = inputs_of(batch)
        y = self.forward(x)
        self.log(f"{stage}/energy", self.energy_of(x, y).to(y.dtype), batch_size=len(x), sync_dist=True)
        if self.trainer.state.fn == "fit":
            # The name that Lightning's loggers take for the x axis, which would count blocks of updates otherwise.
            self.log("step", float(self.global_step), batch_size=len(x))
        return y

    @torch.no_grad()
    def energy_of(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Energy of a batch (batch, m); float64, this process's own.

        Args:
            x: The inputs.
            y: The responses to them, if they are known already.
        """
        network = self.network
        with full_precision(x.device):
            k = network.kernel(x, network.W)
            y = functional.responses(network.q * k, network.L, network.ridge) if y is None else y
            norms = network.kernel.diag(network.W)
            return functional.energy_terms(k, y, norms, network.q, network.L, network.ridge).total


def batches_of(batch: Any) -> Tensor:
    """The batches (updates, batch, m) that one step of Lightning's loop brings: a block, or another loader's one."""
    if isinstance(batch, UpdateBlock):
        return batch.x
    return inputs_of(batch)[None]


def inputs_of(batch: Any) -> Tensor:
    """The inputs (batch, m) of a batch that is a tensor or starts with one; images are flattened.

    Raises:
        TypeError: If the batch is neither.
    """
    x = batch[0] if isinstance(batch, Sequence) and len(batch) else batch
    if not isinstance(x, Tensor):
        raise TypeError(f"A batch must be a tensor or a tuple that starts with one, got {type(batch).__name__}.")
    return x.flatten(1) if x.dim() > 2 else x
