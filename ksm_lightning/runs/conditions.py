"""The conditions under which a run learns, stored in its checkpoints: a resumed run must have the same data."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from ksm_lightning.data import KSMDataModule
from ksm_lightning.data.datamodule import datamodule_of
from ksm_lightning.data.fingerprint import Fingerprint
from ksm_lightning.runs.checkpoint import FORMAT, seal


@dataclass(frozen=True)
class TrainingConditions:
    """What an update depends on besides the model. Values about the data are None without a datamodule of this package.

    Args:
        data: Fingerprint of the raw training points.
        centre: Whether the mean of each feature is subtracted.
        scaling: How the points are scaled.
        batch_size: Number of points per batch in each process.
        processes: Number of processes that draw batches of their own; 1 if they share the neurons.
        precision: Precision of the trainer.
        seed: Seed of the process, which determines the start and, by default, the batches.
    """

    data: Fingerprint | None
    centre: bool | None
    scaling: str | None
    batch_size: int | None
    processes: int
    precision: str
    seed: int

    @classmethod
    def of(cls, trainer: L.Trainer, data: KSMDataModule | None = None) -> Self:
        """The conditions of a trainer, with its own datamodule by default; loads the data at the first access."""
        data = datamodule_of(trainer) if data is None else data
        return cls(
            data=None if data is None else data.fingerprint,
            centre=None if data is None else data.centre,
            scaling=None if data is None else data.scaling,
            batch_size=None if data is None else data.batch_size,
            processes=1 if getattr(trainer.lightning_module, "shares_neurons", False) else trainer.world_size,
            precision=str(trainer.precision),
            seed=torch.initial_seed(),
        )

    @property
    def global_batch(self) -> int | None:
        """Number of points of an update, on all processes."""
        return None if self.batch_size is None else self.batch_size * self.processes

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """Conditions from the result of :meth:`state`. Raises ValueError if it is incomplete or invalid."""
        names = {each.name for each in fields(cls)}
        if not isinstance(state, dict) or set(state) != names or not isinstance(state["seed"], int):
            raise ValueError("The conditions of the training are incomplete.")
        data = state["data"]
        if data is not None and (not isinstance(data, dict) or set(data) != {f.name for f in fields(Fingerprint)}):
            raise ValueError("The fingerprint of the training data is incomplete.")
        return cls(**{**state, "data": None if data is None else Fingerprint(**data)})

    def require_same_data(self, now: Self, path: str) -> None:
        """Raise ValueError if a run that continues ``path`` has other points, or scales them in another way."""
        if self.data is None or now.data is None:
            return
        if self.data != now.data:
            saved, found = (
                f"{each.num_points:,} points of {each.num_features} features" for each in (self.data, now.data)
            )
            difference = f"now it is {found}" if saved != found else "their values differ"
            raise ValueError(
                f"{path} was trained on other data ({saved}; {difference}): continue with the data of that run, or "
                "train a new network without the checkpoint."
            )
        for name in ("centre", "scaling"):
            saved, found = getattr(self, name), getattr(now, name)
            if saved != found:
                raise ValueError(
                    f"{path} was trained with {name}={saved} of the data, but {name} is {found}: set it to {saved} to "
                    "continue that run, or train a new network without the checkpoint."
                )

    def differences(self, now: Self) -> str:
        """What a resumed run may change, and has changed, in words; empty if it will make the same updates.

        How the points of an update are shared by processes makes no difference, except by rounding.
        """
        changed = []
        if self.global_batch != now.global_batch and None not in (self.global_batch, now.global_batch):
            changed.append(
                f"the points per update are {now.batch_size} x {now.processes} = {now.global_batch:,} and were "
                f"{self.batch_size} x {self.processes} = {self.global_batch:,} (batch_size x processes)"
            )
        if self.precision != now.precision:
            changed.append(f"precision is {now.precision} and was {self.precision}")
        return ", ".join(changed)


def conditions_of(content: dict[str, Any], path: str = "The checkpoint") -> TrainingConditions:
    """Under which conditions the run of a checkpoint learned."""
    try:
        return TrainingConditions.from_state(content["ksm_lightning"].get("training"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def add_section(
    content: dict[str, Any],
    trainer: L.Trainer,
    learner: dict[str, Any],
    run: dict[str, Any],
    preprocessing: dict[str, Any] | None,
    panels: dict[str, Any] | None = None,
) -> None:
    """Add what this package stores in a checkpoint, and seal it.

    ``preprocessing`` is for data from elsewhere, ``panels`` the index of weights in other files.
    """
    data = datamodule_of(trainer)
    content["ksm_lightning"] = {
        "format": FORMAT,
        "learner": learner,
        "run": run,
        "preprocessing": preprocessing if data is None else data.preprocessing.state(),
        "training": TrainingConditions.of(trainer).state(),
        **({} if panels is None else {"panels": panels}),
    }
    seal(content)


def check_continuation(content: dict[str, Any], trainer: L.Trainer | None) -> None:
    """Raise ValueError if a trainer that fits would continue a checkpoint on other data; warn of other differences."""
    if trainer is None or trainer.state.fn != "fit":
        return
    saved, now = conditions_of(content), TrainingConditions.of(trainer)
    saved.require_same_data(now, "The checkpoint")
    differences = saved.differences(now)
    if differences:
        rank_zero_warn(f"The run continues, but not with the updates that it would have made: {differences}.")
