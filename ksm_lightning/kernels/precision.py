"""Full float32 precision for kernels and errors, independent of the global matmul setting."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Run a block with IEEE matrix products and without autocast on ``device``, then restore both settings.

    The expanded square computes a distance as a small difference of large numbers. TensorFloat-32 (10 bits),
    bfloat16 (8 bits) and float16 autocast are not precise enough for it. Kernels, updates and errors therefore
    ignore ``torch.set_float32_matmul_precision`` and autocast regions.

    Example:
        >>> torch.set_float32_matmul_precision("high")
        >>> with full_precision(torch.device("cpu")):
        ...     torch.backends.mkldnn.matmul.fp32_precision
        'ieee'
        >>> torch.get_float32_matmul_precision()
        'high'
        >>> torch.set_float32_matmul_precision("highest")
    """
    if device.type == "mps":
        raise ValueError(
            "Apple's GPU (MPS) has no float64, which kernels and linear systems need here: move the network and its "
            "data to the CPU with `.to('cpu')`, or train with accelerator='cpu'."
        )
    backend: Any = (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul
    before = backend.fp32_precision
    if before != "ieee":
        backend.fp32_precision = "ieee"
    try:
        is_autocast = torch.is_autocast_enabled(device.type)
        with torch.autocast(device.type, enabled=False) if is_autocast else nullcontext():
            yield
    finally:
        if before != "ieee":
            backend.fp32_precision = before
