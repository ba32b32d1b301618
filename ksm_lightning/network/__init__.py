"""The network ``y = (L + ridge I)^-1 (q * f(x, W))``: mathematics, initialisation, readouts and preprocessing."""

from ksm_lightning.network.initialisation import DataInit, Initialiser, NormalInit
from ksm_lightning.network.ksm_network import (
    NETWORKS,
    PAPER_RIDGE,
    Bound,
    KSMNetwork,
    Solver,
    TightNetwork,
    check_bound,
)

__all__ = [
    "NETWORKS", "PAPER_RIDGE", "Bound", "DataInit", "Initialiser", "KSMNetwork", "NormalInit", "Solver",
    "TightNetwork", "check_bound",
]  # fmt: skip
