"""Data that needs no file: half moons and scikit-learn's small digits."""

import numpy as np

from ksm_lightning.data.datamodule import Dataset, KSMDataModule
from ksm_lightning.data.points import Standardisation


class HalfMoonsDataModule(KSMDataModule):
    """Two interleaved noisy half circles in the plane, mean removed; test points are a fresh draw.

    Args:
        num_points: Training points; the paper has 1,600.
        noise: Standard deviation of the noise.
        data_seed: Seed of the points themselves.
        batch_size: Points a batch, on each device.
        updates_per_epoch: Updates from one validation to the next; to the method itself an epoch means nothing.
        eval_batch_size: Points a block in validation, test and prediction.
        seed: Seed of the batches; the seed of the run (``seed_everything``) unless given. A checkpoint keeps it.

    Raises:
        ValueError: If there are fewer than 2 points, or the noise is negative.
    """

    label_names = ("upper", "lower")

    def __init__(
        self,
        num_points: int = 1600,
        noise: float = 0.1,
        data_seed: int = 0,
        batch_size: int = 64,
        updates_per_epoch: int = 1000,
        eval_batch_size: int = 4096,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, updates_per_epoch, eval_batch_size, seed)
        if num_points < 2:
            raise ValueError(f"`num_points` must be at least 2, one for each moon, got {num_points}.")
        if not 0 <= noise < float("inf"):
            raise ValueError(f"`noise` must be finite and not negative, got {noise}.")
        self.num_points = num_points
        self.noise = noise
        self.data_seed = data_seed

    def load(self) -> tuple[Dataset, Dataset]:
        from sklearn.datasets import make_moons  # here because it takes longer to import than to use

        # One stream of randomness, so that no choice of data_seed makes test points of training points.
        random = np.random.RandomState(self.data_seed)
        train = Dataset(*make_moons(self.num_points, noise=self.noise, random_state=random))
        test = Dataset(*make_moons(self.num_points, noise=self.noise, random_state=random))
        return train, test

    def standardise(self, x: np.ndarray) -> Standardisation:
        return Standardisation.measure(x, centre=True, scaling="none")


class DigitsDataModule(KSMDataModule):
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, divided by the standard deviation of all pixels.

    Args:
        test_fraction: Share of the digits that is kept for testing, drawn evenly over the classes.
        data_seed: Seed of that split.
        batch_size: Points a batch, on each device.
        updates_per_epoch: Updates from one validation to the next; to the method itself an epoch means nothing.
        eval_batch_size: Points a block in validation, test and prediction.
        seed: Seed of the batches; the seed of the run (``seed_everything``) unless given. A checkpoint keeps it.

    Raises:
        ValueError: If ``test_fraction`` leaves a class without a digit on one side.
    """

    image_shape = (8, 8)
    label_names = tuple("0123456789")

    def __init__(
        self,
        test_fraction: float = 0.2,
        data_seed: int = 0,
        batch_size: int = 64,
        updates_per_epoch: int = 1000,
        eval_batch_size: int = 4096,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, updates_per_epoch, eval_batch_size, seed)
        if not 0.01 <= test_fraction <= 0.99:
            raise ValueError(f"`test_fraction` must be between 0.01 and 0.99, got {test_fraction}.")
        self.test_fraction = test_fraction
        self.data_seed = data_seed

    def load(self) -> tuple[Dataset, Dataset]:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, labels = load_digits(return_X_y=True)
        x_train, x_test, train_labels, test_labels = train_test_split(
            x, labels, test_size=self.test_fraction, random_state=self.data_seed, stratify=labels
        )
        return Dataset(x_train, train_labels), Dataset(x_test, test_labels)

    def standardise(self, x: np.ndarray) -> Standardisation:
        return Standardisation.measure(x, centre=False, scaling="global")
