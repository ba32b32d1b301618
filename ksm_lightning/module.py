"""The network as a LightningModule: manual optimisation on two time scales, logging."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from ksm_lightning import functional
from ksm_lightning.checkpoint import read_checkpoint
from ksm_lightning.data import KSMDataModule, UpdateBlock
from ksm_lightning.functional import Step
from ksm_lightning.initialisation import DataInit, Initialiser, NormalInit
from ksm_lightning.kernels import full_precision, make_kernel
from ksm_lightning.network import KSMNetwork, Solver
from ksm_lightning.schedule import Phase, Schedule, half_moons_phases

Init = Literal["normal", "data"]
# Starting points are drawn from at most this many candidates a neuron: more cost time and change nothing.
_CANDIDATES_PER_NEURON = 50


class KernelSimilarityMatching(L.LightningModule):
    """Trains a :class:`KSMNetwork`: W and q descend the energy, L ascends it, each update from one batch.

    The gradients have closed forms, so nothing is back-propagated. One SGD optimizer has three named groups (W, q, L),
    the last of them ascending; W's gradient is divided by q^2. Rates and kernel parameters are a function of the update
    count (``trainer.global_step``), so that a resumed run continues exactly; training ends with the last phase.

    Args:
        num_neurons: Neurons n, the dimension of the representation.
        in_features: Input features m; taken from the data when training starts unless given.
        kernel: Registered name of the kernel: gaussian, laplacian, cauchy, linear, polynomial, power_cosine,
            arc_cosine, or your own.
        kernel_params: The kernel's numbers, such as ``{sigma: 0.3}``; its defaults unless given.
        ridge: The paper's lambda, positive.
        init: Start of W: ``normal`` is the paper's, ``data`` draws data points by kernel k-means++.
        init_scale: Standard deviation of the normal start; the paper has 1, which loses neurons on half moons.
        solver: ``closed_form`` or, to see the recurrent network settle, ``dynamics`` (validation and prediction).
        phases: The schedule; the paper's for half moons unless given.

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
        ridge: float = 1e-3,
        init: Init = "data",
        init_scale: float = 0.5,
        solver: Solver = "closed_form",
        phases: list[Phase] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.schedule = Schedule(half_moons_phases() if phases is None else phases)
        self.kernel = make_kernel(kernel, **(kernel_params or {}))
        for phase in self.schedule.phases:
            self.kernel.with_params(**phase.kernel_params)
        if init not in ("normal", "data"):
            raise ValueError(f"`init` must be 'normal' or 'data', got {init!r}.")
        self.save_hyperparameters(
            {
                "num_neurons": num_neurons,
                "in_features": in_features,
                "kernel": kernel,
                "kernel_params": self.kernel.params(),
                "ridge": ridge,
                "init": init,
                "init_scale": init_scale,
                "solver": solver,
                "phases": self.schedule.as_primitives(),
            }
        )
        # Without `in_features` this one is a stand-in: it refuses impossible values now, not when the data is there.
        self.network = self._make_network(1 if in_features is None else in_features, NormalInit(init_scale))
        self._knows_features = in_features is not None
        self._awaits_data = in_features is None or init == "data"
        self.has_updated = False
        self.apply_schedule(0)

    def _make_network(
        self, in_features: int, init: Initialiser, generator: torch.Generator | None = None
    ) -> KSMNetwork:
        hparams = self.hparams
        return KSMNetwork(
            self.kernel, in_features, hparams["num_neurons"], hparams["ridge"], init, hparams["solver"], generator
        )

    # ------------------------------------------------------------------ life of a run

    def configure_model(self) -> None:
        """Check the model against the data; at the first fit, make the network that waited for it.

        Raises:
            ValueError: If data and model do not fit, or the data needed is not there.
        """
        data = getattr(self.trainer, "datamodule", None)
        data = data if isinstance(data, KSMDataModule) else None
        if self._knows_features and data is not None and data.in_features != self.network.in_features:
            raise ValueError(
                f"The data has {data.in_features} features, but the model was made for in_features="
                f"{self.network.in_features}: set `in_features` to {data.in_features}, or leave it out."
            )
        if not self._awaits_data or (self._knows_features and self.trainer.state.fn != "fit"):
            return
        if data is None:
            raise ValueError(
                "Only a datamodule of ksm_lightning can tell the model its input size and starting points: "
                "give `in_features` and `init='normal'`, or use ArrayDataModule."
            )
        # A stream of its own from the seed of the run: how far the global one has come depends on the strategy.
        generator = torch.Generator().manual_seed(torch.initial_seed())
        init: Initialiser = NormalInit(self.hparams["init_scale"])
        if self.hparams["init"] == "data":
            init = DataInit(self._candidates(data, generator))
        self.network = self._make_network(data.in_features, init, generator)
        self.hparams["in_features"] = data.in_features
        self._knows_features, self._awaits_data = True, False
        self.apply_schedule(self.trainer.global_step)

    def _candidates(self, data: KSMDataModule, generator: torch.Generator) -> Tensor:
        points = data.train_points
        count = min(len(points), _CANDIDATES_PER_NEURON * int(self.hparams["num_neurons"]))
        return points.take(torch.randperm(len(points), generator=generator)[:count])

    def on_fit_start(self) -> None:
        """Refuse precisions that the update cannot have."""
        if self.trainer.precision not in ("32-true", "64-true"):
            raise ValueError(
                f"The update solves linear systems and needs full precision: set `precision` to 32-true or 64-true, "
                f"got {self.trainer.precision}."
            )

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
        """One SGD with the groups W, q and L, so that ``global_step`` counts updates."""
        network = self.network
        groups: list[dict[str, Any]] = [
            {"name": "W", "params": [network.W]},
            {"name": "q", "params": [network.q]},
            {"name": "L", "params": [network.L], "maximize": True},
        ]
        return torch.optim.SGD(groups, lr=0.0)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up the kernel parameters of the phase that the checkpoint was saved in."""
        self._awaits_data = False
        self.apply_schedule(int(checkpoint.get("global_step", 0)))

    def apply_schedule(self, update: int) -> dict[str, float]:
        """Set the kernel for the update with this number and return its rates by parameter."""
        phase = self.schedule.at(update)
        kernel = self.kernel.with_params(**phase.kernel_params) if phase.kernel_params else self.kernel
        if self.network.kernel.params() != kernel.params():
            self.network.kernel = kernel
        rates = phase.rates()
        if self.network.kernel.is_homogeneous:
            rates["q"] = 0.0
        return rates

    # ------------------------------------------------------------------ one update

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One update for each batch of a block, or for the one batch of another loader."""
        batches = batch.x if isinstance(batch, UpdateBlock) else inputs_of(batch)[None]
        self.network.check_input(batches[0])
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        log_every: int = getattr(self.trainer, "log_every_n_steps", 0)  # 0 in a barebones trainer
        update = self.global_step
        for x in batches[: max(0, self.schedule.total_updates - update)]:
            self._update(x, optimizer, update, is_logged=bool(log_every) and (update + 1) % log_every == 0)
            update += 1
        self.has_updated = True
        # Once a block, so that neither a checkpoint nor an evaluation ever sees what has diverged.
        self._check_finite()
        self.apply_schedule(update)
        if update >= self.schedule.total_updates:
            self.trainer.should_stop = True

    def _update(self, x: Tensor, optimizer: LightningOptimizer, update: int, *, is_logged: bool) -> None:
        """One update of W, q and L from one batch (batch, m), all from the same state."""
        rates = self.apply_schedule(update)
        network = self.network
        step = functional.hebbian_step(network.kernel, x, network.W, network.q, network.L, network.ridge)
        gradients = self._average_over_ranks(step.gradients)
        if is_logged:
            self._log_update(step, gradients, rates)
        network.W.grad = gradients.W / network.q.detach().square()[:, None]
        network.q.grad = gradients.q
        network.L.grad = gradients.L
        for group in optimizer.param_groups:
            group["lr"] = rates[group["name"]]
        optimizer.step()

    def _average_over_ranks(self, gradients: functional.Gradients) -> functional.Gradients:
        """The mean over all processes, in one reduction."""
        if self.trainer.world_size == 1:
            return gradients
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat = self.trainer.strategy.reduce(flat, reduce_op="mean")
        parts = flat.split([gradient.numel() for gradient in gradients])
        return functional.Gradients(*(part.view_as(old) for part, old in zip(parts, gradients, strict=True)))

    def _log_update(self, step: Step, gradients: functional.Gradients, rates: dict[str, float]) -> None:
        """Energy, rates and health; everything comes from what the update computed anyway."""
        network = self.network
        terms = functional.energy_terms(
            step.k, step.y, step.self_similarity, network.q.detach(), network.L.detach(), network.ridge, C=step.C
        )
        pivots = step.factor.diagonal()
        values = {f"energy/{name}": value for name, value in terms._asdict().items()}
        values |= {f"gradient_norm/{name}": value.norm() for name, value in gradients._asdict().items()}
        values["health/min_abs_q"] = network.q.detach().abs().min()
        # The ratio of squared pivots is a lower bound of the condition number that costs nothing.
        values["health/condition_L"] = (pivots.max() / pivots.min()).square()
        # One stack and one reduction instead of one for each of them.
        stacked = torch.stack([value.double() for value in (terms.total, *values.values())])
        if self.trainer.world_size > 1:
            stacked = self.trainer.strategy.reduce(stacked, reduce_op="mean")
        energy, *others = stacked.tolist()
        if not all(map(math.isfinite, (energy, *others))):
            named = zip(("energy", *values), (energy, *others), strict=True)
            self._raise_diverged([name for name, value in named if not math.isfinite(value)])
        self.log("train/energy", energy, prog_bar=True, logger=False)
        # At once, and counted in updates: a call of `self.log` for each would cost more than the update.
        logged = {"train/energy": energy, **dict(zip(values, others, strict=True))}
        logged |= {f"rate/{name}": rate for name, rate in rates.items()}
        for logger in self.loggers:
            logger.log_metrics(logged, step=self.global_step + 1)

    def _check_finite(self) -> None:
        parameters = dict(self.network.named_parameters())
        sums = torch.stack([p.detach().sum(dtype=torch.float64) for p in parameters.values()]).tolist()
        bad = [name for name, total in zip(parameters, sums, strict=True) if not math.isfinite(total)]
        if bad:
            self._raise_diverged(bad)

    def _raise_diverged(self, bad: list[str]) -> None:
        raise FloatingPointError(
            f"Training diverged at or before update {self.global_step}: {', '.join(bad)} not finite. Start W at data "
            "points (init=data) or at a smaller init_scale, or lower the rates of the first phase."
        )

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
        if not self._knows_features:
            raise ValueError("The model learns its input size in `fit`; give it `in_features` to use it before.")
        y: Tensor = self.network(x)
        return y

    def features(self, x: Tensor, block: int = 8192) -> Tensor:
        """Responses to any number of inputs (samples, m), a block at a time."""
        return torch.cat([self.forward(part) for part in torch.split(x, block)])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Responses to a block of points; logs their energy."""
        return self._evaluation_step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Responses to a block of points; logs their energy."""
        return self._evaluation_step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Responses to a block of points."""
        return self.forward(inputs_of(batch))

    def _evaluation_step(self, batch: Any, stage: str) -> Tensor:
        network = self.network
        x = inputs_of(batch)
        y = self.forward(x)
        with full_precision(x.device):
            terms = functional.energy_terms(
                network.kernel(x, network.W), y, network.kernel.diag(network.W), network.q, network.L, network.ridge
            )
        self.log(f"{stage}/energy", terms.total.to(y.dtype), batch_size=len(x), sync_dist=True)
        if self.trainer.state.fn == "fit":
            # The name that Lightning's loggers take for the x axis, which would count blocks of updates otherwise.
            self.log("step", float(self.global_step), batch_size=len(x))
        return y


def inputs_of(batch: Any) -> Tensor:
    """The inputs (batch, m) of a batch that is a tensor or starts with one; images are flattened.

    Raises:
        TypeError: If the batch is neither.
    """
    x = batch[0] if isinstance(batch, Sequence) and len(batch) else batch
    if not isinstance(x, Tensor):
        raise TypeError(f"A batch must be a tensor or a tuple that starts with one, got {type(batch).__name__}.")
    return x.flatten(1) if x.dim() > 2 else x
