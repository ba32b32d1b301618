"""The start of a run: the first process chooses the first weights, on its device, and the others receive them."""

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ksm_lightning.data import KSMDataModule
from ksm_lightning.data.datamodule import datamodule_of
from ksm_lightning.data.loaders import FirstBatches
from ksm_lightning.kernels import auto_width, chooses_width
from ksm_lightning.kernels.limits import EXACT_UP_TO, TILE
from ksm_lightning.learning import HyperParameters, Learner, Schedule, candidate_count, check_range
from ksm_lightning.learning.learner import Stage
from ksm_lightning.learning.training import start_at
from ksm_lightning.network import Initialiser, KSMNetwork, NormalInit
from ksm_lightning.private_apis import training_loader
from ksm_lightning.runs.processes import on_first_process
from ksm_lightning.runs.run_state import StoppableModule

StartingPoints = KSMDataModule | FirstBatches


def fixed_sample(data: StartingPoints) -> Tensor:
    """2,000 random training points (samples, m), the same in every run on these data.

    The bound is measured on them, and whether the kernel is in range and a neuron responds.
    """
    return data.random_points(EXACT_UP_TO, torch.Generator().manual_seed(0))


class StartingModule(StoppableModule):
    """A LightningModule that places its landmarks and starts its learner, see :class:`~ksm_lightning.learning.Learner`.

    The start takes up to minutes and is not split between processes, so one of them decides and the others wait. An
    error there is raised on every process.
    """

    network: KSMNetwork
    learner: Learner
    schedule: Schedule

    def __init__(self) -> None:
        super().__init__()
        self._first_batches: FirstBatches | None = None

    def use_network(self, network: KSMNetwork, stage: Stage | None = None) -> None:
        """Make this the network of the module, with a learner of its own."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the width of the kernel

    @property
    def chooses_width(self) -> bool:
        """Whether ``sigma=auto`` is still to be replaced by a number, which takes data."""
        return chooses_width(self.hparams["kernel"], self.hparams["kernel_params"])

    @property
    def kernel_text(self) -> str:
        """The kernel in a sentence; its width is ``auto`` until it is chosen."""
        return f"{type(self.network.kernel).__name__}(sigma=auto)" if self.chooses_width else str(self.network.kernel)

    def choose_width_from(self, data: StartingPoints) -> None:
        """Replace ``sigma=auto`` by the width for the data, and say so. It does not depend on the seed of the run."""
        if self.chooses_width:
            generator = torch.Generator().manual_seed(0)
            width = on_first_process(self.trainer, lambda: auto_width(data.random_points(TILE, generator)))
            self.use_width(width)
            rank_zero_info(f"sigma=auto chose {self.network.kernel}.")

    def use_width(self, sigma: float) -> None:
        """Make this the width of the kernel."""
        self.hparams["kernel_params"] = {**self.hparams["kernel_params"], "sigma": sigma}
        self.network.kernel = HyperParameters.of(self.hparams).make_kernel()
        self.use_network(self.network, self.learner.stage)

    # ------------------------------------------------------------------ data

    @property
    def starting_points(self) -> StartingPoints | None:
        """What the run starts from: the datamodule, or the first batches of another loader; None if it does not fit."""
        return datamodule_of(self.trainer) or self._first_batches

    def read_first_batches(self) -> None:
        """Read the first batches of a loader without a datamodule: as many points as the start needs."""

        def count_for(features: int) -> int:
            is_started, p = self.learner.stage == "learning", self.hparams["num_landmarks"]
            return EXACT_UP_TO if is_started else candidate_count(p, features)

        self._first_batches = FirstBatches(training_loader(self.trainer), count_for)

    # ------------------------------------------------------------------ landmarks

    def place_and_start(self, data: StartingPoints) -> None:
        """Build the network if it has no landmarks yet, and start the adaptive schedule, with points of the data."""
        is_unplaced, is_natural = self.learner.stage == "unplaced", self.schedule.is_natural
        self.hparams["in_features"] = data.in_features
        hyper, device = HyperParameters.of(self.hparams), self.trainer.strategy.root_device
        # A generator of its own: how far the global one has advanced depends on the strategy.
        generator = torch.Generator().manual_seed(torch.initial_seed())

        def build(init: Initialiser | None) -> None:
            self.use_network(hyper.make_network(data.in_features, init, generator).to(device))
            self.learner.set_kernel_for(self.trainer.global_step)

        def choose() -> float:
            check_range(hyper.make_kernel(), fixed_sample(data))
            starts_at_data = is_unplaced and hyper.init == "data"
            candidates = None
            if starts_at_data or is_natural:
                count = candidate_count(self.hparams["num_landmarks"], data.in_features)
                candidates = data.random_points(count, generator)
            if is_unplaced and starts_at_data and candidates is not None:
                build(start_at(candidates, hyper.make_kernel(), is_natural))
            elif is_unplaced:
                build(None)
            if self.learner.stage == "unstarted" and candidates is not None:
                self._start_alone(candidates.to(self.network.to(device).W))
            return self.network.ridge

        if is_unplaced and not self.trainer.is_global_zero:
            build(NormalInit())  # until the weights of the first process come
        self._take_over(on_first_process(self.trainer, choose))

    def _start_alone(self, x: Tensor) -> float:
        """Start the learner of this process while the others wait; returns the ridge."""
        self.learner.start(x)
        return self.network.ridge

    def _take_over(self, ridge: float) -> None:
        """Learn on with the ridge and the weights of the first process."""
        self.network.ridge = self.hparams["ridge"] = ridge
        self.learner.stage = "learning"
        self.share_weights()

    def share_weights(self) -> None:
        """Replace the weights by those of the first process. A tracked inverse stays: it is that of equal weights."""
        collectives = self.learner.collectives
        if collectives.size > 1:
            for parameter in self.network.parameters():
                parameter.data.copy_(collectives.broadcast(parameter.data))
