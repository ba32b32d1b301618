"""Built-in data that needs no file: half moons and scikit-learn's small digits."""

from typing import Any

import numpy as np

from ksm_lightning.data.datamodule import Dataset, KSMDataModule


class HalfMoonsDataModule(KSMDataModule):
    """Two interleaved noisy half circles in the plane with the mean removed; test points are a second draw.

    Args:
        num_points: Number of training points, and of test points, at least 2. The paper uses 1,600.
        noise: Standard deviation of the noise.
        data_seed: Seed of the points.
        kwargs: Arguments of :class:`KSMDataModule`.
    """

    centre = True
    label_names = ("upper", "lower")

    def __init__(self, num_points: int = 1600, noise: float = 0.1, data_seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_points < 2:
            raise ValueError(f"`num_points` must be at least 2, one for each moon, got {num_points}.")
        if not 0 <= noise < float("inf"):
            raise ValueError(f"`noise` must be finite and not negative, got {noise}.")
        self.num_points = num_points
        self.noise = noise
        self.data_seed = data_seed

    def load(self) -> tuple[Dataset, Dataset]:
        from sklearn.datasets import make_moons  # a slow import that most processes do not need

        # Both draws continue one random stream, so that the test points differ from the training points of any seed.
        random = np.random.RandomState(self.data_seed)
        train, test = (make_moons(self.num_points, noise=self.noise, random_state=random) for _ in range(2))
        return Dataset(*train), Dataset(*test)


class DigitsDataModule(KSMDataModule):
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, divided by the standard deviation of all pixels.

    Args:
        test_fraction: Fraction of the digits used for testing, between 0.01 and 0.99, stratified by class.
        data_seed: Seed of the split.
        kwargs: Arguments of :class:`KSMDataModule`.
    """

    scaling = "global"
    image_shape = (8, 8)
    label_names = tuple("0123456789")

    def __init__(self, test_fraction: float = 0.2, data_seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
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
