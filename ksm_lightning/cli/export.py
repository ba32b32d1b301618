"""``ksm export``: the features of a trained network as a file for other programs."""

import os
from pathlib import Path

from ksm_lightning.cli.run_options import checkpoint_of
from ksm_lightning.data import KSMDataModule
from ksm_lightning.export import SUFFIXES, Format, example_inputs
from ksm_lightning.export import export as write
from ksm_lightning.extractor import FeatureExtractor
from ksm_lightning.files import remove_stale_drafts
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.network.readout import Readout, feature_count, needs_sample
from ksm_lightning.runs.checkpoint import network_of, preprocessing_of, read_checkpoint
from ksm_lightning.runs.finished_run import FinishedRun

_USAGE = {
    "torch": "torch.export.load({path!r}).module()",
    "onnx": "onnxruntime.InferenceSession({path!r})",
    "safetensors": "ksm_lightning.FeatureExtractor.load({path!r})",
}


def export(
    ckpt_path: str,
    format: Format = "safetensors",
    readout: Readout = "neural",
    out: str | None = None,
    input_shape: list[int] | None = None,
    data: KSMDataModule | None = None,
    num_features: int | None = None,
) -> None:
    """Write the feature extractor of a checkpoint as one file: raw input in, features out, any batch size.

    The preprocessing of the training data is included. Before the file appears, it is read back and its features are
    compared with PyTorch's.

    Args:
        ckpt_path: A run folder or a checkpoint.
        format: torch writes a .pt2 program for torch.export.load, onnx a .onnx file for ONNX runtimes (needs pip
            install 'ksm_lightning[onnx]'), safetensors a file for FeatureExtractor.load.
        readout: The features: neural is the network's response; nystroem and least_squares have a lower kernel error
            with the same landmarks.
        out: The file to write, which must not exist. Default: READOUT.SUFFIX in the run folder.
        input_shape: Shape of one input, such as [1, 28, 28]. A safetensors file accepts any shape. Default: one row of
            raw values.
        data: Data for fitting least_squares, or nystroem with fewer features than landmarks. Default: the data of the
            checkpoint's run, if its datamodule is one of this package: nothing that a run folder names is imported.
        num_features: Number of features of nystroem or least_squares, at most the number of landmarks: the top
            principal directions. Default: the number of neurons.
    """
    ckpt_path = checkpoint_of(ckpt_path)
    folder = Path(ckpt_path).parent
    if FinishedRun.of_checkpoint(ckpt_path) is not None:
        folder = Path(os.path.normpath(folder / ".."))  # Path(".").parent would be "."
    path = Path(out) if out is not None else folder / f"{readout}{SUFFIXES[format]}"
    remove_stale_drafts(path)
    if path.exists():
        raise FileExistsError(f"{path} exists already: choose another file with --out.")
    extractor = extractor_of(ckpt_path, readout, data, num_features)
    written = write(extractor, path, format, input_shape, is_new=True)
    shape = ", ".join(map(str, ["batch", *(input_shape or [extractor.raw_features])]))
    print(
        f"Features of the readout {readout}: {path} (extractor {extractor.identity})\n"
        f"Input: float32 ({shape}); output: (batch, {extractor.out_features}). Largest difference from PyTorch on "
        f"{len(example_inputs(extractor))} inputs: {written.difference:.1e}.\n"
        f"Usage:  {_USAGE[format].format(path=str(path))}"
    )


def extractor_of(
    ckpt_path: str, readout: Readout, data: KSMDataModule | None = None, num_features: int | None = None
) -> FeatureExtractor:
    """The extractor of a checkpoint. A readout is fitted to ``data``, by default that of the checkpoint's run."""
    content = read_checkpoint(ckpt_path)
    network, prepare = network_of(content), preprocessing_of(content)
    sample = None
    if needs_sample(network, readout, num_features):
        if data is None:
            run = FinishedRun.of_checkpoint(ckpt_path)
            if run is None:
                raise ValueError(
                    f"The readout {readout} needs data to be fitted to, and the checkpoint is not in a run folder: "
                    "give --data."
                )
            data = run.data()
        elif prepare is not None:
            data.use(prepare)
        data.prepare_data()
        prepare = prepare or Preprocessing.identity(network.in_features)
        points = data.readout_sample(readout)
        sample = None if points is None else prepare.inverse(points)
    elif data is not None:
        count = feature_count(network, readout, num_features)
        raise ValueError(f"The readout {readout} with {count} features is not fitted to data: remove --data.")
    return FeatureExtractor.from_network(
        network, readout, sample=sample, preprocessing=prepare, num_features=num_features
    )
