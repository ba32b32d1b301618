"""Linear probe: accuracy of softmax regression on a representation, for many penalties and seeds at once.

All penalties and seeds are solved together with batched linear algebra on the device of the features. The solver does
not use autograd, so it works under ``inference_mode``. Global random state is not changed.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ksm_lightning.kernels import full_precision
from ksm_lightning.kernels.limits import BYTES_AT_ONCE, ROUNDING, ROWS_AT_ONCE
from ksm_lightning.network.readout import Encoder, encode_in_blocks

Selection = Literal["validation", "paper"]
PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Penalties of a softmax regression to choose from."""
# Iterations that L-BFGS remembers. The convergence is checked, which synchronises host and device, once per as many.
_HISTORY = 10
# A typical <p (1-p)> of a class near the solution.
_CURVATURE = 0.03


class Classifiers(NamedTuple):
    """Softmax classifiers ``argmax_c (x W + b)_c``, one per seed and penalty."""

    W: Tensor  # (seeds, penalties, features, classes)
    b: Tensor  # (seeds, penalties, classes)
    iterations: int  # until the last of them converged

    def accuracy(self, x: Tensor, labels: Tensor) -> Tensor:
        """Accuracy of each classifier on ``x`` (samples, features): (seeds, penalties), float64."""
        seeds, penalties, features, classes = self.W.shape
        flat = self.W.permute(2, 0, 1, 3).reshape(features, -1)  # (features, seeds * penalties * classes)
        right = torch.zeros(seeds, penalties, dtype=torch.float64, device=x.device)
        with full_precision(x.device):
            for part, part_labels in zip(torch.split(x, ROWS_AT_ONCE), torch.split(labels, ROWS_AT_ONCE), strict=True):
                logits = (part @ flat).view(-1, seeds, penalties, classes) + self.b
                right += (logits.argmax(-1) == part_labels[:, None, None]).sum(0)
        return right / len(x)


@torch.no_grad()
def fit_softmax(
    x: Tensor,
    labels: Tensor,
    penalties: Sequence[float],
    num_classes: int,
    *,
    weights: Tensor | None = None,
    is_bias_penalised: bool = True,
    tolerance: float = 2e-6,
    max_iterations: int = 1000,
    check: Callable[[], object] = lambda: None,
) -> Classifiers:
    """Minimise ``<cross-entropy> + penalty/2 (|W|^2 + |b|^2)`` from zero for every data set and penalty at once.

    The bias is penalised as well, like under the paper's weight decay; an unpenalised bias overfits few labels.
    Features, with a constant feature for the bias, are rotated to their principal axes, where the mean curvature
    ``<p (1-p)> <x x^T> + penalty`` is nearly diagonal. L-BFGS runs on variables scaled by it, so that small penalties
    converge too. With fewer samples than features, only the span of the samples is used.

    Args:
        x: Features (seeds, samples, features), one data set per seed.
        labels: Class numbers (seeds, samples), int64.
        penalties: Weight penalties, positive.
        num_classes: Number of classes.
        weights: Weights of the samples in the mean (seeds, samples), with a positive sum. Default: 1.
        is_bias_penalised: Whether the penalty includes ``|b|^2``. If not, features are centred first.
        tolerance: Stop when the predicted decrease of the loss is below this value, in nats.
        max_iterations: Maximum number of iterations.
        check: Called every few iterations; it may raise an exception to give up.
    """
    seeds, samples, _ = x.shape
    share = None if weights is None else (weights / weights.sum(1, keepdim=True)).to(x.dtype)[:, :, None]
    with full_precision(x.device):
        ones = x.new_ones(seeds, samples, 1)
        if is_bias_penalised:
            offset = x.new_zeros(seeds, 1, x.shape[2])
            x = torch.cat([x, ones], dim=2)
            axes = _principal_axes(x, share)  # (seeds, features + 1, rank)
        else:
            offset = _mean(x, share)[:, None]  # (seeds, 1, features)
            x = torch.cat([x - offset, ones], dim=2)
            inside = _principal_axes(x[:, :, :-1], share)
            axes = torch.nn.functional.pad(inside, (0, 1, 0, 1))  # (seeds, features + 1, rank + 1)
            axes[:, -1, -1] = 1
        z = x @ axes  # (seeds, samples, rank)
        penalty = torch.tensor(penalties, dtype=x.dtype, device=x.device)[:, None, None].repeat(1, z.shape[2], 1)
        if not is_bias_penalised:
            penalty[:, -1] = 0
        curvature = _CURVATURE * _mean(z.square(), share)[:, None, :, None] + penalty  # (seeds, penalties, rank, 1)
        target = torch.nn.functional.one_hot(labels, num_classes).to(x.dtype)  # (seeds, samples, classes)
        # A direction without features has curvature 0 if its penalty is 0.
        scale = torch.where(curvature > 0, curvature, 1.0).rsqrt()
        objective = _Objective(z, target, penalty, scale, share)
        phi, iterations = _minimise(objective, tolerance, max_iterations, check)
        weights = axes[:, None] @ (phi * objective.scale)  # (seeds, penalties, features + 1, classes)
        W, b = weights[:, :, :-1], weights[:, :, -1]
        return Classifiers(W, b - (offset[:, None] @ W)[:, :, 0], iterations)


def _mean(values: Tensor, share: Tensor | None) -> Tensor:
    """Means (seeds, features) of values (seeds, samples, features), weighted by shares (seeds, samples, 1)."""
    return values.mean(1) if share is None else (values * share).sum(1)


def _principal_axes(x: Tensor, share: Tensor | None) -> Tensor:
    """Orthonormal axes (seeds, features, rank) that span the rows ``x`` (seeds, samples, features).

    They are the principal axes of the rows weighted by ``share`` (seeds, samples, 1).
    """
    _, samples, features = x.shape
    x = x if share is None else x * (samples * share).sqrt()
    if samples >= features:
        directions: Tensor = torch.linalg.eigh(x.mT @ x / samples)[1]
        return directions
    values, vectors = torch.linalg.eigh((x @ x.mT).double())  # (seeds, samples)
    # Directions that consist of rounding errors are set to 0.
    keep = values > ROUNDING * values[:, -1:]
    inverse = torch.where(keep, values.clamp(min=1e-300).rsqrt(), 0.0)
    axes: Tensor = x.double().mT @ (vectors * inverse[:, None])
    return axes.to(x.dtype)


class _Objective:
    """Penalised cross-entropy of all problems as a function of scaled weights (seeds, penalties, rank, classes)."""

    def __init__(self, z: Tensor, target: Tensor, penalty: Tensor, scale: Tensor, share: Tensor | None) -> None:
        self.z, self.target, self.penalty, self.scale, self.share = z, target, penalty, scale, share

    def only(self, penalties: Tensor) -> "_Objective":
        """The objective of a subset of the penalties."""
        return _Objective(self.z, self.target, self.penalty[penalties], self.scale[:, penalties], self.share)

    def __call__(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        seeds, penalties, rank, classes = phi.shape
        theta = phi * self.scale
        flat = theta.permute(0, 2, 1, 3).reshape(seeds, rank, -1)
        # With few columns and many rows, the transposed products are up to six times faster.
        logits = (flat.mT @ self.z.mT).mT.reshape(seeds, -1, penalties, classes)
        target = self.target[:, :, None]
        log_p = logits.log_softmax(-1)
        loss = -_mean((log_p * target).sum(-1), self.share) + 0.5 * (self.penalty * theta.square()).sum((2, 3))
        residual = log_p.exp_().sub_(target).flatten(2)
        residual = residual.div_(self.z.shape[1]) if self.share is None else residual.mul_(self.share)
        gradient = (residual.mT @ self.z).view(seeds, penalties, classes, rank).mT
        return loss, (gradient + self.penalty * theta) * self.scale


def _minimise(
    objective: _Objective, tolerance: float, max_iterations: int, check: Callable[[], object]
) -> tuple[Tensor, int]:
    """L-BFGS on all problems in parallel. Steps that do not descend are halved; converged problems do not move.

    A penalty that has converged for every seed leaves the batch.
    """
    seeds, _, rank = objective.z.shape
    penalties, classes = len(objective.penalty), objective.target.shape[2]
    phi = objective.z.new_zeros(seeds, penalties, rank, classes)
    loss, gradient = objective(phi)
    step, gamma = torch.ones_like(loss), torch.ones_like(loss)
    history: list[tuple[Tensor, Tensor, Tensor]] = []
    solution = torch.zeros_like(phi)
    members = torch.arange(penalties, device=phi.device)
    iteration = 0
    while iteration < max_iterations:
        direction = _two_loops(gradient, history, gamma)
        slope = _dot(gradient, direction)
        is_open = -slope > tolerance
        if iteration % _HISTORY == _HISTORY - 1:
            check()
            keep = is_open.any(0).nonzero()[:, 0]
            solution[:, members] = phi
            if len(keep) == 0:
                break
            if len(keep) < len(members):
                members, objective = members[keep], objective.only(keep)
                phi, gradient, direction = phi[:, keep], gradient[:, keep], direction[:, keep]
                loss, step, gamma, slope, is_open = (t[:, keep] for t in (loss, step, gamma, slope, is_open))
                history = [(moved[:, keep], turned[:, keep], inverse[:, keep]) for moved, turned, inverse in history]
        iteration += 1
        trial = phi + (step * is_open)[..., None, None] * direction
        trial_loss, trial_gradient = objective(trial)
        # Sufficient decrease, up to rounding errors of the loss.
        slack = 4 * torch.finfo(loss.dtype).eps * loss.abs()
        is_better = is_open & (trial_loss <= loss + 1e-4 * step * slope + slack)
        moved = torch.where(is_better[..., None, None], trial - phi, 0.0)
        turned = torch.where(is_better[..., None, None], trial_gradient - gradient, 0.0)
        curvature = _dot(moved, turned)
        is_curved = curvature > 0
        inverse = torch.where(is_curved, 1 / curvature, 0.0)
        gamma = torch.where(is_curved, curvature / _dot(turned, turned).clamp(min=1e-38), gamma)
        history = [*history[-(_HISTORY - 1) :], (moved, turned, inverse)]
        phi = phi + moved
        loss = torch.where(is_better, trial_loss, loss)
        gradient = gradient + turned
        step = torch.where(is_better, 1.0, step / 2)
    solution[:, members] = phi
    return solution, iteration


def _two_loops(gradient: Tensor, history: list[tuple[Tensor, Tensor, Tensor]], gamma: Tensor) -> Tensor:
    """The L-BFGS direction of each problem; pairs with inverse curvature 0 are skipped."""
    direction = -gradient
    weights = []
    for moved, turned, inverse in reversed(history):
        weight = inverse * _dot(moved, direction)
        direction = direction - weight[..., None, None] * turned
        weights.append(weight)
    direction = gamma[..., None, None] * direction
    for (moved, turned, inverse), weight in zip(history, reversed(weights), strict=True):
        correction = weight - inverse * _dot(turned, direction)
        direction = direction + correction[..., None, None] * moved
    return direction


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((2, 3))


def draw_labelled(labels: Tensor, per_class: int, seed: int) -> Tensor:
    """Indices of ``per_class`` random samples of each class, in random order.

    Args:
        labels: Class numbers (samples,).
        per_class: Samples per class; ``0`` takes all samples.
        seed: Seed of a separate random stream.
    """
    labels = labels.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    if per_class == 0:
        return order
    chosen = []
    for label in torch.unique(labels).tolist():
        members = order[labels[order] == label]
        if len(members) < per_class:
            raise ValueError(f"`per_class` is {per_class}, but class {label} has only {len(members)} labelled samples.")
        chosen.append(members[:per_class])
    return torch.cat(chosen)


class Probe(NamedTuple):
    """Results of a linear probe at the selected penalty, averaged over seeds."""

    accuracy: float  # on the test set; in the paper's protocol, on the validation set
    validation_accuracy: float  # on the validation set, which selects the penalty
    train_accuracy: float  # on the labelled training samples
    penalty: float  # the selected penalty
    deviation: float  # standard deviation of `accuracy` over seeds


@torch.no_grad()
def linear_probe(
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor] | None = None,
    *,
    per_class: int = 100,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    penalties: Sequence[float] = PENALTIES,
    selection: Selection = "validation",
    encode: Encoder = lambda x: x,
    check: Callable[[], object] = lambda: None,
) -> Probe:
    """Accuracy of softmax regression on features, with few labels per class.

    Args:
        train: Inputs (samples, m) and labels (samples,) to draw the labelled samples from.
        validation: Inputs and labels that select the penalty.
        test: Inputs and labels to report on; not used by the paper's protocol.
        per_class: Labelled samples per class; 0 for all.
        seeds: Seeds of the draws.
        penalties: Penalties to select from.
        selection: ``validation`` reports the accuracy on ``test`` at the penalty that is best on ``validation``;
            ``paper`` reports the best accuracy on ``validation``, which is optimistically biased.
        encode: Maps inputs to features. Default: the identity.
        check: Called between the parts of the work; it may raise an exception to give up.
    """
    if selection not in ("validation", "paper"):
        raise ValueError(f"`selection` must be 'validation' or 'paper', got {selection!r}.")
    if selection == "validation" and test is None:
        raise ValueError("`selection='validation'` needs test samples: pass `test`, or use `selection='paper'`.")
    x = train[0]
    parts = [train, validation, *([test] if test is not None else [])]
    # Labels may be any numbers; classes are renumbered from 0.
    classes, numbered = torch.unique(torch.cat([part[1].cpu() for part in parts]), return_inverse=True)
    labels, validation_labels, *test_labels = numbered.split([len(part[1]) for part in parts])
    draws = [draw_labelled(labels, per_class, seed) for seed in seeds]
    validation_features = encode_in_blocks(encode, validation[0])
    test_features = encode_in_blocks(encode, test[0]) if test is not None and selection == "validation" else None
    together = max(1, BYTES_AT_ONCE // (4 * len(draws[0]) * validation_features.shape[1]))
    scores = []
    for start in range(0, len(draws), together):
        check()
        chosen = torch.stack(draws[start : start + together]).to(x.device)  # (seeds, samples)
        drawn = encode_in_blocks(encode, x[chosen].flatten(0, 1)).view(*chosen.shape, -1)
        drawn_labels = labels.to(x.device)[chosen]
        found = fit_softmax(drawn, drawn_labels, penalties, len(classes), check=check)
        on_train = torch.stack(
            [
                Classifiers(found.W[i : i + 1], found.b[i : i + 1], 0).accuracy(drawn[i], drawn_labels[i])[0]
                for i in range(len(drawn))
            ]
        )
        on_validation = on_test = found.accuracy(validation_features, validation_labels.to(x.device))
        if test_features is not None:
            on_test = found.accuracy(test_features, test_labels[0].to(x.device))
        scores.append(torch.stack([on_test, on_validation, on_train]))
    score = torch.cat(scores, dim=1)  # (3, seeds, penalties)
    mean = score.mean(1)  # (3, penalties)
    best = int(mean[1].argmax())
    accuracy, validation_accuracy, train_accuracy = mean[:, best].tolist()
    deviation = float(score[0, :, best].std(correction=0))
    return Probe(accuracy, validation_accuracy, train_accuracy, float(penalties[best]), deviation)
