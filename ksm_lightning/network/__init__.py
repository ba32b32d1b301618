"""The network ``y = (L + ridge I)^-1 (q * f(x, W))``: its mathematics, its start, its readouts, its input."""

from ksm_lightning.network.initialisation import DataInit, Initialiser, NormalInit
from ksm_lightning.network.ksm_network import KSMNetwork, Solver

__all__ = ["DataInit", "Initialiser", "KSMNetwork", "NormalInit", "Solver"]
