"""Divergence noticed at once: the run stops, or goes back to its last checkpoint with smaller steps."""

import math
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ksm_lightning.data.loaders import NUMBERS_AT_ONCE, UPDATES_AT_ONCE
from ksm_lightning.module import KernelSimilarityMatching, Snapshot, batches_of

OnDivergence = Literal["stop", "rollback"]


class DivergenceGuard(Callback):
    """Stops a run that diverges, or takes it back to its last checkpoint and halves the steps.

    The host looks once a block of updates: at the sums of W, q and L, which no non-finite value escapes, and at the
    energy. Single updates cost nothing. What went wrong first, and at which update, is found out afterwards, by making
    the updates of the block again from a copy of its start, one by one. All processes see the same numbers and so come
    to the same end. No checkpoint is written of a state that was not looked at.

    Args:
        on_divergence: ``stop`` ends the run with an error, the last good checkpoint kept; ``rollback`` takes W, q and L
            from that checkpoint (or from the start of the run), halves all rates and goes on; updates are counted on.
        energy_limit: The energy of a batch has run away when it is so many times larger, in size, than what it was at
            first and than the batch's mean of ``f(x, x)^2``, which bounds it at a solution.
        max_rollbacks: After so many the run is stopped.

    Raises:
        ValueError: If a value is impossible.
    """

    def __init__(
        self, on_divergence: OnDivergence = "stop", energy_limit: float = 100.0, max_rollbacks: int = 10
    ) -> None:
        if on_divergence not in ("stop", "rollback"):
            raise ValueError(f"`on_divergence` must be 'stop' or 'rollback', got {on_divergence!r}.")
        if not energy_limit > 1 or max_rollbacks < 1:
            raise ValueError(
                "A guard needs an `energy_limit` above 1 and `max_rollbacks` of at least 1, got "
                f"{energy_limit} and {max_rollbacks}."
            )
        self.on_divergence = on_divergence
        self.energy_limit = energy_limit
        self.max_rollbacks = max_rollbacks
        self.rollbacks = 0
        self._scale: float | None = None
        self._good: Snapshot | None = None
        self._before: Snapshot | None = None
        self._pending: list[Tensor] = []
        self._first = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(pl_module, KernelSimilarityMatching) and stage == "fit":
            self._forget(pl_module)
            self.rollbacks = 0
            pl_module.is_guarded = True

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._forget(pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._forget(pl_module)

    def _forget(self, pl_module: L.LightningModule) -> None:
        if isinstance(pl_module, KernelSimilarityMatching):
            pl_module.is_guarded = False
        self._scale = self._good = self._before = None
        self._pending = []

    def state_dict(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "scale": self._scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rollbacks = int(state_dict["rollbacks"])
        self._scale = state_dict["scale"]

    # ------------------------------------------------------------------ looking

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, KernelSimilarityMatching) or self._pending:
            return
        pl_module.begin(batch)
        self._before, self._first = pl_module.snapshot(), trainer.global_step
        if self._good is None:
            self._good = self._before
        if self._scale is None:
            energy = pl_module.energy_of(batches_of(batch)[0].to(pl_module.network.W))
            self._scale = abs(float(pl_module.over_ranks(energy, "mean")))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, KernelSimilarityMatching):
            return
        self._pending.append(batches_of(batch))
        updates = sum(len(batches) for batches in self._pending)
        numbers = sum(batches.numel() for batches in self._pending)
        # Another loader's batches come one at a time: they are looked at together, as many as a block of ours has.
        if updates >= UPDATES_AT_ONCE or 2 * numbers > NUMBERS_AT_ONCE or len(self._pending[-1]) > 1:
            self._look(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._look(trainer, pl_module)
        if isinstance(pl_module, KernelSimilarityMatching):
            self._good = pl_module.snapshot()

    def _look(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        """Ask the device once about the updates since the last time; act if something is wrong."""
        if not self._pending or not isinstance(model, KernelSimilarityMatching):
            return
        batches, self._pending = self._pending, []
        assert model.energy is not None
        seen = torch.stack([*model.health(), model.energy, self._typical(model, batches[-1][-1])])
        *finite, energy, bound = model.over_ranks(seen, "mean").tolist()
        if all(map(math.isfinite, (*finite, energy))) and not self._has_run_away(energy, bound):
            return
        self._act(trainer, model, *self._find(trainer, model, batches))

    def _typical(self, model: KernelSimilarityMatching, x: Tensor) -> Tensor:
        """The mean of ``f(x, x)^2`` over a batch, which the size of its energy does not exceed at a solution."""
        return model.network.kernel.diag(x.to(model.network.W)).double().square().mean()

    def _has_run_away(self, energy: float, typical: float) -> bool:
        first = 0.0 if self._scale is None or not math.isfinite(self._scale) else self._scale
        return abs(energy) > self.energy_limit * max(first, typical)

    # ------------------------------------------------------------------ acting

    def _find(self, trainer: L.Trainer, model: KernelSimilarityMatching, batches: list[Tensor]) -> tuple[str, int]:
        """What went wrong first, and at which update (counted from 1), by making the updates again one by one."""
        assert self._before is not None
        model.restore(self._before)
        update, end = self._first, trainer.global_step
        for block, place in [(one, place) for one in batches for place in range(len(one))]:
            if update == end:  # a block may have been left early
                break
            with model.updater.block(block):
                seen = model.make_update(place, block, update, observe=True)
            assert seen is not None
            update += 1
            *parameters, factorised = model.health()
            values = {
                "the inputs x": block[place].sum(dtype=torch.float64),
                "the similarities f(x, W)": seen.k.sum(dtype=torch.float64),
                "the factorisation of L + ridge I": factorised,
                "the responses y": seen.y.sum(dtype=torch.float64),
                "the energy": seen.energy.total,
                **dict(zip("WqL", parameters, strict=True)),
            }
            typical = self._typical(model, block[place])
            *sums, bound = model.over_ranks(torch.stack([*values.values(), typical]), "mean").tolist()
            for name, total in zip(values, sums, strict=True):
                if not math.isfinite(total):
                    return f"{name} {'failed' if 'factorisation' in name else 'became non-finite'}", update
            energy_now = sums[list(values).index("the energy")]
            if self._has_run_away(energy_now, bound):
                return f"the energy ran away (to {energy_now:.2g})", update
        return "the weights became non-finite", update

    def _act(self, trainer: L.Trainer, model: KernelSimilarityMatching, what: str, update: int) -> None:
        assert self._good is not None
        model.restore(self._good)
        sentence = f"Training diverged at update {update:,}: {what}"
        if self.on_divergence == "rollback" and self.rollbacks < self.max_rollbacks:
            self.rollbacks += 1
            model.rate_factor /= 2
            rank_zero_warn(
                f"{sentence}; going on from the last good weights with {model.rate_factor:g} times the rates."
            )
            if trainer.global_step >= model.schedule.total_updates:
                model.finish()
            return
        paths = [getattr(callback, "last_path", None) for callback in trainer.checkpoint_callbacks]
        kept = next((f" The last good checkpoint is {path}." for path in paths if path), "")
        advice = "Leave out `phases` for the adaptive schedule, lower the rates"
        if model.schedule.is_natural:
            advice = "Look for outliers in the data"
        raise FloatingPointError(f"{sentence}.{kept} {advice}, or choose on_divergence=rollback.")
