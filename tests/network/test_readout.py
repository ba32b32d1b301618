"""Readouts against their definitions and limit cases, and by name wherever features are computed."""

import numpy as np
import pytest
import torch
from test_callbacks import trainer
from test_module import fit, model, moons
from torch.testing import assert_close

from ksm_lightning.callbacks import FeatureWriter, KernelErrorEvaluation, KMeansProbe, LinearProbe
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.network.initialisation import DataInit
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.network.readout import (
    READOUTS,
    least_squares_matrix,
    make_encoder,
    nystroem_matrix,
    read_out,
    readout_matrix,
)


@pytest.fixture
def network(rng) -> KSMNetwork:
    net = KSMNetwork(GaussianKernel(1.0), in_features=2, num_neurons=7, ridge=0.01, generator=rng)
    with torch.no_grad():
        net.q.copy_(0.5 + torch.rand(7, generator=rng))
        root = torch.randn(7, 7, generator=rng)
        net.L.copy_(root @ root.mT / 7)
    return net


@pytest.fixture
def x(rng) -> torch.Tensor:
    return torch.randn(90, 2, generator=rng)


@pytest.mark.parametrize("readout", READOUTS)
def test_each_readout_is_one_matrix(network, x, readout):
    network, x = network.double(), x.double()
    M = readout_matrix(network, readout, x)
    assert M.shape == (7, 7)
    assert M.dtype == torch.float64
    assert_close(read_out(network, readout, x, block=13), network.kernel(x, network.W) @ M, rtol=1e-9, atol=1e-9)
    assert read_out(network.float(), readout, x.float()).dtype == torch.float32


def test_neural_is_the_networks_response(network, x):
    assert torch.equal(read_out(network, "neural", x), network(x))


def test_nystroem_is_exact_on_its_landmarks(network):
    W = network.W.double()
    y = network.kernel(W, W) @ nystroem_matrix(network.kernel, network.W)
    assert_close(y @ y.mT, network.kernel(W, W), rtol=1e-9, atol=1e-9)


def test_nystroem_survives_equal_landmarks(network, x):
    with torch.no_grad():
        network.W[3] = network.W[4]
    y = read_out(network, "nystroem", x)
    with torch.no_grad():
        network.W[3] = 1e6  # far from everything: as if it were not there
    assert y.isfinite().all()
    assert_close(y @ y.mT, (z := read_out(network, "nystroem", x)) @ z.mT, rtol=1e-4, atol=1e-4)


def test_least_squares_has_the_smallest_error_of_all(network, x):
    errors = {name: kernel_nrmse(network.kernel, x, read_out(network, name, x)).item() for name in READOUTS}
    assert errors["least_squares"] < errors["nystroem"] < errors["neural"]
    K = network.kernel(x.double(), network.W.double())
    F = network.kernel(x.double(), x.double())
    basis = torch.linalg.qr(K).Q
    best = basis @ basis.mT @ F @ basis @ basis.mT
    M = least_squares_matrix(network.kernel, network.W, x)
    assert_close(K @ M @ M.mT @ K.mT, best, rtol=1e-6, atol=1e-7)


def test_every_point_a_landmark_makes_both_exact(x):
    kernel = GaussianKernel(0.5)
    W = x[:40]
    for M in (nystroem_matrix(kernel, W), least_squares_matrix(kernel, W, W)):
        y = kernel(W.double(), W.double()) @ M
        assert kernel_nrmse(kernel, W.double(), y).item() < 1e-6


def test_bad_names_and_missing_samples_are_refused(network, x):
    with pytest.raises(ValueError, match="There is no readout 'pca': choose one of neural, nystroem, least_squares"):
        read_out(network, "pca", x)
    with pytest.raises(ValueError, match="needs a sample"):
        make_encoder(network, "least_squares")
    with pytest.raises(ValueError, match="it is empty"):
        make_encoder(network, "least_squares", x[:0])
    with pytest.raises(ValueError, match="There is no readout"):
        KernelErrorEvaluation(["neural", "pca"])


def test_evaluations_and_predictions_take_a_readout_by_name(tmp_path):
    module, data = model(phases=None, updates=60), moons()
    fit(module, data)
    x = data.train_points.data
    run = trainer(
        [KernelErrorEvaluation(READOUTS), LinearProbe(20, readout="nystroem"), KMeansProbe(readout="nystroem")]
    )
    (scores,) = run.validate(module, datamodule=data, verbose=False)
    for name, key in zip(READOUTS, ["", "_nystroem", "_least_squares"], strict=True):
        expected = kernel_nrmse(module.network.kernel, x, module.features(x, name)).item()
        assert scores[f"val/kernel_nrmse{key}"] == pytest.approx(expected, rel=1e-4)
    assert scores["val/probe_accuracy"] > 0.8
    writer = FeatureWriter(str(tmp_path / "y.npy"), readout="nystroem")
    trainer([writer]).predict(module, datamodule=data)
    assert_close(torch.tensor(np.load(tmp_path / "y.npy")), module.features(data.test_points.data, "nystroem"))


def test_predicting_leaves_the_model_as_it_was(tmp_path):
    module, data = model(), moons()
    fit(module, data)
    names = set(module.state_dict())
    for number, readout in enumerate(["neural", "nystroem", "neural", "least_squares"]):
        trainer([FeatureWriter(str(tmp_path / f"{number}.npy"), readout)]).predict(module, datamodule=data)
        assert set(module.state_dict()) == names
    x = data.test_points.data
    assert torch.equal(torch.cat(trainer([]).predict(module, datamodule=data)), module(x))
    expected = module.features(x, "least_squares", data.readout_sample("least_squares"))
    assert_close(torch.tensor(np.load(tmp_path / "3.npy")), expected)


def test_sorted_data_does_not_bias_the_least_squares_readout(rng):
    """5,000 of the inputs are looked at, drawn from all of them."""
    x = torch.cat([torch.randn(6000, 2, generator=rng), torch.randn(6000, 2, generator=rng) + 6])
    net = KSMNetwork(GaussianKernel(2.0), in_features=2, num_neurons=12, init=DataInit(x[::100]), generator=rng)
    y = read_out(net, "least_squares", x)
    for part in (slice(0, 1000), slice(-1000, None)):
        assert kernel_nrmse(net.kernel, x[part], y[part]).item() < 0.1
