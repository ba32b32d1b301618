"""The feature extractor against ``f((raw - mean) / scale, W) M``: dtypes, shapes, files and pipelines."""

import copy
import json
import pickle
import struct
import warnings

import lightning
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from helpers import references
from helpers.checkpoints import changed
from helpers.extractors import MEAN, SCALE, extractor_of, network_of, prepare, raw_points, reference
from helpers.mnist_files import arrays
from helpers.runs import fit, model, moons
from ksm_lightning import FeatureExtractor
from ksm_lightning.data import ArrayDataModule, CroppedMNISTDataModule, DigitsDataModule
from ksm_lightning.extractor import sufficient_dtype
from ksm_lightning.kernels import GaussianKernel, LinearKernel, register_kernel, registry
from ksm_lightning.learning import AdaptiveSchedule, Phase, train
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.network.readout import READOUTS, LandmarkFeatures
from ksm_lightning.network.readout_matrices import nystroem_matrix


def largest(features) -> float:
    return float(np.abs(np.asarray(features, dtype=np.float64)).max())


# ---------------------------------------------------------------------- the formula


@pytest.mark.parametrize("readout", READOUTS)
def test_features_equal_the_definition(spec, readout):
    raw = raw_points()
    expected = reference(spec, readout, raw)
    extractor = extractor_of(registry.make_kernel(spec[0], **spec[1]), readout)
    np.testing.assert_allclose(extractor.transform(raw), expected, rtol=0, atol=5e-6 * largest(expected))
    exact = extractor_of(registry.make_kernel(spec[0], **spec[1]), readout, dtype=torch.float64)
    np.testing.assert_allclose(exact.transform(raw), expected, rtol=0, atol=1e-9 * largest(expected))


def test_two_landmarks_computed_by_hand():
    """With a linear kernel and W = I, the features of (5, 1) are ((5 - 1) / 2, (1 - 1) / 4) M."""
    prepared = Preprocessing(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 4.0]))
    extractor = FeatureExtractor(LinearKernel(), torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), prepared)
    assert extractor(torch.tensor([[5.0, 1.0], [1.0, 5.0]])).tolist() == [[2.0, 4.0], [3.0, 4.0]]


def test_every_point_a_landmark_makes_nystroem_exact():
    raw = raw_points(30)
    W = (torch.tensor(raw) - torch.tensor(MEAN)) / torch.tensor(SCALE)
    extractor = FeatureExtractor(
        GaussianKernel(0.7), W, nystroem_matrix(GaussianKernel(0.7), W), prepare(), readout="nystroem"
    )
    features = extractor.transform(raw)
    K = references.gram("gaussian", {"sigma": 0.7}, W, W).numpy()
    np.testing.assert_allclose(features @ features.T, K, rtol=0, atol=1e-7)


def test_a_readout_may_have_fewer_features_than_landmarks():
    W = torch.randn(5, 4)
    extractor = FeatureExtractor(GaussianKernel(), W, torch.ones(5, 2))
    assert (extractor.in_features, extractor.out_features, extractor.raw_features) == (4, 2, 4)
    assert extractor(torch.zeros(3, 4)).shape == (3, 2)


@pytest.mark.parametrize("readout", ["nystroem", "least_squares"])
def test_compressed_features_are_the_leading_principal_components_of_the_sample(readout):
    spec, raw = ("gaussian", {"sigma": 0.7}), raw_points(60, seed=5)  # the sample of `extractor_of`
    y = reference(spec, readout, raw, num_features=3)
    expected = y @ y.T
    extractor = extractor_of(readout=readout, num_features=3, dtype=torch.float64)
    assert extractor.M.shape == (7, 3)
    assert (extractor.out_features, extractor.metadata["out_features"]) == (3, 3)
    found = extractor.transform(raw)
    np.testing.assert_allclose(found @ found.T, expected, rtol=0, atol=1e-9 * largest(expected))


def test_a_sample_is_ignored_by_readouts_that_are_not_fitted():
    for readout in ("neural", "nystroem"):
        extractor = FeatureExtractor.from_network(network_of(GaussianKernel(0.7)), readout, sample=BAD)
        assert extractor.out_features == 7


# ---------------------------------------------------------------------- dtypes and shapes


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 3e-6), (torch.float32, 3e-6), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)],
)
@pytest.mark.parametrize("readout", READOUTS)
def test_features_have_the_dtype_of_the_input(dtype, tolerance, readout):
    """float16 has 3 digits and bfloat16 has 2. Only input and output are rounded to them."""
    raw = torch.tensor(raw_points())
    spec = ("gaussian", {"sigma": 0.7})
    extractor, expected = extractor_of(readout=readout), reference(spec, readout, raw.numpy())
    features = extractor(raw.to(dtype))
    assert features.dtype == dtype
    assert np.abs(features.double().numpy() - expected).max() < tolerance * max(1.0, largest(expected))
    # Features of the rounded input differ only by the rounding of the output.
    of_rounded = reference(spec, readout, raw.to(dtype).double().numpy())
    assert np.abs(features.double().numpy() - of_rounded).max() < max(5e-6, torch.finfo(dtype).eps) * largest(expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int64, bool])
def test_features_of_integers_are_float32(dtype):
    raw = np.random.RandomState(0).randint(0, 2 if dtype is bool else 12, (20, 4)).astype(dtype)
    features = extractor_of().transform(raw)
    assert features.dtype == np.float32
    expected = reference(("gaussian", {"sigma": 0.7}), "neural", raw)
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(20, 4), (20, 2, 2), (20, 1, 2, 2), (20, 4, 1)])
def test_images_are_flattened(shape):
    raw, extractor = torch.tensor(raw_points(20)), extractor_of()
    assert torch.equal(extractor(raw.view(shape)), extractor(raw))
    assert np.array_equal(extractor.transform(raw.view(shape).numpy()), extractor.transform(raw.numpy()))


def test_the_memory_layout_of_the_input_does_not_change_the_features():
    raw, extractor = torch.tensor(raw_points(20)), extractor_of()
    expected = extractor(raw)
    wide = torch.zeros(20, 8, dtype=torch.float64)
    wide[:, ::2] = raw
    images = raw.view(20, 1, 2, 2).to(memory_format=torch.channels_last)
    for same in (wide[:, ::2], raw.mT.contiguous().mT, images):
        assert torch.equal(extractor(same), expected)


@pytest.mark.parametrize("shape", [(20, 5), (20, 2, 3), (4,), ()])
def test_a_wrong_number_of_features_is_refused(shape):
    with pytest.raises(ValueError, match=r"Inputs must be \(batch, 4\) or images of 2 x 2 pixels, got the shape"):
        extractor_of()(torch.zeros(shape))


# ---------------------------------------------------------------------- inside a model


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_casting_the_surrounding_model_does_not_change_the_extractor(cast):
    extractor = extractor_of()
    before = {name: value.clone() for name, value in extractor.state_dict().items()}
    cast(nn.Sequential(extractor, nn.Linear(7, 2)))
    after = extractor.state_dict()
    assert {name: value.dtype for name, value in after.items()} == {
        "features.W": torch.float32, "features.M": torch.float32,
        "preprocessing.mean": torch.float64, "preprocessing.scale": torch.float64,
    }  # fmt: skip
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_training_a_head_does_not_change_the_extractor():
    extractor, raw = extractor_of(), torch.tensor(raw_points(), dtype=torch.float32)
    assert list(extractor.parameters()) == []
    network = nn.Sequential(extractor, nn.Linear(extractor.out_features, 2))
    before = copy.deepcopy(network.state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    first = network(raw)[:, 0].detach()
    labels = (first > first.median()).long()
    for _ in range(300):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network.train()(raw), labels)
        loss.backward()
        optimizer.step()
    assert loss < 0.6
    moved = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"1.weight", "1.bias"}


def test_the_gradient_of_the_input_equals_finite_differences(spec):
    """Central differences of the float64 reference. All kernels are smooth at random points."""
    raw = raw_points(3)
    extractor = extractor_of(registry.make_kernel(spec[0], **spec[1]), dtype=torch.float64)
    weights = np.random.RandomState(0).randn(3, 7)
    x = torch.tensor(raw, requires_grad=True)
    (extractor(x) * torch.tensor(weights)).sum().backward()
    expected, step = np.zeros((3, 4)), 1e-6
    for row in range(3):
        for column in range(4):
            moved = np.zeros((3, 4))
            moved[row, column] = step
            change = reference(spec, "neural", raw + moved) - reference(spec, "neural", raw - moved)
            expected[row, column] = (change * weights).sum() / (2 * step)
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-5, atol=1e-6 * largest(expected))


def test_the_gradient_at_a_landmark_is_finite_and_correct_for_smooth_kernels(spec):
    extractor = extractor_of(registry.make_kernel(spec[0], **spec[1]), dtype=torch.float64)
    x = extractor.preprocessing.inverse(extractor.W).requires_grad_()
    extractor(x).sum().backward()
    assert x.grad.isfinite().all()
    if spec not in (("laplacian", {"sigma": 0.7}), ("arc_cosine", {"order": 0})):  # these two have a kink there
        raw, step = x.detach().numpy(), 1e-6
        for column in range(4):
            moved = step * np.eye(4)[column]
            change = reference(spec, "neural", raw + moved) - reference(spec, "neural", raw - moved)
            expected = change.sum(1) / (2 * step)
            np.testing.assert_allclose(x.grad[:, column], expected, rtol=1e-4, atol=1e-5 * largest(expected))


class Classifier(lightning.LightningModule):
    """A linear head on the extractor. Records inputs and features of every training step."""

    def __init__(self, extractor):
        super().__init__()
        self.extractor, self.head = extractor, nn.Linear(extractor.out_features, 2)
        self.seen = []

    def training_step(self, batch, batch_idx):
        features = self.extractor(batch[0])
        self.seen.append((batch[0].detach().clone(), features.detach().clone()))
        return nn.functional.cross_entropy(self.head(features).float(), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("16-true", torch.float16), ("bf16-true", torch.bfloat16),
     ("bf16-mixed", torch.float32), ("64-true", torch.float64)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("inside", "spec"),
    [(torch.float32, ("gaussian", {"sigma": 0.7})), (torch.float64, ("arc_cosine", {"order": 0}))],
    ids=["float32 inside", "float64 inside"],
)
def test_the_precision_of_a_trainer_does_not_change_the_extractor(precision, dtype, inside, spec):
    extractor = extractor_of(registry.make_kernel(spec[0], **spec[1]))
    assert extractor.W.dtype == inside
    before = copy.deepcopy(extractor.state_dict())
    module = Classifier(extractor)
    data = TensorDataset(torch.tensor(raw_points(), dtype=torch.float32), torch.arange(40) % 2)
    lightning.Trainer(
        accelerator="cpu", precision=precision, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, DataLoader(data, batch_size=20))  # fmt: skip
    for name, value in extractor.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name]), name
    for raw, features in module.seen:
        assert raw.dtype == features.dtype == dtype
        expected = reference(spec, "neural", raw.double().numpy())
        error = np.abs(features.double().numpy() - expected).max()
        assert error < max(1e-5, torch.finfo(dtype).eps) * largest(expected)


def test_the_default_dtype_does_not_change_the_features():
    """The arc-cosine kernel of antiparallel vectors is exactly 0 only if pi has all digits."""
    extractor = FeatureExtractor(
        registry.make_kernel("arc_cosine", order=0), torch.eye(2).double(), torch.eye(2).double()
    )
    x = torch.tensor([[-1.0, 0.0], [0.0, 3.0]])
    torch.set_default_dtype(torch.float16)
    try:
        features = extractor(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert features.tolist() == [[0.0, 0.5], [0.5, 1.0]]


# ---------------------------------------------------------------------- transform


def test_every_kind_of_data_gives_the_same_features(tmp_path):
    raw, extractor = raw_points(50), extractor_of()
    expected = extractor(torch.tensor(raw)).numpy()
    dataset = TensorDataset(torch.tensor(raw), torch.arange(50))
    np.save(tmp_path / "raw.npy", raw)
    found = {
        "array": extractor.transform(raw),
        "tensor": extractor.transform(torch.tensor(raw)),
        "frame": extractor.transform(pd.DataFrame(raw, columns=list("abcd"))),
        "loader": extractor.transform(DataLoader(dataset, batch_size=16)),
        "generator": extractor.transform(torch.tensor(part) for part in np.split(raw, [7, 30])),
        "list": extractor.transform([raw[:20], raw[20:]]),
        "pairs": extractor.transform([[raw[:20], "a"], (raw[20:], "b")]),
        "memory map": extractor.transform(np.load(tmp_path / "raw.npy", mmap_mode="r")),
        "fortran": extractor.transform(np.asfortranarray(raw)),
        "backwards": extractor.transform(raw[::-1])[::-1],
        "big endian": extractor.transform(raw.astype(">f8")),
        "long": extractor.transform(raw.astype(np.longdouble)),
    }
    kinds = {name: type(features).__name__ for name, features in found.items()}
    assert {name for name, kind in kinds.items() if kind == "Tensor"} == {
        "tensor", "loader", "generator", "list", "pairs",
    }  # fmt: skip
    assert {name for name, kind in kinds.items() if kind == "ndarray"} == set(kinds) - {
        "tensor", "loader", "generator", "list", "pairs",
    }  # fmt: skip
    for name, features in found.items():
        np.testing.assert_allclose(np.asarray(features), expected, rtol=0, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("batch_size", [1, 3, 49, 50, 51, 4096])
def test_the_batch_size_does_not_change_the_features(batch_size):
    raw, extractor = raw_points(50), extractor_of(dtype=torch.float64)
    np.testing.assert_allclose(
        extractor.transform(raw, batch_size), extractor(torch.tensor(raw)).numpy(), rtol=0, atol=1e-13
    )


def test_a_memory_mapped_file_is_read_in_batches(tmp_path):
    np.save(tmp_path / "raw.npy", raw_points(50))
    lengths = []

    class Spy(np.memmap):
        def __getitem__(self, key):
            part = super().__getitem__(key)
            lengths.append(len(part))
            return part

    extractor_of().transform(np.load(tmp_path / "raw.npy", mmap_mode="r").view(Spy), 16)
    assert lengths == [16, 16, 16, 2]


def test_a_progress_bar_is_shown_only_on_request(capsys):
    extractor = extractor_of()
    extractor.transform(raw_points(50), 16)
    assert capsys.readouterr() == ("", "")
    extractor.transform(raw_points(50), 16, show_progress=True)
    assert "4/4" in capsys.readouterr().err


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(torch.tensor(raw_points(5)))


def test_a_loader_without_a_length_is_accepted():
    assert extractor_of().transform(DataLoader(Unsized(), batch_size=2)).shape == (5, 7)


BAD = raw_points(5)
BAD[3, 2] = np.nan


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((0, 4)), "The input is empty"),
        ([], "The input is empty"),
        (iter(()), "The input is empty"),
        (np.zeros((3, 5)), r"got the shape \(3, 5\)"),
        (np.zeros(4), r"got the shape \(4,\)"),
        (np.float64(3), "Input must have one row per point, got a single number"),
        (torch.tensor(1.0), "Input must have one row per point, got a single number"),
        (BAD, "The input contains NaN or infinity"),
        (torch.tensor([[torch.inf, 0, 0, 0]]), "The input contains NaN or infinity"),
        ([torch.tensor(BAD)], "The input contains NaN or infinity"),
        (np.array([["a", "b", "c", "d"]]), "Input must be numbers, got <U1 in a ndarray"),
        (pd.DataFrame({"a": ["x"], "b": [1.0], "c": [1.0], "d": [1.0]}), "Input must be numbers, got object"),
        (np.zeros((2, 4), dtype=complex), "Input must be numbers, got complex128"),
        (torch.zeros(2, 4, dtype=torch.complex64), "Input must be real numbers, got torch.complex64"),
        ("four", "Input must be numbers"),
        (7, "Input must be an array, a tensor, a data frame or a loader, got a int"),
        (None, "got a NoneType"),
        ([{"x": torch.zeros(2, 4)}], "Input must be numbers, got object in a dict"),
        (np.full((1, 4), 1e300), "Features are out of the range of torch.float64"),
    ],
)
def test_invalid_input_is_refused_in_one_sentence(data, message):
    with pytest.raises(ValueError, match=message) as caught:
        extractor_of().transform(data)
    assert "\n" not in str(caught.value)


def test_features_out_of_the_range_of_float16_are_refused():
    extractor = FeatureExtractor(registry.make_kernel("polynomial", degree=3), torch.eye(2), torch.eye(2))
    assert extractor.transform(np.full((1, 2), 100.0, dtype=np.float32)).tolist() == [[1e6, 1e6]]
    with pytest.raises(ValueError, match=r"out of the range of torch\.float16"):
        extractor.transform(np.full((1, 2), 100.0, dtype=np.float16))
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        extractor.transform(np.ones((1, 2)), 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeatureExtractor(LinearKernel(), torch.eye(3), torch.eye(2)), r"got \(3, 3\) in torch.float32"),
        (lambda: FeatureExtractor(LinearKernel(), torch.eye(2), torch.eye(2).double()), "in torch.float64"),
        (lambda: FeatureExtractor(LinearKernel(), torch.eye(3), torch.eye(3), prepare()), "has 4 features"),
        (lambda: FeatureExtractor(LinearKernel(), torch.eye(2), torch.eye(2), readout="pca"), "no readout 'pca'"),
        (lambda: FeatureExtractor.from_network(network_of(LinearKernel()), "pca"), "no readout 'pca'"),
        (lambda: FeatureExtractor.from_network(network_of(LinearKernel()), "least_squares"), "pass a `sample`"),
        (
            lambda: FeatureExtractor.from_network(network_of(LinearKernel()), "least_squares", sample=BAD),
            "The sample contains NaN or infinity",
        ),
        (
            lambda: FeatureExtractor.from_network(network_of(LinearKernel()), "least_squares", sample=BAD[:, :2]),
            r"Inputs must be \(batch, 4\), got the shape \(5, 2\)",
        ),
        (
            lambda: FeatureExtractor.from_network(network_of(LinearKernel()), "nystroem", num_features=3),
            "The readout nystroem with fewer features than landmarks is fitted to data: pass a `sample` of raw input",
        ),
        (lambda: extractor_of(num_features=3), "The neural readout always has 7 features, one per neuron, but"),
        (lambda: extractor_of(readout="nystroem", num_features=0), "between 1 and the number of landmarks, 7, got 0"),
        (lambda: extractor_of(readout="least_squares", num_features=8), "the number of landmarks, 7, got 8"),
        (lambda: extractor_of(dtype=torch.float16), "computes in float32 or float64, got torch.float16"),
    ],
)
def test_an_invalid_extractor_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("name", ["W", "q", "L"])
def test_a_network_that_diverged_is_refused(name, readout):
    network = network_of(GaussianKernel(0.7))
    with torch.no_grad():
        getattr(network, name).view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match="weights that are not finite: it diverged, use an older checkpoint"):
        FeatureExtractor.from_network(network, readout, sample=raw_points())


# ---------------------------------------------------------------------- copies


def test_changing_the_network_does_not_change_the_extractor():
    network, prepared, raw = network_of(GaussianKernel(0.7)), prepare(), raw_points()
    first = FeatureExtractor.from_network(network, preprocessing=prepared)
    before = first.transform(raw)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
        prepared.mean += 1
    assert np.array_equal(first.transform(raw), before)


def test_the_preprocessing_is_copied_to_the_device_of_the_landmarks():
    """Uses the ``meta`` device, which every machine has."""
    W = torch.empty(7, 4, device="meta")
    shared = prepare()
    for given in (None, shared):
        extractor = FeatureExtractor(GaussianKernel(), W, torch.empty(7, 3, device="meta"), given)
        assert {value.device.type for value in extractor.state_dict().values()} == {"meta"}
        assert extractor.device.type == "meta"
    assert shared.mean.device.type == "cpu"


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda extractor: pickle.loads(pickle.dumps(extractor)), copy.copy],
    ids=["deepcopy", "pickle", "copy"],
)
def test_a_copy_gives_identical_features(again):
    extractor, raw = extractor_of(), raw_points()
    copied = again(extractor)
    assert copied.identity == extractor.identity
    assert np.array_equal(copied.transform(raw), extractor.transform(raw))


def test_a_state_dict_restores_all_values():
    extractor, raw = extractor_of(), raw_points()
    other = FeatureExtractor.from_network(network_of(GaussianKernel(0.7), seed=9), dtype=torch.float32)
    assert not np.allclose(other.transform(raw), extractor.transform(raw), atol=1e-2)
    other.load_state_dict(extractor.state_dict())
    assert np.array_equal(other.transform(raw), extractor.transform(raw))


def test_repr_describes_the_extractor():
    text = repr(extractor_of(readout="nystroem"))
    assert "in_features=4, out_features=7, readout='nystroem', dtype=torch.float32" in text
    assert "GaussianKernel(sigma=0.7)" in text
    assert "image_shape=(2, 2), crop=0" in text


# ---------------------------------------------------------------------- choice of dtype


def nystroem_dtype(kernel, W) -> torch.dtype:
    return sufficient_dtype(LandmarkFeatures(kernel, W, nystroem_matrix(kernel, W)))


def test_a_well_conditioned_readout_is_float32_and_an_ill_conditioned_one_float64():
    W = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).double()
    kernel = GaussianKernel(1.0)
    assert nystroem_dtype(kernel, W) == torch.float32
    # Landmarks at a distance of 1e-3: the Gram matrix has an eigenvalue of 1e-6, so M amplifies rounding by 1,000.
    assert nystroem_dtype(kernel, torch.cat([W, W[:1] + 1e-3])) == torch.float64
    assert FeatureExtractor.from_network(network_of(kernel), "nystroem", dtype=torch.float64).W.dtype == torch.float64


def test_landmarks_far_from_the_origin_need_float64():
    kernel, M = GaussianKernel(0.5), torch.eye(5).double()
    W = 1e6 + torch.randn(5, 2, dtype=torch.float64)
    assert sufficient_dtype(LandmarkFeatures(kernel, W, M)) == torch.float64
    assert sufficient_dtype(LandmarkFeatures(kernel, W - 1e6, M)) == torch.float32


def test_features_in_float32_are_exact_to_a_few_parts_in_a_million(spec):
    """``_ROUNDING`` holds at the landmarks. Random data near them may have up to twice that error."""
    kernel = registry.make_kernel(spec[0], **spec[1])
    decided = []
    for features, neurons, scale in ((2, 6, 1.0), (2, 40, 1.0), (20, 30, 1.0), (2, 12, 0.2)):
        generator = torch.Generator().manual_seed(neurons)
        x = scale * torch.randn(300, features, generator=generator) + 0.3
        network = train(kernel, x, neurons, AdaptiveSchedule(30), seed=1)
        for readout in READOUTS:
            extractor = FeatureExtractor.from_network(network, readout, sample=x)
            decided.append(extractor.W.dtype)
            exact = FeatureExtractor.from_network(network, readout, sample=x, dtype=torch.float64)
            W = network.W.detach().double()
            around = W.repeat(5, 1) + 0.01 * scale * torch.randn(5 * neurons, features, generator=generator)
            error = (extractor(around) - exact(around)).abs().max() / exact(around).abs().max()
            assert error < 6e-6, (features, neurons, readout)
    has_cusp = spec[0] == "laplacian" or spec == ("arc_cosine", {"order": 0})  # there, rounding acts like a distance
    assert (torch.float32 in decided) != has_cusp


# ---------------------------------------------------------------------- checkpoints


def checkpoint_of(tmp_path, data, **options):
    module = model(in_features=data.in_features, phases=None, updates=30, **options)
    fit(module, data).save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    return module, tmp_path / "x.ckpt"


def compare_with_network(module, path, raw, points):
    """Compare features of raw input by the extractor with features of standardised points by the network."""
    for readout in READOUTS:
        extractor = FeatureExtractor.from_checkpoint(path, readout, sample=raw)
        exact = copy.deepcopy(module).double()
        expected = exact.features(points.double(), readout, points.double())
        assert_close(
            extractor(torch.as_tensor(raw)).double(), expected, rtol=0, atol=6e-6 * float(expected.abs().max())
        )
        assert extractor.out_features == module.network.num_neurons


def test_a_checkpoint_of_half_moons_takes_raw_points(tmp_path):
    data = moons()
    module, path = checkpoint_of(tmp_path, data)
    raw = data.load()[1].x
    assert np.abs(raw.mean(0)).max() > 0.1  # so centring makes a difference
    compare_with_network(module, path, raw, data.test_points.data)


def test_a_checkpoint_of_digits_takes_images_in_any_shape(tmp_path):
    data = DigitsDataModule(seed=0)
    module, path = checkpoint_of(tmp_path, data, kernel="power_cosine", kernel_params={"alpha": 2})
    raw = data.load()[1].x
    compare_with_network(module, path, raw, data.test_points.data)
    extractor = FeatureExtractor.from_checkpoint(path)
    assert extractor.metadata["image_shape"] == [8, 8]
    whole = extractor.transform(raw.astype(np.uint8).reshape(-1, 1, 8, 8))
    np.testing.assert_allclose(whole, extractor.transform(raw), rtol=0, atol=1e-6)


@pytest.mark.parametrize("memory_map", ["always", "never"])
def test_a_checkpoint_of_arrays_includes_centring_and_scaling(tmp_path, memory_map):
    raw = raw_points(200)
    np.save(tmp_path / "raw.npy", raw)
    data = ArrayDataModule(
        str(tmp_path / "raw.npy"), centre=True, scaling="feature", memory_map=memory_map, seed=0, batch_size=16
    )
    module, path = checkpoint_of(tmp_path, data, kernel_params={"sigma": 1.5})
    points = torch.tensor((raw - raw.mean(0)) / raw.std(0), dtype=torch.float32)
    compare_with_network(module, path, raw, points)


def test_a_checkpoint_of_cropped_images_takes_uncropped_ones(tmp_path, small_mnist):
    data = CroppedMNISTDataModule(data_dir=str(small_mnist), seed=0, batch_size=16)
    module, path = checkpoint_of(tmp_path, data, kernel="power_cosine", kernel_params={"alpha": 2})
    images = np.concatenate([arrays()["train-images-idx3-ubyte"], arrays()["t10k-images-idx3-ubyte"]])
    compare_with_network(module, path, images.astype(np.float64), data.train_points.data)
    extractor = FeatureExtractor.from_checkpoint(path)
    assert (extractor.in_features, extractor.raw_features) == (400, 784)
    assert (extractor.metadata["image_shape"], extractor.metadata["crop"]) == ([20, 20], 4)
    expected = extractor.transform(images)
    for same in (images.astype(np.uint8)[:, None], images.reshape(-1, 784), images[:, 4:24, 4:24]):
        np.testing.assert_array_equal(extractor.transform(same), expected)
    with pytest.raises(ValueError, match=r"\(batch, 400\) or images of 28 x 28 pixels, got the shape \(80, 27, 28\)"):
        extractor.transform(images[:, 1:])


def test_a_checkpoint_has_the_kernel_of_its_phase(tmp_path):
    phases = [Phase(20, kernel_params={"alpha": 1}), Phase(20)]
    module, data = model(kernel="power_cosine", kernel_params={"alpha": 3}, phases=phases), moons()
    x = data.test_points.data
    for updates, alpha in ((10, 1), (20, 3), (30, 3)):
        path = tmp_path / f"{updates}.ckpt"
        fit(module, data, max_steps=updates).save_checkpoint(path, weights_only=False)
        extractor = FeatureExtractor.from_checkpoint(path)
        assert extractor.metadata["kernel_params"] == {"alpha": alpha}
        loaded = type(module).load_from_checkpoint(path)
        assert_close(extractor.features(x), loaded(x), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_a_plain_loader_has_no_preprocessing(tmp_path):
    x = moons().train_points.data
    module = model()
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=-1,
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=50))
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    extractor = FeatureExtractor.from_checkpoint(tmp_path / "x.ckpt")
    assert (extractor.preprocessing.mean == 0).all()
    assert (extractor.preprocessing.scale == 1).all()
    assert_close(extractor(x), module(x), rtol=0, atol=1e-5)


def test_continued_training_with_a_plain_loader_keeps_the_preprocessing(tmp_path):
    data = moons()
    _, path = checkpoint_of(tmp_path, data)
    before = FeatureExtractor.from_checkpoint(path).preprocessing.mean
    module = type(model()).load_from_checkpoint(path)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=-1,
        log_every_n_steps=1, max_steps=5,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(data.train_points.data), batch_size=50))
    trainer.save_checkpoint(tmp_path / "y.ckpt", weights_only=False)
    assert before.abs().min() > 0.1
    assert torch.equal(FeatureExtractor.from_checkpoint(tmp_path / "y.ckpt").preprocessing.mean, before)


def test_other_tensors_in_the_checkpoint_are_ignored(tmp_path):
    _, path = checkpoint_of(tmp_path, moons())
    expected = FeatureExtractor.from_checkpoint(path).identity
    changed(path, lambda content: content["state_dict"].update({"my_metric.total": torch.zeros(3)}))
    assert FeatureExtractor.from_checkpoint(path).identity == expected


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.unlink(), "There is no checkpoint"),
        (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "damaged"),
        (
            lambda p: changed(p, lambda c: c["state_dict"]["network.L"].fill_(torch.nan)),
            "it diverged, use an older checkpoint",
        ),
        (
            lambda p: changed(p, lambda c: c["state_dict"]["network.L"].copy_(-torch.eye(6))),
            "The network has no neural readout",
        ),
        (lambda p: changed(p, lambda c: c["ksm_lightning"].pop("preprocessing")), "preprocessing is incomplete"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(tmp_path, spoil, message):
    _, path = checkpoint_of(tmp_path, moons())
    spoil(path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        FeatureExtractor.from_checkpoint(path)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- safetensors


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_extractor_is_loaded_bitwise(tmp_path, spec, readout, dtype):
    extractor, raw = extractor_of(registry.make_kernel(spec[0], **spec[1]), readout, dtype=dtype), raw_points()
    path = extractor.save(tmp_path / "new" / "x.safetensors")
    loaded = FeatureExtractor.load(path)
    assert [p.name for p in path.parent.iterdir()] == ["x.safetensors"]
    assert np.array_equal(loaded.transform(raw), extractor.transform(raw))
    assert (loaded.identity, loaded.metadata) == (extractor.identity, extractor.metadata)


@pytest.mark.parametrize("readout", ["nystroem", "least_squares"])
def test_a_compressed_extractor_is_loaded_bitwise(tmp_path, readout):
    extractor, raw = extractor_of(readout=readout, num_features=3), raw_points()
    loaded = FeatureExtractor.load(extractor.save(tmp_path / "x.safetensors"))
    assert loaded.transform(raw).shape == (40, 3)
    assert np.array_equal(loaded.transform(raw), extractor.transform(raw))
    assert (loaded.identity, loaded.metadata) == (extractor.identity, extractor.metadata)
    assert loaded.identity != extractor_of(readout=readout, num_features=4).identity


def test_the_file_holds_named_tensors_and_a_description(tmp_path):
    extractor = extractor_of(readout="nystroem")
    extractor.save(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="np") as file:
        about = json.loads(file.metadata()["ksm_lightning"])
        mean = file.get_tensor("preprocessing.mean")
        names = sorted(file.keys())
    assert about == {
        "format": 1, "kernel": "gaussian", "kernel_params": {"sigma": 0.7}, "readout": "nystroem", "in_features": 4,
        "out_features": 7, "image_shape": [2, 2], "crop": 0, "version": "0.1.0", "identity": extractor.identity,
    }  # fmt: skip
    assert names == ["M", "W", "preprocessing.mean", "preprocessing.scale"]
    assert mean.tolist() == MEAN.tolist()


def test_the_identity_changes_with_every_component_and_with_nothing_else():
    def made(kernel=None, W=None, M=None, mean=None, scale=None, shape=(2, 2), crop=0, readout="neural"):
        generator = torch.Generator().manual_seed(0)
        W = torch.randn(7, 4, generator=generator) if W is None else W
        M = torch.randn(7, 7, generator=generator) if M is None else M
        prepared = Preprocessing(
            torch.tensor(MEAN if mean is None else mean), torch.tensor(SCALE if scale is None else scale), shape, crop
        )
        return FeatureExtractor(kernel or GaussianKernel(0.7), W, M, prepared, readout)

    usual = made()
    others = {
        "kernel": made(registry.make_kernel("laplacian", sigma=0.7)),
        "sigma": made(GaussianKernel(0.7000001)),
        "W": made(W=torch.nextafter(usual.W, torch.tensor(torch.inf))),
        "M": made(M=usual.M * (1 + 1e-6)),
        "dtype": made(W=usual.W.double(), M=usual.M.double()),
        "mean": made(mean=MEAN + 1e-12),
        "scale": made(scale=SCALE * 2),
        "shape": made(shape=(4, 1)),
        "crop": made(crop=1),
        "readout": made(readout="nystroem"),
    }
    assert len({usual.identity, *(other.identity for other in others.values())}) == 1 + len(others)
    assert len(usual.identity) == 16
    same = [
        made(), copy.deepcopy(usual).half(), usual.to("cpu").train(), made(W=usual.W.mT.contiguous().mT, M=usual.M),
    ]  # fmt: skip
    assert {other.identity for other in same} == {usual.identity}


def saved(tmp_path):
    return extractor_of().save(tmp_path / "x.safetensors")


def rewritten(path, change):
    """Change tensors or description of the file."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["ksm_lightning"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, about)
    save_file(tensors, path, metadata={"ksm_lightning": json.dumps(about)})


def flip(path, index):
    """Flip one bit of a byte."""
    content = bytearray(path.read_bytes())
    content[index] ^= 0x10
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.unlink(), "does not exist"),
        (lambda p: p.write_bytes(b""), "damaged or not a safetensors file"),
        (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "damaged or not a safetensors file"),
        (lambda p: p.write_bytes(b"hello" * 100), "damaged or not a safetensors file"),
        (lambda p: flip(p, -1), "its content does not match its identity"),
        (lambda p: flip(p, -100), "its content does not match its identity"),
        (lambda p: save_file({"W": torch.eye(2)}, p), "is not a feature extractor that this version"),
        (lambda p: save_file({"W": torch.eye(2)}, p, {"ksm_lightning": "[1]"}), "is not a feature extractor"),
        (lambda p: save_file({"W": torch.eye(2)}, p, {"ksm_lightning": "{"}), "damaged or not a safetensors file"),
        (lambda p: rewritten(p, lambda t, a: a.update(format=2)), "is not a feature extractor that this version"),
        (lambda p: rewritten(p, lambda t, a: a.update(kernel="mine")), "No kernel is registered as 'mine'"),
        (lambda p: rewritten(p, lambda t, a: a.update(kernel_params={"alpha": 1})), "cannot be made from"),
        (lambda p: rewritten(p, lambda t, a: a.update(kernel_params=3)), "cannot be used"),
        (lambda p: rewritten(p, lambda t, a: a.update(image_shape=4)), "an invalid image shape"),
        (lambda p: rewritten(p, lambda t, a: a.update(readout="pca")), "There is no readout 'pca'"),
        (lambda p: rewritten(p, lambda t, a: a.pop("kernel")), "'kernel' is missing"),
        (lambda p: rewritten(p, lambda t, a: a.pop("identity")), "its content does not match its identity"),
        (lambda p: rewritten(p, lambda t, a: t.pop("M")), "'M' is missing"),
        (lambda p: rewritten(p, lambda t, a: t.pop("preprocessing.mean")), "'preprocessing.mean' is missing"),
        (lambda p: rewritten(p, lambda t, a: t.update(M=t["M"][:3])), r"got \(7, 4\) in torch.float32 and \(3, 7\)"),
        (lambda p: rewritten(p, lambda t, a: t["preprocessing.scale"].zero_()), "a scale that is not positive"),
        (lambda p: rewritten(p, lambda t, a: a.update(crop=1)), "its content does not match its identity"),
        (lambda p: rewritten(p, lambda t, a: a.update(in_features=5)), "its content does not match its identity"),
        (lambda p: rewritten(p, lambda t, a: a.update(more=1)), "its content does not match its identity"),
        (lambda p: rewritten(p, lambda t, a: t.update(N=t["M"] + 1)), "its content does not match its identity"),
        (lambda p: rewritten(p, lambda t, a: t.update(W=t["W"].int())), "cannot be used|does not match its identity"),
        (
            lambda p: save_file({"W": torch.eye(2)}, p, {"ksm_lightning": "[" * 100_000 + "]" * 100_000}),
            "damaged or not a safetensors file",
        ),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, spoil, message):
    path = saved(tmp_path)
    spoil(path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        FeatureExtractor.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_flipped_bit_is_detected_or_changes_no_feature(tmp_path):
    """Flips a bit of every byte in turn. A file that still loads has the same tensors."""
    path = FeatureExtractor.from_network(network_of(GaussianKernel(0.7), neurons=2)).save(tmp_path / "x.safetensors")
    whole, expected = path.read_bytes(), FeatureExtractor.load(path).state_dict()
    (header,) = struct.unpack("<Q", whole[:8])
    refused: list[str] = []
    for index in range(len(whole)):
        path.write_bytes(whole)
        flip(path, index)
        try:
            found = FeatureExtractor.load(path)
        except ValueError as error:
            refused.append(str(error))
        else:
            assert 8 < index < 8 + header  # in the header, not in the tensors
            assert all(torch.equal(found.state_dict()[name], value) for name, value in expected.items())
    assert len(refused) > 0.9 * len(whole)
    assert not any("\n" in sentence for sentence in refused)


def test_saving_needs_a_registered_kernel_and_the_right_suffix(tmp_path):
    class Mine(GaussianKernel):
        pass

    extractor = FeatureExtractor(Mine(0.5), torch.eye(2), torch.eye(2))
    assert extractor(torch.eye(2)).shape == (2, 2)
    with pytest.raises(ValueError, match="Mine has no registered name"):
        extractor.save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"saved to a .safetensors file, got .*x.pt"):
        extractor_of().save(tmp_path / "x.pt")
    register_kernel("test_extractor_mine")(Mine)
    extractor.save(tmp_path / "x.safetensors")
    assert isinstance(FeatureExtractor.load(tmp_path / "x.safetensors").kernel, Mine)
    del registry._KERNELS["test_extractor_mine"]
    with pytest.raises(ValueError, match="import the module that defines it"):
        FeatureExtractor.load(tmp_path / "x.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


# ---------------------------------------------------------------------- scikit-learn


def test_a_pipeline_does_not_change_the_extractor():
    extractor, raw = extractor_of(), raw_points(100)
    labels = (np.abs(raw - MEAN) / SCALE).max(1) > 1.6  # far from the mean, not linearly separable
    identity = extractor.identity
    pipeline = make_pipeline(extractor.to_sklearn(), LogisticRegression(C=10)).fit(raw, labels)
    assert pipeline.score(raw, labels) > LogisticRegression().fit(raw, labels).score(raw, labels)
    assert pipeline[0].extractor.identity == identity
    assert np.array_equal(pipeline[:-1].transform(raw), extractor.transform(raw))
    by_hand = LogisticRegression(C=10).fit(extractor.transform(raw), labels)
    np.testing.assert_allclose(pipeline.predict_proba(raw), by_hand.predict_proba(extractor.transform(raw)))


def test_a_clone_and_a_pickle_keep_the_features():
    transformer, raw = extractor_of().to_sklearn(), raw_points()
    expected = transformer.transform(raw)  # without fit
    for again in (clone(transformer), pickle.loads(pickle.dumps(transformer)), clone(transformer).fit(raw[:3])):
        assert again.extractor is not transformer.extractor
        assert np.array_equal(again.transform(raw), expected)


def test_a_grid_search_over_the_classifier_keeps_the_extractor():
    raw = raw_points(90)
    labels = (raw[:, 0] > MEAN[0]).astype(int)
    pipeline = make_pipeline(extractor_of().to_sklearn(), LogisticRegression())
    search = GridSearchCV(pipeline, {"logisticregression__C": [1e-6, 10.0]}, cv=3).fit(raw, labels)
    assert search.best_params_ == {"logisticregression__C": 10.0}
    assert search.best_estimator_[0].extractor.identity == extractor_of().identity


def test_feature_names_and_data_frames():
    transformer, raw = extractor_of().to_sklearn(), raw_points(5)
    names = [f"frozentransformer{i}" for i in range(7)]
    assert list(transformer.get_feature_names_out()) == names
    frame = pd.DataFrame(raw, columns=list("abcd"), index=[5, 6, 7, 8, 9])
    found = clone(transformer).set_output(transform="pandas").fit_transform(frame)
    assert list(found.columns) == names
    assert list(found.index) == [5, 6, 7, 8, 9]
    np.testing.assert_allclose(found.to_numpy(), extractor_of().transform(raw), rtol=0, atol=1e-7)
    assert transformer.transform(raw.astype(np.float32)).dtype == np.float32
    fitted = clone(transformer).fit(frame)
    with pytest.raises(ValueError, match="feature names"):
        fitted.transform(frame[list("dcba")])
    assert list(fitted.feature_names_in_) == list("abcd")


def test_loading_does_not_use_the_random_generator(tmp_path):
    trained = model(phases=None, updates=5)
    fit(trained, moons()).save_checkpoint(tmp_path / "x.ckpt")
    before = torch.random.get_rng_state()
    FeatureExtractor.from_checkpoint(tmp_path / "x.ckpt")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_numpy_parameters_of_a_custom_kernel_can_be_saved(tmp_path):
    @register_kernel("test_extractor_own")
    class Own(GaussianKernel):
        def __init__(self, sigma: float = 1.0, power: float = 1.0) -> None:
            super().__init__(sigma)
            self.power = power

    try:
        extractor = FeatureExtractor(Own(2.0, np.float32(1.5)), torch.zeros(3, 4), torch.eye(3))
        loaded = FeatureExtractor.load(extractor.save(tmp_path / "x.safetensors"))
        assert loaded.kernel.params() == {"sigma": 2.0, "power": 1.5}
        assert loaded.identity == extractor.identity
    finally:
        del registry._KERNELS["test_extractor_own"]


def test_the_transformer_takes_uncropped_rows():
    extractor = FeatureExtractor(
        LinearKernel(), torch.eye(4), torch.eye(4),
        Preprocessing(torch.zeros(4), torch.ones(4), image_shape=(2, 2), crop=1),
    )  # fmt: skip
    row = np.arange(16.0)[None]
    assert extractor.to_sklearn().fit_transform(row).tolist() == [[5.0, 6.0, 9.0, 10.0]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((3, 5)), "The extractor takes 4 features per sample, got 5"),
        (BAD, "contains NaN"),
        (np.zeros((0, 4)), "0 sample"),
    ],
)
@pytest.mark.parametrize("method", ["fit", "transform"])
def test_invalid_samples_are_refused(data, message, method):
    with pytest.raises(ValueError, match=message):
        getattr(extractor_of().to_sklearn(), method)(data)


def test_read_only_input_gives_no_warning():
    raw = raw_points()
    raw.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extractor_of().transform(raw).shape == (40, 7)
