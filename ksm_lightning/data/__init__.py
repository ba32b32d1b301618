"""Datamodules (half moons, digits, cropped MNIST, your own arrays, tables and datasets), points and loaders."""

from ksm_lightning.data.array import ArrayDataModule
from ksm_lightning.data.builtin import DigitsDataModule, HalfMoonsDataModule
from ksm_lightning.data.datamodule import Dataset, KSMDataModule
from ksm_lightning.data.dataset import DatasetDataModule
from ksm_lightning.data.loaders import PointLoader, UpdateBlock, UpdateLoader, batches_of, draw_indices, inputs_of
from ksm_lightning.data.mnist import CroppedMNISTDataModule
from ksm_lightning.data.points import Points

__all__ = [
    "ArrayDataModule", "CroppedMNISTDataModule", "Dataset", "DatasetDataModule", "DigitsDataModule",
    "HalfMoonsDataModule", "KSMDataModule", "PointLoader", "Points", "UpdateBlock", "UpdateLoader", "batches_of",
    "draw_indices", "inputs_of",
]  # fmt: skip
