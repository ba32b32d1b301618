"""Half moons, small built-in digits, a user's own arrays, and the device-resident batch source."""

from ksm_lightning.data.array import ArrayDataModule
from ksm_lightning.data.builtin import DigitsDataModule, HalfMoonsDataModule
from ksm_lightning.data.datamodule import Dataset, KSMDataModule
from ksm_lightning.data.loaders import PointLoader, UpdateBlock, UpdateLoader, draw_indices
from ksm_lightning.data.mnist import CroppedMNISTDataModule
from ksm_lightning.data.points import Points, Standardisation

__all__ = [
    "ArrayDataModule",
    "CroppedMNISTDataModule",
    "Dataset",
    "DigitsDataModule",
    "HalfMoonsDataModule",
    "KSMDataModule",
    "PointLoader",
    "Points",
    "Standardisation",
    "UpdateBlock",
    "UpdateLoader",
    "draw_indices",
]
