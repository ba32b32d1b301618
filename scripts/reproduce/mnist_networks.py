"""The paper's four MNIST networks (800 neurons, alpha 1 to 4), trained once for all figures that show them."""

import numpy as np
import torch
from figure_script import MNIST_PHASES, Place, load, mnist_points, save
from tqdm import tqdm

from ksm_lightning import KSMNetwork, NormalInit, PowerCosineKernel
from ksm_lightning.learning.schedule import PhaseSchedule
from ksm_lightning.learning.train import train
from ksm_lightning.network.functional import align_signs

ALPHAS = (1, 2, 3, 4)


def network(place: Place, alpha: int) -> KSMNetwork:
    """The network of a kernel; trained unless it is in a file already."""
    kernel = PowerCosineKernel(alpha)
    neurons = 40 if place.quick else 800
    path = place.folder / f"mnist_network_{alpha}.npz"
    if not path.exists():
        x = mnist_points(place)
        phases = [{**phase, "updates": 100} for phase in MNIST_PHASES] if place.quick else MNIST_PHASES
        schedule = PhaseSchedule(phases)
        with tqdm(total=schedule.total_updates, desc=f"network, alpha {alpha}", unit="update") as bar:
            trained = train(kernel, x, neurons, schedule, init=NormalInit(1.0), seed=0, progress=bar.update)
        save(path, {name: value.detach().numpy() for name, value in trained.named_parameters()})
    arrays = load(path)
    found = KSMNetwork(kernel, arrays["W"].shape[1], neurons)
    found.load_state_dict({name: torch.from_numpy(arrays[name]) for name in ("W", "q", "L")})
    return found


def encode(found: KSMNetwork, x: torch.Tensor) -> torch.Tensor:
    """Responses (samples, n) of many points."""
    return torch.cat([found(part) for part in torch.split(x, 8192)])


def aligned(found: KSMNetwork, x: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """W and responses with the signs that are free chosen: an odd kernel's neuron responds positively on average.

    An even kernel answers the same to w and -w; its w is the one that is like the data.
    """
    W, y = found.W.detach(), encode(found, x)
    if found.kernel.is_odd:
        W, y = align_signs(W, y)
    else:
        W = W * torch.sign(W @ x.mean(0))[:, None]
    return W.numpy(), y
