"""What the datamodules share: device-resident batches for training, blocks in order for everything else."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from ksm_lightning.data.loaders import MAX_SLOTS, PointLoader, UpdateLoader, draw_indices
from ksm_lightning.data.points import Points, Standardisation, check_points
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.network.readout import READOUT_SAMPLE

_MOST_PROBED = 100_000


@dataclass(frozen=True)
class Dataset:
    """What a datamodule loads: rows (samples, m) with labels (samples,) where there are any."""

    x: np.ndarray
    labels: np.ndarray | None = None


class KSMDataModule(L.LightningDataModule):
    """Base of the datamodules: a subclass says what to load and how to standardise it.

    Training batches are drawn independently each update from tensors on the device, as a function of (seed, rank,
    update); validation walks over the training points, test and predict over the test points where there are any.

    Args:
        batch_size: Points a batch, on each device.
        updates_per_epoch: Updates from one validation to the next; to the method itself an epoch means nothing.
        eval_batch_size: Points a block in validation, test and prediction.
        seed: Seed of the batches; the seed of the run (``seed_everything``) unless given. A checkpoint keeps it.

    Raises:
        ValueError: If a size is below 1.
    """

    image_shape: tuple[int, int] | None = None
    """Height and width of a point, where points are images."""
    crop: int = 0
    """Pixels cropped from each side of raw images before they become points."""
    label_names: tuple[str, ...] | None = None
    """Names of the labels, where they have some."""

    def __init__(
        self,
        batch_size: int = 64,
        updates_per_epoch: int = 1000,
        eval_batch_size: int = 4096,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "updates_per_epoch": updates_per_epoch, "eval_batch_size": eval_batch_size}
        for name, size in sizes.items():
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
        self.standardisation: Standardisation | None = None
        self._given: Preprocessing | None = None

    @abstractmethod
    def load(self) -> tuple[Dataset, Dataset | None]:
        """Training data and, where there is some, test data."""

    def standardise(self, x: np.ndarray) -> Standardisation | None:
        """Centring and scaling as measured on the training data ``x``; none unless a subclass has one."""
        return None

    def setup(self, stage: str | None = None) -> None:
        """Load and check the data; once, whatever the stage.

        Raises:
            ValueError: If the data cannot be trained on.
        """
        if self._train is not None:
            return
        train, test = self.load()
        name = type(self).__name__
        check_points(train.x, f"The training data of {name}")
        self.standardisation = self.standardise(train.x)
        if self._given is not None:
            self._check_given(self._given, train.x.shape[1])
            self.standardisation = Standardisation(self._given.mean.numpy(), self._given.scale.numpy())
        if test is not None:
            check_points(test.x, f"The test data of {name}")
            if test.x.shape[1] != train.x.shape[1]:
                raise ValueError(
                    f"The test data has {test.x.shape[1]} features and the training data {train.x.shape[1]}."
                )
            self._test, self.test_labels = self._points(test)
        self._train, self.train_labels = self._points(train)

    def use(self, preprocessing: Preprocessing) -> None:
        """Centre and scale as a trained network's data was, whatever this data's own mean and scale are.

        Raises:
            RuntimeError: If the data has been loaded already.
        """
        if self._train is not None:
            raise RuntimeError("The data is loaded already: say what to use before `setup`.")
        self._given = preprocessing

    def _check_given(self, given: Preprocessing, features: int) -> None:
        if given.in_features != features:
            raise ValueError(
                f"The data has {features} features, but the network was trained on points of {given.in_features}: use "
                "the data that it was trained on, or data like it."
            )

    @property
    def preprocessing(self) -> Preprocessing:
        """What makes points of raw input; loads the data if need be."""
        features = self.in_features
        if self._given is not None:
            return Preprocessing.from_state(self._given.state())
        done = self.standardisation or Standardisation(np.zeros(features), np.ones(features))
        return Preprocessing.from_state(
            {
                "mean": torch.tensor(done.mean),
                "scale": torch.tensor(done.scale),
                "image_shape": self.image_shape,
                "crop": self.crop,
            }
        )

    def _points(self, data: Dataset) -> tuple[Points, Tensor | None]:
        labels = None
        if data.labels is not None:
            if data.labels.shape != (len(data.x),):
                raise ValueError(f"There are {len(data.x)} points but labels of shape {data.labels.shape}.")
            labels = torch.tensor(np.asarray(data.labels, dtype=np.int64))
        if isinstance(data.x, np.memmap):
            return Points(data.x, self.standardisation), labels
        x = self.standardisation(data.x) if self.standardisation is not None else np.asarray(data.x, dtype=np.float32)
        return Points(torch.tensor(x)), labels

    @property
    def train_points(self) -> Points:
        """The standardised training points; loads them if need be."""
        self.setup()
        assert self._train is not None
        return self._train

    @property
    def test_points(self) -> Points | None:
        """The standardised test points, if there are any; loads them if need be."""
        self.setup()
        return self._test

    @property
    def in_features(self) -> int:
        """Features of a point."""
        return self.train_points.num_features

    def batch_seed(self) -> int:
        """The seed of the batches, fixed the first time it is asked for."""
        if self.seed is None:
            self.seed = torch.initial_seed() % 2**63
        return self.seed

    def sample(self, update: int, count: int) -> Tensor:
        """Up to ``count`` different training points (samples, m), on the device, as a function of (seed, update).

        They are drawn from places of the global batch that no process uses, independently of the batches.
        """
        points = self._on_device(self.train_points)
        if count >= len(points):
            return points.slice(0, len(points))
        slots = torch.arange(MAX_SLOTS - count, MAX_SLOTS, device=points.device)
        drawn = draw_indices(self.batch_seed(), torch.tensor([update], device=points.device), slots, len(points))
        return points.take(torch.unique(drawn))

    def readout_sample(self, readout: str) -> Tensor | None:
        """The training points that a readout is fitted to: always the same ones; None where it is not fitted."""
        return self.sample(0, READOUT_SAMPLE) if readout == "least_squares" else None

    def train_dataloader(self) -> UpdateLoader:
        """A source of batches that continues at the trainer's update count."""
        trainer = self.trainer
        if trainer is None:
            return UpdateLoader(self.train_points, self.batch_size, self.updates_per_epoch, seed=self.batch_seed())
        # Whatever a callback does every so many updates, it does it between two blocks.
        # That goes for Lightning's ModelCheckpoint too, which keeps its number to itself.
        every = [
            getattr(callback, name, 0)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            for name in ("every_n_updates", "_every_n_train_steps")
        ]
        return UpdateLoader(
            self._on_device(self.train_points),
            self.batch_size,
            self.updates_per_epoch,
            seed=self.batch_seed(),
            rank=trainer.global_rank,
            next_update=lambda: trainer.global_step,
            last_update=trainer.max_steps if trainer.max_steps >= 0 else None,
            stops=[updates for updates in every if updates],
        )

    def val_dataloader(self) -> PointLoader:
        """The training points in order: the approximation error is defined on them."""
        return self._blocks(self.train_points, self.train_labels)

    def test_dataloader(self) -> PointLoader:
        """The test points in order; the training points where there are none."""
        if self.test_points is None:
            return self.val_dataloader()
        return self._blocks(self.test_points, self.test_labels)

    def predict_dataloader(self) -> PointLoader:
        """The same points as for test."""
        return self.test_dataloader()

    def evaluation_points(self, stage: str) -> Points:
        """The points that are scored, on the device: the test points in ``test``, if there are any, else training's."""
        is_test = stage == "test" and self.test_points is not None
        return self._on_device(self.test_points if is_test and self.test_points is not None else self.train_points)

    def evaluation_labels(self, stage: str) -> Tensor | None:
        """Labels of :meth:`evaluation_points`, if there are any."""
        return self.test_labels if stage == "test" and self.test_points is not None else self.train_labels

    def probe_indices(self) -> dict[str, Tensor]:
        """Which training points train a probe and which select its penalty: four fifths and the rest, at random."""
        order = torch.randperm(len(self.train_points), generator=torch.Generator().manual_seed(0))
        if not isinstance(self.train_points.data, Tensor):
            order = order[:_MOST_PROBED]  # the points are in a file because they do not fit
        count = len(order)
        return {"train": order[: count * 4 // 5], "validation": order[count * 4 // 5 :]}

    def probe_sets(self) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Inputs and labels to ``train`` a probe, for ``validation`` of its penalty and to ``test`` it; on the device.

        The test set is that of validation where the data has no test points; None without labels.
        """
        points = self._on_device(self.train_points)
        if self.train_labels is None:
            return None
        sets = {
            name: (points.take(chosen.to(points.device)), self.train_labels[chosen])
            for name, chosen in self.probe_indices().items()
        }
        sets["test"] = sets["validation"]
        if self.test_points is not None and self.test_labels is not None:
            test = self._on_device(self.test_points)
            sets["test"] = (test.slice(0, len(test)), self.test_labels)
        return sets

    def _blocks(self, points: Points, labels: Tensor | None) -> PointLoader:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return PointLoader(self._on_device(points), labels, self.eval_batch_size, rank=rank, world_size=world_size)

    def _on_device(self, points: Points) -> Points:
        return points.to(self.trainer.strategy.root_device) if self.trainer else points

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know: the seed of the batches."""
        return {"seed": self.batch_seed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the batches of the run that was saved.

        Raises:
            ValueError: If another seed was asked for.
        """
        saved = int(state_dict["seed"])
        if self.seed not in (None, saved):
            raise ValueError(
                f"The run to continue draws its batches with seed {saved}, but {self.seed} was asked for: leave the "
                "seed of the data out."
            )
        self.seed = saved
