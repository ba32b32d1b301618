"""Full float32 precision for kernels and errors, whatever the global matmul setting says."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Run a block with IEEE matrix products and without autocast on ``device``, then restore both.

    A squared distance by the expanded square is a small difference of large numbers: the 10 bits of
    TensorFloat-32, the 8 bits of bfloat16 or a float16 autocast would leave nothing of it. Kernels, updates
    and errors therefore never follow ``torch.set_float32_matmul_precision`` or an autocast region.

    Example:
        >>> torch.set_float32_matmul_precision("high")
        >>> with full_precision(torch.device("cpu")):
        ...     torch.backends.mkldnn.matmul.fp32_precision
        'ieee'
        >>> torch.get_float32_matmul_precision()
        'high'
        >>> torch.set_float32_matmul_precision("highest")
    """
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    backend = backend.matmul
    before = backend.fp32_precision
    if before != "ieee":
        backend.fp32_precision = "ieee"
    try:
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield
    finally:
        if before != "ieee":
            backend.fp32_precision = before
