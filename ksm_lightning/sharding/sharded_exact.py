"""The start and the end of a sharded run: scale and L from a sample, then from all data."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.kernels.limits import TILE
from ksm_lightning.learning.exact import bound_from, lateral_eigenvalues, optimal_scale, set_scale
from ksm_lightning.learning.spectrum import PASSES, RANK, Spectrum, gram_eigenvalues
from ksm_lightning.sharding.layout import Shard
from ksm_lightning.sharding.matrix_function import exact_lateral
from ksm_lightning.sharding.sharded_network import ShardedNetwork


@torch.no_grad()
def leading_spectrum(kernel: Kernel, x: Tensor, W: Tensor, q: Tensor, shard: Shard, rank: int = RANK) -> Spectrum:
    """The leading eigenvalues of ``B = <b b^T>``, see :func:`ksm_lightning.learning.spectrum.leading_spectrum`.

    Up to ``rank`` neurons these are all eigenvalues. The eigenvectors (n, rank) are on every process.

    Args:
        kernel: The similarity.
        x: A sample of the data (samples, m), the same on all processes.
        W: Landmarks (n_r, m) of this process.
        q: Gains (n_r,) of this process.
        shard: The neurons of this process.
        rank: Number of leading eigenvalues r.
    """
    n, count = shard.num_neurons, min(rank, shard.num_neurons)
    basis = torch.linalg.qr(shard.gather(_random_rows(shard.rows, count).to(W)))[0]  # (n, r)
    blocks = torch.split(x.to(W), TILE)
    with full_precision(W.device):
        for _ in range(PASSES):
            product = W.new_zeros(shard.count, count)
            for part in blocks:
                drive = kernel(part, W) * q  # (block, n_r)
                product.addmm_(drive.mT, shard.sum(drive @ basis[shard.rows]))
            basis = torch.linalg.qr(shard.gather(product))[0]
        small = torch.zeros(count, count, dtype=torch.float64, device=W.device)
        trace = small.new_zeros(())
        for part in blocks:
            drive = kernel(part, W) * q
            seen = shard.sum(drive @ basis[shard.rows]).double()  # (block, r)
            small.addmm_(seen.mT, seen)
            trace += drive.square().sum(dtype=torch.float64)
        values, turn = torch.linalg.eigh(small / len(x))
        values = values.clamp(min=0)
        rest = (shard.sum(trace) / len(x) - values.sum()).clamp(min=0) / max(1, n - count)
        return Spectrum(values, basis @ turn.to(basis), rest)


def _random_rows(rows: slice, count: int) -> Tensor:
    """Normal numbers (rows, count), a function of the index of the row: they do not depend on who owns it."""
    blocks = range(rows.start // TILE, -(-rows.stop // TILE))
    drawn = [torch.randn(TILE, count, generator=torch.Generator().manual_seed(block)) for block in blocks]
    first = blocks.start * TILE
    return torch.cat(drawn)[rows.start - first : rows.stop - first]


def _eigenvalues(B: Tensor, shard: Shard) -> Tensor:
    """The eigenvalues (n,) of the rows (n_r, n) of B, float64: those beyond the first 1,024 count as equal."""
    n, rank = shard.num_neurons, min(RANK, shard.num_neurons)
    basis = torch.linalg.qr(shard.gather(_random_rows(shard.rows, rank).to(B)))[0]  # (n, rank)
    for _ in range(PASSES):
        basis = torch.linalg.qr(shard.gather(B @ basis))[0]
    values = torch.linalg.eigvalsh(shard.sum(basis[shard.rows].mT @ (B @ basis))).clamp(min=0)
    rest = (shard.sum(shard.diagonal(B).sum()) - values.sum()).clamp(min=0) / max(1, n - rank)
    return torch.cat([values, rest.expand(n - rank)])


def _best_scale(network: ShardedNetwork, eigenvalues: Tensor) -> Tensor:
    """The best common scale from the eigenvalues (n,) of B, see :func:`ksm_lightning.learning.exact.optimal_scale`."""
    own = (network.q.double().square() * network.kernel.diag(network.W)).sum()
    return optimal_scale(eigenvalues, network.shard.sum(own), network.ridge)


@torch.no_grad()
def bound_on(network: ShardedNetwork, x: Tensor) -> float:
    """The bound J for a sample (samples, m), the same on all processes."""
    shard, ridge = network.shard, network.ridge
    b = network.q.double() * network.kernel(x, network.W).double()  # (samples, n_r)
    beta = gram_eigenvalues(shard.sum(b @ b.mT) / len(x))
    gain = 0.5 * shard.sum((network.q.double().square() * network.kernel.diag(network.W)).sum())
    return float(bound_from(gain, lateral_eigenvalues(beta, ridge), ridge))


@torch.no_grad()
def balance(network: ShardedNetwork, x: Tensor, shrinkage: float = 0.0) -> None:
    """Set the best common scale of W (or q), and L, for a sample: :func:`ksm_lightning.learning.exact.balance`.

    L is exact in the leading 1,024 directions and a multiple of I in the others.
    """
    shard = network.shard
    B = leading_spectrum(network.kernel, x, network.W, network.q, shard).shrunk(shrinkage)
    if not B.values[-1] > 0:
        return  # no neuron responds, and any L is as good as another
    c = _best_scale(network, B.eigenvalues)
    set_scale(network.kernel, network.W, network.q, c)
    L = B.map(lambda beta: lateral_eigenvalues(c * c * beta, network.ridge))
    scaled = L.vectors[shard.rows] * (L.values - L.rest).to(network.L)
    torch.mm(scaled, L.vectors.mT, out=network.L.data)
    shard.diagonal(network.L.data).add_(L.rest.to(network.L))


@torch.no_grad()
def consolidate(network: ShardedNetwork, blocks: Iterable[Tensor]) -> float:
    """Set the best common scale of W (or q) and the exact L for all data; returns the bound J.

    The scale counts the eigenvalues of B beyond the first 1,024 as equal.

    Args:
        network: The network, changed in place.
        blocks: All inputs, the same on every process, one block (samples, m) at a time.

    Raises:
        ValueError: If there are no inputs, or B is too close to singular for float64.
    """
    shard, W, q = network.shard, network.W.detach(), network.q.detach()
    B = torch.zeros(shard.count, shard.num_neurons, dtype=torch.float64, device=W.device)
    samples = 0
    for x in blocks:
        for part in torch.split(x.to(W), TILE):
            b = network.kernel(part, W).double() * q.double()  # (block, n_r)
            B.addmm_(b.mT, shard.gathered_mT(b))
            samples += len(part)
    if not samples:
        raise ValueError("The exact L needs data, but there are no inputs.")
    beta = _eigenvalues(B.div_(samples), shard)
    c = _best_scale(network, beta)
    L, failed = exact_lateral(B.mul_(c * c), shard, network.ridge)
    if int(failed):
        raise ValueError(
            f"{int(failed)} inverses that the exact L needs could not be computed, because landmarks are equal or not "
            "finite: set `consolidate=False`, and L stays as it was learned."
        )
    set_scale(network.kernel, W, q, c)
    network.L.copy_(L)
    gain = 0.5 * (q.double().square() * network.kernel.diag(W).double()).sum()
    l = lateral_eigenvalues(c * c * beta, network.ridge)  # noqa: E741
    # At the best scale the two sums of l (l + ridge) cancel, also where beyond the first 1,024 they are not exact.
    bound = shard.sum(gain - 0.25 * torch.linalg.vector_norm(L).square()) - 0.5 * (l * (l + network.ridge)).sum()
    return float(bound)
