"""The start and the end of a sharded run: the first L from a sample, the exact L for all data."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.kernels.limits import TILE
from ksm_lightning.learning.exact import lateral_eigenvalues, scale_of, set_scale
from ksm_lightning.learning.spectrum import RANK, Spectrum
from ksm_lightning.sharding.layout import Shard
from ksm_lightning.sharding.matrix_function import exact_lateral
from ksm_lightning.sharding.sharded_network import ShardedNetwork

# Passes over the sample that make the leading eigenvectors precise.
_PASSES = 2


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
        for _ in range(_PASSES):
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


@torch.no_grad()
def balance(network: ShardedNetwork, x: Tensor, shrinkage: float = 0.0) -> None:
    """Set the best common scale of W (or q), and L, for a sample: :func:`ksm_lightning.learning.exact.balance`.

    L is exact in the leading 1,024 directions and a multiple of I in the others.
    """
    kernel, ridge, shard = network.kernel, network.ridge, network.shard
    found = leading_spectrum(kernel, x, network.W, network.q, shard).shrunk(shrinkage)
    if not found.values[-1] > 0:
        return  # no neuron responds, and any L is as good as another
    eigenvalues = torch.cat([found.values, found.rest.expand(found.num_equal)])
    own = (network.q.double().square() * kernel.diag(network.W)).sum()
    c = scale_of(eigenvalues, shard.sum(own))
    set_scale(kernel, network.W, network.q, c)
    values, rest = (lateral_eigenvalues(c * c * beta, ridge) for beta in (found.values, found.rest))
    scaled = found.vectors[shard.rows] * (values - rest).to(network.L)
    torch.mm(scaled, found.vectors.mT, out=network.L.data)
    shard.diagonal(network.L.data).add_(rest.to(network.L))


@torch.no_grad()
def consolidate(network: ShardedNetwork, blocks: Iterable[Tensor]) -> float:
    """Set the exact L for the network's W and q and all data; returns the bound J.

    Args:
        network: The network, changed in place.
        blocks: All inputs, the same on every process, one block (samples, m) at a time.

    Raises:
        ValueError: If there are no inputs, or B is too close to singular for float64.
    """
    shard, W, q = network.shard, network.W.detach(), network.q.detach().double()
    B = torch.zeros(shard.count, shard.num_neurons, dtype=torch.float64, device=W.device)
    samples = 0
    for x in blocks:
        for part in torch.split(x.to(W), TILE):
            b = network.kernel(part, W).double() * q  # (block, n_r)
            B.addmm_(b.mT, shard.gathered_mT(b))
            samples += len(part)
    if not samples:
        raise ValueError("The exact L needs data, but there are no inputs.")
    L, failed = exact_lateral(B.div_(samples), shard, network.ridge)
    if int(failed):
        raise ValueError(
            f"{int(failed)} inverses that the exact L needs could not be computed, because landmarks are equal or not "
            "finite: set `consolidate=False`, and L stays as it was learned."
        )
    network.L.copy_(L)
    gain = 0.5 * (q.square() * network.kernel.diag(W).double()).sum()
    square, trace = torch.linalg.vector_norm(L).square(), shard.diagonal(L).sum()
    return float(shard.sum(gain - 0.75 * square - 0.5 * network.ridge * trace))
