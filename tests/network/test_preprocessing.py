"""Raw input to points, against numpy: cropping, centring and scaling, kept in their own digits."""

import copy

import numpy as np
import pytest
import torch
from test_mnist import arrays
from test_mnist import small as small  # a fixture
from test_module import moons
from torch import nn

from ksm_lightning.data import ArrayDataModule, CroppedMNISTDataModule, DigitsDataModule
from ksm_lightning.network.preprocessing import Preprocessing

RANDOM = np.random.RandomState(0)
MEAN, SCALE = RANDOM.randn(6), 0.5 + RANDOM.rand(6)


def cropping(crop=1) -> Preprocessing:
    """Images of 2 x 3 pixels."""
    return Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE), image_shape=(2, 3), crop=crop)


# ---------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("crop", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_uncropped_images_are_cropped_as_numpy_slices(crop, dtype):
    images = (255 * RANDOM.rand(5, 2 + 2 * crop, 3 + 2 * crop)).astype(dtype)
    inside = images[:, crop:-crop, crop:-crop].reshape(5, 6).astype(np.float64)
    prepare = cropping(crop)
    assert prepare.raw_shape == images.shape[1:]
    flat = torch.tensor(images.reshape(5, -1))
    for same in (torch.tensor(images), torch.tensor(images[:, None]), flat, torch.tensor(inside.astype(dtype))):
        found = prepare(same)
        assert found.dtype == torch.float64
        np.testing.assert_allclose(found.numpy(), (inside - MEAN) / SCALE, rtol=1e-14, atol=1e-13)


def test_a_strided_image_is_cropped_too():
    images = torch.tensor(RANDOM.rand(4, 8, 5))
    assert torch.equal(cropping()(images[:, ::2]), cropping()(images[:, ::2].contiguous()))
    turned = torch.tensor(RANDOM.rand(5, 4, 4)).permute(2, 1, 0)
    assert torch.equal(cropping()(turned), cropping()(turned.contiguous()))


def test_rows_are_centred_and_scaled_in_float64_whatever_they_come_in():
    raw = RANDOM.randn(7, 6)
    prepare = Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE))
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = torch.tensor(raw).to(dtype)
        expected = (x.double().numpy() - MEAN) / SCALE
        np.testing.assert_allclose(prepare(x).numpy(), expected, rtol=1e-14, atol=1e-14)
    answers = torch.tensor(raw > 0)
    np.testing.assert_allclose(prepare(answers).numpy(), ((raw > 0) - MEAN) / SCALE, rtol=1e-14, atol=1e-14)


def test_inverse_undoes_it():
    prepare, raw = cropping(), torch.tensor(RANDOM.randn(7, 6))
    np.testing.assert_allclose(prepare.inverse(prepare(raw)).numpy(), raw.numpy(), rtol=0, atol=1e-14)
    assert prepare.inverse(prepare(raw).float()).dtype == torch.float64


def test_nothing_done_is_nothing_changed():
    x = torch.tensor(RANDOM.randn(7, 6), dtype=torch.float32)
    assert torch.equal(Preprocessing.none(6)(x).float(), x)
    assert torch.equal(Preprocessing.from_state(Preprocessing.none(6).state())(x).float(), x)
    assert torch.equal(Preprocessing(torch.zeros(6), torch.ones(6))(x).float(), x)


def test_input_is_left_alone():
    x = torch.tensor(RANDOM.randn(7, 6))
    before = x.clone()
    for prepare in (cropping(), Preprocessing.none(6)):
        prepare(x)
    assert torch.equal(x, before)


def test_numbers_loaded_into_one_that_does_nothing_are_used():
    prepare, x = Preprocessing.none(6), torch.tensor(RANDOM.randn(7, 6))
    prepare.load_state_dict(Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE)).state_dict())
    np.testing.assert_allclose(prepare(x).numpy(), (x.numpy() - MEAN) / SCALE, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 3), (5, 21), (5, 4, 6), (6,), ()])
def test_another_shape_is_refused_with_what_is_wanted(shape):
    with pytest.raises(ValueError, match=r"Inputs must be \(batch, 6\) or images of 4 x 5 pixels, got the shape"):
        cropping()(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"Inputs must be \(batch, 6\), got the shape"):
        Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE))(torch.zeros(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": torch.zeros(2, 3)}, r"one number a feature each, got shapes \(2, 3\) and \(6,\)"),
        ({"mean": torch.zeros(5)}, r"got shapes \(5,\) and \(6,\)"),
        ({"mean": torch.zeros(0), "scale": torch.zeros(0)}, r"got shapes \(0,\) and \(0,\)"),
        ({"image_shape": (2, 2)}, "Images of 2 x 2 pixels do not have 6 features"),
        ({"crop": 1}, "Only images can be cropped, by 0 pixels or more, got crop=1 for None"),
        ({"crop": -1, "image_shape": (2, 3)}, r"got crop=-1 for \(2, 3\)"),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(**{"mean": torch.zeros(6), "scale": torch.ones(6), **options})


# ---------------------------------------------------------------------- its digits


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.float(), lambda m: m.double(),
        lambda m: m.to(torch.float16), lambda m: m.to("cpu", torch.float32), lambda m: m.type(torch.float16),
    ],
)  # fmt: skip
def test_a_cast_of_the_model_around_it_leaves_its_digits(cast):
    prepare = cropping()
    head = nn.Linear(6, 2).double()
    model = cast(nn.Sequential(prepare, head))
    assert prepare.mean.tolist() == MEAN.tolist()
    assert prepare.scale.tolist() == SCALE.tolist()
    assert prepare.mean.dtype == torch.float64
    assert list(model.parameters()) == list(head.parameters())


def test_it_moves_with_the_model_around_it():
    model = nn.Sequential(cropping(), nn.Linear(6, 2)).to("meta", torch.float16)
    assert (model[0].mean.device.type, model[0].mean.dtype) == ("meta", torch.float64)
    assert (model[1].weight.device.type, model[1].weight.dtype) == ("meta", torch.float16)


def test_it_holds_its_own_copy_of_what_it_was_given():
    mean, scale = torch.zeros(3, requires_grad=True), torch.ones(3)
    prepare = Preprocessing(mean, scale)
    scale.fill_(7)
    assert prepare.scale.tolist() == [1.0, 1.0, 1.0]
    assert not prepare.mean.requires_grad
    assert copy.deepcopy(prepare)(torch.ones(1, 3)).tolist() == [[1.0, 1.0, 1.0]]


# ---------------------------------------------------------------------- its state


@pytest.mark.parametrize("prepare", [cropping(), cropping(0), Preprocessing.none(4)], ids=["cropped", "image", "none"])
def test_a_state_comes_back(tmp_path, prepare):
    torch.save(prepare.state(), tmp_path / "x.pt")
    found = Preprocessing.from_state(torch.load(tmp_path / "x.pt", weights_only=True))
    assert torch.equal(found.mean, prepare.mean)
    assert torch.equal(found.scale, prepare.scale)
    assert (found.image_shape, found.crop) == (prepare.image_shape, prepare.crop)
    assert repr(found) == repr(prepare)


def test_a_state_is_of_plain_values():
    assert cropping().state()["image_shape"] == [2, 3]
    assert (cropping().state()["crop"], Preprocessing.none(2).state()["image_shape"]) == (1, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "incomplete"),
        ({"mean": None}, "incomplete"),
        ({"scale": [1.0] * 6}, "incomplete"),
        ({"more": 1}, "incomplete"),
        ({"mean": torch.full((6,), torch.nan)}, "a mean that is not finite"),
        ({"scale": torch.zeros(6)}, "a scale that is not positive"),
        ({"scale": -torch.ones(6)}, "a scale that is not positive"),
        ({"scale": torch.full((6,), torch.inf)}, "not positive"),
        ({"image_shape": 6}, "no possible image shape or crop: 6, 1"),
        ({"image_shape": "23"}, "no possible image shape"),
        ({"image_shape": [6]}, "no possible image shape"),
        ({"image_shape": [-2, -3]}, "no possible image shape"),
        ({"image_shape": [2.0, 3.0]}, "no possible image shape"),
        ({"image_shape": [2, 2]}, "Images of 2 x 2 pixels do not have 6 features"),
        ({"crop": None}, "no possible image shape or crop"),
        ({"crop": 1.5}, "no possible image shape or crop"),
        ({"crop": -1}, "Only images can be cropped"),
        ({"image_shape": None}, "Only images can be cropped"),
        ({"mean": torch.zeros(5)}, "one number a feature each"),
    ],
)
def test_a_damaged_state_is_refused_in_one_sentence(changes, message):
    state = None if changes is None else {**cropping().state(), **changes}
    with pytest.raises(ValueError, match=message) as caught:
        Preprocessing.from_state(state)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["mean", "scale", "image_shape", "crop"])
def test_a_state_that_lacks_something_is_refused(missing):
    state = cropping().state()
    del state[missing]
    with pytest.raises(ValueError, match="incomplete"):
        Preprocessing.from_state(state)


# ---------------------------------------------------------------------- datamodules


def compare(data, raw: np.ndarray, points) -> None:
    found = data.preprocessing(torch.tensor(raw)).float()
    expected = points.slice(0, len(points))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_of_half_moons():
    data = moons()
    train, test = data.load()
    compare(data, train.x, data.train_points)
    compare(data, test.x, data.test_points)
    np.testing.assert_allclose(data.preprocessing.mean.numpy(), train.x.mean(0), rtol=1e-12)
    assert (data.preprocessing.scale == 1).all()


def test_of_digits():
    data = DigitsDataModule()
    train, test = data.load()
    compare(data, train.x, data.train_points)
    compare(data, test.x.reshape(-1, 8, 8), data.test_points)
    np.testing.assert_allclose(data.preprocessing.scale.numpy(), train.x.std(), rtol=1e-12)
    assert (data.preprocessing.image_shape, data.preprocessing.crop) == ((8, 8), 0)


def test_of_cropped_mnist(small):
    data = CroppedMNISTDataModule(data_dir=str(small), crop=9, include_test=False)
    compare(data, arrays()["train-images-idx3-ubyte"], data.train_points)
    compare(data, arrays()["t10k-images-idx3-ubyte"].reshape(-1, 784), data.test_points)
    assert (data.preprocessing.image_shape, data.preprocessing.crop) == ((10, 10), 9)


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("scaling", ["none", "global", "feature"])
@pytest.mark.parametrize("memory_map", ["always", "never"])
def test_of_arrays(tmp_path, centre, scaling, memory_map):
    raw = RANDOM.randn(50, 3) * [1, 10, 0] + [5, -5, 2]  # the last feature is constant
    np.save(tmp_path / "x.npy", raw)
    data = ArrayDataModule(str(tmp_path / "x.npy"), centre=centre, scaling=scaling, memory_map=memory_map)
    compare(data, raw, data.train_points)
    expected = raw - raw.mean(0) if centre else raw
    scale = {"none": 1, "global": raw.std(), "feature": np.where(raw.std(0) > 0, raw.std(0), 1)}[scaling]
    np.testing.assert_allclose(data.preprocessing(torch.tensor(raw)).numpy(), expected / scale, rtol=0, atol=1e-12)


@pytest.mark.parametrize("memory_map", ["always", "never"])
def test_what_a_trained_network_used_overrules_the_data(tmp_path, memory_map):
    np.save(tmp_path / "x.npy", raw := RANDOM.randn(50, 6) + 100)
    np.save(tmp_path / "y.npy", raw[:9] + 1)
    data = ArrayDataModule(
        str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), centre=True, scaling="feature", memory_map=memory_map
    )
    given = cropping()
    data.use(given)
    expected = torch.tensor((raw - MEAN) / SCALE, dtype=torch.float32)
    torch.testing.assert_close(data.train_points.slice(0, 50), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        data.test_points.slice(0, 9), torch.tensor((raw[:9] + 1 - MEAN) / SCALE, dtype=torch.float32)
    )
    # What is handed on is what was given, with the image shape that a file knows nothing of.
    handed_on = data.preprocessing
    assert handed_on.state()["image_shape"] == [2, 3]
    assert torch.equal(handed_on.mean, given.mean)
    handed_on.mean += 1
    assert torch.equal(given.mean, torch.tensor(MEAN))
    with pytest.raises(RuntimeError, match="The data is loaded already: say what to use before `setup`"):
        data.use(given)


def test_the_preprocessing_of_other_data_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", RANDOM.randn(50, 5))
    data = ArrayDataModule(str(tmp_path / "x.npy"))
    data.use(cropping())
    with pytest.raises(ValueError, match="The data has 5 features, but the network was trained on points of 6"):
        data.setup()
