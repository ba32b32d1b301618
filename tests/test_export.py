"""Files for other programs: read back without this package's code, at every batch size, against the extractor."""

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
from test_cli import FEW, HALF_MOONS, refused
from test_extractor import MEAN, SCALE, extractor_of, raw_points, reference

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
    """What another program makes of the file: a function of float32 arrays."""
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
def test_a_file_gives_the_features_of_the_definition_for_any_batch(tmp_path, format, spec, readout, shape, dtype):
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


def test_a_file_crops_what_the_extractor_crops(tmp_path):
    """By hand: of the image 0 to 15, the middle is 5, 6, 9, 10; minus 1, halved."""
    prepare = Preprocessing(torch.ones(4), torch.full((4,), 2.0), image_shape=(2, 2), crop=1)
    extractor = FeatureExtractor(LinearKernel(), torch.eye(4), torch.eye(4), prepare)
    export(extractor, tmp_path / "x.pt2", "torch", (1, 4, 4))
    image = np.arange(16.0, dtype=np.float32).reshape(1, 1, 4, 4)
    assert program_of(tmp_path / "x.pt2")(image).tolist() == [[2.0, 2.5, 4.0, 4.5]]
    with pytest.raises(ValueError, match=r"Inputs of shape \(4,\) have 4 values, and the extractor takes 16"):
        export(extractor, tmp_path / "y.pt2", "torch", (4,))


# ---------------------------------------------------------------------- what it is made of


def test_the_arc_cosine_of_onnx_is_that_of_numpy():
    dense = np.concatenate([np.linspace(-1, 1, 200_001), 1 - np.logspace(-16, 0, 2001), -1 + np.logspace(-16, 0, 2001)])
    found = float64_acos(torch.tensor(dense)).numpy()
    assert np.abs(found - np.arccos(dense)).max() < 2e-13
    assert float64_acos(torch.tensor([1.0, 0.0, -1.0]).double()).tolist() == [0.0, math.pi / 2, math.pi]
    assert float64_acos(torch.zeros(1)) is NotImplemented  # float32 is left to the runtime


def test_the_inputs_it_is_tried_on_are_raw_and_lie_where_the_landmarks_are():
    extractor = extractor_of()
    raw = example_inputs(extractor)
    assert raw.dtype == torch.float32
    landmarks = MEAN + SCALE * extractor.W.double().numpy()
    np.testing.assert_allclose(raw[:7].numpy(), landmarks, rtol=1e-6)
    assert raw.shape == (21, 4)
    assert len(example_inputs(extractor, count=3)) == 9


def test_asking_for_inputs_leaves_the_extractor_where_it_is():
    extractor = FeatureExtractor(LinearKernel(), torch.empty(3, 4, device="meta"), torch.empty(3, 3, device="meta"))
    with pytest.raises(NotImplementedError, match="meta"):  # its numbers are nowhere
        example_inputs(extractor)
    assert extractor.preprocessing.mean.device.type == "meta"


@pytest.mark.parametrize(
    ("name", "format", "shape", "message"),
    [
        ("x.pt2", "onnx", None, r"The format onnx is written to a .onnx file, got .*x.pt2"),
        ("x.onnx", "torch", None, "is written to a .pt2 file"),
        ("x", "safetensors", None, "is written to a .safetensors file"),
        ("x.pb", "tensorflow", None, "There is no format 'tensorflow': choose one of torch, onnx, safetensors"),
        ("x.pt2", "torch", (5,), r"Inputs of shape \(5,\) have 5 values, and the extractor takes 4"),
        ("x.pt2", "torch", (-2, -2), "The sides of an input are at least 1, got the shape"),
        ("x.pt2", "torch", (2, 2, 2), "have 8 values"),
    ],
)
def test_impossible_files_are_refused_and_nothing_is_written(tmp_path, name, format, shape, message):
    with pytest.raises(ValueError, match=message):
        export(extractor_of(), tmp_path / name, format, shape)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [lambda y: y + 2e-5, lambda y: y * torch.nan, lambda y: torch.where(y > 0, y, 1)])
def test_features_that_differ_are_not_written(tmp_path, monkeypatch, wrong):
    def read(path):
        extractor = FeatureExtractor.load(path)
        return lambda x: wrong(extractor(x))

    write = export_module._safetensors[0]
    monkeypatch.setattr(export_module, "_safetensors", (write, read))
    with pytest.raises(ValueError, match=r"The features of the file differ by .* and were not written"):
        export(extractor_of(), tmp_path / "x.safetensors", "safetensors")
    assert list(tmp_path.iterdir()) == []


def test_one_wrong_batch_size_is_enough(tmp_path, monkeypatch):
    def read(path):
        extractor = FeatureExtractor.load(path)
        return lambda x: extractor(x) * (torch.nan if len(x) == 1 else 1)

    monkeypatch.setattr(export_module, "_safetensors", (export_module._safetensors[0], read))
    with pytest.raises(ValueError, match="differ by nan"):
        export(extractor_of(), tmp_path / "x.safetensors", "safetensors")


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path, monkeypatch):
    path = extractor_of().save(tmp_path / "x.safetensors")
    before = path.read_bytes()

    def write(extractor, x, draft):
        draft.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(export_module, "_safetensors", (write, None))
    with pytest.raises(OSError, match="No space left"):
        export(extractor_of(readout="nystroem"), path, "safetensors")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("name", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=rf"needs the package {name}: .*pip install 'ksm_lightning\[onnx\]'"):
        export(extractor_of(), tmp_path / "x.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- ksm export


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder that ``ksm fit`` made."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", *FEW])
    return folder / "runs" / "half_moons" / "version_0"


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of it in a folder of the test's own."""
    import shutil

    copied = shutil.copytree(trained, tmp_path / "runs" / "half_moons" / "version_0")
    monkeypatch.chdir(tmp_path)
    return copied.relative_to(tmp_path)


def ckpt(run) -> str:
    return str(run / "checkpoints" / "last.ckpt")


def test_a_checkpoint_becomes_a_file_in_its_run_folder(run, capsys):
    main(["export", f"--ckpt_path={ckpt(run)}"])
    path = run / "neural.safetensors"
    extractor = FeatureExtractor.load(path)
    assert extractor.identity == FeatureExtractor.from_checkpoint(ckpt(run)).identity
    out = capsys.readouterr().out
    assert f"Features of the readout neural: {path} (extractor {extractor.identity})" in out
    assert "Takes float32 (batch, 2) and gives (batch, 4)" in out
    assert f"Use it:  ksm_lightning.FeatureExtractor.load('{path}')" in out
    assert float(re.search(r"differs from PyTorch by ([\d.e+-]+) at most", out)[1]) < 1e-5
    assert extractor.preprocessing.mean.abs().min() > 0.1


def test_from_inside_the_checkpoints_folder_it_is_the_same_place(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    main(["export", "--ckpt_path=last.ckpt"])
    assert [path.name for path in Path("..").glob("*.safetensors")] == ["neural.safetensors"]
    assert list(Path().glob("*.safetensors")) == []


def test_onnx_by_one_command(run, capsys):
    main(["export", f"--ckpt_path={ckpt(run)}", "--format=onnx", "--readout=nystroem", "--out=mine/x.onnx",
          "--input_shape=[2, 1]"])  # fmt: skip
    assert "Takes float32 (batch, 2, 1)" in capsys.readouterr().out
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


def test_data_that_would_not_be_used_is_refused(run, capsys):
    sentence = refused(capsys, "export", f"--ckpt_path={ckpt(run)}", "--data=HalfMoonsDataModule")
    assert sentence == "--data is what least_squares is fitted to, and the readout is neural: leave it out."


def test_least_squares_takes_other_data_in_the_units_of_the_training(run, tmp_path):
    raw = np.random.RandomState(3).randn(150, 2) + 4
    np.save(tmp_path / "mine.npy", raw)
    main(["export", f"--ckpt_path={ckpt(run)}", "--readout=least_squares", "--data=ArrayDataModule",
          "--data.path=mine.npy", "--data.centre=true"])  # fmt: skip
    expected = FeatureExtractor.from_checkpoint(ckpt(run), "least_squares", sample=raw).transform(raw)
    found = FeatureExtractor.load(run / "least_squares.safetensors").transform(raw)
    largest = np.abs(expected @ expected.T).max()
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=0, atol=1e-4 * largest)


def test_an_existing_file_is_never_replaced(run, capsys):
    (run / "neural.safetensors").write_bytes(b"precious")
    sentence = refused(capsys, "export", f"--ckpt_path={ckpt(run)}")
    assert sentence.endswith("neural.safetensors exists already: name another file with --out.")
    assert (run / "neural.safetensors").read_bytes() == b"precious"


def test_a_checkpoint_outside_a_run_lands_beside_it_and_has_no_data(run, capsys, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    moved = Path(ckpt(run)).rename(tmp_path / "elsewhere" / "best.ckpt")
    sentence = refused(capsys, "export", f"--ckpt_path={moved}", "--readout=least_squares")
    assert "the checkpoint lies in no run folder that would say which: give --data" in sentence
    main(["export", f"--ckpt_path={moved}"])
    assert sorted(path.name for path in moved.parent.iterdir()) == ["best.ckpt", "neural.safetensors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out=x.txt"], "The format safetensors is written to a .safetensors file, got x.txt"),
        (["--format=torch", "--input_shape=[3]"], "have 3 values, and the extractor takes 2"),
        (["--format=tflite"], "tflite"),
        (["--readout=pca"], "pca"),
        (["--ckpt_path=nowhere.ckpt"], "There is no checkpoint nowhere.ckpt"),
    ],
)
def test_wrong_options_get_one_sentence_and_leave_nothing(run, capsys, options, message):
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
        "The checkpoint.", "onnx a .onnx for ONNX runtimes", "neural is the network's response",
        "which must not exist yet", "a row of raw values unless given", "Data that least_squares is fitted to",
    ):  # fmt: skip
        assert explanation in text


def test_the_run_is_what_the_fixture_says(run):
    assert read_checkpoint(ckpt(run))["global_step"] == 100
    assert Path(HALF_MOONS).is_file()
