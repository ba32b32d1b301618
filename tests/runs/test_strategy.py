"""Devices and strategies: Apple's GPU is replaced by the CPU, and strategies that cannot work are refused."""

import warnings

import lightning
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.runs import model, moons
from ksm_lightning.callbacks import DivergenceGuard, KernelErrorEvaluation
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network import KSMNetwork
from ksm_lightning.runs.strategy import MPS_NOTICE, check_strategy

QUIET = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}


@pytest.fixture
def mps(monkeypatch):
    """A machine on which Lightning finds Apple's GPU."""
    monkeypatch.setattr("lightning.fabric.accelerators.mps.MPSAccelerator.is_available", lambda: True)


def fit(**options):
    lightning.seed_everything(0)
    module = KernelSimilarityMatching(num_neurons=6, kernel_params={"sigma": 0.3}, updates=20)
    run = lightning.Trainer(max_epochs=-1, callbacks=[DivergenceGuard(), KernelErrorEvaluation()], **QUIET, **options)
    run.fit(module, datamodule=moons(updates_per_epoch=10))
    return module, run


def test_a_trainer_that_chooses_apples_gpu_trains_on_the_cpu_with_one_notice(mps):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, run = fit()
    assert [str(each.message) for each in caught].count(MPS_NOTICE) == 1
    assert (run.global_step, str(run.strategy.root_device)) == (20, "cpu")
    expected, _ = fit(accelerator="cpu")
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in module.state_dict().items())
    error = run.callback_metrics["val/kernel_nrmse"]
    run.validate(module, datamodule=moons(), verbose=False)  # a second run of the same trainer
    assert run.callback_metrics["val/kernel_nrmse"] == error


def test_a_network_moved_to_apples_gpu_says_what_to_do():
    message = r"^Apple's GPU \(MPS\) has no float64, which kernels and linear systems need here: move the network and"
    with FakeTensorMode(), torch.device("mps"):
        network = KSMNetwork(GaussianKernel(0.3), in_features=2, num_neurons=4)
        x = torch.empty(10, 2)
        assert x.device.type == "mps"
        for use in (lambda: network(x), lambda: network.energy_of(x), lambda: network.kernel(x, x)):
            with pytest.raises(ValueError, match=message):
                use()


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_that_return_only_the_weights_are_refused(method):
    with pytest.raises(ValueError, match=f"^Processes that are started by {method} .* use strategy='ddp' in a script"):
        check_strategy(DDPStrategy(start_method=method))
    check_strategy(DDPStrategy())
    check_strategy(SingleDeviceStrategy("cpu"))


def test_strategies_that_shard_the_network_are_refused():
    for strategy in (FSDPStrategy(), object.__new__(DeepSpeedStrategy)):  # deepspeed is not installed
        with pytest.raises(ValueError, match=f"^{type(strategy).__name__} is not supported, because every process"):
            check_strategy(strategy)


def test_ddp_notebook_is_refused_before_training(capfd):
    """Before, it trained, and returned a network without its ridge."""
    run = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp_notebook", max_epochs=-1, **QUIET)
    with pytest.raises(Exception, match="ValueError: Processes that are started by fork"):
        run.fit(model(), datamodule=moons())
    assert run.global_step == 0
