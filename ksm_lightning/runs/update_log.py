"""What is logged about updates: each of them to the loggers, and the mean energy of the epoch to the callbacks."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ksm_lightning.learning import Observation, Rates
from ksm_lightning.learning.collectives import Collectives
from ksm_lightning.runs import metric_names as names


class UpdateLog:
    """Logs observed updates, and averages their energy over the epoch.

    Observed are the updates that are logged, every ``log_every_n_steps``, and the last one of each block, so every
    epoch has at least one. The energy of a single batch is too noisy for early stopping.
    """

    def __init__(self) -> None:
        self.energy: Tensor | None = None  # of the last observed batch of the block on this process
        self.logged: list[tuple[int, float]] = []  # updates of the block, counted from 1, and their energies
        self._to_log: set[int] = set()
        self._last = -1
        self._seen: list[tuple[int, Rates, Tensor]] = []  # observed updates of the block: number, rates, values
        self._names: list[str] = []  # of these values
        self._sums: Tensor | None = None  # energies of the epoch, and their number

    def start_block(self, updates: range, log_every: int) -> None:
        """Choose the updates of a block to observe; ``log_every`` is 0 if nothing is logged."""
        self.energy, self.logged, self._seen, self._last = None, [], [], updates[-1] if updates else -1
        self._to_log = {update for update in updates if log_every and (update + 1) % log_every == 0}

    def observes(self, update: int) -> bool:
        """Whether an update of the block is observed."""
        return update == self._last or update in self._to_log

    def add(self, update: int, seen: Observation, rates: Rates) -> None:
        """Note an observed update, without a host synchronisation and without the other processes."""
        self.energy = seen.energy.total
        values = names.of_update(seen)
        self._names = list(values)
        self._seen.append((update, rates, torch.stack([value.double() for value in values.values()])))

    def end_block(self, collectives: Collectives, loggers: Iterable[Any]) -> None:
        """Count the observed updates of the block, and log those that are due. Every process must call it."""
        if not self._seen:
            return
        reduced = collectives.mean(torch.stack([values for *_, values in self._seen]))  # one reduction for all
        self._count(reduced[:, self._names.index(names.TRAIN_ENERGY)])
        if self._to_log:
            for (update, rates, _), values in zip(self._seen, reduced.tolist(), strict=True):
                # A value that is not finite is reported by the divergence guard.
                if update in self._to_log and all(map(math.isfinite, values)):
                    self._log(update, rates, dict(zip(self._names, values, strict=True)), loggers)
        self._seen = []

    def _log(self, update: int, rates: Rates, means: dict[str, float], loggers: Iterable[Any]) -> None:
        # Directly to the loggers: one call of `self.log` per value would take longer than the update.
        for logger in loggers:
            logger.log_metrics(means | {names.rate(name): rate for name, rate in rates._asdict().items()}, update + 1)
        self.logged.append((update + 1, means[names.TRAIN_ENERGY]))

    def _count(self, energies: Tensor) -> None:
        """Add to the mean of the epoch without a host synchronisation; values that are not finite are left out."""
        is_finite = energies.isfinite()
        added = torch.stack([torch.where(is_finite, energies, 0.0).sum(), is_finite.to(energies).sum()])
        self._sums = added if self._sums is None else self._sums.to(added) + added

    def start_epoch(self) -> None:
        """Forget the energies of the epoch before."""
        self._sums = None

    def epoch_energy(self) -> float | None:
        """Mean energy of the updates that the epoch has observed so far, over all processes; None without any."""
        total, count = (0.0, 0.0) if self._sums is None else self._sums.tolist()
        return total / count if count else None

    def state(self) -> list[float]:
        """Sum and number of the energies of the epoch, for a checkpoint."""
        return [0.0, 0.0] if self._sums is None else list(self._sums.tolist())

    def load_state(self, state: list[float]) -> None:
        """Continue the epoch of :meth:`state`."""
        self._sums = torch.tensor(state, dtype=torch.float64)
