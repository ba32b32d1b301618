"""Kernel similarity matching with Hebbian neural networks, in PyTorch Lightning."""
