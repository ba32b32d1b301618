"""MNIST and Fashion-MNIST with the border of the images cropped."""

import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.data.datamodule import Dataset, KSMDataModule
from ksm_lightning.files import draft_path, draft_tag, stale_drafts
from ksm_lightning.network.preprocessing import Preprocessing

Name = Literal["mnist", "fashion_mnist"]
_FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
_TRAIN, _TEST, _SIDE = 60_000, 10_000, 28
_FILES = {
    "train-images-idx3-ubyte": (_TRAIN, _SIDE, _SIDE),
    "train-labels-idx1-ubyte": (_TRAIN,),
    "t10k-images-idx3-ubyte": (_TEST, _SIDE, _SIDE),
    "t10k-labels-idx1-ubyte": (_TEST,),
}
# Seconds that a process waits for the download of the first one of its machine.
_PATIENCE = 1800.0


class CroppedMNISTDataModule(KSMDataModule):
    """MNIST with cropped borders, divided by the standard deviation of all remaining pixels.

    The paper trains the representation on all 70,000 images, including the test images, without labels. Only probes
    use labels: 50,000 images to train, 10,000 to choose the penalty, and the 10,000 test images to report.

    Args:
        dataset: ``mnist`` or ``fashion_mnist``.
        crop: Number of pixels cropped from each side of the 28x28 images; 4 gives the paper's 20x20.
        include_test: Whether to train the representation on the test images too, as in the paper.
        data_dir: Folder with ``MNIST/raw`` or ``FashionMNIST/raw``. Default: the environment variable KSM_DATA_DIR, or
            ``~/.cache/ksm_lightning`` if that is not set.
        download: Whether to download missing files. Of several processes on a machine, the first one does.
        kwargs: Arguments of :class:`KSMDataModule`.
    """

    label_names = tuple("0123456789")

    def __init__(
        self,
        dataset: Name = "mnist",
        crop: int = 4,
        include_test: bool = True,
        data_dir: str | None = None,
        download: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if dataset not in _FOLDERS:
            raise ValueError(f"`dataset` must be 'mnist' or 'fashion_mnist', got {dataset!r}.")
        if not 0 <= crop <= 13:
            raise ValueError(f"`crop` must be between 0 and 13 pixels of the 28x28 images, got {crop}.")
        self.dataset = dataset
        self.crop = crop
        self.include_test = include_test
        self.data_dir = Path(data_dir or os.environ.get("KSM_DATA_DIR") or Path.home() / ".cache" / "ksm_lightning")
        self.download = download
        self.image_shape = (_SIDE - 2 * crop, _SIDE - 2 * crop)

    @property
    def raw_folder(self) -> Path:
        """Folder of the four files."""
        return self.data_dir / _FOLDERS[self.dataset] / "raw"

    def prepare_data(self) -> None:
        """Download missing files. Only the first process of a machine downloads, the others wait for its files.

        Lightning calls this in one process per machine, but everything that reads the data calls it, too.
        """
        if not (missing := self._missing()):
            return
        name = _FOLDERS[self.dataset]
        advice = (
            f"put the unpacked files {', '.join(_FILES)} into {self.raw_folder}, or set data_dir or KSM_DATA_DIR to "
            f"the folder that contains {name}/raw."
        )
        if not self.download:
            raise FileNotFoundError(f"{name} lacks {', '.join(missing)}: {advice}")
        if local_rank() > 0:
            started = time.monotonic()
            while self._missing():
                if time.monotonic() - started > _PATIENCE:
                    raise FileNotFoundError(
                        f"{name} was not downloaded by the process with local rank 0 within {_PATIENCE:g} s: {advice}"
                    )
                time.sleep(1)
            return
        try:
            self._fetch()
        except (RuntimeError, URLError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise FileNotFoundError(f"{name} could not be downloaded ({reason}): {advice}") from error

    def _missing(self) -> list[str]:
        return [name for name in _FILES if not (self.raw_folder / name).is_file()]

    def _fetch(self) -> None:
        """Download into a folder of this process, then rename: no other process ever sees part of a file."""
        from torchvision import datasets  # a slow import that is rarely needed

        self.raw_folder.mkdir(parents=True, exist_ok=True)
        for left in stale_drafts(self.raw_folder):
            shutil.rmtree(left, ignore_errors=True)
        draft = draft_path(self.raw_folder, draft_tag())
        try:
            fetched = Path(getattr(datasets, _FOLDERS[self.dataset])(str(draft), download=True).raw_folder)
            for name in self._missing():
                os.replace(fetched / name, self.raw_folder / name)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def load(self) -> tuple[Dataset, Dataset | None]:
        self.prepare_data()
        arrays = [read_idx(self.raw_folder / name, shape) for name, shape in _FILES.items()]
        images, labels = np.concatenate(arrays[::2]), np.concatenate(arrays[1::2])
        inside = slice(self.crop, _SIDE - self.crop)
        x = np.ascontiguousarray(images[:, inside, inside]).reshape(len(images), -1)
        # The scale is measured on all images even if only some are used in training, to keep results comparable.
        self._scale = float(x.std(dtype=np.float64))
        count = len(x) if self.include_test else _TRAIN
        return Dataset(x[:count], labels[:count]), Dataset(x[_TRAIN:], labels[_TRAIN:])

    def standardise(self, x: np.ndarray) -> Preprocessing:
        scale = torch.full((x.shape[1],), self._scale, dtype=torch.float64)
        return Preprocessing(torch.zeros_like(scale), scale, self.image_shape, self.crop)

    def probe_indices(self) -> dict[str, Tensor]:
        """The first 50,000 training images train a probe and the other 10,000 select its penalty."""
        return {"train": torch.arange(50_000), "validation": torch.arange(50_000, _TRAIN)}


def local_rank() -> int:
    """Number of this process among those that torchrun, Lightning or SLURM started on this machine; 0 if alone."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Array of bytes from a file in the idx format. Raises ValueError if it is damaged or has another shape."""
    content = path.read_bytes()
    header = 4 + 4 * len(shape)
    advice = "delete it to download it again"
    if len(content) < header or content[:4] != bytes([0, 0, 8, len(shape)]):
        raise ValueError(
            f"{path} is damaged: it does not start as an idx file of bytes in {len(shape)} dimensions; {advice}."
        )
    found = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4))
    if found != shape:
        raise ValueError(f"{path} is damaged: its shape is {found} and should be {shape}; {advice}.")
    size = header + int(np.prod(shape))
    if len(content) != size:
        raise ValueError(f"{path} is damaged: it has {len(content):,} bytes and should have {size:,}; {advice}.")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)
