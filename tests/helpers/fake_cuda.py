"""Tensors on a CUDA device that does not exist; the fixture ``fake_cuda`` of conftest.py makes them fake."""

import torch

CUDA = torch.device("cuda:0")


def on_cuda(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.empty(*shape, device=CUDA, dtype=dtype)
