"""What a trained network's numbers say about it, and what to try next: numbers in, findings out."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ksm_lightning.report.health import SILENT, Health, Similarity

Severity = Literal["error", "warning", "advice"]

# Half moons and digits that went well had up to 6 % of landmarks that another place would suit better.
_IDLE = 0.1
# Responses are wrong by about eps times the condition number; a hundredth can be seen in errors of 0.01 to 0.2.
_ROUNDING = 0.01
# On half moons the network's error is 1.5 times Nystroem's at 16 neurons, when more of them still help it, and 4 times
# at 32, when they no longer do.
_FLOOR = 2.0
# Errors of float32 features below this are rounding, and no worse than others.
_EXACT = 1e-5
# Energies to average in each of two stretches before their difference means something, the standard errors that it has
# to exceed, and the part of the energy: on half moons 8,000 updates end 0.6 % below 100 updates, with an error of 0.175
# instead of 0.182, so that less than a hundredth is not worth another run.
_STRETCH, _CERTAIN, _FALL = 8, 3.0, 0.01
# With a flat spectrum of r directions the best n features leave sqrt(1 - n / r): 95 % of the kernel at r = 10 n.
_SPREAD = 10.0
# At a mean similarity of 0.99 a constant leaves sqrt(1 - 0.99^2) = 0.14 of the kernel, no more than the network itself
# leaves on half moons: points can hardly be told apart by it.
_ALIKE = 0.99


class Finding(NamedTuple):
    """One thing that is not as it could be."""

    severity: Severity
    """``error`` spoils the run, ``warning`` costs some of what it could reach, ``advice`` is a better way to use it."""
    title: str
    measured: str
    """The numbers, and what they were held against."""
    advice: str
    """What to do."""


class Errors(NamedTuple):
    """The kernel's NRMSE with as many features, on the same points."""

    neural: float
    nystroem: float
    """Of Nystroem's readout of the network's landmarks."""
    uniform: float
    """Of Nystroem with landmarks drawn from the data."""


@dataclass(frozen=True)
class Evidence:
    """What a diagnosis is made of.

    Args:
        num_neurons: Neurons n.
        ridge: The paper's lambda.
        health: The network at work.
        similarity: The kernel on the data.
        errors: Errors of the network and of other methods; None where they are not known.
        energies: Energies of batches in the order of the updates, of the last phase alone.
        updates: Updates that were made.
        planned: Updates of the whole schedule.
        is_adaptive: Whether the schedule is the adaptive one.
        starts_at_data: Whether landmarks started at data points.
        rate_factor: What the divergence guard left of the rates.
        sigma: The kernel's width, where it has one.
    """

    num_neurons: int
    ridge: float
    health: Health
    similarity: Similarity
    errors: Errors | None = None
    energies: Sequence[float] = ()
    updates: int = 0
    planned: int = 0
    is_adaptive: bool = True
    starts_at_data: bool = True
    rate_factor: float = 1.0
    sigma: float | None = None


def diagnose(evidence: Evidence) -> list[Finding]:
    """Everything that is not as it could be, the worst first; empty where nothing is wrong.

    Example:
        >>> sound = Evidence(16, 1e-3, Health(True), Similarity(mean=0.1, mean_square=0.07, distance=1.0))
        >>> diagnose(sound)
        []
    """
    found: list[Finding] = [*_about_divergence(evidence)]
    if evidence.health.is_finite:
        found += [*_about_neurons(evidence), *_about_lateral_weights(evidence), *_about_errors(evidence)]
    found += [*_about_training(evidence), *_about_kernel(evidence)]
    order = ("error", "warning", "advice")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _about_divergence(evidence: Evidence) -> Iterator[Finding]:
    gentler = "Scale the data (--data.scaling=global of ArrayDataModule), or train with --trainer.precision=64-true."
    if not evidence.is_adaptive:
        gentler = "Leave out --model.phases for the adaptive schedule, or lower their rates."
    if not evidence.health.is_finite:
        yield Finding(
            "error", "The network is not finite", "W, q, L or the responses hold a NaN or an infinity.", gentler
        )
    elif evidence.rate_factor < 1:
        yield Finding(
            "warning",
            "The run diverged on its way",
            f"The guard went back to a checkpoint and left {evidence.rate_factor:g} of the rates.",
            gentler,
        )


def _about_neurons(evidence: Evidence) -> Iterator[Finding]:
    n, silent, idle = evidence.num_neurons, evidence.health.silent, evidence.health.idle
    if silent:
        title = f"{silent} of {n} neurons {'is' if silent == 1 else 'are'} dead"
        measured = f"Mean squared response below {SILENT:.0%} of the mean over neurons."
    elif idle > _IDLE * n:
        title = f"{idle} of {n} landmarks explain nothing"
        measured = f"They would explain more at another place; up to {_IDLE:.0%} is usual."
    else:
        return
    if not evidence.starts_at_data:
        advice = (
            "The normal start lost them: a landmark far from the data never answers, and so never learns. Use "
            "--model.init=data, or leave out --model.phases: the adaptive schedule moves such landmarks."
        )
    elif not evidence.is_adaptive:
        advice = "Leave out --model.phases: the adaptive schedule moves such landmarks to where they are needed."
    else:
        advice = f"Train longer, or with fewer neurons (--model.num_neurons={max(1, n - max(silent, idle))})."
    yield Finding("warning", title, measured, advice)


def _about_lateral_weights(evidence: Evidence) -> Iterator[Finding]:
    health, ridge = evidence.health, evidence.ridge
    largest, smallest = health.largest + ridge, health.smallest + ridge
    condition = largest / smallest if smallest > 0 else math.inf
    if condition * health.precision <= _ROUNDING:
        return
    enough = health.largest * health.precision / (0.1 * _ROUNDING)
    yield Finding(
        "warning",
        "L is ill-conditioned",
        f"The condition number of L + ridge I is {condition:.1e}, where the ridge of {ridge:.2g} allows "
        f"{largest / ridge:.1e}; rounding may reach {min(condition * health.precision, 1):.0%} of a response.",
        f"Raise --model.ridge to {enough:.1g}, train with --trainer.precision=64-true, or use fewer neurons.",
    )


def _about_errors(evidence: Evidence) -> Iterator[Finding]:
    errors = evidence.errors
    if errors is None:
        return
    if errors.nystroem > max(1.01 * errors.uniform, _EXACT):
        yield Finding(
            "warning",
            "Landmarks drawn from the data do better than the learned ones",
            f"NRMSE of Nystroem's readout {errors.nystroem:.4f}, with uniformly drawn landmarks {errors.uniform:.4f}.",
            _longer(evidence),
        )
    if errors.neural > max(_FLOOR * errors.nystroem, _EXACT):
        yield Finding(
            "advice",
            "The network's own error is at the floor of its bound",
            f"NRMSE {errors.neural:.4f}, while Nystroem's readout of the same landmarks has {errors.nystroem:.4f}.",
            "More neurons will not help: the network minimises a bound of the error. Use the readout nystroem or "
            "least_squares where features are computed, such as --features.readout=nystroem.",
        )


def _about_training(evidence: Evidence) -> Iterator[Finding]:
    if evidence.updates < evidence.planned:
        yield Finding(
            "warning",
            "The run stopped before its end",
            f"{evidence.updates:,} of {evidence.planned:,} updates were made.",
            "Continue it: ksm fit --config=RUN/config.yaml --ckpt_path=RUN/checkpoints/last.ckpt "
            "--trainer.max_steps=-1",
        )
    fall = falling(evidence.energies)
    if fall is not None:
        yield Finding(
            "warning",
            "The energy was still falling at the end",
            f"Its mean over the last quarter is {fall:.1%} below that of the quarter before.",
            _longer(evidence),
        )


def falling(energies: Sequence[float]) -> float | None:
    """By which part the mean energy fell from the last quarter but one to the last; None where it stood still.

    Energies of batches are noisy: a fall counts if it exceeds three standard errors, and a hundredth of the energy.

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
    return drop / scale if scale > 0 and drop > max(_CERTAIN * noise, _FALL * scale) else None


def _about_kernel(evidence: Evidence) -> Iterator[Finding]:
    similarity, n = evidence.similarity, evidence.num_neurons
    rank = 1 / similarity.mean_square if similarity.mean_square > 0 else math.inf
    has_width = evidence.sigma is not None
    width = f"--model.kernel_params.sigma={similarity.distance:.2g}, the median distance of two points"
    if not similarity.distance > 0:
        return  # one point, or all the same: no kernel tells them apart
    if rank > _SPREAD * n:
        slower = "Use more neurons, or a kernel that falls more slowly, such as one of a lower degree or alpha."
        directions = f"about {rank:,.0f}" if rank < 1e6 else "more than a million"
        yield Finding(
            "warning",
            "The similarity is nearly diagonal",
            f"Two different points have a similarity of {math.sqrt(similarity.mean_square):.2g} (root mean square), as "
            f"if there were {directions} independent directions for {n} neurons.",
            f"The kernel is too narrow: try {width}." if has_width else slower,
        )
    elif similarity.mean > _ALIKE:
        faster = "Remove the data's mean (--data.centre=true of ArrayDataModule), or use a kernel that falls faster."
        yield Finding(
            "warning",
            "The similarity is nearly constant",
            f"Two different points have a similarity of {similarity.mean:.4f} on average, where 1 is the same point.",
            f"The kernel is too wide: try {width}." if has_width else faster,
        )


def _longer(evidence: Evidence) -> str:
    if evidence.is_adaptive:
        return f"Train longer: --model.updates={2 * max(evidence.planned, 1)}."
    return "Train with longer --model.phases, or leave them out for the adaptive schedule, which needs fewer updates."
