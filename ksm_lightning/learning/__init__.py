"""How a network learns: schedule, rules, responses, the Learner that owns them, and training without Lightning."""

from ksm_lightning.learning.collectives import Collectives, SingleProcess
from ksm_lightning.learning.hyperparameters import HyperParameters
from ksm_lightning.learning.learner import Learner, Snapshot
from ksm_lightning.learning.observation import Observation
from ksm_lightning.learning.schedule import (
    AdaptiveSchedule,
    PaperPhases,
    Phase,
    PhaseSchedule,
    Rates,
    Schedule,
    TightSchedule,
    make_schedule,
)
from ksm_lightning.learning.stream import Stream
from ksm_lightning.learning.training import fit_network, train
from ksm_lightning.learning.units import candidate_count, check_range, natural_ridge, sample_size

__all__ = [
    "AdaptiveSchedule",
    "Collectives",
    "HyperParameters",
    "Learner",
    "Observation",
    "PaperPhases",
    "Phase",
    "PhaseSchedule",
    "Rates",
    "Schedule",
    "SingleProcess",
    "Snapshot",
    "Stream",
    "TightSchedule",
    "candidate_count",
    "check_range",
    "fit_network",
    "make_schedule",
    "natural_ridge",
    "sample_size",
    "train",
]  # fmt: skip
