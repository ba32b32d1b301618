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
from ksm_lightning.learning import AdaptiveSchedule, Learner, Phase, Rates, acceleration


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


class Graph:
    """In place of a CUDA graph: replays the work on the tensors that were there when it was recorded."""

    made = replayed = 0

    def __init__(self, work, state):
        Graph.made += 1
        self.work, self.memory = work, [value.data_ptr() for value in state]
        self.state = state

    def replay(self):
        assert [value.data_ptr() for value in self.state] == self.memory, "a graph was replayed on memory that is gone"
        Graph.replayed += 1
        self.work()


@pytest.fixture
def recordings(monkeypatch):
    """Recording is replaced by keeping the work, to see which tensors a replay reads and writes."""

    def record(work):
        for _ in range(3):
            work()  # as a real recording does; these updates must not take effect
        accelerator = next(
            cell.cell_contents for cell in work.__closure__ if isinstance(cell.cell_contents, acceleration.Accelerator)
        )
        return Graph(work, accelerator.state())

    monkeypatch.setattr(acceleration, "_record", record)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Graph.made = Graph.replayed = 0
    return Graph


@pytest.mark.parametrize(("n", "replays"), [(7, 7 + 4), (64, 6 + 12)])
def test_recorded_updates_are_replayed_with_new_inputs(recordings, n, replays):
    """Graphs of 8 updates and of one. With 64 neurons the inverse of L is tracked, and renewed between two graphs."""
    kernel, x = GaussianKernel(0.7), blocks(updates=60, batch=8)
    ours, theirs = (network_for(kernel, x, True, n) for _ in range(2))
    rates = Rates(0.01, 0.01, 0.03)
    learner_of(ours, rates, True, acceleration="cuda_graph").learn(x)
    learner_of(theirs, rates, True).learn(x)
    assert largest_difference(ours, theirs) < 1e-9
    assert (recordings.made, recordings.replayed) == (2, replays)


def test_a_batch_of_another_shape_is_recorded_apart(recordings):
    """The last batch of a loader without `drop_last`."""
    kernel, x = GaussianKernel(0.7), blocks(updates=6, batch=8)
    ours, theirs = (network_for(kernel, x, True) for _ in range(2))
    for network, method in ((ours, "cuda_graph"), (theirs, "none")):
        learner = learner_of(network, Rates(0.01, 0.01, 0.03), True, acceleration=method)
        for block in (x[:3], x[3:, :5], x[:3]):
            learner.learn(block)
    assert recordings.made == 2
    assert largest_difference(ours, theirs) < 1e-9


@pytest.mark.parametrize("n", [7, 64])
def test_recordings_are_dropped_when_the_network_moves(recordings, n):
    kernel, x = GaussianKernel(0.7), blocks(updates=6, batch=8)
    ours, theirs = (network_for(kernel, x, True, n) for _ in range(2))
    for network, method in ((ours, "cuda_graph"), (theirs, "none")):
        learner = learner_of(network, Rates(0.01, 0.01, 0.03), True, acceleration=method)
        learner.learn(x)
        made = recordings.made
        learner.learn(x)
        assert recordings.made == made  # nothing has moved
        network.float().double()  # new memory, as by `cpu()` and `cuda()`
        learner.learn(x)
        if method == "cuda_graph":
            assert recordings.made == 2 * made
            assert learner._updates._accelerator._versions
            learner.drop_recordings()
            assert not learner._updates._accelerator._versions
    assert largest_difference(ours, theirs) < 1e-6  # float() rounds


def test_a_fit_leaves_no_recordings(recordings):
    """They hold memory of the device, which `cpu()` at the end of a fit does not free."""
    module = model(phases=[Phase(5)], acceleration="cuda_graph")
    fit(module)
    assert recordings.made >= 1
    assert not module.learner._updates._accelerator._versions


@pytest.mark.parametrize("method", ["compile", "cuda_graph"])
def test_step_sizes_are_uploaded_once_per_block(recordings, monkeypatch, method):
    """Counted as tensors made of numbers on the host while 12 updates with decaying rates run."""
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    kernel, x = GaussianKernel(0.7), blocks(updates=12, batch=8)
    ours, theirs = (network_for(kernel, x, True, 64) for _ in range(2))
    learner = Learner(ours, AdaptiveSchedule(20), stage="learning", acceleration=method)
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
    assert fast._updates._accelerator.method == "compile"
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert largest_difference(ours, theirs) < 1e-6
