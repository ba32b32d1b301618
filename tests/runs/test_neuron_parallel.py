"""Options of shared neurons: what is refused, in one sentence, and what one process does with them."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from helpers.runs import fit, model, moons, trainer
from ksm_lightning.callbacks import FeatureWriter, KernelErrorEvaluation
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.runs.neuron_parallel import NeuronParallelModule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": "tight"}, "`parallel` neurons needs bound=paper, got tight: change it, or set `parallel` to data."),
        ({"solver": "dynamics"}, "`parallel` neurons needs solver=closed_form, got dynamics"),
        ({"acceleration": "compile"}, "`parallel` neurons needs acceleration=auto, got compile"),
        ({"acceleration": "native"}, "`parallel` neurons needs acceleration=auto, got native"),
    ],
)
def test_options_that_shared_neurons_do_not_have_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        KernelSimilarityMatching(num_neurons=6, parallel="neurons", **options)
    with pytest.raises(ValueError, match=r"^`parallel` must be one of 'data', 'neurons', got 'rows'\.$"):
        KernelSimilarityMatching(num_neurons=6, parallel="rows")


@pytest.fixture
def several(monkeypatch):
    """A process that is one of several, before any of them communicates."""
    monkeypatch.setattr(NeuronParallelModule, "shares_neurons", property(lambda self: True))


def shared(**options) -> KernelSimilarityMatching:
    return KernelSimilarityMatching(num_neurons=6, kernel_params={"sigma": 0.3}, parallel="neurons", **options)


@pytest.mark.usefixtures("several")
def test_loaders_of_others_are_refused_because_ranks_would_see_different_batches():
    loader = DataLoader(TensorDataset(torch.randn(20, 2)), batch_size=4)
    with pytest.raises(
        ValueError, match=r"all processes must draw the same batches.* use a datamodule of ksm_lightning"
    ):
        trainer().fit(shared(in_features=2, init="normal"), loader)


@pytest.mark.usefixtures("several")
def test_readouts_of_many_shared_neurons_and_predict_are_refused_before_anything_happens(tmp_path):
    many = KernelSimilarityMatching(num_neurons=3000, parallel="neurons")
    assert many.network.L.is_meta, "a matrix (n, n) was allocated"
    with pytest.raises(ValueError, match=r"^The readout nystroem of 3,000 neurons needs a matrix of 3,000 x 3,000"):
        trainer([KernelErrorEvaluation()]).fit(many, datamodule=moons())
    with pytest.raises(ValueError, match=r"^`predict` computes features from one matrix"):
        trainer([FeatureWriter(str(tmp_path / "y.npy"))]).predict(shared(in_features=2), datamodule=moons())


def test_one_process_trains_a_whole_network():
    torch.manual_seed(0)
    shares = shared(updates=20)
    with pytest.raises(ValueError, match=r"^The input size is known after `fit` only"):
        shares(torch.zeros(1, 2))
    fit(shares)
    torch.manual_seed(0)
    whole = KernelSimilarityMatching(num_neurons=6, kernel_params={"sigma": 0.3}, updates=20)
    fit(whole)
    for name, value in whole.network.named_parameters():
        assert torch.equal(shares.network.get_parameter(name), value), name


def test_one_process_without_a_datamodule_trains_a_whole_network_from_a_normal_start():
    network = model(parallel="neurons")
    trainer(max_steps=3).fit(network, DataLoader(TensorDataset(torch.randn(20, 2)), batch_size=4))
    assert network.network.L.shape == (6, 6)


def test_checkpoints_from_before_the_option_mean_shared_data(tmp_path):
    from ksm_lightning.runs.checkpoint import read_checkpoint, seal

    run, module = trainer(max_steps=2), model()
    run.fit(module, datamodule=moons())
    run.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del content["hyper_parameters"]["parallel"]
    seal(content)
    torch.save(content, tmp_path / "b.ckpt")
    assert "parallel" not in read_checkpoint(tmp_path / "b.ckpt")["hyper_parameters"]
    again = KernelSimilarityMatching.load_from_checkpoint(tmp_path / "b.ckpt")
    assert again.hparams["parallel"] == "data"
    assert torch.equal(again.network.L, module.network.L)
