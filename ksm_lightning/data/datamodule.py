"""Base class of the datamodules: random batches for training, all points in order for everything else."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from torch import Tensor

from ksm_lightning.data.fingerprint import Fingerprint
from ksm_lightning.data.loaders import (
    MAX_SLOTS,
    PointLoader,
    UpdateLoader,
    draw_indices,
    inputs_of,
)
from ksm_lightning.data.points import Points, check_points
from ksm_lightning.network.preprocessing import Preprocessing, Scaling
from ksm_lightning.network.readout import READOUT_SAMPLE
from ksm_lightning.private_apis import checkpoint_interval

# Points that a probe uses of data that may not fit into memory.
_MAX_PROBE_POINTS = 100_000


@dataclass(frozen=True)
class Dataset:
    """Loaded data: rows (samples, m), and labels (samples,) or None."""

    x: np.ndarray
    labels: np.ndarray | None = None


class KSMDataModule(L.LightningDataModule, ABC):
    """Base class of the datamodules. A subclass defines :meth:`load` and sets the class attributes below.

    Training batches are drawn independently for each update from points on the device, as a function of (seed, rank,
    update). Validation uses the training points. Test and prediction use the test points, or the training points if
    the data has no test points.

    Args:
        batch_size: Number of points per batch on each device. ``auto`` chooses it at the start of the first fit, see
            :mod:`ksm_lightning.learning.batch_choice`; until then it is 64.
        updates_per_epoch: Number of updates between two validations; epochs have no other meaning.
        eval_batch_size: Number of points per batch in validation, test and prediction.
        seed: Seed of the batches, stored in checkpoints. Default: the seed of the run (``seed_everything``).
    """

    # Arguments of `Preprocessing.measure`.
    centre: bool = False
    scaling: Scaling = "none"
    image_shape: tuple[int, int] | None = None
    crop: int = 0
    label_names: tuple[str, ...] | None = None  # names of the labels 0, 1, ...

    def __init__(
        self,
        batch_size: int | Literal["auto"] = 64,
        updates_per_epoch: int = 1000,
        eval_batch_size: int = 4096,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.chooses_batch_size = batch_size == "auto"
        batch_size = 64 if batch_size == "auto" else batch_size
        sizes = {"batch_size": batch_size, "updates_per_epoch": updates_per_epoch, "eval_batch_size": eval_batch_size}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool):
                words = " or 'auto'" if name == "batch_size" else ""
                raise ValueError(f"`{name}` must be a whole number{words}, got {size!r}.")
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1, got {size}.")
        self.batch_size = batch_size
        self.updates_per_epoch = updates_per_epoch
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self._train: Points | None = None
        self._test: Points | None = None
        self.train_labels: Tensor | None = None
        self.test_labels: Tensor | None = None
        self._preprocessing: Preprocessing | None = None
        self._fingerprint: Fingerprint | None = None

    @abstractmethod
    def load(self) -> tuple[Dataset, Dataset | None]:
        """Training data, and test data or None; defined by each subclass."""

    def standardise(self, x: np.ndarray) -> Preprocessing:
        """Preprocessing for the training data ``x``; by default measured as ``centre`` and ``scaling`` say."""
        return Preprocessing.measure(
            x, centre=self.centre, scaling=self.scaling, image_shape=self.image_shape, crop=self.crop
        )

    def setup(self, stage: str | None = None) -> None:
        """Load, check and preprocess the data; only the first call has an effect."""
        if self._train is not None:
            return
        train, test = self.load()
        check_points(train.x, f"The training data of {type(self).__name__}")
        num_features = train.x.shape[1]
        if test is not None:
            check_points(test.x, f"The test data of {type(self).__name__}")
            if test.x.shape[1] != num_features:
                raise ValueError(f"The test data has {test.x.shape[1]} features and the training data {num_features}.")
        preprocessing = self.standardise(train.x) if self._preprocessing is None else self._preprocessing
        if preprocessing.in_features != num_features:
            raise ValueError(
                f"The data has {num_features} features, but the preprocessing is for {preprocessing.in_features}: use "
                "data like that the network was trained on."
            )
        self._fingerprint = Fingerprint.of(train.x)
        # The state is a copy on the CPU; reading it back checks the values.
        self._preprocessing = Preprocessing.from_state(preprocessing.state())
        if test is not None:
            self._test, self.test_labels = self._points(test, self._preprocessing)
        self._train, self.train_labels = self._points(train, self._preprocessing)

    def use_batch_size(self, batch_size: int) -> None:
        """Use this batch size from now on; ``auto`` chooses none."""
        self.batch_size, self.chooses_batch_size = batch_size, False

    def use(self, preprocessing: Preprocessing) -> None:
        """Apply the preprocessing of a trained network instead of one measured on this data; call it before setup."""
        if self._train is not None:
            raise RuntimeError("The data has already been loaded: call `use` before `setup`.")
        self._preprocessing = preprocessing

    @property
    def preprocessing(self) -> Preprocessing:
        """A copy of the preprocessing that makes points of raw input; loads the data at the first access."""
        self.setup()
        assert self._preprocessing is not None
        return self._preprocessing.copy_to("cpu")

    @property
    def fingerprint(self) -> Fingerprint:
        """Size and hash of the raw training points; loads the data at the first access."""
        self.setup()
        assert self._fingerprint is not None
        return self._fingerprint

    def _points(self, data: Dataset, preprocessing: Preprocessing) -> tuple[Points, Tensor | None]:
        labels = None
        if data.labels is not None:
            if data.labels.shape != (len(data.x),):
                raise ValueError(f"The data has {len(data.x)} points but labels of shape {data.labels.shape}.")
            labels = torch.tensor(np.asarray(data.labels, dtype=np.int64))
        if isinstance(data.x, np.memmap):
            return Points(data.x, preprocessing), labels
        return Points(torch.tensor(preprocessing.transform(data.x))), labels

    @property
    def train_points(self) -> Points:
        """The preprocessed training points; loads the data at the first access."""
        self.setup()
        assert self._train is not None
        return self._train

    @property
    def test_points(self) -> Points | None:
        """The preprocessed test points or None; loads the data at the first access."""
        self.setup()
        return self._test

    @property
    def in_features(self) -> int:
        """Number of features of a point."""
        return self.train_points.num_features

    def batch_seed(self) -> int:
        """Seed of the batches; without ``seed``, the first call fixes it to PyTorch's initial seed."""
        if self.seed is None:
            self.seed = torch.initial_seed() % 2**63
        return self.seed

    def random_points(self, count: int, generator: torch.Generator) -> Tensor:
        """Up to ``count`` different training points (samples, m), on the device; ``generator`` is on the CPU."""
        points = self._on_device(self.train_points)
        return points.take(torch.randperm(len(points), generator=generator)[:count].to(points.device))

    def sample(self, update: int, count: int) -> Tensor:
        """Up to ``count`` different training points (samples, m) on the device, as a function of (seed, update).

        The draw uses positions of the global batch that no rank uses, so it is independent of the batches.
        """
        points = self._on_device(self.train_points)
        if count >= len(points):
            return points.slice(0, len(points))
        slots = torch.arange(MAX_SLOTS - count, MAX_SLOTS, device=points.device)
        drawn = draw_indices(self.batch_seed(), torch.tensor([update], device=points.device), slots, len(points))
        return points.take(torch.unique(drawn))

    def readout_sample(self, readout: str) -> Tensor | None:
        """Training points that a readout may be fitted to, the same at every call; None for the neural readout."""
        return None if readout == "neural" else self.sample(0, READOUT_SAMPLE)

    def train_dataloader(self) -> UpdateLoader:
        """Random batches that continue at the trainer's number of updates."""
        trainer = self.trainer
        if trainer is None:
            return UpdateLoader(self.train_points, self.batch_size, self.updates_per_epoch, seed=self.batch_seed())
        # Callbacks act between two blocks, so a block must end at every update at which one of them acts.
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        intervals = [getattr(callback, "every_n_updates", 0) for callback in callbacks]
        intervals += [checkpoint_interval(callback) for callback in callbacks]
        return UpdateLoader(
            self._on_device(self.train_points),
            self.batch_size,
            self.updates_per_epoch,
            seed=self.batch_seed(),
            rank=self._part[0],
            next_update=lambda: trainer.global_step,
            last_update=trainer.max_steps if trainer.max_steps >= 0 else None,
            stops=[interval for interval in intervals if interval],
            ends_at_milestones=bool(trainer.loggers),  # they get the bound and the kernel error there
        )

    def val_dataloader(self) -> PointLoader:
        """The training points in order: the approximation error is defined on them."""
        return self._point_loader("val")

    def test_dataloader(self) -> PointLoader:
        """The test points in order, or the training points if the data has no test points."""
        return self._point_loader("test")

    def predict_dataloader(self) -> PointLoader:
        """The same points as in test."""
        return self.test_dataloader()

    def evaluation_points(self, stage: str) -> Points:
        """The points to evaluate on, on the device: test points in the stage ``test``, if any; or training points."""
        test = self.test_points if stage == "test" else None
        return self._on_device(self.train_points if test is None else test)

    def evaluation_labels(self, stage: str) -> Tensor | None:
        """Labels of :meth:`evaluation_points`, or None."""
        return self.test_labels if stage == "test" and self.test_points is not None else self.train_labels

    def probe_indices(self) -> dict[str, Tensor]:
        """A random split of the training points: 80 % to train a probe, 20 % to select its penalty."""
        order = torch.randperm(len(self.train_points), generator=torch.Generator().manual_seed(0))
        if not isinstance(self.train_points.data, Tensor):
            order = order[:_MAX_PROBE_POINTS]
        count = len(order)
        return {"train": order[: count * 4 // 5], "validation": order[count * 4 // 5 :]}

    def probe_sets(self) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Inputs, on the device, and labels to ``train`` a probe, for ``validation`` of its penalty and to ``test`` it.

        Without labelled test points, the test set is the validation set. None without labels.
        """
        points = self._on_device(self.train_points)
        if self.train_labels is None:
            return None
        sets = {
            name: (points.take(indices.to(points.device)), self.train_labels[indices])
            for name, indices in self.probe_indices().items()
        }
        sets["test"] = sets["validation"]
        if self.test_points is not None and self.test_labels is not None:
            test = self._on_device(self.test_points)
            sets["test"] = (test.slice(0, len(test)), self.test_labels)
        return sets

    def _point_loader(self, stage: str) -> PointLoader:
        points, labels = self.evaluation_points(stage), self.evaluation_labels(stage)
        rank, world_size = self._part
        return PointLoader(points, labels, self.eval_batch_size, rank=rank, world_size=world_size)

    @property
    def _part(self) -> tuple[int, int]:
        """Which part of the points this process has, and of how many. Processes that share neurons see all points."""
        trainer = self.trainer
        if trainer is None or getattr(trainer.lightning_module, "shares_neurons", False):
            return 0, 1
        return trainer.global_rank, trainer.world_size

    def _on_device(self, points: Points) -> Points:
        return points.to(self.trainer.strategy.root_device) if self.trainer else points

    def state_dict(self) -> dict[str, Any]:
        """The seed of the batches, for checkpoints."""
        return {"seed": self.batch_seed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the batches of the saved run."""
        saved = int(state_dict["seed"])
        if self.seed not in (None, saved):
            raise ValueError(
                f"The saved run draws its batches with seed {saved}, but `seed` is {self.seed}: leave `seed` of the "
                "data unset."
            )
        self.seed = saved


def datamodule_of(trainer: L.Trainer) -> KSMDataModule | None:
    """The trainer's datamodule, if it is one of this package."""
    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, KSMDataModule) else None


def training_inputs(trainer: L.Trainer) -> Iterator[Tensor]:
    """This process's share of the training inputs, one block (samples, m) at a time, on the device."""
    data = datamodule_of(trainer)
    loader = trainer.train_dataloader if data is None else data.val_dataloader()
    assert loader is not None
    for block in loader:
        yield inputs_of(trainer.strategy.batch_to_device(block))
