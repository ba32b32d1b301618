"""The batch size that learns fastest on this machine, by measurement.

A larger batch takes longer but allows larger natural steps: C of a batch has rank ``batch``, so L must average over
``n / batch`` of them. With 800 neurons on two cores, a batch of 512 takes three times as long as one of 64 and allows a
step five times as large.
"""

import copy
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ksm_lightning.learning.acceleration import Acceleration
from ksm_lightning.learning.learner import Learner
from ksm_lightning.learning.responses import Inverse
from ksm_lightning.learning.schedule import Schedule
from ksm_lightning.learning.units import tight_batch
from ksm_lightning.network import KSMNetwork

BATCH_SIZES = (64, 128, 256, 512, 1024)
# A size is measured for this number of updates, or until this number of seconds is over. Beyond a size whose update
# takes longer than that, none is measured.
_UPDATES, _SECONDS = 16, 0.5
# A larger batch must be faster by this factor: measurements are noisy, and a small one wastes less if they are wrong.
_MARGIN = 1.1


class Measured(NamedTuple):
    """Time and step of an update with one batch size."""

    batch_size: int
    seconds: float  # of one update
    step: float  # of W, at the start of the schedule

    @property
    def speed(self) -> float:
        """How far W moves in a second, in natural units."""
        return self.step / self.seconds


def choose_batch_size(
    network: KSMNetwork,
    schedule: Schedule,
    x: Tensor,
    *,
    processes: int = 1,
    inverse: Inverse = "auto",
    acceleration: Acceleration = "auto",
    sizes: Sequence[int] = BATCH_SIZES,
) -> tuple[int, list[Measured]]:
    """The number of points per batch with which W moves furthest in a second; the network stays as it is.

    With the tight bound, W's direction is as noisy as the batch is small, and nothing is measured: it is
    :func:`~.units.tight_batch`. With the paper's phases, rates do not depend on the batch, and the smallest is best.

    Args:
        network: A network that can learn.
        schedule: Its schedule.
        x: Points to learn from (samples, m), at least one.
        processes: Number of processes that share an update, each with a batch of its own.
        inverse: As in :class:`~.learner.Learner`.
        acceleration: As in :class:`~.learner.Learner`. Updates that would be compiled or recorded for each size, and
            those of several processes, are measured as torch operations.
        sizes: Batch sizes in ascending order.

    Returns:
        The batch size, and what was measured.
    """
    if network.bound == "tight":
        return max(1, tight_batch(network.num_landmarks) // processes), []
    if not schedule.is_natural:
        return sizes[0], []
    found: list[Measured] = []
    method: Acceleration = acceleration if processes == 1 and acceleration in ("auto", "native") else "none"
    for size in sizes:
        if found and found[-1].seconds > _SECONDS:
            break
        learner = Learner(copy.deepcopy(network), schedule, stage="learning", inverse=inverse, acceleration=method)
        step = schedule.rates(0, network.num_neurons, size * processes).W
        found.append(Measured(size, _seconds(learner, x, size), step))
    best = found[0]
    for each in found[1:]:
        if each.speed > _MARGIN * best.speed:
            best = each
    return best.batch_size, found


def _seconds(learner: Learner, x: Tensor, size: int) -> float:
    """Seconds of an update with batches of a size."""
    batch = x[torch.arange(size, device=x.device) % len(x)][None]
    learner.learn(batch)  # compiles, and computes the first inverse
    done, started = 0, time.perf_counter()
    while done < _UPDATES and time.perf_counter() - started < _SECONDS:
        done += learner.learn(batch)
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
    return (time.perf_counter() - started) / done
