"""Export of a feature extractor as a torch program, ONNX or safetensors, with a check of the written file."""

import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.extractor import FeatureExtractor
from ksm_lightning.files import draft_of
from ksm_lightning.kernels.limits import FLOAT32_ROUNDING

Format = Literal["torch", "onnx", "safetensors"]
SUFFIXES: dict[Format, str] = {"torch": ".pt2", "onnx": ".onnx", "safetensors": ".safetensors"}
_INPUT, _OUTPUT = "x", "features"


class Exported(NamedTuple):
    """Result of :func:`export`."""

    path: Path
    difference: float  # largest difference between a feature of the file and of the extractor


def export(
    extractor: FeatureExtractor,
    path: str | Path,
    format: Format,
    input_shape: Sequence[int] | None = None,
    *,
    is_new: bool = False,
) -> Exported:
    """Write an extractor to a file, load the file, and compare its features with those of the extractor.

    The file takes float32 input of any batch size. ``torch`` writes a program for ``torch.export.load`` and ``onnx``
    one for ONNX runtimes; both run without this package. ``safetensors`` is read by :meth:`FeatureExtractor.load`.

    Args:
        extractor: The extractor. It is moved to the CPU.
        path: The file to write, atomically.
        format: ``torch``, ``onnx`` or ``safetensors``.
        input_shape: Shape of one input, such as ``(1, 28, 28)``. Default: ``(raw_features,)``.
        is_new: Whether the file must not exist. By default it is replaced.

    Raises:
        FileExistsError: If the file must be new, and another process has written it in the meantime.
        ValueError: If the format, the shape or the suffix of the file is invalid, or the features differ.
        ModuleNotFoundError: If a package for ONNX is missing.
    """
    path, shape = Path(path), tuple(input_shape or (extractor.raw_features,))
    if format not in get_args(Format):
        raise ValueError(f"There is no format {format!r}: choose one of {', '.join(SUFFIXES)}.")
    if path.suffix != SUFFIXES[format]:
        raise ValueError(f"The format {format} is written to a {SUFFIXES[format]} file, got {path}.")
    if min(shape) < 1:
        raise ValueError(f"Every side of `input_shape` must be at least 1, got {shape}; leave out the batch dimension.")
    if math.prod(shape) != extractor.raw_features:
        raise ValueError(
            f"Inputs of shape {shape} have {math.prod(shape)} values, but the extractor takes {extractor.raw_features}."
        )
    extractor = extractor.cpu().eval()
    x = example_inputs(extractor).view(-1, *shape)
    write, read = _FORMATS[format]
    with draft_of(path, is_new=is_new) as draft:
        written = draft.with_name(f"{draft.name}{path.suffix}")  # the libraries check the suffix
        try:
            write(extractor, x, written)
            program = read(written)
            differences = [(program(part) - extractor(part)).abs().max() for part in (x, x[:1])]
            written.replace(draft)
        finally:
            written.unlink(missing_ok=True)
        largest = max(1.0, float(extractor(x).abs().max()))
        difference = float(torch.stack(differences).max())  # NaN if any is NaN
        if not difference <= FLOAT32_ROUNDING * largest:
            raise ValueError(f"The exported features differ by {difference:.1e}, so no file was written.")
    return Exported(path, difference)


def example_inputs(extractor: FeatureExtractor, count: int = 64) -> Tensor:
    """Raw inputs (samples, raw_features) in float32: landmarks and points between them, near the training data."""
    prepare = extractor.preprocessing
    W = extractor.W.double().cpu()
    chosen = W[torch.linspace(0, len(W) - 1, min(len(W), count)).long()]
    rows = torch.cat([chosen, 0.5 * (chosen + chosen.roll(1, 0)), 0.9 * chosen])
    rows = prepare.inverse(rows.to(prepare.mean.device)).float().cpu()
    if prepare.raw_shape is None or prepare.image_shape is None:
        return rows
    border = (prepare.crop,) * 4
    return torch.nn.functional.pad(rows.view(-1, *prepare.image_shape), border).flatten(1)


def _trace(extractor: FeatureExtractor, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(extractor, (x,), dynamic_shapes={_INPUT: {0: torch.export.Dim("batch", min=1)}})


def _write_torch(extractor: FeatureExtractor, x: Tensor, path: Path) -> None:
    about = {"ksm_lightning.json": json.dumps(extractor.description)}
    with _quietly():
        content = io.BytesIO()  # torch does not report why a file cannot be written
        torch.export.save(_trace(extractor, x), content, extra_files=about)
    path.write_bytes(content.getbuffer())


def _read_torch(path: Path) -> Callable[[Tensor], Tensor]:
    with _quietly():
        program: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return program


def _write_onnx(extractor: FeatureExtractor, x: Tensor, path: Path) -> None:
    _check_onnx()
    with _quietly():
        table = torch.export.default_decompositions()
        table[torch.ops.aten.acos.default] = float64_acos
        traced = _trace(extractor, x).run_decompositions(table)
        program = torch.onnx.export(
            traced, dynamo=True, input_names=[_INPUT], output_names=[_OUTPUT], external_data=False, verbose=False
        )
        assert program is not None
        program.model.metadata_props["ksm_lightning"] = json.dumps(extractor.description)
        program.save(str(path), external_data=False)


def float64_acos(x: Tensor) -> Tensor:
    """Arc cosine with an error of about 2e-13 from operations that ONNX Runtime supports in float64.

    One step of Newton's method from the float32 result, and the series in ``1 - x`` near an angle of 0. For other
    dtypes it returns ``NotImplemented``.

    Example:
        >>> x = torch.tensor([-1.0, -0.3, 0.999, 1.0], dtype=torch.float64)
        >>> bool((float64_acos(x) - x.acos()).abs().max() < 1e-13)
        True
    """
    if x.dtype != torch.float64:
        return NotImplemented  # type: ignore[no-any-return]  # torch.export then keeps the operation
    cosine = x.abs()
    rest = 1 - cosine
    series = (2 * rest).sqrt() * (1 + rest * (1 / 12 + rest * (3 / 160 + rest * (5 / 896 + rest * 35 / 18432))))
    guess = cosine.float().acos().double()
    newton = guess + (torch.sin(math.pi / 2 - guess) - cosine) / torch.sin(guess).clamp(min=0.1)
    angle = torch.where(rest < 0.01, series, newton)
    return torch.where(x < 0, math.pi - angle, angle)


def _read_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> Tensor:
        (features,) = session.run([_OUTPUT], {_INPUT: np.ascontiguousarray(x.numpy())})
        return torch.from_numpy(features)

    return run


def _check_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"ONNX export needs the package {name}: run pip install 'ksm_lightning[onnx]'."
            ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress log messages and warnings of the exporters."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# How each format is written and read.
_FORMATS: dict[Format, tuple[Callable[[FeatureExtractor, Tensor, Path], Any], Callable[[Path], Any]]] = {
    "torch": (_write_torch, _read_torch),
    "onnx": (_write_onnx, _read_onnx),
    "safetensors": (lambda extractor, x, path: path.write_bytes(extractor.to_bytes()), FeatureExtractor.load),
}
