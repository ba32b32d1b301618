"""Processes that train together: a failure of the first one reaches all, and so do its choices."""

import threading
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from helpers.runs import model, moons, trainer
from helpers.thread_ranks import ThreadRanks
from ksm_lightning.callbacks import DivergenceGuard, Figures, LinearProbe
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, relocation
from ksm_lightning.learning.collectives import checksums
from ksm_lightning.network import KSMNetwork
from ksm_lightning.runs.processes import on_first_process


def trainer_of(collectives):
    """The few attributes of a Trainer that `on_first_process` uses."""
    return SimpleNamespace(world_size=collectives.size, is_global_zero=collectives.is_first, strategy=collectives)


def test_all_processes_get_what_the_first_computes():
    assert ThreadRanks().run(lambda ranks: on_first_process(trainer_of(ranks), lambda: ranks.rank + 5)) == [5, 5]


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (ValueError("no labels"), "ValueError: no labels"),
        (
            MisconfigurationException("x"),
            "RuntimeError: The first process has failed with MisconfigurationException: x",
        ),
    ],
)
def test_a_failure_of_the_first_process_is_raised_on_all(error, elsewhere):
    def fail():
        raise error

    first, second = ThreadRanks().run(lambda ranks: on_first_process(trainer_of(ranks), fail))
    assert first is error
    assert f"{type(second).__name__}: {second}" == elsewhere


@pytest.mark.parametrize("callback", ["probe", "figures"])
def test_a_failure_of_a_probe_or_figure_does_not_leave_the_others_waiting(callback, monkeypatch):
    """Before, the first process raised, and the second returned and waited at its next reduction."""
    module, data = model(), moons()
    trainer(max_steps=1).fit(module, datamodule=data)

    def fail(*args, **options):
        raise ValueError("it broke")

    monkeypatch.setattr("ksm_lightning.callbacks.evaluations.linear_probe", fail)
    monkeypatch.setattr("ksm_lightning.callbacks.run_figures.portrait_arrays", fail)

    def call(ranks):
        run = trainer_of(ranks)
        run.datamodule, run.log_dir, run.loggers, run.global_step = data, "unused", [], 1
        if callback == "probe":
            return LinearProbe(labels_per_class=5).evaluate(run, module, data, "val")
        return Figures()._draw(run, module, to_files=True)

    assert [repr(result) for result in ThreadRanks().run(call)] == ["ValueError('it broke')"] * 2


local = threading.local()


def train_on(ranks, rows: torch.Tensor, updates: int) -> dict:
    network = KSMNetwork(GaussianKernel(0.3), in_features=2, num_neurons=8, generator=torch.Generator().manual_seed(1))
    learner = Learner(network, AdaptiveSchedule(updates=updates), collectives=ranks)
    local.rank = 0  # the start is decided elsewhere
    learner.start(rows)
    local.rank = ranks.rank
    batches = rows[torch.randint(len(rows), (updates, 16), generator=torch.Generator().manual_seed(ranks.rank))]
    learner.learn(batches, sample=lambda update, batch: rows[:200])
    return {name: value.detach().clone() for name, value in network.named_parameters()}


def test_the_first_process_decides_for_all(monkeypatch):
    """The second one would move no landmark; before, W differed."""
    rows = torch.tensor(moons(num_points=300).load()[0].x, dtype=torch.float32)
    expected, _ = ThreadRanks().run(lambda ranks: train_on(ranks, rows, 200))
    find, choices = relocation.find_moves, []

    def find_here(*args, **options):
        choices.append(local.rank)
        return find(*args, **options) if local.rank == 0 else []

    monkeypatch.setattr(relocation, "find_moves", find_here)
    first, second = ThreadRanks().run(lambda ranks: train_on(ranks, rows, 200))
    assert set(choices) == {0}, "only the first process searches"
    for name, value in expected.items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name


def test_the_guard_stops_processes_with_different_weights(monkeypatch):
    """The other process is imitated: what the guard gathers has a second row, of weights that differ in one value."""
    module, run = model(phases=None, updates=40), trainer([DivergenceGuard()])

    def gather(rows):
        other = [value.detach().clone() for value in module.network.parameters()]
        other[0][2, 1] += change
        row = torch.cat([rows[0, : -2 * len(other)], checksums(other)])
        return torch.stack([rows[0], row])

    change = 1e-6
    module.learner.collectives.gather = gather
    run.fit(module, datamodule=moons(updates_per_epoch=20))
    assert run.global_step == 40
    module, run, change = model(phases=None, updates=40), trainer([DivergenceGuard()]), 0.5
    module.learner.collectives.gather = gather
    message = (
        r"^The processes have different weights after update 20 \(W\), although all of them make the same updates\."
    )
    with pytest.raises(RuntimeError, match=message):
        run.fit(module, datamodule=moons(updates_per_epoch=20))
