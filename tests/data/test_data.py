"""Batches, points, and the datamodules."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, make_moons
from torch.testing import assert_close

import references
from ksm_lightning.data import (
    ArrayDataModule,
    DigitsDataModule,
    HalfMoonsDataModule,
    PointLoader,
    Points,
    Standardisation,
    UpdateLoader,
    draw_indices,
)


def source(**options) -> UpdateLoader:
    arguments = {"points": Points(torch.arange(100.0)[:, None]), "batch_size": 8, **options}
    return UpdateLoader(**arguments)


# ---------------------------------------------------------------------- batches


@pytest.mark.parametrize("seed", [0, 7, -3, 2**62 + 5])
def test_indices_equal_splitmix_in_pythons_integers(seed):
    indices = draw_indices(seed, torch.tensor([0, 1, 10_000_000]), torch.tensor([0, 5, 2**24 - 1]), 1600)
    expected = [[references.splitmix_index(seed, u, s, 1600) for s in (0, 5, 2**24 - 1)] for u in (0, 1, 10_000_000)]
    assert indices.tolist() == expected


def test_indices_are_uniform_and_independent():
    indices = draw_indices(3, torch.arange(2000), torch.arange(64), 100)
    counts = torch.bincount(indices.flatten(), minlength=100).double()
    chi2 = ((counts - 1280) ** 2 / 1280).sum().item()
    assert 50 < chi2 < 160  # 99 degrees of freedom
    a, b = indices[:-1].flatten().double(), indices[1:].flatten().double()
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.01


def test_a_batch_depends_on_seed_rank_and_update_alone():
    fresh = source(seed=1).indices(17, 1)
    assert torch.equal(source(seed=1).indices(0, 50)[17:18], fresh)
    assert not torch.equal(source(seed=2).indices(17, 1), fresh)
    assert not torch.equal(source(seed=1, rank=1).indices(17, 1), fresh)
    assert not torch.equal(source(seed=1).indices(18, 1), fresh)


def test_two_ranks_draw_what_one_rank_of_twice_the_batch_draws():
    together = source(batch_size=16).indices(5, 3)
    apart = torch.cat([source(batch_size=8, rank=rank).indices(5, 3) for rank in (0, 1)], dim=1)
    assert torch.equal(together, apart)


def test_an_iteration_continues_at_the_update_count_and_ends_with_the_epoch():
    updates = {"done": 30}
    batches = source(seed=4, updates_per_epoch=100, next_update=lambda: updates["done"])
    first = torch.cat([block.x for block in batches])
    assert first.shape == (70, 8, 1)
    assert torch.equal(first[..., 0].long(), batches.indices(30, 70))
    updates["done"] = 100
    assert torch.equal(next(iter(batches)).x[0, :, 0].long(), batches.indices(100, 1)[0])


def test_blocks_end_at_every_stop_and_at_the_last_update():
    batches = source(updates_per_epoch=1000, stops=[80], last_update=277)
    assert list(batches.blocks(0)) == [(0, 80), (80, 80), (160, 40), (200, 40), (240, 37)]
    assert list(batches.blocks(277)) == []


def test_a_block_of_large_batches_holds_few_updates():
    batches = source(points=Points(torch.zeros(10, 1000)), batch_size=1000)
    assert next(iter(batches)).x.shape == (4, 1000, 1000)


def test_impossible_batches_are_refused():
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        source(batch_size=0)
    with pytest.raises(ValueError, match="`updates_per_epoch` must be at least 1"):
        source(updates_per_epoch=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_blocks_share_all_points_in_order(world_size):
    points, labels = Points(torch.arange(10.0)[:, None]), torch.arange(10)
    seen, seen_labels = [], []
    for rank in range(world_size):
        blocks = PointLoader(points, labels, 4, rank=rank, world_size=world_size)
        content = list(blocks)
        assert len(content) == len(blocks)
        seen += [x for x, _ in content]
        seen_labels += [label for _, label in content]
    assert torch.cat(seen).flatten().tolist() == list(range(10))
    assert torch.cat(seen_labels).tolist() == list(range(10))


# ---------------------------------------------------------------------- points


def test_standardisation_is_streamed_exactly(monkeypatch):
    monkeypatch.setattr("ksm_lightning.data.points._ROWS_AT_ONCE", 7)
    x = 1e4 + np.random.RandomState(0).randn(50, 3) * [1, 2, 3]
    for scaling, expected in (("none", 1.0), ("global", x.std()), ("feature", x.std(0))):
        measured = Standardisation.measure(x, centre=True, scaling=scaling)
        np.testing.assert_allclose(measured.mean, x.mean(0), rtol=1e-12)
        np.testing.assert_allclose(measured.scale, np.broadcast_to(expected, 3), rtol=1e-9)


def test_data_far_from_the_origin_is_centred_before_it_loses_its_digits(tmp_path):
    x = np.random.RandomState(0).randn(200, 2)
    np.save(tmp_path / "x.npy", 1e9 + x)
    data = ArrayDataModule(str(tmp_path / "x.npy"), centre=True, scaling="feature")
    expected = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    assert_close(data.train_points.data, expected, rtol=0, atol=1e-5)
    mapped = ArrayDataModule(str(tmp_path / "x.npy"), centre=True, scaling="feature", memory_map="always")
    assert torch.equal(mapped.train_points.slice(0, 200), data.train_points.data)


def test_a_constant_feature_keeps_its_scale():
    x = np.stack([np.full(20, 5.3), np.arange(20.0)], axis=1)
    measured = Standardisation.measure(x, centre=True, scaling="feature")
    assert measured.scale[0] == 1
    assert np.isfinite(measured(x)).all()


def test_nothing_is_changed_without_centring_and_scaling():
    x = np.random.RandomState(0).randn(5, 2).astype(np.float32)
    np.testing.assert_array_equal(Standardisation.measure(x, centre=False, scaling="none")(x), x)


def test_points_are_copied_to_a_device_once():
    points = Points(torch.zeros(3, 2))
    assert points.to("cpu") is points
    moved = points.to("meta")
    assert moved.data.device == torch.device("meta")
    assert points.to("meta") is moved


# ---------------------------------------------------------------------- built-in data


def test_half_moons_are_the_papers_points():
    data = HalfMoonsDataModule()
    x, labels = make_moons(1600, noise=0.1, random_state=np.random.RandomState(0))
    assert_close(data.train_points.data, torch.tensor(x - x.mean(0), dtype=torch.float32))
    assert data.train_labels.tolist() == labels.tolist()
    assert data.in_features == 2
    # A fresh draw for the test, with the training data's mean removed.
    test = data.test_points.data
    assert test.shape == (1600, 2)
    assert torch.cdist(test, data.train_points.data).min() > 0
    assert 0 < test.mean(0).abs().max() < 0.05


def test_digits_are_scaled_by_all_their_pixels_and_split_evenly():
    data = DigitsDataModule()
    train, test = data.train_points.data, data.test_points.data
    assert (len(train), len(test)) == (1437, 360)
    assert train.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert torch.bincount(data.test_labels).min() >= 34
    scale = float(data.standardisation.scale[0])
    assert (train * scale).round().max() == load_digits().data.max() == 16
    assert data.image_shape == (8, 8)


def test_validation_walks_over_training_points_and_test_over_test_points():
    data = HalfMoonsDataModule(num_points=10, eval_batch_size=4)
    x, labels = zip(*data.val_dataloader(), strict=True)
    assert torch.equal(torch.cat(x), data.train_points.data)
    assert torch.equal(torch.cat(labels), data.train_labels)
    assert torch.equal(torch.cat([x for x, _ in data.test_dataloader()]), data.test_points.data)
    assert torch.equal(torch.cat([x for x, _ in data.predict_dataloader()]), data.test_points.data)


def test_the_batch_seed_follows_the_run_and_is_kept():
    torch.manual_seed(5)
    data = HalfMoonsDataModule()
    assert data.state_dict() == {"seed": 5}
    torch.manual_seed(6)
    assert data.state_dict() == {"seed": 5}
    other = HalfMoonsDataModule()
    other.load_state_dict({"seed": 5})
    assert torch.equal(next(iter(other.train_dataloader())).x, next(iter(data.train_dataloader())).x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HalfMoonsDataModule(num_points=1), "`num_points` must be at least 2"),
        (lambda: HalfMoonsDataModule(noise=-1), "`noise` must be finite and not negative"),
        (lambda: HalfMoonsDataModule(batch_size=0), "`batch_size` must be at least 1"),
        (lambda: DigitsDataModule(test_fraction=1.5), "`test_fraction` must be between"),
        (lambda: DigitsDataModule(updates_per_epoch=0), "`updates_per_epoch` must be at least 1"),
        (lambda: ArrayDataModule("x.npy", memory_map="perhaps"), "`memory_map` must be"),
    ],
)
def test_impossible_datamodules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------- a user's arrays


@pytest.fixture
def table() -> np.ndarray:
    return np.random.RandomState(0).randn(30, 3)


def test_npy_npz_and_csv_give_the_same_points(tmp_path, table):
    labels = np.arange(30) % 3
    np.save(tmp_path / "x.npy", table)
    np.save(tmp_path / "labels.npy", labels)
    np.savez(tmp_path / "x.npz", x=table, label=labels)
    both = np.column_stack([table, labels])
    np.savetxt(tmp_path / "x.csv", both, delimiter=",", header="a,b,c,label", comments="", fmt="%.17g")
    modules = [
        ArrayDataModule(str(tmp_path / "x.npy"), labels=str(tmp_path / "labels.npy"), centre=True, scaling="feature"),
        ArrayDataModule(str(tmp_path / "x.npz"), labels="label", centre=True, scaling="feature"),
        ArrayDataModule(str(tmp_path / "x.csv"), labels="label", centre=True, scaling="feature"),
    ]
    expected = torch.tensor((table - table.mean(0)) / table.std(0), dtype=torch.float32)
    for module in modules:
        assert_close(module.train_points.data, expected, rtol=1e-5, atol=1e-6)
        assert module.train_labels.tolist() == labels.tolist()
        assert module.in_features == 3


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_csv_without_header_and_with_other_delimiters(tmp_path, table, delimiter):
    np.savetxt(tmp_path / "x.csv", table, delimiter=delimiter, fmt="%.17g")
    assert_close(ArrayDataModule(str(tmp_path / "x.csv")).train_points.data, torch.tensor(table, dtype=torch.float32))
    assert ArrayDataModule(str(tmp_path / "x.csv"), labels=None).train_labels is None


def test_a_memory_mapped_file_gives_the_batches_of_one_in_memory(tmp_path, table):
    path = str(tmp_path / "x.npy")
    np.save(path, table)
    mapped = ArrayDataModule(path, centre=True, scaling="global", memory_map="always", seed=1)
    loaded = ArrayDataModule(path, centre=True, scaling="global", memory_map="never", seed=1)
    assert isinstance(mapped.train_points.data, np.memmap)
    assert isinstance(loaded.train_points.data, torch.Tensor)
    assert torch.equal(next(iter(mapped.train_dataloader())).x, next(iter(loaded.train_dataloader())).x)
    assert torch.equal(next(iter(mapped.val_dataloader())), next(iter(loaded.val_dataloader())))


def test_a_file_larger_than_memory_is_mapped_by_itself(tmp_path, table, monkeypatch):
    np.save(tmp_path / "x.npy", table)
    monkeypatch.setattr("ksm_lightning.data.array.free_memory", lambda: 1000.0)
    assert isinstance(ArrayDataModule(str(tmp_path / "x.npy")).train_points.data, np.memmap)


def test_test_points_have_their_own_file_and_the_training_scale(tmp_path, table):
    np.save(tmp_path / "x.npy", table)
    np.save(tmp_path / "t.npy", table[:5] + 1)
    data = ArrayDataModule(str(tmp_path / "x.npy"), test_path=str(tmp_path / "t.npy"), centre=True)
    assert_close(data.test_points.data, torch.tensor(table[:5] + 1 - table.mean(0), dtype=torch.float32))


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the pickle ran')",))


def bad_files(folder, table):
    def write(name, content):
        (folder / name).write_bytes(content)
        return str(folder / name)

    def save(name, array, **options):
        np.save(folder / name, array, **options)
        return str(folder / name)

    with_nan, with_inf = table.copy(), table.copy()
    with_nan[7, 1], with_inf[3, 2] = np.nan, 1e300
    whole = (folder / "whole.npy", np.save(folder / "whole.npy", table))[0].read_bytes()
    np.savez(folder / "two.npz", a=table, b=table)
    np.savez(folder / "one.npz", x=table)
    flipped = bytearray((folder / "one.npz").read_bytes())
    flipped[300] ^= 0xFF
    np.savez(folder / "bomb.npz", x=np.array([Bomb()], dtype=object))
    return {
        "is empty": write("empty.csv", b""),
        "There is no data file": str(folder / "missing.npy"),
        "must be a .npy, .npz or .csv": write("x.txt", b"1,2"),
        "line 3: 'x' is not a number": write("text.csv", b"a,b\n1,2\n3,x\n"),
        "line 2: 1 fields where the first line has 2": write("ragged.csv", b"1,2\n3\n"),
        "is empty: its shape is \\(0, 2\\)": write("header.csv", b"a,b\n"),
        "holds nan at row 7, column 1": save("nan.npy", with_nan),
        "holds inf at row 3, column 2": save("inf.npy", with_inf),
        "is empty: its shape is": save("zero.npy", np.zeros((0, 3))),
        "two dimensions": save("flat.npy", np.zeros(3)),
        "not numbers": save("words.npy", np.array([["a", "b"]])),
        "holds pickled objects, which could run code": save(
            "bomb.npy", np.array([Bomb()], dtype=object), allow_pickle=True
        ),
        "is damaged or no NumPy file": write("cut.npy", whole[: len(whole) // 2]),
        "Say which array of": str(folder / "two.npz"),
        "bomb.npz is refused": str(folder / "bomb.npz"),
        "crc.npz is damaged": write("crc.npz", flipped),
    }


def test_bad_files_are_refused_in_one_sentence(tmp_path, table):
    for message, path in bad_files(tmp_path, table).items():
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            ArrayDataModule(path).setup()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "message"),
    [("colour", "has no column 'colour' for labels; it has a, b"), ("b", "must be whole numbers"), ("7", "no column")],
)
def test_bad_labels_are_named(tmp_path, labels, message):
    (tmp_path / "x.csv").write_text("a,b\n1,2.5\n2,3\n")
    with pytest.raises(ValueError, match=message):
        ArrayDataModule(str(tmp_path / "x.csv"), labels=labels).setup()


@pytest.mark.parametrize("labels", ["label", "1"])
def test_a_column_of_labels_has_a_name_and_a_number(tmp_path, labels):
    (tmp_path / "x.csv").write_text('"a","label"\n\n"1.5","2"\n"2.5","3"\n')
    data = ArrayDataModule(str(tmp_path / "x.csv"), labels=labels)
    assert data.train_points.data.flatten().tolist() == [1.5, 2.5]
    assert data.train_labels.tolist() == [2, 3]


def test_labels_that_are_no_numbers_are_named(tmp_path, table):
    np.save(tmp_path / "x.npy", table)
    for labels in (np.array(["a"] * 30), np.full(30, np.nan)):
        np.save(tmp_path / "l.npy", labels)
        with pytest.raises(ValueError, match="must be whole numbers"):
            ArrayDataModule(str(tmp_path / "x.npy"), labels=str(tmp_path / "l.npy")).setup()


def test_labels_of_another_length_are_named(tmp_path, table):
    np.save(tmp_path / "x.npy", table)
    np.save(tmp_path / "l.npy", np.arange(4))
    with pytest.raises(ValueError, match="30 points but labels of shape"):
        ArrayDataModule(str(tmp_path / "x.npy"), labels=str(tmp_path / "l.npy")).setup()
