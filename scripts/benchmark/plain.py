"""The reference of the benchmarks: a direct PyTorch implementation of the paper's algorithm."""

from collections.abc import Callable

import torch
from torch import Tensor

RIDGE = 1e-3


def gaussian(x: Tensor, w: Tensor) -> Tensor:
    """``exp(-|x - w|^2 / (2 sigma^2))`` with the paper's sigma for half moons."""
    return torch.exp(-(torch.cdist(x, w) ** 2) / (2 * 0.3**2))


def power_cosine(x: Tensor, w: Tensor) -> Tensor:
    """``|x| |w| cos(x, w)^3``."""
    x_length, w_length = x.norm(dim=1, keepdim=True), w.norm(dim=1, keepdim=True)
    return x_length * w_length.T * ((x / x_length) @ (w / w_length).T) ** 3


def train(
    x: Tensor, W: Tensor, kernel: Callable[[Tensor, Tensor], Tensor], updates: int, eta_w: float, eta_q: float,
    eta_l: float, batch: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """W, q and L after ``updates`` updates, with autograd for the gradients and ``inverse()`` for the responses."""
    n = len(W)
    W = W.clone().requires_grad_()
    q = torch.ones(n, requires_grad=True)
    L = torch.eye(n, requires_grad=True)
    for _ in range(updates):
        sample = x[torch.randperm(len(x))[:batch]]
        k = kernel(sample, W)
        own = (W * W).sum(1) if kernel is power_cosine else torch.ones(n)  # f(w, w)
        with torch.no_grad():
            y = (q * k) @ torch.inverse(L + RIDGE * torch.eye(n))
        energy = (
            -(q * k * y).sum(1).mean()
            + 0.5 * (q**2 * own).sum()
            + 0.5 * (L * (y.T @ y / batch) - 0.5 * L**2).sum()
            + 0.5 * RIDGE * (y**2).sum(1).mean()
        )
        gradient_W, gradient_q, gradient_L = torch.autograd.grad(energy, (W, q, L))
        with torch.no_grad():
            W -= eta_w * gradient_W / q[:, None] ** 2
            q -= eta_q * gradient_q
            L += eta_l * gradient_L
    return W.detach(), q.detach(), L.detach()
