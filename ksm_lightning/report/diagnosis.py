"""The diagnosis of a trained network: measurements in, findings with advice out."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ksm_lightning.evaluation.plausibility import FAR_ABOVE, Similarity, width_problem
from ksm_lightning.kernels.limits import FLOAT32_ROUNDING, NOTICEABLE
from ksm_lightning.report.health import Health

Severity = Literal["error", "warning", "advice"]

# Part of the landmarks that may be idle in a good run.
_IDLE = 0.1
# Values of a stretch of energies, and standard errors by which two stretches must differ.
_STRETCH, _CERTAIN = 8, 3.0


class Finding(NamedTuple):
    """One problem or possible improvement."""

    severity: Severity  # error: the network is unusable; warning: it could be better; advice: it could be used better
    title: str
    measured: str  # the measured values and their reference
    advice: str  # what to do


class Errors(NamedTuple):
    """Kernel errors (NRMSE) on the same points with the same number of features."""

    neural: float
    nystroem: float  # Nystroem readout of the network's landmarks
    uniform: float  # Nystroem with landmarks drawn uniformly from the data


@dataclass(frozen=True)
class Evidence:
    """The measurements that a diagnosis uses."""

    num_neurons: int
    ridge: float
    health: Health
    similarity: Similarity
    errors: Errors | None = None  # None if unknown
    energies: Sequence[float] = ()  # of batches in the last phase, in the order of the updates
    updates: int = 0  # updates made
    planned: int = 0  # updates of the schedule
    is_adaptive: bool = True  # whether the schedule is the adaptive one
    starts_at_data: bool = True  # whether landmarks were initialised at data points
    rate_factor: float = 1.0  # factor on all rates after rollbacks of the divergence guard
    sigma: float | None = None  # width of the kernel, if it has one
    is_tight: bool = False  # whether the network has the tight bound


def diagnose(evidence: Evidence) -> list[Finding]:
    """All findings, most severe first; empty if there are none.

    Example:
        >>> good = Evidence(16, 1e-3, Health(True), Similarity(mean=0.1, mean_square=0.07, distance=1.0))
        >>> diagnose(good)
        []
    """
    found: list[Finding] = [*_about_divergence(evidence)]
    if evidence.health.is_finite:
        found += [*_about_neurons(evidence), *_about_lateral_weights(evidence), *_about_errors(evidence)]
    found += [*_about_training(evidence), *_about_kernel(evidence)]
    order = ("error", "warning", "advice")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _about_divergence(evidence: Evidence) -> Iterator[Finding]:
    advice = "Scale the data (--data.scaling=global of ArrayDataModule), or train with --trainer.precision=64-true."
    if not evidence.is_adaptive:
        advice = "Leave out --model.phases to use the adaptive schedule, or lower the rates."
    if not evidence.health.is_finite:
        yield Finding("error", "The network is not finite", "W, q, L or the responses contain NaN or infinity.", advice)
    elif evidence.rate_factor < 1:
        yield Finding(
            "warning",
            "The run diverged and was rolled back",
            f"The divergence guard restored a checkpoint and multiplied the rates by {evidence.rate_factor:g}.",
            advice,
        )


def _about_neurons(evidence: Evidence) -> Iterator[Finding]:
    n, silent, idle = evidence.num_neurons, evidence.health.silent, evidence.health.idle
    if silent:
        title = f"{silent} of {n} neurons {'is' if silent == 1 else 'are'} dead"
        limit = "the ridge" if evidence.is_tight else f"{NOTICEABLE:.0%} of the mean over neurons"
        measured = f"Their mean squared response is below {limit}."
    elif idle > _IDLE * n:
        title = f"{idle} of {n} landmarks are idle"
        measured = f"They would reduce the error more at another position. Up to {_IDLE:.0%} is normal."
    else:
        return
    if not evidence.starts_at_data:
        advice = (
            "The normal initialisation placed them far from the data, where they never respond and never learn. Use "
            "--model.init=data, or leave out --model.phases: the adaptive schedule moves such landmarks."
        )
    elif not evidence.is_adaptive:
        advice = "Leave out --model.phases: the adaptive schedule moves such landmarks to useful positions."
    else:
        advice = f"Train longer, or use fewer neurons (--model.num_neurons={max(1, n - max(silent, idle))})."
    yield Finding("warning", title, measured, advice)


def _about_lateral_weights(evidence: Evidence) -> Iterator[Finding]:
    health, ridge = evidence.health, evidence.ridge
    largest, smallest = health.largest + ridge, health.smallest + ridge
    condition = largest / smallest if smallest > 0 else math.inf
    if condition * health.precision <= NOTICEABLE or evidence.is_tight:  # a tight network's L is diagonal
        return
    enough = health.largest * health.precision / (0.1 * NOTICEABLE)
    yield Finding(
        "warning",
        "L is ill-conditioned",
        f"The condition number of L + ridge I is {condition:.1e}; the ridge of {ridge:.2g} allows up to "
        f"{largest / ridge:.1e}. Rounding errors may reach {min(condition * health.precision, 1):.0%} of a response.",
        f"Raise --model.ridge to {enough:.1g}, train with --trainer.precision=64-true, or use fewer neurons.",
    )


def _about_errors(evidence: Evidence) -> Iterator[Finding]:
    errors = evidence.errors
    if errors is None:
        return
    if errors.nystroem > max((1 + NOTICEABLE) * errors.uniform, FLOAT32_ROUNDING):
        yield Finding(
            "warning",
            "Random data points are better landmarks than the learned ones",
            f"NRMSE of the Nystroem readout: {errors.nystroem:.4f} with the learned landmarks and {errors.uniform:.4f} "
            "with uniformly drawn ones.",
            _longer(evidence),
        )
    if errors.neural > max(FAR_ABOVE * errors.nystroem, FLOAT32_ROUNDING):
        yield Finding(
            "advice",
            "The error of the network has reached the limit of its bound",
            f"NRMSE {errors.neural:.4f}; the Nystroem readout of the same landmarks has {errors.nystroem:.4f}.",
            "More neurons will not help, because the network minimises an upper bound of the error. Compute features "
            "with the readout nystroem or least_squares, such as --features.readout=nystroem, or train with "
            "--model.bound=tight, which gives up the sparse tuning.",
        )


def _about_training(evidence: Evidence) -> Iterator[Finding]:
    if evidence.updates < evidence.planned:
        yield Finding(
            "warning",
            "The run stopped early",
            f"{evidence.updates:,} of {evidence.planned:,} updates were made.",
            "Continue it: ksm fit --config=RUN/config.yaml --ckpt_path=RUN/checkpoints/last.ckpt "
            "--trainer.max_steps=-1",
        )
    fall = falling(evidence.energies)
    if fall is not None:
        yield Finding(
            "warning",
            "The energy was still falling at the end",
            f"The mean of the last quarter is {fall:.1%} below the mean of the quarter before.",
            _longer(evidence),
        )


def falling(energies: Sequence[float]) -> float | None:
    """Relative decrease of the mean energy from the third to the last quarter; None if it is not significant.

    Energies of batches are noisy: a decrease is significant if it exceeds three standard errors and 1 % of the energy.

    Example:
        >>> falling([-1.0] * 32), round(falling([-1.0] * 24 + [-1.25] * 8), 2)
        (None, 0.2)
    """
    size = len(energies) // 4
    if size < _STRETCH or not all(map(math.isfinite, energies)):
        return None
    before, after = energies[-2 * size : -size], energies[-size:]
    drop = statistics.fmean(before) - statistics.fmean(after)
    noise = math.sqrt((statistics.variance(before) + statistics.variance(after)) / size)
    scale = abs(statistics.fmean(after))
    return drop / scale if scale > 0 and drop > max(_CERTAIN * noise, NOTICEABLE * scale) else None


def _about_kernel(evidence: Evidence) -> Iterator[Finding]:
    similarity, n = evidence.similarity, evidence.num_neurons
    rank = 1 / similarity.mean_square if similarity.mean_square > 0 else math.inf
    has_width = evidence.sigma is not None
    width = f"--model.kernel_params.sigma={similarity.distance:.2g}, the median distance between two points"
    problem = width_problem(similarity, n)
    if problem == "narrow":
        slower = "Use more neurons, or a kernel that decays more slowly, such as one with a smaller degree or alpha."
        directions = f"about {rank:,.0f}" if rank < 1e6 else "more than a million"
        yield Finding(
            "warning",
            "The similarity is nearly diagonal",
            f"Two different points have a root-mean-square similarity of {math.sqrt(similarity.mean_square):.2g}. This "
            f"corresponds to {directions} independent directions for {n} neurons.",
            f"The kernel is too narrow: try {width}." if has_width else slower,
        )
    elif problem == "wide":
        faster = "Subtract the data's mean (--data.centre=true of ArrayDataModule), or use a kernel that decays faster."
        yield Finding(
            "warning",
            "The similarity is nearly constant",
            f"Two different points have a mean similarity of {similarity.mean:.4f}; equal points have 1.",
            f"The kernel is too wide: try {width}." if has_width else faster,
        )


def _longer(evidence: Evidence) -> str:
    if evidence.is_adaptive:
        return f"Train longer: --model.updates={2 * max(evidence.planned, 1)}."
    return "Use longer --model.phases, or leave them out for the adaptive schedule, which needs fewer updates."
