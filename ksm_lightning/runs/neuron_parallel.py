"""Runs whose processes share the neurons: how they start, and what they write to checkpoints."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self, TypeVar

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ksm_lightning.data import KSMDataModule
from ksm_lightning.kernels.limits import TILE
from ksm_lightning.learning import HyperParameters, Learner, Schedule, candidate_count, check_range
from ksm_lightning.learning.learner import Stage
from ksm_lightning.learning.training import start_at
from ksm_lightning.network import KSMNetwork, NormalInit
from ksm_lightning.network.landmark_error import MANY_LANDMARKS
from ksm_lightning.private_apis import attached_trainer
from ksm_lightning.runs import metric_names
from ksm_lightning.runs.digest import digest_of
from ksm_lightning.runs.panels import PanelName, has_panels, put_rows, read_rows, restrict_rows, take_rows
from ksm_lightning.runs.processes import TrainerCollectives, on_first_process
from ksm_lightning.runs.start import StartingModule, StartingPoints, fixed_sample
from ksm_lightning.runs.strategy import keep_unwrapped
from ksm_lightning.sharding import Shard, ShardedLearner, ShardedNetwork

T = TypeVar("T")


def make_learner(
    network: KSMNetwork, schedule: Schedule, hyper: HyperParameters, stage: Stage | None, module: L.LightningModule
) -> Learner:
    """The learner of a network, sharded or whole."""
    chooses = hyper.ridge is None
    if isinstance(network, ShardedNetwork):
        return ShardedLearner(network, schedule, chooses_ridge=chooses, stage=stage, inverse=hyper.inverse)
    return Learner(
        network, schedule, chooses_ridge=chooses, stage=stage, inverse=hyper.inverse, acceleration=hyper.acceleration,
        collectives=TrainerCollectives(module),
    )  # fmt: skip


class NeuronParallelModule(StartingModule):
    """A LightningModule whose processes can share the neurons (``parallel=neurons``).

    The network is built when a run starts and its number of processes is known. Until then it has shapes only. With one
    process it is a whole network like any other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._panel_name: PanelName | None = None  # while a checkpoint is written in panels
        self._panel: dict[str, Tensor] = {}

    @property
    def shares_neurons(self) -> bool:
        """Whether each process of the trainer owns some of the neurons, and all of them see the same points."""
        return self.hparams.get("parallel") == "neurons" and TrainerCollectives(self).size > 1

    def configure_callbacks(self) -> list[L.Callback]:
        trainer = attached_trainer(self)
        if trainer is not None:
            keep_unwrapped(trainer.strategy, self.shares_neurons)
        return super().configure_callbacks()

    def cpu(self) -> Self:
        """Move to the CPU, as Lightning does after an error; a network without memory stays where it is."""
        return self if self.network.W.is_meta else super().cpu()

    def first_network(self, hyper: HyperParameters) -> KSMNetwork:
        """The network before a run: without ``in_features`` a placeholder, with shared neurons one without memory."""
        with torch.device("meta") if hyper.parallel == "neurons" else nullcontext():
            return hyper.make_network(hyper.in_features or 1)

    def build_for_loading(self, in_features: int) -> None:
        """Build a network, of which this process may own a part, whose weights come from a checkpoint."""
        hyper = HyperParameters.of({**self.hparams, "in_features": in_features})
        network: KSMNetwork
        if self.shares_neurons:
            network = self._shard(hyper)
        else:
            network = hyper.make_network(in_features, generator=torch.Generator())
        self.use_network(network, "learning")

    def _shard(self, hyper: HyperParameters) -> ShardedNetwork:
        network, m = self.first_network(hyper), hyper.in_features
        assert m is not None
        shard = Shard(hyper.num_neurons, TrainerCollectives(self))
        return ShardedNetwork(network.kernel, shard, m, network.ridge).to(self.trainer.strategy.root_device)

    def prepare_neurons(self, data: KSMDataModule | None) -> None:
        """Check what shared neurons need, and build the network if its weights come from a checkpoint."""
        if self.shares_neurons and data is None:
            raise ValueError(
                "With parallel=neurons all processes must draw the same batches, which other loaders do not: use a "
                "datamodule of ksm_lightning, such as ArrayDataModule."
            )
        if self.shares_neurons and data is not None and data.chooses_batch_size:
            raise ValueError("`batch_size` auto measures whole networks: give a number with parallel=neurons.")
        if not self.network.W.is_meta:
            return
        trainer, m = self.trainer, self.hparams["in_features"]
        m = data.in_features if m is None and data is not None else m
        if m is not None and (trainer.state.fn != "fit" or trainer.ckpt_path):
            self.build_for_loading(m)

    # ------------------------------------------------------------------ start

    def place_and_start(self, data: StartingPoints) -> None:
        if not self.shares_neurons or not isinstance(data, KSMDataModule):
            super().place_and_start(data)
            return
        trainer, is_natural = self.trainer, self.schedule.is_natural
        self.hparams["in_features"] = data.in_features
        hyper = HyperParameters.of(self.hparams)
        seed, data.seed = on_first_process(trainer, lambda: (torch.initial_seed(), data.batch_seed()))
        generator = torch.Generator().manual_seed(seed)
        candidates = None
        if hyper.init == "data" or is_natural:
            count = candidate_count(hyper.num_neurons, data.in_features)
            candidates = data.random_points(count, generator)  # the same on every process
        W = torch.empty(hyper.num_neurons, data.in_features)

        def choose() -> None:
            kernel, sizes = hyper.make_kernel(), (hyper.num_neurons, data.in_features)
            check_range(kernel, fixed_sample(data))
            init = NormalInit(hyper.init_scale)
            if hyper.init == "data" and candidates is not None:
                init = start_at(candidates, kernel, is_natural)  # type: ignore[assignment]
            W.copy_(init(kernel, *sizes, generator))

        on_first_process(trainer, choose)
        network = self._shard(hyper)
        network.take(network.shard.ranks.broadcast(W))
        self.use_network(network)
        self.learner.set_kernel_for(trainer.global_step)
        if self.learner.stage == "unstarted" and candidates is not None:
            self.learner.start(candidates.to(network.W))
        self._take_over(on_first_process(trainer, lambda: self.network.ridge))

    # ------------------------------------------------------------------ what all processes compute together

    def compute_once(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns on the first process. All of them compute it if they share the neurons."""
        if not self.shares_neurons:
            return on_first_process(self.trainer, compute)
        result: T = self.trainer.strategy.broadcast(compute())
        return result

    def log_bound(self) -> None:
        """Log the bound J on a fixed sample, which has no noise of batches."""
        data = self.starting_points
        if data is None or not self.loggers or not (self.trainer.is_global_zero or self.shares_neurons):
            return
        bound = self.learner.bound_on(fixed_sample(data).to(self.network.W))
        if math.isfinite(bound):
            for logger in self.loggers:
                logger.log_metrics({metric_names.TRAIN_BOUND: bound}, step=self.trainer.global_step)

    def warn_if_silent(self) -> None:
        """Warn, once in a run, if all responses to the data are rounding errors: ``|y|^2`` next to ``f(x, x)``."""
        data, network = self.starting_points, self.network
        if data is None or self.run_state.is_silent or not (self.trainer.is_global_zero or self.shares_neurons):
            return
        x = fixed_sample(data).to(network.W)
        own, eps = network.kernel.diag(x), torch.finfo(x.dtype).eps
        parts = zip(
            torch.split(x, 64), torch.split(own, 64), strict=True
        )  # nearly always the first part has a response
        is_silent = all(bool((network(part).square().sum(1) <= eps * f).all()) for part, f in parts)
        self.run_state.is_silent = is_silent and bool(own.any())
        if self.run_state.is_silent:
            rank_zero_warn(
                f"The network does not respond to the data: for each of {len(x):,} points, |y|^2 is a rounding error "
                f"next to f(x, x). Start W at data points (init=data), scale the data, choose a wider kernel than "
                f"{network.kernel}, or lower `ridge`."
            )

    def skips_work(self) -> bool:
        return self.agree_to_stop() if self.shares_neurons else super().skips_work()

    def on_train_batch_end(self, *args: Any) -> None:
        """Say if an inverse was inaccurate, then leave after a signal."""
        if isinstance(self.learner, ShardedLearner):
            self.learner.responses.warn_if_inaccurate()
        super().on_train_batch_end(*args)

    def leave_work(self) -> None:
        """Raise StoppedEarly after a signal, unless the others could not go on without this process."""
        if not self.shares_neurons:
            self.run_state.stop.leave_work()

    def network_for(self, readout: str) -> KSMNetwork:
        """The network that features of a readout are computed with: readouts other than ``neural`` need a whole one."""
        return self.network if readout == "neural" else self.network.whole()

    def check_readout_fits(self, readout: str) -> None:
        """Raise ValueError if a readout needs a matrix (n, n) of neurons that are shared because they are many."""
        n = self.hparams["num_neurons"]
        if self.shares_neurons and readout != "neural" and n > MANY_LANDMARKS:
            raise ValueError(
                f"The readout {readout} of {n:,} neurons needs a matrix of {n:,} x {n:,} numbers, which "
                "parallel=neurons avoids: choose neural (--kernel_error.readouts=[neural]) during the run, and export "
                "its checkpoint on a machine that has the memory."
            )

    # ------------------------------------------------------------------ checkpoints

    @contextmanager
    def writing_panels(self, name: PanelName) -> Iterator[dict[str, Tensor]]:
        """Within the block, checkpoints are indices of panels, and the rows of this process come into the mapping."""
        self._panel_name, self._panel = name, {}
        try:
            yield self._panel
        finally:
            self._panel_name, self._panel = None, {}

    def share_out(self, checkpoint: dict[str, Any], learner: dict[str, Any]) -> dict[str, Any] | None:
        """Take the rows out of a checkpoint, and return an index; or give the first process those of all neurons."""
        network = self.network
        if not isinstance(network, ShardedNetwork):
            return None
        rows = take_rows(checkpoint, learner)
        if self._panel_name is not None:
            self._panel.update(rows)
            owned = [network.shard.rows_of(rank) for rank in range(network.shard.ranks.size)]
            return self._panel_name.index_of(owned, self._of_all(digest_of(rows)))
        checkpoint["ksm_lightning"] = {"learner": learner}
        put_rows(checkpoint, {name: _on_first(value, network.shard) for name, value in rows.items()})
        return None

    def use_rows(self, checkpoint: dict[str, Any]) -> None:
        """Put the rows that this process needs into the content of a checkpoint, a whole one or an index."""
        network, trainer = self.network, attached_trainer(self)
        rows = network.shard.rows if isinstance(network, ShardedNetwork) else None
        if has_panels(checkpoint):
            if trainer is None or not trainer.ckpt_path:
                raise ValueError(
                    "The folder of the panels of this checkpoint is unknown: give its path as `ckpt_path`."
                )
            read_rows(checkpoint, Path(trainer.ckpt_path).parent, rows)
        elif rows is not None:
            restrict_rows(checkpoint, rows)

    def first_of_all(self, text: str) -> str:
        """The first text of a process that is not empty; empty if all of them are."""
        has_text = torch.tensor([bool(text)], dtype=torch.int64, device=self.trainer.strategy.root_device)
        found = TrainerCollectives(self).gather(has_text).tolist()
        broadcast: str = self.trainer.strategy.broadcast(text, found.index(1)) if any(found) else ""
        return broadcast

    def _of_all(self, text: str) -> list[str]:
        """A text of each process, all of the same length."""
        device = self.trainer.strategy.root_device
        codes = torch.tensor([list(text.encode())], dtype=torch.uint8, device=device)
        return [bytes(row).decode() for row in TrainerCollectives(self).gather(codes).tolist()]


def _on_first(rows: Tensor, shard: Shard) -> Tensor:
    """The rows of all processes, on the CPU of the first one; elsewhere an empty tensor."""
    whole = torch.empty(shard.num_neurons if shard.ranks.is_first else 0, *rows.shape[1:], dtype=rows.dtype)
    for panel in shard.panels(TILE):
        sent = shard.broadcast(panel, rows)
        if shard.ranks.is_first:
            whole[panel.rows] = sent.cpu()
    return whole
