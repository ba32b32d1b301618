"""``python -m ksm_lightning.cli``, for torchrun."""

from ksm_lightning.cli import main

if __name__ == "__main__":
    main()
