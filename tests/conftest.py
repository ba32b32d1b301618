"""What the tests share."""

import logging
import os
from pathlib import Path

import pytest
import torch

from ksm_lightning.kernels import Kernel, make_kernel

# LightningCLI calls methods that jsonargparse is about to rename.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

ROOT = Path(__file__).resolve().parent.parent

# Every built-in kernel, with parameters that matter.
KERNELS = [
    ("gaussian", {"sigma": 0.7}),
    ("laplacian", {"sigma": 0.7}),
    ("cauchy", {"sigma": 0.7}),
    ("linear", {}),
    ("polynomial", {"degree": 2}),
    ("polynomial", {"degree": 3}),
    ("power_cosine", {"alpha": 1}),
    ("power_cosine", {"alpha": 2}),
    ("power_cosine", {"alpha": 3}),
    ("arc_cosine", {"order": 0}),
    ("arc_cosine", {"order": 1}),
]


def pytest_collection_modifyitems(items):
    """What needs MNIST says so, and is skipped where the files are not."""
    if (Path(os.environ.get("KSM_DATA_DIR", "/nowhere")) / "MNIST" / "raw").is_dir():
        return
    for item in items:
        if item.get_closest_marker("mnist"):
            item.add_marker(pytest.mark.skip(reason="set KSM_DATA_DIR to a folder with MNIST/raw to run it"))


@pytest.fixture(params=KERNELS, ids=lambda spec: "-".join([spec[0], *map(str, spec[1].values())]))
def spec(request) -> tuple[str, dict[str, float]]:
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
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(1)
