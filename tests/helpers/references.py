"""Reference computations in float64: slow, with loops and scalar formulas."""

import math

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.network import functional


def kernel_value(name: str, params: dict[str, float], u: np.ndarray, v: np.ndarray) -> float:
    """``f(u, v)`` of two vectors by definition."""
    u, v = np.asarray(u, dtype=np.float64), np.asarray(v, dtype=np.float64)
    distance = math.sqrt(sum((a - b) ** 2 for a, b in zip(u, v, strict=True)))
    dot = sum(a * b for a, b in zip(u, v, strict=True))
    norm_u, norm_v = math.sqrt(sum(u * u)), math.sqrt(sum(v * v))
    cosine = dot / (norm_u * norm_v) if norm_u > 0 and norm_v > 0 else 0.0
    theta = math.acos(max(-1.0, min(1.0, cosine)))
    if name == "gaussian":
        return math.exp(-(distance**2) / (2 * params["sigma"] ** 2))
    if name == "laplacian":
        return math.exp(-distance / params["sigma"])
    if name == "cauchy":
        return 1 / (1 + (distance / params["sigma"]) ** 2)
    if name == "linear":
        return dot
    if name == "polynomial":
        return dot ** int(params["degree"])
    if name == "offset_polynomial":
        return (params["gamma"] * dot + params["coef0"]) ** int(params["power"])
    if name == "power_cosine":
        return norm_u * norm_v * cosine ** int(params["alpha"])
    if name == "arc_cosine" and params["order"] == 0:
        return (math.pi - theta) / math.pi
    if name == "arc_cosine":
        return norm_u * norm_v * (math.sin(theta) + (math.pi - theta) * math.cos(theta)) / math.pi
    raise NotImplementedError(name)


def gram(name: str, params: dict[str, float], u: Tensor, v: Tensor) -> Tensor:
    """The kernel matrix (n_u, n_v), one entry at a time."""
    rows = [[kernel_value(name, params, a.numpy(), b.numpy()) for b in v.double()] for a in u.double()]
    return torch.tensor(rows, dtype=torch.float64)


def energy(k: Tensor, y: Tensor, norms: Tensor, q: Tensor, L: Tensor, ridge: float) -> float:
    """The paper's energy, averaged over the samples one at a time."""
    k, y, norms, q, L = (t.detach().double().numpy() for t in (k, y, norms, q, L))
    total = 0.0
    for sample in range(len(y)):
        e = 0.0
        for i in range(len(q)):
            e -= q[i] * y[sample, i] * k[sample, i] - 0.5 * q[i] ** 2 * norms[i]
            e += 0.5 * ridge * y[sample, i] ** 2
            for j in range(len(q)):
                e += 0.5 * (L[i, j] * y[sample, i] * y[sample, j] - 0.5 * L[i, j] ** 2)
        total += e
    return total / len(y)


def differentiable_energy(kernel, x: Tensor, y: Tensor, W: Tensor, q: Tensor, L: Tensor, ridge: float) -> Tensor:
    """The energy for autograd, with y a constant and ``f(w_i, w_i)`` through both arguments."""
    k = kernel.gram(x, W)
    norms = torch.stack([kernel.gram(w[None], w[None])[0, 0] for w in W])
    if hasattr(kernel, "order"):  # arc-cosine: acos has an infinite slope at an angle of 0
        norms = (W * W).sum(1) ** kernel.order
    C = y.mT @ y / len(y)
    return (
        -(q * k * y).sum(1).mean()
        + 0.5 * (q * q * norms).sum()
        + 0.5 * (L * C).sum()
        - 0.25 * (L * L).sum()
        + 0.5 * ridge * (y * y).sum(1).mean()
    )


def self_similarity(kernel, w: Tensor) -> Tensor:
    """``f(w, w)`` of one vector for autograd, where the Gram matrix has no derivative at a distance or angle of 0."""
    if hasattr(kernel, "order"):
        return (w * w).sum() ** kernel.order
    return torch.ones((), dtype=w.dtype) if kernel.is_radial else kernel.gram(w[None], w[None])[0, 0]


def landmark_gram(kernel, W: Tensor) -> Tensor:
    """``f(W, W)`` (p, p) for autograd, one pair at a time."""

    def entry(i: int, j: int) -> Tensor:
        return self_similarity(kernel, W[i]) if i == j else kernel.gram(W[i : i + 1], W[j : j + 1])[0, 0]

    return torch.stack([torch.stack([entry(i, j) for j in range(len(W))]) for i in range(len(W))])


def tight_energy(kernel, x: Tensor, y: Tensor, W: Tensor, Q: Tensor, L: Tensor, ridge: float) -> Tensor:
    """The energy of the tight bound for autograd, with y a constant, one sample, neuron and landmark at a time."""
    n, p = Q.shape
    k, K = kernel.gram(x, W), landmark_gram(kernel, W)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(n):
        for j in range(p):
            for sample in range(len(x)):
                total = total - Q[i, j] * y[sample, i] * k[sample, j] / len(x)
            for other in range(p):
                total = total + 0.5 * Q[i, j] * Q[i, other] * K[j, other]
        for j in range(n):
            total = total + 0.5 * L[i, j] * (y[:, i] * y[:, j]).mean() - 0.25 * L[i, j] ** 2
        total = total + 0.5 * ridge * (y[:, i] ** 2).mean()
    return total


def limited_step(kernel, x: Tensor, W: Tensor, q: Tensor, L: Tensor, ridge: float, limit: float) -> functional.Step:
    """:func:`functional.hebbian_step` with responses cut to the length ``limit sqrt(f(x, x))``."""
    step = functional.hebbian_step(kernel, x, W, q, L, ridge)
    length, allowed = step.y.norm(dim=1, keepdim=True), limit * kernel.diag(x).sqrt()[:, None]
    y = torch.where(length > allowed, step.y * allowed / length, step.y)
    C, pullback = y.mT @ y / len(y), kernel.value_and_pullback(x, W)[1]
    gradients = functional.Gradients(
        functional.gradient_W(q, y, pullback, kernel.diag_gradient(W)),
        functional.gradient_q(q, step.k, y, step.self_similarity),
        functional.gradient_L(C, L),
    )
    return step._replace(gradients=gradients, y=y, C=C)


def nrmse(F: Tensor, y: Tensor) -> float:
    """``||F - Y Y^T|| / ||F||`` of full matrices."""
    F, y = F.double(), y.double()
    return float(torch.linalg.norm(F - y @ y.mT) / torch.linalg.norm(F))


def splitmix_index(seed: int, update: int, slot: int, count: int) -> int:
    """One index drawn by the update loader, computed with Python integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    state = mix(seed + golden & mask) + (update * 2**24 + slot) * golden & mask
    return (mix(state) & (2**63 - 1)) % count


def principal_subspace(rng: torch.Generator) -> tuple[Tensor, float]:
    """Points (60, 4) and the error of the best rank-2 approximation of their linear kernel, that of PCA."""
    scales = torch.tensor([3.0, 2.0, 0.5, 0.2], dtype=torch.float64)
    x = torch.randn(60, 4, generator=rng, dtype=torch.float64) * scales
    values = torch.linalg.svdvals(x)
    return x, float((values[2:] ** 4).sum().sqrt() / (values**4).sum().sqrt())
