"""The start of a run with several processes: the first one decides, and the others receive its weights."""

from types import SimpleNamespace

import pytest
import torch

from helpers.runs import fit, moons, trainer
from ksm_lightning.learning import Learner
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.runs import start
from ksm_lightning.runs.processes import TrainerCollectives

OPTIONS = {"num_neurons": 6, "kernel_params": {"sigma": 0.3}, "updates": 20}


@pytest.fixture
def first(monkeypatch):
    """A module that the first of two processes has started, and stand-ins for what the second one receives of it."""
    torch.manual_seed(0)
    module = KernelSimilarityMatching(**OPTIONS)
    module.trainer = trainer()
    module.trainer.datamodule = data = moons()
    module.configure_model()
    sent = iter([])

    def broadcast(self, value):
        found = next(sent)
        assert value.shape == found.shape
        return found

    def on_first_process(trainer, compute):
        nonlocal sent
        sent = iter([parameter.detach().clone() for parameter in module.network.parameters()])
        return module.network.ridge

    monkeypatch.setattr(TrainerCollectives, "broadcast", broadcast)
    monkeypatch.setattr(start, "on_first_process", on_first_process)
    return module, data


def test_a_process_that_is_not_the_first_computes_no_start(first, monkeypatch):
    """Its own seed differs; its weights, its ridge and its stage are those of the first one."""
    module, data = first
    torch.manual_seed(1)
    second = KernelSimilarityMatching(**OPTIONS)
    second.__dict__["_trainer"] = SimpleNamespace(
        global_step=0, world_size=2, is_global_zero=False, datamodule=data, state=SimpleNamespace(fn="fit"),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    monkeypatch.setattr(Learner, "start", lambda *args: pytest.fail("this process must wait for the first one"))
    monkeypatch.setattr(type(data), "random_points", lambda *args: pytest.fail("only the first process needs points"))
    second.configure_model()
    assert second.learner.stage == "learning"
    assert second.network.ridge == second.hparams["ridge"] == module.network.ridge
    for name, parameter in module.network.named_parameters():
        assert torch.equal(second.network.get_parameter(name), parameter), name


def test_the_start_uses_points_on_the_training_device(monkeypatch):
    """They were moved to the CPU before, whatever the device."""
    devices, random_points = [], type(moons()).random_points

    def moved(self, device):
        devices.append(torch.device(device))
        return self

    monkeypatch.setattr("ksm_lightning.data.points.Points.to", moved)
    monkeypatch.setattr(
        type(moons()), "random_points", lambda *args: (devices.append("points"), random_points(*args))[1]
    )
    fit(KernelSimilarityMatching(**OPTIONS), max_steps=1)
    assert devices[:2] == ["points", torch.device("cpu")]
