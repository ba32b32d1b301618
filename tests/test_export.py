"""Exported files, loaded without this package and compared with the definition at several batch sizes."""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from helpers.commands import FEW, HALF_MOONS, refused
from helpers.extractors import MEAN, SCALE, extractor_of, raw_points, reference
from helpers.limits import file_size_limit
from ksm_lightning import FeatureExtractor
from ksm_lightning import export as export_module
from ksm_lightning.cli import main
from ksm_lightning.export import example_inputs, export, float64_acos
from ksm_lightning.kernels import LinearKernel, make_kernel
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.runs.checkpoint import read_checkpoint

GAUSSIAN, ARC_COSINE = ("gaussian", {"sigma": 0.7}), ("arc_cosine", {"order": 0})
POLYNOMIAL = ("polynomial", {"degree": 3})


def program_of(path: Path):
    """Load the file as a function of float32 arrays."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return lambda x: session.run(None, {"x": x})[0]
    program = torch.export.load(path).module() if path.suffix == ".pt2" else FeatureExtractor.load(path)
    return lambda x: program(torch.tensor(x)).numpy()


def check(path: Path, spec, readout: str, shape: tuple[int, ...]) -> None:
    program = program_of(path)
    raw = raw_points(50).astype(np.float32)
    expected = reference(spec, readout, raw)
    largest = max(1.0, np.abs(expected).max())
    for count in (1, 2, 50):
        found = program(raw[:count].reshape(count, *shape))
        assert found.dtype == np.float32
        assert found.shape == (count, 7)
        assert np.abs(found - expected[:count]).max() < 1e-5 * largest


@pytest.mark.parametrize(
    ("spec", "readout", "shape", "dtype"),
    [
        (GAUSSIAN, "neural", (4,), torch.float32),
        (ARC_COSINE, "nystroem", (1, 2, 2), torch.float64),
        (POLYNOMIAL, "least_squares", (2, 2), torch.float32),
    ],
)
@pytest.mark.parametrize("format", ["torch", "onnx", "safetensors"])
def test_a_file_gives_the_features_of_the_definition_for_any_batch_size(tmp_path, format, spec, readout, shape, dtype):
    extractor = extractor_of(make_kernel(spec[0], **spec[1]), readout)
    assert extractor.W.dtype == dtype
    path = tmp_path / "new" / f"x{export_module.SUFFIXES[format]}"
    written = export(extractor, path, format, shape)
    assert written.path == path
    assert written.difference < 1e-5 * max(1.0, float(extractor(example_inputs(extractor)).abs().max()))
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    check(path, spec, readout, shape)
    about = json.loads(description(path))
    assert about == {**extractor.metadata, "identity": extractor.identity}


def description(path: Path) -> str:
    if path.suffix == ".onnx":
        model = onnx.load(path)
        onnx.checker.check_model(model)
        assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["x", "features"]
        assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param  # any batch size
        return next(entry.value for entry in model.metadata_props if entry.key == "ksm_lightning")
    if path.suffix == ".pt2":
        files = {"ksm_lightning.json": ""}
        torch.export.load(path, extra_files=files)
        return files["ksm_lightning.json"]
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return file.metadata()["ksm_lightning"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_every_kernel_can_be_exported(tmp_path, spec, format):
    path = tmp_path / f"x{export_module.SUFFIXES[format]}"
    export(extractor_of(make_kernel(spec[0], **spec[1])), path, format)
    check(path, spec, "neural", (4,))


def test_an_exported_program_crops_images(tmp_path):
    """By hand: the centre of the image 0 to 15 is 5, 6, 9, 10; subtract 1 and divide by 2."""
    prepare = Preprocessing(torch.ones(4), torch.full((4,), 2.0), image_shape=(2, 2), crop=1)
    extractor = FeatureExtractor(LinearKernel(), torch.eye(4), torch.eye(4), prepare)
    export(extractor, tmp_path / "x.pt2", "torch", (1, 4, 4))
    image = np.arange(16.0, dtype=np.float32).reshape(1, 1, 4, 4)
    assert program_of(tmp_path / "x.pt2")(image).tolist() == [[2.0, 2.5, 4.0, 4.5]]
    with pytest.raises(ValueError, match=r"Inputs of shape \(4,\) have 4 values, but the extractor takes 16"):
        export(extractor, tmp_path / "y.pt2", "torch", (4,))


# ---------------------------------------------------------------------- parts and errors


def test_the_arc_cosine_for_onnx_equals_that_of_numpy():
    dense = np.concatenate([np.linspace(-1, 1, 200_001), 1 - np.logspace(-16, 0, 2001), -1 + np.logspace(-16, 0, 2001)])
    found = float64_acos(torch.tensor(dense)).numpy()
    assert np.abs(found - np.arccos(dense)).max() < 2e-13
    assert float64_acos(torch.tensor([1.0, 0.0, -1.0]).double()).tolist() == [0.0, math.pi / 2, math.pi]
    assert float64_acos(torch.zeros(1)) is NotImplemented  # the runtime supports float32


def test_example_inputs_are_raw_and_near_the_landmarks():
    extractor = extractor_of()
    raw = example_inputs(extractor)
    assert raw.dtype == torch.float32
    landmarks = MEAN + SCALE * extractor.W.double().numpy()
    np.testing.assert_allclose(raw[:7].numpy(), landmarks, rtol=1e-6)
    assert raw.shape == (21, 4)
    assert len(example_inputs(extractor, count=3)) == 9


def test_example_inputs_do_not_move_the_extractor():
    extractor = FeatureExtractor(LinearKernel(), torch.empty(3, 4, device="meta"), torch.empty(3, 3, device="meta"))
    with pytest.raises(NotImplementedError, match="meta"):  # meta tensors have no values
        example_inputs(extractor)
    assert extractor.preprocessing.mean.device.type == "meta"


@pytest.mark.parametrize(
    ("name", "format", "shape", "message"),
    [
        ("x.pt2", "onnx", None, r"The format onnx is written to a .onnx file, got .*x.pt2"),
        ("x.onnx", "torch", None, "is written to a .pt2 file"),
        ("x", "safetensors", None, "is written to a .safetensors file"),
        ("x.pb", "tensorflow", None, "There is no format 'tensorflow': choose one of torch, onnx, safetensors"),
        ("x.pt2", "torch", (5,), r"Inputs of shape \(5,\) have 5 values, but the extractor takes 4"),
        ("x.pt2", "torch", (-2, -2), r"Every side of `input_shape` must be at least 1, got \(-2, -2\)"),
        ("x.pt2", "torch", (2, 2, 2), "have 8 values"),
    ],
)
def test_invalid_arguments_are_refused_and_nothing_is_written(tmp_path, name, format, shape, message):
    with pytest.raises(ValueError, match=message):
        export(extractor_of(), tmp_path / name, format, shape)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [lambda y: y + 2e-5, lambda y: y * torch.nan, lambda y: torch.where(y > 0, y, 1)])
def test_a_file_with_different_features_is_not_written(tmp_path, monkeypatch, wrong):
    def read(path):
        extractor = FeatureExtractor.load(path)
        return lambda x: wrong(extractor(x))

    write = export_module._FORMATS["safetensors"][0]
    monkeypatch.setitem(export_module._FORMATS, "safetensors", (write, read))
    with pytest.raises(ValueError, match=r"The exported features differ by .*, so no file was written"):
        export(extractor_of(), tmp_path / "x.safetensors", "safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_difference_at_one_batch_size_is_detected(tmp_path, monkeypatch):
    def read(path):
        extractor = FeatureExtractor.load(path)
        return lambda x: extractor(x) * (torch.nan if len(x) == 1 else 1)

    monkeypatch.setitem(export_module._FORMATS, "safetensors", (export_module._FORMATS["safetensors"][0], read))
    with pytest.raises(ValueError, match="differ by nan"):
        export(extractor_of(), tmp_path / "x.safetensors", "safetensors")


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = extractor_of().save(tmp_path / "x.safetensors")
    before = path.read_bytes()

    def write(extractor, x, draft):
        draft.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setitem(export_module._FORMATS, "safetensors", (write, None))
    with pytest.raises(OSError, match="No space left"):
        export(extractor_of(readout="nystroem"), path, "safetensors")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("name", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_the_command_to_install_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # the import fails
    with pytest.raises(ModuleNotFoundError, match=rf"needs the package {name}: run pip install .*\[onnx\]"):
        export(extractor_of(), tmp_path / "x.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- ksm export


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder of ``ksm fit``."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", *FEW])
    return folder / "runs" / "half_moons" / "version_0"


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of the run folder in ``tmp_path``."""
    import shutil

    copied = shutil.copytree(trained, tmp_path / "runs" / "half_moons" / "version_0")
    monkeypatch.chdir(tmp_path)
    return copied.relative_to(tmp_path)


def ckpt(run) -> str:
    return str(run / "checkpoints" / "last.ckpt")


def test_a_checkpoint_is_exported_to_its_run_folder(run, capsys):
    main(["export", f"--ckpt_path={ckpt(run)}"])
    path = run / "neural.safetensors"
    extractor = FeatureExtractor.load(path)
    assert extractor.identity == FeatureExtractor.from_checkpoint(ckpt(run)).identity
    out = capsys.readouterr().out
    assert f"Features of the readout neural: {path} (extractor {extractor.identity})" in out
    assert "Input: float32 (batch, 2); output: (batch, 4)." in out
    assert f"Usage:  ksm_lightning.FeatureExtractor.load('{path}')" in out
    assert float(re.search(r"Largest difference from PyTorch on \d+ inputs: ([\d.e+-]+)\.", out)[1]) < 1e-5
    assert extractor.preprocessing.mean.abs().min() > 0.1


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_a_file_that_another_process_writes_in_the_meantime_is_kept(run, capsys, monkeypatch, format):
    path = run / f"neural{export_module.SUFFIXES[format]}"
    write, read = export_module._FORMATS[format]

    def write_late(extractor, x, draft):
        write(extractor, x, draft)
        path.write_bytes(b"precious")

    monkeypatch.setitem(export_module._FORMATS, format, (write_late, read))
    before = {*run.iterdir(), path}
    sentence = refused(capsys, "export", f"--ckpt_path={ckpt(run)}", f"--format={format}")
    assert sentence == (
        f"{path} was written by another process in the meantime and is left as it is: choose another file."
    )
    assert path.read_bytes() == b"precious"
    assert set(run.iterdir()) == before


@pytest.mark.parametrize("format", export_module.SUFFIXES)
def test_an_export_to_a_full_disk_names_the_file(tmp_path, format):
    path = tmp_path / f"x{export_module.SUFFIXES[format]}"
    with file_size_limit(500), pytest.raises(OSError, match="could not be written") as caught:
        export(extractor_of(), path, format)
    assert str(caught.value) == f"{path} could not be written: File too large."
    assert list(tmp_path.iterdir()) == []


def test_the_run_folder_is_found_from_inside_the_checkpoints_folder(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    main(["export", "--ckpt_path=last.ckpt"])
    assert [path.name for path in Path("..").glob("*.safetensors")] == ["neural.safetensors"]
    assert list(Path().glob("*.safetensors")) == []


def test_the_command_exports_onnx(run, capsys):
    main(["export", f"--ckpt_path={ckpt(run)}", "--format=onnx", "--readout=nystroem", "--out=mine/x.onnx",
          "--input_shape=[2, 1]"])  # fmt: skip
    assert "Input: float32 (batch, 2, 1)" in capsys.readouterr().out
    raw = np.random.RandomState(0).randn(30, 2, 1).astype(np.float32)
    expected = FeatureExtractor.from_checkpoint(ckpt(run), "nystroem").transform(raw)
    np.testing.assert_allclose(program_of(Path("mine/x.onnx"))(raw), expected, rtol=0, atol=1e-5)


def test_least_squares_is_fitted_to_the_data_of_the_run(run):
    main(["export", f"--ckpt_path={ckpt(run)}", "--readout=least_squares"])
    from ksm_lightning.data import HalfMoonsDataModule

    raw = HalfMoonsDataModule(num_points=200).load()[0].x
    expected = FeatureExtractor.from_checkpoint(ckpt(run), "least_squares", sample=raw).transform(raw)
    found = FeatureExtractor.load(run / "least_squares.safetensors").transform(raw)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("format", "suffix"), [("torch", "pt2"), ("onnx", "onnx"), ("safetensors", "safetensors")])
@pytest.mark.parametrize("readout", ["nystroem", "least_squares"])
def test_the_command_exports_compressed_readouts_fitted_to_the_data_of_the_run(run, capsys, format, suffix, readout):
    """The run has 4 neurons; the file has 3 features."""
    from ksm_lightning.data import HalfMoonsDataModule

    main(["export", f"--ckpt_path={ckpt(run)}", f"--format={format}", f"--readout={readout}", "--num_features=3"])
    assert "output: (batch, 3)." in capsys.readouterr().out
    raw = HalfMoonsDataModule(num_points=200).load()[0].x
    expected = FeatureExtractor.from_checkpoint(ckpt(run), readout, sample=raw, num_features=3).transform(raw)
    found = program_of(run / f"{readout}.{suffix}")(raw.astype(np.float32))
    assert found.shape == (200, 3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_data_is_refused_for_readouts_that_do_not_use_it(run, capsys):
    for readout in ("neural", "nystroem"):
        options = [f"--ckpt_path={ckpt(run)}", "--data=HalfMoonsDataModule", f"--readout={readout}"]
        sentence = refused(capsys, "export", *options)
        assert sentence == f"The readout {readout} with 4 features is not fitted to data: remove --data."


def test_least_squares_standardises_other_data_like_the_training_data(run, tmp_path):
    raw = np.random.RandomState(3).randn(150, 2) + 4
    np.save(tmp_path / "mine.npy", raw)
    main(["export", f"--ckpt_path={ckpt(run)}", "--readout=least_squares", "--data=ArrayDataModule",
          "--data.path=mine.npy", "--data.centre=true"])  # fmt: skip
    expected = FeatureExtractor.from_checkpoint(ckpt(run), "least_squares", sample=raw).transform(raw)
    found = FeatureExtractor.load(run / "least_squares.safetensors").transform(raw)
    largest = np.abs(expected @ expected.T).max()
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=0, atol=1e-4 * largest)


def test_an_existing_file_is_not_replaced(run, capsys):
    (run / "neural.safetensors").write_bytes(b"precious")
    sentence = refused(capsys, "export", f"--ckpt_path={ckpt(run)}")
    assert sentence.endswith("neural.safetensors exists already: choose another file with --out.")
    assert (run / "neural.safetensors").read_bytes() == b"precious"


def test_a_checkpoint_outside_a_run_is_exported_next_to_it_and_has_no_data(run, capsys, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    moved = Path(ckpt(run)).rename(tmp_path / "elsewhere" / "best.ckpt")
    for readout in ("least_squares", "nystroem"):
        sentence = refused(capsys, "export", f"--ckpt_path={moved}", f"--readout={readout}", "--num_features=2")
        assert "the checkpoint is not in a run folder: give --data" in sentence
    main(["export", f"--ckpt_path={moved}"])
    assert sorted(path.name for path in moved.parent.iterdir()) == ["best.ckpt", "neural.safetensors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out=x.txt"], "The format safetensors is written to a .safetensors file, got x.txt"),
        (["--format=torch", "--input_shape=[3]"], "have 3 values, but the extractor takes 2"),
        (["--format=tflite"], "tflite"),
        (["--readout=pca"], "pca"),
        (["--num_features=3"], "The neural readout always has 4 features, one per neuron, but `num_features` is 3"),
        (["--readout=nystroem", "--num_features=5"], "between 1 and the number of landmarks, 4, got 5."),
        (["--readout=least_squares", "--num_features=0"], "between 1 and the number of landmarks, 4, got 0."),
        (["--num_features=few"], "num_features"),
        (["--ckpt_path=nowhere.ckpt"], "There is no checkpoint nowhere.ckpt"),
    ],
)
def test_invalid_options_give_one_sentence_and_write_nothing(run, capsys, options, message):
    before = sorted(run.rglob("*"))
    assert message in refused(capsys, "export", f"--ckpt_path={ckpt(run)}", *options)
    assert sorted(run.rglob("*")) == before
    assert not Path("x.txt").exists()


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["export", "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for explanation in (
        "A run folder or a checkpoint.", "onnx a .onnx file for ONNX runtimes", "neural is the network's response",
        "which must not exist.", "Default: one row of raw values.", "Data for fitting least_squares,",
        "Number of features of nystroem or least_squares",
    ):  # fmt: skip
        assert explanation in text


def test_the_fixture_has_100_updates(run):
    assert read_checkpoint(ckpt(run))["global_step"] == 100
    assert Path(HALF_MOONS).is_file()
