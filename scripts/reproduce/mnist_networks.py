"""The paper's four MNIST networks (800 neurons, alpha 1 to 4), trained once for all figures that show them."""

import numpy as np
import torch
from figure_script import Workspace, load, mnist_points, named_phases, save
from tqdm import tqdm

from ksm_lightning import KSMNetwork, NormalInit, PhaseSchedule, PowerCosineKernel
from ksm_lightning.learning import train
from ksm_lightning.network.functional import align_signs
from ksm_lightning.network.readout import encode_in_blocks

ALPHAS = (1, 2, 3, 4)
# Eigenvalues, histograms and nearest digits use every seventh of the 70,000 digits.
STRIDE = 7


def network(workspace: Workspace, alpha: int) -> KSMNetwork:
    """The stored network of a kernel. It is trained first if it is missing."""
    kernel = PowerCosineKernel(alpha)
    neurons = 40 if workspace.is_quick else 800
    path = workspace.folder / f"mnist_network_{alpha}.npz"
    if not path.exists():
        schedule = PhaseSchedule(named_phases(workspace, "released_mnist"))
        with tqdm(total=schedule.total_updates, desc=f"network, alpha {alpha}", unit="update") as bar:
            trained = train(
                kernel, mnist_points(workspace), neurons, schedule, init=NormalInit(1.0), seed=0, progress=bar.update
            )
        save(path, {name: value.detach().numpy() for name, value in trained.named_parameters()})
    arrays = load(path)
    found = KSMNetwork(kernel, arrays["W"].shape[1], neurons)
    found.load_state_dict({name: torch.from_numpy(arrays[name]) for name in ("W", "q", "L")})
    return found


def some_of(workspace: Workspace, x: torch.Tensor) -> torch.Tensor:
    """Every seventh digit; all of them in a quick run."""
    return x if workspace.is_quick else x[::STRIDE]


def aligned(found: KSMNetwork, x: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """W and responses after choosing the free signs.

    With an odd kernel, every neuron gets a positive mean response. An even kernel responds equally to w and -w: w gets
    the sign that resembles the data.
    """
    W, y = found.W.detach(), encode_in_blocks(found, x)
    if found.kernel.is_odd:
        W, y = align_signs(W, y)
    else:
        W = W * torch.sign(W @ x.mean(0))[:, None]
    return W.numpy(), y
