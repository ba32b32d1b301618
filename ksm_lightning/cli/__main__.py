"""``python -m ksm_lightning.cli``, which torchrun needs."""

from ksm_lightning.cli import main

if __name__ == "__main__":
    main()
