"""``ksm export``: a trained network as a file for other programs."""

import os
from pathlib import Path

from ksm_lightning.data import KSMDataModule
from ksm_lightning.export import SUFFIXES, Format, example_inputs
from ksm_lightning.export import export as write
from ksm_lightning.extractor import FeatureExtractor
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.network.readout import Readout
from ksm_lightning.runs.checkpoint import network_of, preprocessing_of, read_checkpoint
from ksm_lightning.runs.finished_run import Run

_USE = {
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
) -> None:
    """Write the feature extractor of a checkpoint as one file: raw input in, features out, any batch size.

    Centring and scaling of the training data are inside. The file is read back and its features held against
    PyTorch's before it appears. Example: ksm export --ckpt_path=runs/half_moons/version_0/checkpoints/last.ckpt
    --format=onnx

    Args:
        ckpt_path: The checkpoint.
        format: torch makes a .pt2 program for torch.export.load, onnx a .onnx for ONNX runtimes (needs pip install
            'ksm_lightning[onnx]'), safetensors a file for FeatureExtractor.load.
        readout: The features: neural is the network's response, nystroem and least_squares have a lower kernel error
            with the same landmarks.
        out: The file to write, which must not exist yet; READOUT.SUFFIX in the run folder unless given.
        input_shape: Shape of one input, such as [1, 28, 28]; a row of raw values unless given. Other formats than
            safetensors, which takes any, keep to it.
        data: Data that least_squares is fitted to; that of the run which the checkpoint lies in unless given.
    """
    folder = Path(ckpt_path).parent
    if Run.of_checkpoint(ckpt_path) is not None:
        folder = Path(os.path.normpath(folder / ".."))  # the parent of "." is "." again
    path = Path(out) if out is not None else folder / f"{readout}{SUFFIXES[format]}"
    if data is not None and readout != "least_squares":
        raise ValueError(f"--data is what least_squares is fitted to, and the readout is {readout}: leave it out.")
    if path.exists():
        raise FileExistsError(f"{path} exists already: name another file with --out.")
    extractor = extractor_of(ckpt_path, readout, data)
    written = write(extractor, path, format, input_shape)
    shape = ", ".join(map(str, ["batch", *(input_shape or [extractor.raw_features])]))
    print(
        f"Features of the readout {readout}: {path} (extractor {extractor.identity})\n"
        f"Takes float32 ({shape}) and gives (batch, {extractor.out_features}); on {len(example_inputs(extractor))} "
        f"inputs it differs from PyTorch by {written.difference:.1e} at most.\n"
        f"Use it:  {_USE[format].format(path=str(path))}"
    )


def extractor_of(ckpt_path: str, readout: Readout, data: KSMDataModule | None = None) -> FeatureExtractor:
    """The extractor of a checkpoint; what least squares is fitted to comes from ``data`` or from the checkpoint's run.

    Raises:
        ValueError: If there is no data that least squares could be fitted to.
    """
    content = read_checkpoint(ckpt_path)
    network, prepare = network_of(content), preprocessing_of(content)
    sample = None
    if readout == "least_squares":
        if data is None:
            run = Run.of_checkpoint(ckpt_path)
            if run is None:
                raise ValueError(
                    "The least-squares readout is fitted to data, and the checkpoint lies in no run folder that would "
                    "say which: give --data."
                )
            data = run.data()
        elif prepare is not None:
            data.use(prepare)
        data.prepare_data()
        prepare = prepare or Preprocessing.none(network.in_features)
        points = data.readout_sample(readout)
        sample = None if points is None else prepare.inverse(points)
    return FeatureExtractor.from_network(network, readout, sample=sample, preprocessing=prepare)
