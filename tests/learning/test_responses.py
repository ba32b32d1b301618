"""The response solver: the tracked inverse against a factorisation, its renewal, and its state."""

import copy

import lightning
import numpy as np
import pytest
import torch

from helpers import plain_rules
from helpers.kernels import KERNELS
from helpers.learning_cases import blocks, network_for
from helpers.plain_rules import compute_step, largest_difference, learner_of
from helpers.runs import model, moons, trainer
from ksm_lightning.data import ArrayDataModule
from ksm_lightning.kernels import GaussianKernel, PowerCosineKernel, make_kernel
from ksm_lightning.learning import Rates
from ksm_lightning.learning.exact import consolidate
from ksm_lightning.learning.moments import similarity_moment
from ksm_lightning.learning.responses import ResponseSolver
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.runs.checkpoint import read_checkpoint


@pytest.mark.parametrize("natural", [True, False], ids=["natural", "paper"])
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_tracked_responses_stay_close_to_exact_ones(spec, natural):
    """Over several renewals of the inverse, at the largest step that is tracked for this batch size."""
    kernel, n = make_kernel(spec[0], **spec[1]), 64
    x = blocks(updates=60, batch=8)
    net = network_for(kernel, x, natural, n)
    rates = Rates(0.004, 0.0 if kernel.is_homogeneous else 0.004, 0.03125 if natural else 0.0625)
    learner = learner_of(net, rates, natural)
    errors, seen, renewals = [], [], 0
    for batch in x:
        exact = compute_step(net, batch, natural).y
        learner.learn(batch[None], observe=lambda update: True, on_observation=lambda _, found, __: seen.append(found))
        errors.append(float((seen[-1].y - exact).norm() / exact.norm()))
        renewals += learner.responses.state_dict()["age"] == 1
    assert renewals >= 3
    # The ridge inside the inverse is off by up to 15 %: this matters most where eigenvalues of L are small.
    assert max(errors) < 2e-4


def test_one_tracked_update_equals_the_plain_formulas():
    """Also at the end of a period, where the ridge inside the inverse is farthest from the network's."""
    kernel, x = PowerCosineKernel(3), blocks(updates=40, batch=8)
    net, rates = network_for(kernel, x, natural=True, n=64), Rates(0.004, 0.0, 0.03125)
    learner = learner_of(net, rates, natural=True)
    worst = 0.0
    for batch in x:
        theirs = copy.deepcopy(net)
        learner.learn(batch[None])
        plain_rules.update(theirs, batch, rates, natural=True)
        worst = max(worst, largest_difference(net, theirs))
    assert 0 < worst < 1e-5


def test_the_inverse_is_not_tracked_while_L_settles():
    x, rates = blocks(updates=5), Rates(0.01, 0.0, 0.02)
    tracked, exact = (network_for(PowerCosineKernel(2), x, False) for _ in range(2))
    found = learner_of(tracked, rates, False, inverse="tracked", settling=4)
    found.learn(x[:4])
    assert found.responses.state_dict() == {}
    learner_of(exact, rates, False, inverse="exact").learn(x[:4])
    assert largest_difference(tracked, exact) == 0
    found.learn(x[4:], first_update=4)
    assert found.responses.state_dict()["age"] == 1


@pytest.mark.parametrize(
    ("n", "batch", "step", "tracks"),
    [(64, 8, 0.02, True), (63, 8, 0.02, False), (64, 8, 0.06, False), (64, 8, 0.0, False)],
)
def test_auto_tracks_with_many_neurons_and_small_steps(n, batch, step, tracks):
    x = blocks(updates=1, batch=batch)
    learner = learner_of(network_for(PowerCosineKernel(3), x, True, n), Rates(0.001, 0.0, step), natural=True)
    learner.learn(x)
    assert bool(learner.responses.state_dict()) == tracks


@pytest.mark.parametrize(
    "change", ["invalidate", "finish", "balance", "move_idle_landmarks", "restore", "consolidate", "load"]
)
def test_a_changed_L_invalidates_the_tracked_inverse(change):
    """Every way to change L through the Learner, `invalidate` after a change elsewhere, and changes unknown to it."""
    kernel, x = PowerCosineKernel(3), blocks(updates=2, batch=8)
    net, rates = network_for(kernel, x, True, 64), Rates(0.001, 0.0, 0.02)
    learner = learner_of(net, rates, natural=True)
    learner.learn(x[:1])
    assert learner.responses.state_dict()
    points = x.flatten(0, 1)
    if change == "invalidate":
        with torch.no_grad():
            net.L.mul_(2)
        learner.invalidate()
    elif change == "finish":
        learner.finish([points])
    elif change == "consolidate":
        consolidate(net, similarity_moment(kernel, [points], net.W))
    elif change == "load":
        net.load_state_dict({**net.state_dict(), "L": 2 * net.L.detach()})
    elif change == "restore":
        learner.restore(learner.snapshot())
    elif change == "balance":
        learner.balance(points)
    else:
        with torch.no_grad():
            net.W[8:] = net.W[0]  # of several equal landmarks only one explains anything
        assert learner.move_idle_landmarks(points) > 0
    assert learner.responses.state_dict() == {}
    theirs = copy.deepcopy(net)
    learner.learn(x[1:])
    plain_rules.update(theirs, x[1], rates, natural=True)
    assert largest_difference(net, theirs) < 1e-5


def test_a_network_that_was_consolidated_by_hand_is_saved_and_continued_without_the_old_inverse(tmp_path):
    """The inverse of the L before would give other responses, in the checkpoint and in a continued run."""
    module, data = model(num_neurons=64, inverse="tracked", phases=[Phase(40, 0.01, 0.02, 0.01)]), moons(batch_size=8)
    run = trainer()
    run.fit(module, datamodule=data)
    state = module.learner.responses.state_dict()
    x = data.train_points.data
    consolidate(module.network, similarity_moment(module.kernel, [x], module.network.W))
    drive = module.network.q * module.kernel(x, module.network.W)
    exact, stale = module(x), drive @ state["inverse"]
    assert (stale - exact).norm() / exact.norm() > 0.05
    run.save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    content = read_checkpoint(tmp_path / "x.ckpt")
    assert torch.equal(content["state_dict"]["network.L"], module.network.L)
    assert content["ksm_lightning"]["learner"]["inverse"] == {}


def test_the_tracked_inverse_is_kept_if_no_landmark_moves():
    x = blocks(updates=1, batch=8)
    learner = learner_of(network_for(PowerCosineKernel(3), x, True, 64), Rates(0.001, 0.0, 0.02), natural=True)
    learner.learn(x)
    inverse = learner.responses.state_dict()["inverse"]
    assert learner.move_idle_landmarks(x.flatten(0, 1), most=0) == 0
    assert torch.equal(learner.responses.state_dict()["inverse"], inverse)


def test_state_of_another_size_is_refused():
    x = blocks(updates=1, batch=8)
    learner = learner_of(network_for(PowerCosineKernel(3), x, True, 64), Rates(0.001, 0.0, 0.02), natural=True)
    learner.learn(x)
    with pytest.raises(ValueError, match=r"must have the shape \(7, 7\), got \(64, 64\)"):
        ResponseSolver(network_for(PowerCosineKernel(3), x, True)).load_state_dict(learner.responses.state_dict())


def test_a_failed_factorisation_is_remembered_until_reset():
    x = blocks(updates=2)
    net = network_for(GaussianKernel(0.7), x, natural=False)
    with torch.no_grad():
        net.L.copy_(-torch.eye(7))
    learner = learner_of(net, Rates(0.0, 0.0, 0.0), natural=False)
    learner.learn(x[:1])
    assert int(learner.responses.failed) > 0
    assert learner.not_finite() == ["W", "q", "L", "the factorisation of L + ridge I"][-1:]
    learner.invalidate()  # a moved landmark changes L, but the failure stays
    assert int(learner.responses.failed) > 0
    learner.restore(learner.snapshot())
    assert int(learner.responses.failed) == 0


def train(module, data, max_steps=-1, ckpt_path=None):
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=-1,
        enable_model_summary=False, max_steps=max_steps,
    )  # fmt: skip
    trainer.fit(module, datamodule=ArrayDataModule(str(data), batch_size=4, updates_per_epoch=25), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("interrupted", [17, 30])
def test_a_tracked_run_resumes_bitwise(tmp_path, interrupted):
    """In the middle of a period, so that the inverse itself is in the checkpoint."""
    np.save(tmp_path / "x.npy", np.random.default_rng(3).normal(size=(400, 6)).astype(np.float32))
    options = {"num_neurons": 40, "in_features": 6, "kernel": "power_cosine", "kernel_params": {"alpha": 3}}
    options["acceleration"] = "none"  # machine code factorises L
    whole, first, second = (model(**options, updates=60, phases=None) for _ in range(3))
    train(whole, tmp_path / "x.npy")
    trainer = train(first, tmp_path / "x.npy", max_steps=interrupted)
    assert first.learner.responses.state_dict()["age"] > 1
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    train(second, tmp_path / "x.npy", ckpt_path=tmp_path / "half.ckpt")
    for ours, theirs in zip(second.network.parameters(), whole.network.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # The exact end changes L, so the inverse must be dropped.
    assert whole.learner.state_dict()["inverse"] == {}


def test_a_loaded_inverse_goes_into_the_same_buffer():
    x = blocks(updates=2, batch=8)
    learner = learner_of(network_for(PowerCosineKernel(3), x, True, 64), Rates(0.001, 0.0, 0.02), natural=True)
    learner.learn(x[:1])
    buffer, state = learner.responses.P, learner.state_dict()
    learner.learn(x[1:])
    learner.load_state_dict(state)
    learner.responses.prepare()
    assert learner.responses.P is buffer
    assert torch.equal(buffer, state["inverse"]["inverse"])
