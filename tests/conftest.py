"""Fixtures, and the rule that skips the tests of MNIST where its files are missing."""

import logging
import os
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.fake_cuda import CUDA
from helpers.kernels import KERNELS
from helpers.mnist_files import SHAPES, TEST, TRAIN, arrays, idx
from ksm_lightning.kernels import Kernel, make_kernel
from ksm_lightning.learning import native

# LightningCLI calls methods that jsonargparse has deprecated.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

# What a short training computes must not depend on what is compiled already on this machine.
native.PATIENCE = 0

collect_ignore = ["helpers/crash_points.py"]  # a program of its own, which imports from scripts/stress


def pytest_collection_modifyitems(items):
    """Skip the tests marked ``mnist`` if the files are missing."""
    if (Path(os.environ.get("KSM_DATA_DIR", "/nowhere")) / "MNIST" / "raw").is_dir():
        return
    for item in items:
        if item.get_closest_marker("mnist"):
            item.add_marker(pytest.mark.skip(reason="set KSM_DATA_DIR to a folder with MNIST/raw to run it"))


@pytest.fixture(params=KERNELS, ids=lambda spec: "-".join([spec[0], *map(str, spec[1].values())]))
def spec(request) -> tuple[str, dict[str, float]]:
    """Name and parameters of each built-in kernel in turn."""
    return request.param


@pytest.fixture
def kernel(spec) -> Kernel:
    return make_kernel(spec[0], **spec[1])


@pytest.fixture(autouse=True)
def _fixed_randomness():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _quiet_lightning():
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch) -> None:
    """The working folder is the test's temporary folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.fixture
def fake_cuda():
    """Fake tensors, which have a device but no data: mixing devices or synchronising with the host raises an error."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        try:
            torch.zeros(3, device=CUDA)[0].add_(torch.tensor(1, device=CUDA))
            torch.arange(3, device=CUDA)[:, None] * 2
        except RuntimeError as error:
            if "CUDA error" in str(error):
                pytest.skip(f"the fake CUDA tensors of torch {torch.__version__} need a driver")
            raise
        yield mode


@pytest.fixture
def small_mnist(tmp_path, monkeypatch) -> Path:
    """A folder with MNIST and Fashion-MNIST of 60 training and 20 test images, in torchvision's layout."""
    from ksm_lightning.data import mnist  # not above: it imports Lightning, which most fixtures do not need

    monkeypatch.setattr(mnist, "_FILES", SHAPES)
    monkeypatch.setattr(mnist, "_TRAIN", TRAIN)
    monkeypatch.setattr(mnist, "_TEST", TEST)
    for folder in ("MNIST", "FashionMNIST"):
        raw = tmp_path / folder / "raw"
        raw.mkdir(parents=True)
        for name, array in arrays().items():
            (raw / name).write_bytes(idx(array))
    return tmp_path
