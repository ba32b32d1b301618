"""The device of the commands without a Trainer."""

import torch


def find_device(name: str) -> str:
    """The device for an option; ``auto`` is cuda if available, otherwise the CPU."""
    if name.startswith("mps"):
        raise ValueError(f"Apple's GPU (MPS) has no float64: remove --device={name}, or use cpu.")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"No CUDA device is available for --device={name}: remove the option, or use cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
