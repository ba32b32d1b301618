"""`batch_size: auto`: the size with which W moves furthest in a second."""

import pytest
import torch

from helpers.learning_cases import blocks, network_for
from helpers.runs import fit, model, moons, trainer
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import AdaptiveSchedule, Phase, PhaseSchedule, TightSchedule, batch_choice
from ksm_lightning.learning.batch_choice import choose_batch_size
from ksm_lightning.learning.units import tight_batch
from ksm_lightning.network import KSMNetwork, NormalInit, TightNetwork
from ksm_lightning.runs.checkpoint import read_checkpoint


@pytest.fixture
def kernel_and_points():
    return GaussianKernel(0.7), blocks(updates=4).flatten(0, 1)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({64: 0.1, 128: 0.1, 256: 0.1, 512: 0.1}, 512),  # time does not matter: the largest step
        ({64: 0.01, 128: 0.02, 256: 0.04, 512: 0.08}, 64),  # time grows like the batch: nothing is gained
        ({64: 0.10, 128: 0.12, 256: 0.15, 512: 0.9}, 256),
    ],
)
def test_the_largest_step_per_second_wins(kernel_and_points, monkeypatch, seconds, chosen):
    kernel, x = kernel_and_points
    network = KSMNetwork(kernel, 5, 1000, init=NormalInit(0.7))
    monkeypatch.setattr(batch_choice, "_seconds", lambda learner, x, size: seconds[size])
    size, measured = choose_batch_size(network, AdaptiveSchedule(100), x, sizes=tuple(seconds))
    assert size == chosen
    assert [each.seconds for each in measured] == list(seconds.values())
    assert measured[0].step == pytest.approx(0.25 * 64 / 1000 / 3)


def test_processes_share_an_update(kernel_and_points, monkeypatch):
    kernel, x = kernel_and_points
    monkeypatch.setattr(batch_choice, "_seconds", lambda learner, x, size: 1.0)
    network = KSMNetwork(kernel, 5, 1000, init=NormalInit(0.7))
    _, measured = choose_batch_size(network, AdaptiveSchedule(100), x, processes=4)
    assert measured[0].step == pytest.approx(0.25 * 256 / 1000 / 3)


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({}, "auto"),
        ({"acceleration": "native"}, "native"),
        ({"processes": 2}, "none"),
        ({"acceleration": "compile"}, "none"),
    ],
)
def test_updates_are_measured_as_they_will_run(kernel_and_points, monkeypatch, options, method):
    """Several processes do not use machine code; nothing is compiled or recorded for a measurement."""
    made = []
    monkeypatch.setattr(batch_choice, "_seconds", lambda learner, x, size: 1.0)
    learner_of = batch_choice.Learner
    monkeypatch.setattr(
        batch_choice, "Learner", lambda *args, **given: made.append(given["acceleration"]) or learner_of(*args, **given)
    )
    kernel, x = kernel_and_points
    choose_batch_size(network_for(kernel, x[None], True), AdaptiveSchedule(100), x, **options)
    assert made[0] == method


def test_no_larger_size_is_measured_after_a_slow_one(kernel_and_points, monkeypatch):
    kernel, x = kernel_and_points
    monkeypatch.setattr(batch_choice, "_seconds", lambda learner, x, size: size / 200)
    _, measured = choose_batch_size(network_for(kernel, x[None], True), AdaptiveSchedule(100), x)
    assert [each.batch_size for each in measured] == [64, 128]


def test_a_measurement_leaves_the_network_as_it_is(kernel_and_points):
    kernel, x = kernel_and_points
    network = network_for(kernel, x[None], True)
    before = [weights.clone() for weights in network.parameters()]
    size, measured = choose_batch_size(network, AdaptiveSchedule(100), x, sizes=(8, 16))
    assert size in (8, 16)
    assert all(each.seconds > 0 for each in measured)
    assert all(torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))


def test_nothing_is_measured_where_the_answer_is_known(kernel_and_points):
    kernel, x = kernel_and_points
    tight = TightNetwork(kernel, 5, 40, init=NormalInit(0.7), num_landmarks=60)
    assert choose_batch_size(tight, TightSchedule(100), x) == (tight_batch(60), [])
    assert choose_batch_size(tight, TightSchedule(100), x, processes=2) == (tight_batch(60) // 2, [])
    paper = network_for(kernel, x[None], False)
    assert choose_batch_size(paper, PhaseSchedule([Phase(10)]), x) == (64, [])


def test_a_run_uses_the_chosen_size_and_a_resumed_one_keeps_it(tmp_path, monkeypatch):
    options = {"phases": None, "init": "data", "in_features": None}
    monkeypatch.setattr(batch_choice, "_seconds", lambda learner, x, size: {64: 0.1, 128: 0.01}.get(size, 0.4))
    module, data = model(updates=20, **options), moons(batch_size="auto")
    run = trainer()
    run.fit(module, datamodule=data)
    assert data.batch_size == 128
    assert module.run_state.batch_choice.startswith("batch_size=auto chose 128 (milliseconds per update by batch size:")
    run.save_checkpoint(tmp_path / "run.ckpt")
    assert read_checkpoint(str(tmp_path / "run.ckpt"))["ksm_lightning"]["training"]["batch_size"] == 128
    monkeypatch.setattr(batch_choice, "_seconds", lambda learner, x, size: 1.0 / size)
    again = moons(batch_size="auto")
    trainer().fit(model(updates=30, **options), datamodule=again, ckpt_path=tmp_path / "run.ckpt", weights_only=True)
    assert again.batch_size == 128


def test_without_auto_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(batch_choice, "_seconds", lambda *args: pytest.fail("measured"))
    module, data = model(), moons(batch_size=16)
    fit(module, data)
    assert (data.batch_size, module.run_state.batch_choice) == (16, "")


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="`batch_size` must be a whole number or 'auto', got 'many'"):
        moons(batch_size="many")
    with pytest.raises(ValueError, match=r"`updates_per_epoch` must be a whole number, got 2\.5"):
        moons(updates_per_epoch=2.5)
