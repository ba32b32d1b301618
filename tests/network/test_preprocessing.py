"""Cropping, centring and scaling of raw input, against numpy; float64 throughout."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from ksm_lightning.network.preprocessing import Preprocessing

RANDOM = np.random.RandomState(0)
MEAN, SCALE = RANDOM.randn(6), 0.5 + RANDOM.rand(6)


def cropping(crop=1) -> Preprocessing:
    """Preprocessing for images of 2 x 3 pixels after cropping."""
    return Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE), image_shape=(2, 3), crop=crop)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("crop", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_raw_images_are_cropped_like_numpy_slices(crop, dtype):
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


def test_rows_of_any_dtype_are_centred_and_scaled_in_float64():
    raw = RANDOM.randn(7, 6)
    prepare = Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE))
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = torch.tensor(raw).to(dtype)
        expected = (x.double().numpy() - MEAN) / SCALE
        np.testing.assert_allclose(prepare(x).numpy(), expected, rtol=1e-14, atol=1e-14)
    booleans = torch.tensor(raw > 0)
    np.testing.assert_allclose(prepare(booleans).numpy(), ((raw > 0) - MEAN) / SCALE, rtol=1e-14, atol=1e-14)


def test_inverse_restores_raw_rows():
    prepare, raw = cropping(), torch.tensor(RANDOM.randn(7, 6))
    np.testing.assert_allclose(prepare.inverse(prepare(raw)).numpy(), raw.numpy(), rtol=0, atol=1e-14)
    assert prepare.inverse(prepare(raw).float()).dtype == torch.float64


def test_the_identity_changes_nothing():
    x = torch.tensor(RANDOM.randn(7, 6), dtype=torch.float32)
    assert torch.equal(Preprocessing.identity(6)(x).float(), x)
    assert torch.equal(Preprocessing.from_state(Preprocessing.identity(6).state())(x).float(), x)
    assert torch.equal(Preprocessing(torch.zeros(6), torch.ones(6))(x).float(), x)


def test_the_input_is_not_modified():
    x = torch.tensor(RANDOM.randn(7, 6))
    before = x.clone()
    for prepare in (cropping(), Preprocessing.identity(6)):
        prepare(x)
    assert torch.equal(x, before)


def test_an_identity_uses_a_loaded_state_dict():
    prepare, x = Preprocessing.identity(6), torch.tensor(RANDOM.randn(7, 6))
    prepare.load_state_dict(Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE)).state_dict())
    np.testing.assert_allclose(prepare(x).numpy(), (x.numpy() - MEAN) / SCALE, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 3), (5, 21), (5, 4, 6), (6,), ()])
def test_other_shapes_are_refused_with_the_expected_one(shape):
    with pytest.raises(ValueError, match=r"Inputs must be \(batch, 6\) or images of 4 x 5 pixels, got the shape"):
        cropping()(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"Inputs must be \(batch, 6\), got the shape"):
        Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE))(torch.zeros(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": torch.zeros(2, 3)}, r"one number per feature, got shapes \(2, 3\) and \(6,\)"),
        ({"mean": torch.zeros(5)}, r"got shapes \(5,\) and \(6,\)"),
        ({"mean": torch.zeros(0), "scale": torch.zeros(0)}, r"got shapes \(0,\) and \(0,\)"),
        ({"image_shape": (2, 2)}, "Images of 2 x 2 pixels do not have 6 features"),
        ({"crop": 1}, "Only images can be cropped, by 0 or more pixels: got crop=1 with image_shape=None"),
        ({"crop": -1, "image_shape": (2, 3)}, r"got crop=-1 with image_shape=\(2, 3\)"),
    ],
)
def test_contradictory_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(**{"mean": torch.zeros(6), "scale": torch.ones(6), **options})


# ---------------------------------------------------------------------- measured on arrays


def test_mean_and_scale_are_accumulated_over_blocks(monkeypatch):
    monkeypatch.setattr("ksm_lightning.network.preprocessing.ROWS_AT_ONCE", 7)
    x = 1e4 + np.random.RandomState(0).randn(50, 3) * [1, 2, 3]
    for scaling, expected in (("none", 1.0), ("global", x.std()), ("feature", x.std(0))):
        measured = Preprocessing.measure(x, centre=True, scaling=scaling)
        np.testing.assert_allclose(measured.mean.numpy(), x.mean(0), rtol=1e-12)
        np.testing.assert_allclose(measured.scale.numpy(), np.broadcast_to(expected, 3), rtol=1e-9)


def test_a_constant_feature_keeps_a_scale_of_1():
    x = np.stack([np.full(20, 5.3), np.arange(20.0)], axis=1)
    measured = Preprocessing.measure(x, centre=True, scaling="feature")
    assert measured.scale[0] == 1
    assert np.isfinite(measured.transform(x)).all()


def test_without_centring_and_scaling_the_identity_is_measured():
    x = np.random.RandomState(0).randn(5, 6).astype(np.float32)
    measured = Preprocessing.measure(x, centre=False, scaling="none", image_shape=(2, 3), crop=1)
    assert (measured.image_shape, measured.crop) == ((2, 3), 1)
    assert measured(torch.tensor(x)).dtype == torch.float32
    np.testing.assert_array_equal(measured.transform(x), x)


@pytest.mark.parametrize("rows_at_once", [2, 100])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_transform_computes_in_float64_and_returns_float32(monkeypatch, dtype, rows_at_once):
    monkeypatch.setattr("ksm_lightning.network.preprocessing.ROWS_AT_ONCE", rows_at_once)
    rows = (255 * RANDOM.rand(7, 6)).astype(dtype)
    found = cropping().transform(rows)
    np.testing.assert_array_equal(found, ((rows.astype(np.float64) - MEAN) / SCALE).astype(np.float32))
    np.testing.assert_array_equal(found, cropping()(torch.tensor(rows)).float().numpy())
    assert found.dtype == np.float32


def test_an_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="`scaling` must be one of none, global, feature, got 'columns'"):
        Preprocessing.measure(np.zeros((3, 2)), centre=True, scaling="columns")


# ---------------------------------------------------------------------- dtype and device


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.float(), lambda m: m.double(),
        lambda m: m.to(torch.float16), lambda m: m.to("cpu", torch.float32), lambda m: m.type(torch.float16),
    ],
)  # fmt: skip
def test_casting_the_surrounding_model_keeps_float64(cast):
    prepare = cropping()
    head = nn.Linear(6, 2).double()
    model = cast(nn.Sequential(prepare, head))
    assert prepare.mean.tolist() == MEAN.tolist()
    assert prepare.scale.tolist() == SCALE.tolist()
    assert prepare.mean.dtype == torch.float64
    assert list(model.parameters()) == list(head.parameters())


def test_it_moves_with_the_surrounding_model():
    model = nn.Sequential(cropping(), nn.Linear(6, 2)).to("meta", torch.float16)
    assert (model[0].mean.device.type, model[0].mean.dtype) == ("meta", torch.float64)
    assert (model[1].weight.device.type, model[1].weight.dtype) == ("meta", torch.float16)


def test_mean_and_scale_are_copied():
    mean, scale = torch.zeros(3, requires_grad=True), torch.ones(3)
    prepare = Preprocessing(mean, scale)
    scale.fill_(7)
    assert prepare.scale.tolist() == [1.0, 1.0, 1.0]
    assert not prepare.mean.requires_grad
    assert copy.deepcopy(prepare)(torch.ones(1, 3)).tolist() == [[1.0, 1.0, 1.0]]


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize(
    "prepare", [cropping(), cropping(0), Preprocessing.identity(4)], ids=["cropped", "image", "identity"]
)
def test_a_saved_state_gives_the_same_preprocessing(tmp_path, prepare):
    torch.save(prepare.state(), tmp_path / "x.pt")
    found = Preprocessing.from_state(torch.load(tmp_path / "x.pt", weights_only=True))
    assert torch.equal(found.mean, prepare.mean)
    assert torch.equal(found.scale, prepare.scale)
    assert (found.image_shape, found.crop) == (prepare.image_shape, prepare.crop)
    assert repr(found) == repr(prepare)


def test_a_state_has_plain_values():
    assert cropping().state()["image_shape"] == [2, 3]
    assert (cropping().state()["crop"], Preprocessing.identity(2).state()["image_shape"]) == (1, None)


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
        ({"image_shape": 6}, "an invalid image shape or crop: 6, 1"),
        ({"image_shape": "23"}, "an invalid image shape"),
        ({"image_shape": [6]}, "an invalid image shape"),
        ({"image_shape": [-2, -3]}, "an invalid image shape"),
        ({"image_shape": [2.0, 3.0]}, "an invalid image shape"),
        ({"image_shape": [2, 2]}, "Images of 2 x 2 pixels do not have 6 features"),
        ({"crop": None}, "an invalid image shape or crop"),
        ({"crop": 1.5}, "an invalid image shape or crop"),
        ({"crop": -1}, "Only images can be cropped"),
        ({"image_shape": None}, "Only images can be cropped"),
        ({"mean": torch.zeros(5)}, "one number per feature"),
    ],
)
def test_a_damaged_state_is_refused_in_one_sentence(changes, message):
    state = None if changes is None else {**cropping().state(), **changes}
    with pytest.raises(ValueError, match=message) as caught:
        Preprocessing.from_state(state)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["mean", "scale", "image_shape", "crop"])
def test_an_incomplete_state_is_refused(missing):
    state = cropping().state()
    del state[missing]
    with pytest.raises(ValueError, match="incomplete"):
        Preprocessing.from_state(state)
