"""The commands of ``ksm`` that need no Trainer, each a function whose signature and docstring are its options."""
