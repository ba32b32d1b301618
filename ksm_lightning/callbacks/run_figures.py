"""Figures of a run, to TensorBoard and to PNG files in the run folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ksm_lightning.data import KSMDataModule
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.files import write_png
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network import functional
from ksm_lightning.network.functional import linearised_responses

Panel = Callable[[Any], None]


class Figures(Callback):
    """Draws the data with the learned features, the tuning of a few neurons, input against output similarities, the
    spectra of both, the distribution of responses, and the energy over time; for images also the features and the
    linearised responses as images.

    At the end of a run the figures go to TensorBoard and, as PNG, to ``figures/`` in the run folder; on the way their
    overview goes to TensorBoard.

    Args:
        every_n_updates: Updates between two overviews; only the end is drawn when 0.
        max_points: Points to draw and compare at most, evenly over the training data.
        num_neurons: Neurons whose tuning is drawn.

    Raises:
        ValueError: If a number is impossible.
    """

    def __init__(self, every_n_updates: int = 5000, max_points: int = 1600, num_neurons: int = 3) -> None:
        if every_n_updates < 0 or max_points < 2 or num_neurons < 1:
            raise ValueError(
                "Figures need `every_n_updates` of at least 0, `max_points` of at least 2 and `num_neurons` of at "
                f"least 1, got {every_n_updates}, {max_points} and {num_neurons}."
            )
        self.every_n_updates = every_n_updates
        self.max_points = max_points
        self.num_neurons = num_neurons
        self._updates: list[int] = []
        self._energies: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """The energy so far, so that the curve of a resumed run starts at 0."""
        return {"updates": self._updates, "energies": self._energies}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates, self._energies = list(state_dict["updates"]), list(state_dict["energies"])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        done = trainer.global_step
        if isinstance(pl_module, KernelSimilarityMatching):
            for update, energy in pl_module.logged_energies:
                self._updates.append(update)
                self._energies.append(energy)
        is_last = trainer.should_stop or done == trainer.max_steps  # the end draws this one
        if self.every_n_updates and done % self.every_n_updates == 0 and not is_last:
            self._draw(trainer, pl_module, to_files=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        try:
            self._draw(trainer, pl_module, to_files=True)
        except Exception as error:  # a picture is never worth the run: the last checkpoint is yet to be written
            rank_zero_warn(f"The figures could not be drawn: {error}")

    def _draw(self, trainer: L.Trainer, pl_module: L.LightningModule, *, to_files: bool) -> None:
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, KSMDataModule) or not isinstance(pl_module, KernelSimilarityMatching):
            return
        log_dir = trainer.log_dir  # asks the first rank, so that every rank has to ask
        if not trainer.is_global_zero:
            return
        folder = Path(log_dir) / "figures" if to_files and log_dir else None
        writers = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if folder is None and not writers:
            return
        points = data.evaluation_points("val")
        x = points.take(random_subset(len(points), self.max_points).to(points.device))
        computed = figure_data(pl_module, x.to(pl_module.network.W))
        for writer in writers:
            writer.add_histogram("responses", computed["y"], trainer.global_step)
        for name, pixels in self._figures(computed, data, pl_module, only_overview=not to_files).items():
            for writer in writers:
                writer.add_image(f"figures/{name}", pixels, trainer.global_step, dataformats="HWC")
            if folder is not None:
                write_png(folder / f"{name}.png", pixels)

    def _figures(
        self,
        computed: dict[str, np.ndarray],
        data: KSMDataModule,
        model: KernelSimilarityMatching,
        *,
        only_overview: bool,
    ) -> dict[str, np.ndarray]:
        # Matplotlib takes a good part of a second to import, and most processes never draw.
        from ksm_lightning.figures import panels as figures

        W, y, features = computed["W"], computed["y"], computed["x"]
        plane = figures.Plane(features)
        neurons = figures.choose_neurons(W, y, self.num_neurons)
        ends = list(model.schedule.phase_ends)

        shown_W = figures.among_data(W, features) if model.network.kernel.is_homogeneous else W
        panels: dict[str, Panel] = {"features": lambda axes: figures.features_panel(axes, features, shown_W, plane)}
        for neuron in neurons:
            panels[f"tuning_{neuron}"] = partial(
                figures.tuning_panel, x=features, response=y[:, neuron], neuron=neuron, plane=plane
            )
        panels["similarities"] = lambda axes: figures.similarity_panel(
            axes, computed["f"], computed["output"], float(computed["nrmse"])
        )
        panels["spectra"] = lambda axes: figures.spectra_panel(
            axes, computed["input_spectrum"], computed["output_spectrum"]
        )
        panels["responses"] = lambda axes: figures.responses_panel(axes, y)
        panels["energy"] = lambda axes: figures.energy_panel(axes, self._updates, self._energies, ends)

        overview = figures.new_figure(14, 7.4, columns=3, rows=2)
        shown = ["features", *(f"tuning_{neuron}" for neuron in neurons[:2]), "similarities", "spectra", "energy"]
        for place, name in enumerate(shown):
            panels[name](overview.add_subplot(2, 3, place + 1))
        drawn = {"overview": overview}
        if not only_overview:
            drawn |= {name: figures.draw(panel) for name, panel in panels.items()}
        if data.image_shape is not None and not only_overview:
            drawn["weights"] = figures.image_grid(W, data.image_shape, "Learned features $w_i$")
            drawn["linearised"] = figures.image_grid(computed["linearised"], data.image_shape, "Linearised responses")
        return {name: figures.render(figure) for name, figure in drawn.items()}


def figure_data(model: KernelSimilarityMatching, x: Tensor, pairs: int = 500) -> dict[str, np.ndarray]:
    """What the figures show of a model at the points ``x`` (samples, m), as arrays."""
    return {name: value.cpu().numpy() for name, value in figure_tensors(model, x, pairs).items()}


@torch.no_grad()
def figure_tensors(model: KernelSimilarityMatching, x: Tensor, pairs: int = 500) -> dict[str, Tensor]:
    """The same as tensors, computed on the model's device."""
    network = model.network
    kernel = network.kernel
    y = network(x)
    W = network.W.detach()
    if kernel.is_odd:
        W, y = functional.align_signs(W, y)
    few = slice(None, None, max(len(x) // pairs, 1))
    spectrum = slice(None, None, max(len(x) // 1000, 1))
    return {
        "x": x,
        "W": W,
        "y": y,
        "f": kernel(x[few], x[few]),
        "output": y[few] @ y[few].mT,
        "linearised": linearised_responses(x, y),
        "nrmse": kernel_nrmse(kernel, x, y)[0],
        "input_spectrum": torch.linalg.eigvalsh(kernel(x[spectrum], x[spectrum]).double()).flip(0),
        "output_spectrum": torch.linalg.svdvals(y[spectrum].double()).square(),
    }
