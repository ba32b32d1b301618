"""Initial values of the landmarks W."""

import math
from typing import Protocol

import torch
from torch import Tensor

from ksm_lightning.kernels import Kernel, full_precision
from ksm_lightning.network.landmark_error import MANY_LANDMARKS, LandmarkError
from ksm_lightning.network.pivots import residual_pivots
from ksm_lightning.network.rare_points import with_heaviest

# Up to this many distances (landmarks times points), k-means++ draws one landmark at a time. Otherwise it draws rounds
# of `_DRAWS`, which read the points fewer times. Many landmarks are drawn in longer rounds, up to `_MOST_DISTANCES`.
_ONE_BY_ONE, _DRAWS, _MOST_DISTANCES = 256 * 2560, 64, 2**24
# Distances below this fraction of the largest f(x, x) are rounding errors.
_RESOLUTION = 1e-6
# Points whose similarities are computed at once in an iteration of Lloyd's method.
_BLOCK = 2048
# Largest number of iterations of Lloyd's method for more than 2,048 landmarks.
_ITERATIONS_OF_MANY = 8
# Lloyd's method ends when an iteration lowers the energy by less than this fraction.
_PROGRESS = 1e-3
# Number of candidates on which refined landmarks are compared with those they started from.
_JUDGES = 1000
# Shares of the landmarks that are tried as pivots, and how much landmarks at points must lower Nystroem's error:
# where they lower it by less, least-squares features of means have a lower error on new points.
_PIVOT_SHARES, _GAIN = (0.25, 0.5), 0.03


class Initialiser(Protocol):
    """Callable that returns an initial ``W`` (num_neurons, in_features) for a kernel."""

    def __call__(
        self, kernel: Kernel, num_neurons: int, in_features: int, generator: torch.Generator | None
    ) -> Tensor: ...


class NormalInit:
    """The paper's initialisation: every entry of W is drawn from ``scale * N(0, 1)``.

    Args:
        scale: Standard deviation, positive. Default: 1, as in the paper. 0.5 keeps more neurons near centred data.
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"The scale of a normal initialisation must be positive and finite, got {scale}.")
        self.scale = scale

    def __call__(self, kernel: Kernel, num_neurons: int, in_features: int, generator: torch.Generator | None) -> Tensor:
        return self.scale * torch.randn(num_neurons, in_features, generator=generator)


class DataInit:
    """Initialise W at data points chosen by :func:`kernel_kmeans_plus_plus`, so that every neuron is near the data.

    Args:
        points: Candidates (samples, m).
        iterations: Largest number of iterations of :func:`lloyd` that then move W to the means of nearby candidates, if
            that lowers the error on the judges, or without any on a sample of the candidates. More than 2,048 landmarks
            are moved by at most 8 iterations, and without this comparison, which would take as long. Default: 0, W
            stays at data points, and judges are not used.
        judges: Other points (samples, m), on which starts are compared. If there are any, a quarter and half of the
            landmarks are tried as :func:`~ksm_lightning.network.pivots.residual_pivots`: rare points that means do not
            represent. Landmarks at points must lower the error of means by 3 %. Candidates cannot judge this, because a
            pivot is exact for itself. Default: none.
        num_features: Number of features that are compared, at most that of landmarks. Default: as many.
        takes_judges: Whether judges, too, may become pivots after the comparison. Not if they judge landmarks later on.
    """

    def __init__(
        self,
        points: Tensor,
        iterations: int = 0,
        judges: Tensor | None = None,
        num_features: int | None = None,
        takes_judges: bool = False,
    ) -> None:
        if iterations < 0:
            raise ValueError(f"`iterations` must be at least 0, got {iterations}.")
        self.points = points
        self.iterations = iterations
        self.judges = judges
        self.num_features = num_features
        self.takes_judges = takes_judges

    def __call__(self, kernel: Kernel, num_neurons: int, in_features: int, generator: torch.Generator | None) -> Tensor:
        if self.points.dim() != 2 or self.points.shape[1] != in_features or len(self.points) == 0:
            raise ValueError(
                f"Initialisation at data points needs points of shape (samples, {in_features}), "
                f"got {tuple(self.points.shape)}."
            )
        W = self.points[kernel_kmeans_plus_plus(kernel, self.points, num_neurons, generator=generator)]
        if not self.iterations:
            return W
        if num_neurons > MANY_LANDMARKS:
            return lloyd(kernel, self.points, W, min(self.iterations, _ITERATIONS_OF_MANY))
        # The first of the landmarks that k-means++ has drawn are what it draws if fewer are wanted.
        counts = [0] if self.judges is None else [0, *(int(share * num_neurons) for share in _PIVOT_SHARES)]
        means = [W, *(lloyd(kernel, self.points, W[: num_neurons - count], self.iterations) for count in counts)]
        starts = [self._add_pivots(kernel, some, num_neurons, self.points) for some in means]
        judges = self.points[:_JUDGES] if self.judges is None else with_heaviest(kernel, self.judges, self.points)
        error = LandmarkError(kernel, judges)
        errors = [error(start, self.num_features) if len(start) == num_neurons else math.inf for start in starts]
        if self.judges is not None:
            errors[1] *= 1 - _GAIN  # all landmarks are means
        best = min(range(len(starts)), key=errors.__getitem__)
        if self.judges is None or not self.takes_judges or len(means[best]) == num_neurons:
            return starts[best]
        final = self._add_pivots(kernel, means[best], num_neurons, torch.cat([self.points, self.judges]))
        return final if len(final) == num_neurons else starts[best]

    def _add_pivots(self, kernel: Kernel, W: Tensor, count: int, points: Tensor) -> Tensor:
        """The landmarks and pivots among the points, ``count`` together; fewer if there are not so many pivots."""
        return torch.cat([W, points[residual_pivots(kernel, points, W, count - len(W))]]) if len(W) < count else W


def kernel_kmeans_plus_plus(
    kernel: Kernel, points: Tensor, count: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw indices (count,) of points (samples, m) that are spread out in the kernel's feature space.

    Each point is drawn with probability proportional to its squared distance to the nearest point already drawn,
    ``|phi(x) - phi(c)|^2 = f(x,x) + f(c,c) - 2 f(x,c)``. When all distances are 0 (fewer distinct points than
    ``count``), the remaining points are drawn uniformly. The generator must be on the CPU.

    Many points (``count * samples`` above 655,360) are drawn in rounds of 64 with the same probabilities; more than
    2,048 landmarks in longer rounds, whose distances take up to 0.4 GB. A draw is
    accepted with probability (squared distance now) / (squared distance at the start of the round). This gives the same
    distribution, but other points for the same seed.
    """
    self_similarity = kernel.diag(points).double()  # (samples,)
    if count * len(points) > _ONE_BY_ONE:
        return _draw_in_rounds(kernel, points, self_similarity, count, generator)
    draws = torch.rand(count, dtype=torch.float64, generator=generator).to(points.device)
    weights = torch.ones_like(self_similarity)
    nearest = torch.full_like(self_similarity, torch.inf)
    chosen: list[Tensor] = []
    for draw in torch.split(draws, 1):
        # Keep the index as a vector of length 1: a Python scalar would need a host sync in every iteration.
        index = _draw(weights, draw)  # (1,)
        chosen.append(index)
        nearest = torch.minimum(nearest, _distances(kernel, points, self_similarity, index)[:, 0].double())
        nearest = nearest.index_fill(0, index, 0.0)
        weights = _weights(nearest, self_similarity)
    return torch.cat(chosen)


def _draw_in_rounds(
    kernel: Kernel, points: Tensor, self_similarity: Tensor, count: int, generator: torch.Generator | None
) -> Tensor:
    first = torch.rand(1, dtype=torch.float64, generator=generator).to(points.device)
    chosen = _draw(torch.ones_like(self_similarity), first)
    nearest = _distances(kernel, points, self_similarity, chosen)[:, 0].double().index_fill(0, chosen, 0.0)
    smallest = _RESOLUTION * float(self_similarity.max())
    length = max(_DRAWS, min(count // 32, _MOST_DISTANCES // len(points)))
    while len(chosen) < count:
        draws = torch.rand(2, length, dtype=torch.float64, generator=generator)
        index = _draw(_weights(nearest, self_similarity), draws[0].to(points.device))
        distances = _distances(kernel, points, self_similarity, index)  # (samples, draws)
        accepted = _accepted(index.cpu(), distances[index].double().cpu(), nearest[index].cpu(), draws[1], smallest)
        accepted = accepted[: count - len(chosen)].to(points.device)
        index = index[accepted]
        nearest = torch.minimum(nearest, distances[:, accepted].amin(1).double()).index_fill(0, index, 0.0)
        chosen = torch.cat([chosen, index])
    return chosen


def _accepted(index: Tensor, distances: Tensor, nearest: Tensor, draws: Tensor, smallest: float) -> Tensor:
    """Which draws of a round are kept, given the distances between them and to the points drawn before."""
    if not bool((nearest > smallest).any()):
        return torch.arange(len(index))  # no distances are left, so that the points were drawn uniformly
    threshold, kept = draws * nearest, []
    for draw in range(len(index)):
        if nearest[draw] > smallest and not nearest[draw] < threshold[draw]:
            kept.append(draw)
            nearest = torch.minimum(nearest, distances[:, draw]).masked_fill(index == index[draw], 0.0)
    return torch.tensor(kept, dtype=torch.int64)


def _draw(weights: Tensor, draws: Tensor) -> Tensor:
    """Indices (draws,) with probabilities proportional to the weights, from uniform numbers in [0, 1)."""
    cumulative = weights.cumsum(0)
    return torch.searchsorted(cumulative, draws * cumulative[-1], right=True).clamp_(max=len(weights) - 1)


def _distances(kernel: Kernel, points: Tensor, self_similarity: Tensor, index: Tensor) -> Tensor:
    """Squared distances (samples, indices) in feature space, in the dtype of the points: `_RESOLUTION` is above eps."""
    squares: Tensor = kernel(points, points[index]).mul_(-2)
    own = self_similarity.to(squares)
    return squares.add_(own[:, None]).add_(own[index]).clamp_(min=0)


def _weights(nearest: Tensor, self_similarity: Tensor) -> Tensor:
    # Equal points have a computed distance of about eps f, which must not count as a distance.
    resolved = nearest > _RESOLUTION * self_similarity.max()
    return torch.where(resolved.any(), torch.where(resolved, nearest, 0.0), torch.ones_like(nearest))


@torch.no_grad()
def lloyd(kernel: Kernel, points: Tensor, W: Tensor, iterations: int = 20) -> Tensor:
    """Move landmarks to the means of the points that they are closest to, by Lloyd's method in the kernel's geometry.

    A radial kernel assigns a point to the nearest landmark. A homogeneous kernel assigns it to the landmark that
    explains most of it up to scale, ``f(x,w)^2 / f(w,w)``. If its sign does not matter, the point enters the mean with
    the sign of ``x . w``. Any other kernel assigns it to the nearest landmark in feature space,
    ``f(w,w) - 2 f(x,w)``. A landmark without points stays. So does, unless the kernel is radial, a landmark whose mean
    explains its points less well. The method ends early when an iteration lowers the energy by less than 0.1 %.

    Args:
        kernel: The similarity.
        points: Points (samples, m).
        W: First landmarks (n, m), for example from :func:`kernel_kmeans_plus_plus`.
        iterations: Largest number of iterations. Default: 20.

    Returns:
        The landmarks (n, m).

    Example:
        >>> from ksm_lightning.kernels import GaussianKernel
        >>> x = torch.tensor([[0.0], [1.0], [10.0], [12.0]])
        >>> lloyd(GaussianKernel(1.0), x, x[1:3])
        tensor([[ 0.5000],
                [11.0000]])
    """
    with full_precision(points.device):
        # The expanded square is most precise around the mean.
        offset = points.mean(0) if kernel.is_radial else torch.zeros_like(points[0])
        x, W = points - offset, W - offset
        squares = x.square().sum(1) if kernel.is_radial else kernel.diag(x)
        is_mirrored = kernel.is_homogeneous and ignores_sign(kernel, x[:64], W[:64])
        total, energy = squares.double().sum(), math.inf
        before, nearest, costs = W, torch.zeros(len(x), dtype=torch.int64, device=x.device), squares
        is_final = torch.zeros(len(W), dtype=torch.bool, device=x.device)
        for iteration in range(iterations + 1):
            old = _sums(costs, nearest, len(W))
            costs, kept, assignment = _assign(kernel, x, W, nearest)
            if iteration and not kernel.is_radial:
                is_worse = _sums(kept, nearest, len(W)) > old
                W = torch.where(is_worse[:, None], before, W)
                is_final |= is_worse
            last, energy = energy, float(total + costs.double().sum())
            if iteration == iterations or not energy < (1 - _PROGRESS) * last:
                break
            before, nearest = W, assignment
            signed = x * torch.where((x * W[nearest]).sum(1) < 0, -1.0, 1.0)[:, None] if is_mirrored else x
            counts = _sums(torch.ones_like(squares), nearest, len(W))
            means = _sums(signed, nearest, len(W)) / counts.clamp(min=1)[:, None]
            W = torch.where(((counts > 0) & ~is_final)[:, None], means, W)
        return W + offset


def _assign(kernel: Kernel, x: Tensor, W: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The least cost of each point, its cost at the landmark ``before``, and the landmark with the least cost."""
    own = W.square().sum(1) if kernel.is_radial else kernel.diag(W)
    parts = []
    for block, index in zip(torch.split(x, _BLOCK), torch.split(before, _BLOCK), strict=True):
        if kernel.is_radial:
            costs = torch.addmm(own, block, W.mT, alpha=-2)  # (block, n)
        elif kernel.is_homogeneous:
            costs = kernel(block, W).square_().mul_(-torch.where(own > 0, 1 / own, 0.0))
        else:
            costs = own - 2 * kernel(block, W)
        least, nearest = costs.min(1)
        parts.append((least, costs.gather(1, index[:, None])[:, 0], nearest))
    least, kept, nearest = (torch.cat(part) for part in zip(*parts, strict=True))
    return least, kept, nearest


def _sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums (count, ...) of the values (samples, ...) with the same index."""
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, index, values)


def ignores_sign(kernel: Kernel, x: Tensor, W: Tensor) -> bool:
    """Whether ``f(-x, w)^2 = f(x, w)^2``."""
    return kernel.is_odd or torch.equal(kernel(-x, W), kernel(x, W))
