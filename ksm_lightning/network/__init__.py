"""The network ``y = (L + ridge I)^-1 (q * f(x, W))``: mathematics, initialisation, readouts and preprocessing."""

from ksm_lightning.network.initialisation import DataInit, Initialiser, NormalInit
from ksm_lightning.network.ksm_network import PAPER_RIDGE, KSMNetwork, Solver

__all__ = ["PAPER_RIDGE", "DataInit", "Initialiser", "KSMNetwork", "NormalInit", "Solver"]
