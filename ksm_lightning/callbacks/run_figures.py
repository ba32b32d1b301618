"""Figures of a run, for TensorBoard and as PNG files in the run folder."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from ksm_lightning.data.datamodule import KSMDataModule, datamodule_of
from ksm_lightning.evaluation.portrait import portrait_arrays
from ksm_lightning.files import write_png
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.runs.processes import on_first_process


class Figures(Callback):
    """Draws the landmarks, the tuning of a few neurons, the similarities and the energy.

    There are also the spectra of the similarities and a histogram of the responses, and for images the landmarks and
    the linearised responses as images.

    At the end of a run, the figures are written to TensorBoard and as PNG files to ``figures/`` in the run folder.
    During the run, only an overview is written to TensorBoard. After a signal, the figures that are left are not drawn.

    Args:
        every_n_updates: Updates between two overviews; 0 draws only the end of the run.
        max_points: Maximum number of training points to draw and compare.
        num_neurons: Number of neurons whose tuning is drawn.
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
        """The energies so far, so that the curve of a resumed run starts at update 0."""
        return {"updates": self._updates, "energies": self._energies}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates, self._energies = list(state_dict["updates"]), list(state_dict["energies"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:  # forget the curve of an earlier run
            self._updates, self._energies = [], []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = trainer.global_step
        if isinstance(pl_module, KernelSimilarityMatching):
            for update, energy in outputs.get("logged_energies", ()):
                self._updates.append(update)
                self._energies.append(energy)
        is_last = trainer.should_stop or done == trainer.max_steps  # drawn by `on_train_end`
        if self.every_n_updates and done % self.every_n_updates == 0 and not is_last:
            self._draw(trainer, pl_module, to_files=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        try:
            self._draw(trainer, pl_module, to_files=True)
        except Exception as error:  # the last checkpoint is written after this
            rank_zero_warn(f"The figures could not be drawn: {error}")

    def _draw(self, trainer: L.Trainer, pl_module: L.LightningModule, *, to_files: bool) -> None:
        data = datamodule_of(trainer)
        if data is None or not isinstance(pl_module, KernelSimilarityMatching):
            return
        log_dir = trainer.log_dir  # a broadcast from the first process: every process must read it
        folder = Path(log_dir) / "figures" if to_files and log_dir else None
        only_overview = not to_files
        writers = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        arrays = self._arrays(pl_module, data) if pl_module.shares_neurons else None  # all processes compute them

        def write() -> None:
            if folder is not None or writers:
                drawn = self._arrays(pl_module, data) if arrays is None else arrays
                self._write(trainer, pl_module, data, drawn, folder, writers, only_overview=only_overview)

        on_first_process(trainer, write)

    def _arrays(self, model: KernelSimilarityMatching, data: KSMDataModule) -> dict[str, np.ndarray]:
        points = data.evaluation_points("val")
        x = points.take(random_subset(len(points), self.max_points).to(points.device))
        return portrait_arrays(model.network, x.to(model.network.W))

    def _write(
        self,
        trainer: L.Trainer,
        model: KernelSimilarityMatching,
        data: KSMDataModule,
        arrays: dict[str, np.ndarray],
        folder: Path | None,
        writers: list[Any],
        *,
        only_overview: bool,
    ) -> None:
        for writer in writers:
            writer.add_histogram("responses", arrays["y"], trainer.global_step)
        for name, pixels in self._figures(arrays, data, model, only_overview):
            for writer in writers:
                writer.add_image(f"figures/{name}", pixels, trainer.global_step, dataformats="HWC")
            if folder is not None:
                write_png(folder / f"{name}.png", pixels)

    def _figures(
        self, arrays: dict[str, np.ndarray], data: KSMDataModule, model: KernelSimilarityMatching, only_overview: bool
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Names and pixels of the figures, drawn one at a time; none after a signal."""
        from ksm_lightning import figures  # Matplotlib is slow to import, and most processes do not draw

        W, y, x = arrays["W"], arrays["y"], arrays["x"]
        plane, ends = figures.Plane(x), list(model.schedule.phase_ends)
        neurons = figures.choose_neurons(arrays["centres"], y, self.num_neurons)
        shown_W = figures.among_data(W, x) if model.network.kernel.is_homogeneous else W
        panels: dict[str, Callable[[Any], None]] = {
            "features": lambda axes: figures.landmarks_panel(axes, x, shown_W, plane)
        }
        for neuron in neurons:
            panels[f"tuning_{neuron}"] = partial(
                figures.tuning_panel, x=x, response=y[:, neuron], neuron=neuron, plane=plane
            )
        similarities = arrays["f"], arrays["output"], float(arrays["nrmse"])
        spectra = arrays["input_spectrum"], arrays["output_spectrum"]
        panels["similarities"] = lambda axes: figures.similarity_panel(axes, *similarities)
        panels["spectra"] = lambda axes: figures.spectra_panel(axes, *spectra)
        panels["responses"] = lambda axes: figures.responses_panel(axes, y)
        panels["energy"] = lambda axes: figures.energy_panel(axes, self._updates, self._energies, ends)

        def overview() -> Any:
            figure = figures.new_figure(14, 7.4, columns=3, rows=2)
            shown = ["features", *(f"tuning_{neuron}" for neuron in neurons[:2]), "similarities", "spectra", "energy"]
            for position, name in enumerate(shown, start=1):
                panels[name](figure.add_subplot(2, 3, position))
            return figure

        to_draw: dict[str, Callable[[], Any]] = {"overview": overview}
        if not only_overview:
            to_draw |= {name: partial(figures.draw, panel) for name, panel in panels.items()}
        if data.image_shape is not None and not only_overview:
            grids = {"weights": (W, "Landmarks $w_i$"), "linearised": (arrays["linearised"], "Linearised responses")}
            for name, (images, title) in grids.items():
                to_draw[name] = partial(figures.image_grid, images, data.image_shape, title)
        for name, draw in to_draw.items():
            if model.run_state.stop.is_set:
                return
            yield name, figures.render(draw())
