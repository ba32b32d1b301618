"""Compiled updates: the same numbers, and a fallback where they are not possible."""

import warnings

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext

from helpers.learning_cases import blocks, network_for, rates_for
from helpers.plain_rules import largest_difference, learner_of
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, Rates


def test_a_failed_compilation_falls_back_with_a_warning(monkeypatch):
    def refuse(function, **options):
        def call(*args):
            function(*args)  # fails halfway; the update must be undone
            raise RuntimeError("no compiler\nwas found")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    kernel, x = GaussianKernel(0.7), blocks()
    ours, theirs = (network_for(kernel, x, natural=True) for _ in range(2))
    rates = rates_for(kernel, natural=True)
    with pytest.warns(UserWarning, match="Acceleration is not possible here, updates run without it: no compiler$"):
        learner_of(ours, rates, True, acceleration="compile").learn(x)
    learner_of(theirs, rates, True).learn(x)
    assert largest_difference(ours, theirs) == 0


@pytest.mark.parametrize("n", [7, 64])
def test_everything_that_a_compiled_update_changes_is_known_to_keep_its_address(monkeypatch, n):
    """Otherwise torch would not record it as a CUDA graph."""
    found = []

    def look(graph, inputs):
        traced = TracingContext.get().fw_metadata
        found.append((set(traced.mutated_inp_runtime_indices), set(traced.static_input_indices)))
        return make_boxed_func(graph.forward)

    plain = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda step, **options: plain(step, dynamic=False, backend=aot_autograd(fw_compiler=look))
    )
    kernel, x = GaussianKernel(0.7), blocks(updates=3, batch=8)
    ours, theirs = (network_for(kernel, x, True, n) for _ in range(2))
    for network, method in ((ours, "compile"), (theirs, "none")):
        learner_of(network, Rates(0.01, 0.01, 0.03), True, acceleration=method).learn(x)
    assert largest_difference(ours, theirs) < 1e-6
    [(changed, static)] = found
    assert len(changed) >= 4
    assert changed <= static


def test_a_batch_of_another_shape_has_a_version_of_its_own(monkeypatch):
    """The last batch of a loader without `drop_last`."""
    made = []
    monkeypatch.setattr(torch, "compile", lambda step, **options: made.append(options) or step)
    kernel, x = GaussianKernel(0.7), blocks(updates=6, batch=8)
    ours, theirs = (network_for(kernel, x, True) for _ in range(2))
    for network, method in ((ours, "compile"), (theirs, "none")):
        learner = learner_of(network, Rates(0.01, 0.01, 0.03), True, acceleration=method)
        for block in (x[:3], x[3:, :5], x[:3]):
            learner.learn(block)
    assert made == 2 * [{"dynamic": False, "mode": None}]
    assert largest_difference(ours, theirs) < 1e-9


def test_step_sizes_are_uploaded_once_per_block(monkeypatch):
    """Counted as tensors made of numbers on the host while 12 updates with decaying rates run."""
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    kernel, x = GaussianKernel(0.7), blocks(updates=12, batch=8)
    ours, theirs = (network_for(kernel, x, True, 64) for _ in range(2))
    learner = Learner(ours, AdaptiveSchedule(20), stage="learning", acceleration="compile")
    learner.learn(x, 0)  # make the versions
    made, tensor = [], torch.tensor
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", lambda *args, **options: made.append(args) or tensor(*args, **options))
        learner.learn(x[:8], 12)
    assert len(made) == 1
    assert made[0][0][:, 2].tolist() == [learner.rates(update, 8).L for update in range(12, 20)]
    plain = Learner(theirs, AdaptiveSchedule(20), stage="learning", acceleration="none")
    plain.learn(x, 0)
    plain.learn(x[:8], 12)
    assert largest_difference(ours, theirs) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 64])
def test_a_compiled_update_equals_the_plain_one_and_is_compiled_once(n):
    import torch._dynamo as dynamo

    kernel, x = GaussianKernel(0.7), blocks(updates=30, batch=8)
    ours, theirs = (network_for(kernel, x, True, n) for _ in range(2))
    fast = learner_of(ours, Rates(0.01, 0.01, 0.03), True, acceleration="compile")
    plain = learner_of(theirs, Rates(0.01, 0.01, 0.03), True)
    dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!Acceleration is not possible)")
        for learner in (fast, plain):
            for step in (0.03, 0.02, 0.01):  # phases that differ in their rates only
                learner.schedule.fixed = Rates(step / 3, step / 3, step)
                learner.learn(x)
    assert fast._updates._accelerator.is_possible
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert largest_difference(ours, theirs) < 1e-6
