"""The files of ``ksm predict``: the features of all points, their labels, and a description of the extractor."""

import json
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from ksm_lightning.callbacks.row_file import RowFile, create_array
from ksm_lightning.data import PointLoader
from ksm_lightning.data.datamodule import datamodule_of
from ksm_lightning.extractor import FeatureExtractor
from ksm_lightning.files import (
    claimed,
    draft_of,
    draft_path,
    draft_tag,
    naming_errors,
    publish_together,
    remove_unfinished,
)
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.readout import Readout, check_readout, feature_count
from ksm_lightning.runs.processes import on_first_process

_Draft = Literal["features", "labels", "written", "about"]


class FeatureWriter(BasePredictionWriter):
    """Writes the features of the predicted points, in the order of the points, from any number of processes.

    Each process writes its rows to one file that all machines share, so the features may be larger than memory. A
    ``.npz`` file holds the arrays ``features`` (samples, k), ``labels`` (samples,) if the data has labels, and
    ``extractor``, a JSON text that describes the extractor and names the classes, if they have names. A ``.npy`` file
    holds the features alone; the rest is in ``NAME_labels.npy`` and ``NAME.json``. Labels that are not integers are not
    written. Files are complete when they appear. Of two runs that write the same file, the second one is refused.

    Args:
        path: The ``.npy`` or ``.npz`` file to write, which must not exist.
        readout: The features: ``neural`` is the network's response; ``nystroem`` and ``least_squares`` have a lower
            kernel error with the same landmarks.
        num_features: Number of features k of ``nystroem`` or ``least_squares``, at most the number of landmarks: the
            top k principal directions. Default: the number of neurons.
    """

    def __init__(
        self, path: str = "features.npy", readout: Readout = "neural", num_features: int | None = None
    ) -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)
        self.readout = check_readout(readout)
        self.num_features = num_features
        self._arrays: dict[_Draft, RowFile] = {}
        self._extractor: FeatureExtractor | None = None
        self._has_labels = False
        self._classes: dict[str, list[str]] = {}  # names of the labels 0, 1, ...
        self._tag = ""  # of this run's drafts, the same on all ranks
        self._claim = ExitStack()  # on the first rank, from `setup` to the end

    # ------------------------------------------------------------------ before

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        if self.path.suffix not in (".npy", ".npz"):
            raise ValueError(f"Features are written as .npy or .npz, got {self.path}: change --features.path.")
        if isinstance(pl_module, KernelSimilarityMatching):
            if pl_module.shares_neurons:
                raise ValueError(
                    "`predict` computes features from one matrix, which parallel=neurons does not make on several "
                    "processes: run it on one device."
                )
            feature_count(pl_module.network, self.readout, self.num_features)
        on_first_process(trainer, self._claim_files)
        self._tag = trainer.strategy.broadcast(self._tag)

    def _claim_files(self) -> None:
        """Refuse files that exist or that another run is writing."""
        other = "choose another file with --features.path."
        with naming_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._claim.enter_context(claimed(self.path, other))
        beside = self._beside().values()
        remove_unfinished(self.path, beside)
        for path in (self.path, *beside):
            if path.exists():
                raise FileExistsError(f"{path} exists already: {other}")
        self._tag = draft_tag()

    def _beside(self) -> dict[str, Path]:
        """The files that belong to a ``.npy`` file."""
        if self.path.suffix == ".npz":
            return {}
        return {"labels": self.path.with_name(f"{self.path.stem}_labels.npy"), "about": self.path.with_suffix(".json")}

    def _draft(self, name: _Draft) -> Path:
        return draft_path(self.path, self._tag, name)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        samples = _count(_only_loader(trainer))
        data = datamodule_of(trainer)
        if not isinstance(pl_module, KernelSimilarityMatching):
            raise ValueError(f"FeatureWriter needs a KernelSimilarityMatching model, got a {type(pl_module).__name__}.")
        prepare = None if data is None else data.preprocessing
        points = None if data is None else data.readout_sample(self.readout)
        self._extractor = FeatureExtractor.from_network(
            pl_module.network, self.readout, preprocessing=prepare, num_features=self.num_features,
            sample=points if prepare is None or points is None else prepare.to(points.device).inverse(points),
        )  # fmt: skip
        # The extractor has the closed form; with the dynamics the features are the network's own responses.
        is_dynamic = self.readout == "neural" and pl_module.network.solver == "dynamics"
        pl_module.run_state.encoder = None if is_dynamic else self._extractor.features
        shape = (samples, self._extractor.out_features)
        dtypes: dict[_Draft, Any] = {"labels": np.int64, "written": np.bool_}
        dtypes["features"] = pl_module.network.W.detach().cpu().numpy().dtype

        def create() -> None:
            for name, dtype in dtypes.items():
                create_array(self._draft(name), dtype, shape if name == "features" else shape[:1], self.path)

        on_first_process(trainer, create)
        if not self._draft("features").is_file():
            raise FileNotFoundError(f"The folder {self.path.parent} must be shared by all processes.")
        self._arrays = {name: RowFile(self._draft(name), self.path) for name in dtypes}
        self._has_labels = False
        names = None if data is None or data.evaluation_labels("test") is None else data.label_names
        self._classes = {} if names is None else {"label_names": list(names)}

    # ------------------------------------------------------------------ on the way

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert isinstance(prediction, Tensor)
        loader = _only_loader(trainer)
        rows: Any = batch_indices
        if isinstance(loader, PointLoader):
            start = loader.start + batch_idx * loader.batch_size
            rows = slice(start, start + len(prediction))
        elif not batch_indices:
            raise ValueError("The indices of the points in a batch are unknown: use a DataLoader with a Dataset.")
        self._arrays["features"].write(rows, prediction.cpu().numpy())
        self._arrays["written"].write(rows, np.ones(len(prediction), np.bool_))
        labels = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
        if isinstance(labels, Tensor) and labels.shape == prediction.shape[:1] and not labels.is_floating_point():
            self._arrays["labels"].write(rows, labels.cpu().numpy())
            self._has_labels = True

    # ------------------------------------------------------------------ after

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for array in self._arrays.values():
            array.close()
        # The reduction is also a barrier: afterwards all rows are in the file.
        has_labels = torch.tensor(int(self._has_labels), device=pl_module.device)
        self._has_labels = int(trainer.strategy.reduce(has_labels, reduce_op="sum")) > 0
        on_first_process(trainer, self._finish)
        self._release(pl_module)

    def _read(self, name: _Draft) -> np.ndarray:
        return np.lib.format.open_memmap(self._draft(name), "r")

    def _release(self, pl_module: L.LightningModule) -> None:
        if isinstance(pl_module, KernelSimilarityMatching):
            pl_module.run_state.encoder = None
        for array in self._arrays.values():
            with suppress(OSError):
                array.close()
        self._arrays, self._extractor = {}, None

    def _finish(self) -> None:
        features, labels, extractor = self._read("features"), self._read("labels"), self._extractor
        assert extractor is not None
        is_written = self._read("written")
        if not is_written.all():
            raise ValueError(
                f"Only {int(is_written.sum())} of {len(features)} points were predicted, and no features were written: "
                "remove limit_predict_batches, fast_dev_run, drop_last and samplers that skip points."
            )
        about = json.dumps({**extractor.description, "samples": len(features), **self._classes}, indent=2)
        if self.path.suffix == ".npz":
            arrays = {"features": features, **({"labels": labels} if self._has_labels else {})}
            with draft_of(self.path, is_new=True) as draft:
                write_archive(draft, {**arrays, "extractor": np.array(about)})
        else:
            beside = self._beside()
            with naming_errors(beside["about"]):
                self._draft("about").write_text(about + "\n")
            # The features appear last: where they are, the files beside them are.
            targets: dict[_Draft, Path] = {"labels": beside["labels"]} if self._has_labels else {}
            targets |= {"about": beside["about"], "features": self.path}
            publish_together({self._draft(name): path for name, path in targets.items()})
        self._leave()
        print(
            f"Features of {features.shape[0]:,} points in {features.shape[1]} dimensions: {self.path} (extractor "
            f"{extractor.identity})"
        )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._release(pl_module)
        if trainer.is_global_zero:
            self._leave()

    def _leave(self) -> None:
        """Remove the drafts of this run, if it has created any, and let other runs write the file."""
        if self._tag:
            for name in get_args(_Draft):
                with suppress(OSError):
                    self._draft(name).unlink()
        self._tag = ""
        self._claim.close()


def write_archive(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """An uncompressed ``.npz`` file, written in pieces: arrays may be larger than memory."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _count(loader: Any) -> int:
    """Number of points to predict."""
    if isinstance(loader, PointLoader):
        return len(loader.points)
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            "FeatureWriter needs the number of points: use a DataLoader with a Dataset that has a length."
        ) from error


def _only_loader(trainer: L.Trainer) -> Any:
    loaders = trainer.predict_dataloaders
    if isinstance(loaders, list | tuple):
        if len(loaders) != 1:
            raise ValueError(f"FeatureWriter needs exactly one loader, got {len(loaders)}.")
        return loaders[0]
    return loaders
