"""The divergence guard: stops a run that diverges, or returns it to its last checkpoint with smaller steps."""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ksm_lightning.data.loaders import batches_of
from ksm_lightning.kernels.limits import NUMBERS_AT_ONCE, UPDATES_AT_ONCE
from ksm_lightning.learning import Observation, Rates, Snapshot
from ksm_lightning.learning.collectives import checksums
from ksm_lightning.module import KernelSimilarityMatching

OnDivergence = Literal["stop", "rollback"]

# Part of the weights' length by which the checksums of two processes with the same weights may differ.
_SAME = 1e-3


class _Block(NamedTuple):
    """Updates that were not checked yet."""

    batches: Tensor  # (updates, batch, m)
    energy: Tensor | None  # of the last batch, before its update; None if the block was left early


class DivergenceGuard(Callback):
    """Stops a run that diverges, or returns it to its last checkpoint and halves the step sizes.

    The guard checks once per block of updates, so single updates cost nothing: the sums of W, q and L, which are not
    finite if any value is not, and the energy. To find what went wrong first, and at which update, it repeats the
    updates of the block from a copy of its start. All processes see the same numbers and act alike; a run whose
    processes no longer have the same weights is stopped. No checkpoint is written of an unchecked state.

    Args:
        on_divergence: ``stop`` ends the run with an error and keeps the last good checkpoint; ``rollback`` restores W,
            q and L from that checkpoint (or from the start of the run), halves all step sizes and continues. The update
            count is not reset.
        energy_limit: The energy of a batch has run away when its size is this many times larger than at the start and
            than the batch's mean of ``f(x, x)^2``, which bounds it at a solution.
        max_rollbacks: Number of rollbacks after which the run is stopped.
    """

    def __init__(
        self, on_divergence: OnDivergence = "stop", energy_limit: float = 100.0, max_rollbacks: int = 10
    ) -> None:
        if on_divergence not in ("stop", "rollback"):
            raise ValueError(f"`on_divergence` must be 'stop' or 'rollback', got {on_divergence!r}.")
        if not energy_limit > 1 or max_rollbacks < 1:
            raise ValueError(
                "`energy_limit` must be above 1 and `max_rollbacks` at least 1, got "
                f"{energy_limit} and {max_rollbacks}."
            )
        self.on_divergence = on_divergence
        self.energy_limit = energy_limit
        self.max_rollbacks = max_rollbacks
        self.rollbacks = 0
        self._scale: float | None = None
        self._good: Snapshot | None = None
        self._before: Snapshot | None = None
        self._pending: list[_Block] = []
        self._first_update = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(pl_module, KernelSimilarityMatching) and stage == "fit":
            self._reset(pl_module)
            self.rollbacks = 0
            pl_module.run_state.is_guarded = True

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._reset(pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._reset(pl_module)

    def _reset(self, pl_module: L.LightningModule) -> None:
        if isinstance(pl_module, KernelSimilarityMatching):
            pl_module.run_state.is_guarded = False
        self._scale = self._good = self._before = None
        self._pending = []

    def state_dict(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "scale": self._scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rollbacks = int(state_dict["rollbacks"])
        self._scale = state_dict["scale"]

    # ------------------------------------------------------------------ when to check

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, KernelSimilarityMatching) or self._pending:
            return
        self._before, self._first_update = pl_module.learner.snapshot(), trainer.global_step
        if self._good is None:
            self._good = self._before
        if self._scale is None:
            energy = pl_module.network.energy_of(batches_of(batch)[0].to(pl_module.network.W))
            self._scale = abs(float(pl_module.learner.collectives.mean(energy)))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, KernelSimilarityMatching):
            return
        self._pending.append(_Block(batches_of(batch), outputs.get("energy")))
        updates = sum(len(block.batches) for block in self._pending)
        numbers = sum(block.batches.numel() for block in self._pending)
        # Other loaders bring one batch at a time. They are checked together, as many as fit into one of our blocks.
        if updates >= UPDATES_AT_ONCE or 2 * numbers > NUMBERS_AT_ONCE or len(self._pending[-1].batches) > 1:
            self._check(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._check(trainer, pl_module)
        if isinstance(pl_module, KernelSimilarityMatching):
            self._good = pl_module.learner.snapshot()

    # ------------------------------------------------------------------ checking

    def _check(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        """Check the updates since the last time, with one host synchronisation; act if something is wrong."""
        if not self._pending or not isinstance(model, KernelSimilarityMatching):
            return
        blocks, self._pending = self._pending, []
        last = blocks[-1]
        health = model.learner.health()
        energy = torch.zeros_like(health[0]) if last.energy is None else last.energy
        values, collectives = [*health, energy, self._typical(model, last.batches[-1])], model.learner.collectives
        own = torch.cat([torch.stack(values), checksums(model.network.parameters())])
        rows = collectives.gather(own[None]).tolist()  # one per process
        *sums, size, typical = (sum(column) / len(rows) for column in list(zip(*rows, strict=True))[: len(values)])
        if not all(map(math.isfinite, (*sums, size))) or self._has_run_away(size, typical):
            self._act(trainer, model, *self._find(trainer, model, blocks))
            return
        different = _differing(dict(model.network.named_parameters()), [row[len(values) :] for row in rows])
        if different:
            kept = _last_good(trainer)
            raise RuntimeError(
                f"The processes have different weights after update {trainer.global_step:,} ({', '.join(different)}), "
                f"although all of them make the same updates.{kept} {'Continue from it' if kept else 'Train again'} on "
                "devices of one kind."
            )

    def _typical(self, model: KernelSimilarityMatching, x: Tensor) -> Tensor:
        """The mean of ``f(x, x)^2`` over a batch, which bounds the size of its energy at a solution."""
        return model.network.kernel.diag(x.to(model.network.W)).double().square().mean()

    def _has_run_away(self, energy: float, typical: float) -> bool:
        first = 0.0 if self._scale is None or not math.isfinite(self._scale) else self._scale
        return abs(energy) > self.energy_limit * max(first, typical)

    def _find(self, trainer: L.Trainer, model: KernelSimilarityMatching, blocks: list[_Block]) -> tuple[str, int]:
        """What went wrong first, and at which update (counted from 1), found by repeating the updates."""
        assert self._before is not None
        learner = model.learner
        learner.restore(self._before)
        found: list[tuple[str, int]] = []
        first, end = self._first_update, trainer.global_step

        def look(update: int, seen: Observation, rates: Rates) -> None:
            what = self._what_is_wrong(model, batch, seen)
            found.extend([(what, update + 1)] if what else [])

        for update, batch in enumerate((batch for block in blocks for batch in block.batches), start=first):
            if update == end:
                break  # a block may have been left early
            learner.learn(
                batch[None], update, sample=model.points_for_idle_landmarks, observe=lambda update: True,
                on_observation=look,
            )  # fmt: skip
            if found:
                return found[0]
        return "the weights became non-finite", end

    def _what_is_wrong(self, model: KernelSimilarityMatching, x: Tensor, seen: Observation) -> str | None:
        *parameters, factorised = model.learner.health()
        values = {
            "the inputs x": x.sum(dtype=torch.float64),
            "the similarities f(x, W)": seen.k.sum(dtype=torch.float64),
            "the factorisation of L + ridge I": factorised,
            "the responses y": seen.y.sum(dtype=torch.float64),
            "the energy": seen.energy.total,
            **dict(zip(dict(model.network.named_parameters()), parameters, strict=True)),
        }
        stacked = torch.stack([*values.values(), self._typical(model, x)])
        *sums, typical = model.learner.collectives.mean(stacked).tolist()
        totals = dict(zip(values, sums, strict=True))
        for name, total in totals.items():
            if not math.isfinite(total):
                return f"{name} {'failed' if 'factorisation' in name else 'became non-finite'}"
        energy = totals["the energy"]
        return f"the energy ran away (to {energy:.2g})" if self._has_run_away(energy, typical) else None

    # ------------------------------------------------------------------ acting

    def _act(self, trainer: L.Trainer, model: KernelSimilarityMatching, what: str, update: int) -> None:
        assert self._good is not None
        model.learner.restore(self._good)
        sentence = f"Training diverged at update {update:,}: {what}"
        if self.on_divergence == "rollback" and self.rollbacks < self.max_rollbacks:
            self.rollbacks += 1
            model.learner.halve_rates()
            factor = model.learner.rate_factor
            rank_zero_warn(
                f"{sentence}; continuing from the last good weights with all rates multiplied by {factor:g}."
            )
            if trainer.global_step >= model.schedule.total_updates:
                model.finish()
            return
        kept = _last_good(trainer)
        advice = "Leave out `phases` for the adaptive schedule, lower the rates"
        if model.schedule.is_natural:
            advice = "Look for outliers in the data"
        raise FloatingPointError(f"{sentence}.{kept} {advice}, or choose on_divergence=rollback.")


def _last_good(trainer: L.Trainer) -> str:
    """A sentence about the last checkpoint; empty if there is none."""
    paths = [getattr(callback, "last_path", None) for callback in trainer.checkpoint_callbacks]
    return next((f" The last good checkpoint is {path}." for path in paths if path), "")


def _differing(names: Iterable[str], rows: list[list[float]]) -> list[str]:
    """Names of parameters whose checksums, a sum and a length for each in every row, differ by more than rounding."""
    found = []
    for index, name in enumerate(names):
        sums, lengths = ([row[2 * index + which] for row in rows] for which in (0, 1))
        if max(max(sums) - min(sums), max(lengths) - min(lengths)) > _SAME * max(lengths):
            found.append(name)
    return found
