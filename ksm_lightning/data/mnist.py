"""MNIST and Fashion-MNIST, cropped to the part of the image that holds the digit."""

import os
from pathlib import Path
from typing import Literal
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.data.datamodule import Dataset, KSMDataModule
from ksm_lightning.data.points import Standardisation

Name = Literal["mnist", "fashion_mnist"]
_FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
_TRAIN, _TEST, _SIDE = 60_000, 10_000, 28
_FILES = {
    "train-images-idx3-ubyte": (_TRAIN, _SIDE, _SIDE),
    "train-labels-idx1-ubyte": (_TRAIN,),
    "t10k-images-idx3-ubyte": (_TEST, _SIDE, _SIDE),
    "t10k-labels-idx1-ubyte": (_TEST,),
}


class CroppedMNISTDataModule(KSMDataModule):
    """MNIST with a border cropped away, divided by the standard deviation of all pixels that are left.

    The paper trains the representation on all 70,000 images, test images included, without their labels. Labels serve
    probes alone: 50,000 to train on, 10,000 to choose the penalty, the 10,000 test images to report.

    Args:
        dataset: ``mnist`` or ``fashion_mnist``.
        crop: Pixels cropped from each side of the 28x28 images; 4 leaves the paper's 20x20.
        include_test: Whether the representation trains on the test images too, as the paper's does.
        data_dir: Folder that holds ``MNIST/raw`` or ``FashionMNIST/raw``; the environment variable KSM_DATA_DIR, else a
            cache folder, unless given.
        download: Whether to download what is missing.
        batch_size: Points a batch, on each device.
        updates_per_epoch: Updates from one validation to the next; to the method itself an epoch means nothing.
        eval_batch_size: Points a block in validation, test and prediction.
        seed: Seed of the batches; the seed of the run (``seed_everything``) unless given. A checkpoint keeps it.

    Raises:
        ValueError: If ``dataset`` or ``crop`` is impossible.
    """

    label_names = tuple("0123456789")

    def __init__(
        self,
        dataset: Name = "mnist",
        crop: int = 4,
        include_test: bool = True,
        data_dir: str | None = None,
        download: bool = True,
        batch_size: int = 64,
        updates_per_epoch: int = 1000,
        eval_batch_size: int = 4096,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, updates_per_epoch, eval_batch_size, seed)
        if dataset not in _FOLDERS:
            raise ValueError(f"`dataset` must be 'mnist' or 'fashion_mnist', got {dataset!r}.")
        if not 0 <= crop <= 13:
            raise ValueError(f"`crop` must be between 0 and 13 pixels of the 28x28 images, got {crop}.")
        self.dataset = dataset
        self.crop = crop
        self.include_test = include_test
        self.data_dir = Path(data_dir or os.environ.get("KSM_DATA_DIR") or Path.home() / ".cache" / "ksm_lightning")
        self.download = download
        side = _SIDE - 2 * crop
        self.image_shape = (side, side)

    @property
    def raw_folder(self) -> Path:
        """Where the four files are."""
        return self.data_dir / _FOLDERS[self.dataset] / "raw"

    def prepare_data(self) -> None:
        """Download the files that are missing; one process does it for all.

        Raises:
            FileNotFoundError: If files are missing and cannot be, or must not be, downloaded.
        """
        missing = [name for name in _FILES if not (self.raw_folder / name).is_file()]
        if not missing:
            return
        advice = (
            f"put the files {', '.join(_FILES)} (unpacked) into {self.raw_folder}, or name the folder above "
            f"{_FOLDERS[self.dataset]}/raw with data_dir or KSM_DATA_DIR."
        )
        if not self.download:
            raise FileNotFoundError(f"{_FOLDERS[self.dataset]} lacks {', '.join(missing)}: {advice}")
        from torchvision import datasets  # here because it takes long to import

        try:
            getattr(datasets, _FOLDERS[self.dataset])(str(self.data_dir), download=True)
        except (RuntimeError, URLError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise FileNotFoundError(f"{_FOLDERS[self.dataset]} could not be downloaded ({reason}): {advice}") from error

    def load(self) -> tuple[Dataset, Dataset | None]:
        self.prepare_data()
        arrays = {name: read_idx(self.raw_folder / name, shape) for name, shape in _FILES.items()}
        train_images, train_labels, test_images, test_labels = arrays.values()
        # The scale is that of all images, whichever of them train, so that representations can be compared.
        x = self._flatten(np.concatenate([train_images, test_images]))
        labels = np.concatenate([train_labels, test_labels])
        test = Dataset(x[_TRAIN:], labels[_TRAIN:])
        self._scale = float(x.std(dtype=np.float64))
        return (Dataset(x, labels) if self.include_test else Dataset(x[:_TRAIN], labels[:_TRAIN])), test

    def _flatten(self, images: np.ndarray) -> np.ndarray:
        inside = slice(self.crop, _SIDE - self.crop)
        return np.ascontiguousarray(images[:, inside, inside]).reshape(len(images), -1)

    def standardise(self, x: np.ndarray) -> Standardisation:
        features = x.shape[1]
        return Standardisation(np.zeros(features), np.full(features, self._scale))

    def probe_indices(self) -> dict[str, Tensor]:
        """Digits 0 to 50,000 train a probe and the next 10,000 choose its penalty; test images are in the test set."""
        return {"train": torch.arange(50_000), "validation": torch.arange(50_000, _TRAIN)}


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes of a file in the idx format, which must have this shape.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged: no idx file, of another shape, or cut short.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no data file {path}.")
    content = path.read_bytes()
    header = 4 + 4 * len(shape)
    again = "delete it and let it be downloaded again"
    if len(content) < header or content[:4] != bytes([0, 0, 8, len(shape)]):
        raise ValueError(
            f"{path} is damaged: it does not start as an idx file of bytes in {len(shape)} dimensions; {again}."
        )
    found = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4))
    if found != shape:
        raise ValueError(f"{path} is damaged: its shape is {found} and should be {shape}; {again}.")
    size = header + int(np.prod(shape))
    if len(content) != size:
        raise ValueError(f"{path} is damaged: it has {len(content):,} bytes and should have {size:,}; {again}.")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)
