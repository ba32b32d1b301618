"""Random batches for training, all points in order, and the inputs of any batch."""

import pytest
import torch

from helpers import references
from ksm_lightning.data import PointLoader, Points, UpdateBlock, UpdateLoader, batches_of, draw_indices, inputs_of


def make_loader(**options) -> UpdateLoader:
    arguments = {"points": Points(torch.arange(100.0)[:, None]), "batch_size": 8, **options}
    return UpdateLoader(**arguments)


# ---------------------------------------------------------------------- draws


@pytest.mark.parametrize("seed", [0, 7, -3, 2**62 + 5])
def test_indices_equal_splitmix_in_python_integers(seed):
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


# ---------------------------------------------------------------------- training batches


def test_a_batch_is_a_function_of_seed_rank_and_update():
    batch = make_loader(seed=1).indices(17, 1)
    assert torch.equal(make_loader(seed=1).indices(0, 50)[17:18], batch)
    assert not torch.equal(make_loader(seed=2).indices(17, 1), batch)
    assert not torch.equal(make_loader(seed=1, rank=1).indices(17, 1), batch)
    assert not torch.equal(make_loader(seed=1).indices(18, 1), batch)


def test_two_ranks_draw_the_same_points_as_one_rank_with_twice_the_batch_size():
    one = make_loader(batch_size=16).indices(5, 3)
    two = torch.cat([make_loader(batch_size=8, rank=rank).indices(5, 3) for rank in (0, 1)], dim=1)
    assert torch.equal(one, two)


def test_an_iteration_starts_at_the_next_update_and_ends_with_the_epoch():
    updates = {"done": 30}
    loader = make_loader(seed=4, updates_per_epoch=100, next_update=lambda: updates["done"])
    epoch = torch.cat([block.x for block in loader])
    assert epoch.shape == (70, 8, 1)
    assert torch.equal(epoch[..., 0].long(), loader.indices(30, 70))
    updates["done"] = 100
    assert torch.equal(next(iter(loader)).x[0, :, 0].long(), loader.indices(100, 1)[0])


def test_blocks_end_at_every_stop_and_at_the_last_update():
    loader = make_loader(updates_per_epoch=1000, stops=[80], last_update=277)
    assert list(loader.blocks(0)) == [(0, 80), (80, 80), (160, 40), (200, 40), (240, 37)]
    assert list(loader.blocks(277)) == []


def test_blocks_end_at_milestones_which_are_rare_in_a_long_run(monkeypatch):
    monkeypatch.setattr("ksm_lightning.data.loaders.UPDATES_AT_ONCE", 10_000)
    loader = make_loader(updates_per_epoch=10_000, ends_at_milestones=True)
    ends = [first + updates for first, updates in loader.blocks(0)]
    assert ends == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 10_000]


def test_a_block_of_large_batches_holds_few_updates():
    loader = make_loader(points=Points(torch.zeros(10, 1000)), batch_size=1000)
    assert next(iter(loader)).x.shape == (4, 1000, 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"batch_size": 2**23, "rank": 2}, "at most 16777216 summed over all ranks, got 8388608"),
        ({"updates_per_epoch": 0}, "`updates_per_epoch` must be at least 1"),
    ],
)
def test_sizes_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_loader(**options)


# ---------------------------------------------------------------------- points in order


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_all_points_in_order(world_size):
    points, labels = Points(torch.arange(10.0)[:, None]), torch.arange(10)
    seen, seen_labels = [], []
    for rank in range(world_size):
        loader = PointLoader(points, labels, 4, rank=rank, world_size=world_size)
        batches = list(loader)
        assert len(batches) == len(loader)
        seen += [x for x, _ in batches]
        seen_labels += [label for _, label in batches]
    assert torch.cat(seen).flatten().tolist() == list(range(10))
    assert torch.cat(seen_labels).tolist() == list(range(10))


# ---------------------------------------------------------------------- inputs of a batch


def test_inputs_are_the_first_tensor_of_a_batch_with_images_flattened():
    x = torch.zeros(4, 1, 2, 3)
    assert inputs_of((x, None)).shape == (4, 6)
    assert inputs_of([torch.zeros(4, 2)]).shape == (4, 2)
    assert inputs_of(torch.zeros(4, 2)).shape == (4, 2)
    with pytest.raises(TypeError, match="starts with one, got dict"):
        inputs_of({"x": x})


def test_a_block_has_several_batches_and_any_other_batch_is_one():
    assert batches_of(UpdateBlock(torch.zeros(5, 4, 2))).shape == (5, 4, 2)
    assert batches_of([torch.zeros(4, 2), torch.zeros(4)]).shape == (1, 4, 2)
