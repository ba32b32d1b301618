"""Compiled and recorded updates: the same numbers, and a fallback where they are not possible."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close

from helpers.learning_cases import blocks, network_for, rates_for
from helpers.plain_rules import largest_difference, learner_of
from helpers.runs import fit, model
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import Phase, Rates, acceleration


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


def test_a_cuda_graph_without_a_gpu_falls_back_with_a_warning():
    module = model(phases=[Phase(5)], acceleration="cuda_graph")
    plain = model(phases=[Phase(5)])
    fit(plain)
    has_gpu = torch.cuda.is_available()
    with nullcontext() if has_gpu else pytest.warns(UserWarning, match="a CUDA graph needs a CUDA device"):
        fit(module)
    assert_close(module.network.W, plain.network.W)


@pytest.mark.parametrize("n", [7, 64])
def test_a_recorded_update_is_replayed_with_new_inputs(monkeypatch, n):
    """Recording is replaced by keeping the work, to see which tensors a replay reads and writes."""

    class Graph:
        def __init__(self, work):
            self.replay = work

    def record(work):
        for _ in range(3):
            work()  # as a real recording does; these updates must not take effect
        return Graph(work)

    monkeypatch.setattr(acceleration, "_record", record)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kernel, x = GaussianKernel(0.7), blocks(updates=60, batch=8)
    ours, theirs = (network_for(kernel, x, True, n) for _ in range(2))
    rates = Rates(0.01, 0.01, 0.03)
    learner_of(ours, rates, True, acceleration="cuda_graph").learn(x)
    learner_of(theirs, rates, True).learn(x)
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
    assert fast._accelerator.method == "compile"
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert largest_difference(ours, theirs) < 1e-6
