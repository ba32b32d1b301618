"""Where the commands without a Trainer compute."""

import torch


def find_device(name: str) -> str:
    """The device that an option names; ``auto`` is cuda where there is one, and else the CPU.

    Raises:
        ValueError: If it is a CUDA device, and there is none.

    Example:
        >>> find_device("cpu")
        'cpu'
    """
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"There is no CUDA device here for --device={name}: leave it out, or say cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
