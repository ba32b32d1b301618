"""Readouts and landmark features against their definitions and limit cases, and by name in evaluations."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from helpers.runs import fit, model, moons, trainer
from ksm_lightning.callbacks import FeatureWriter, KernelErrorEvaluation, KMeansProbe, LinearProbe
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.network.initialisation import DataInit
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.network.readout import (
    READOUTS,
    LandmarkFeatures,
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
def test_each_readout_is_a_matrix_product(network, x, readout):
    network, x = network.double(), x.double()
    M = readout_matrix(network, readout, x)
    assert M.shape == (7, 7)
    assert M.dtype == torch.float64
    assert_close(read_out(network, readout, x, block=13), network.kernel(x, network.W) @ M, rtol=1e-9, atol=1e-9)
    assert read_out(network.float(), readout, x.float()).dtype == torch.float32


def test_the_neural_readout_equals_the_responses(network, x):
    assert torch.equal(read_out(network, "neural", x), network(x))


def test_nystroem_is_exact_on_the_landmarks(network):
    W = network.W.double()
    y = network.kernel(W, W) @ nystroem_matrix(network.kernel, network.W)
    assert_close(y @ y.mT, network.kernel(W, W), rtol=1e-9, atol=1e-9)


def test_nystroem_ignores_a_repeated_landmark(network, x):
    with torch.no_grad():
        network.W[3] = network.W[4]
    y = read_out(network, "nystroem", x)
    with torch.no_grad():
        network.W[3] = 1e6  # far from all points, so that it contributes nothing
    assert y.isfinite().all()
    assert_close(y @ y.mT, (z := read_out(network, "nystroem", x)) @ z.mT, rtol=1e-4, atol=1e-4)


def test_least_squares_has_the_smallest_error(network, x):
    errors = {name: kernel_nrmse(network.kernel, x, read_out(network, name, x)).item() for name in READOUTS}
    assert errors["least_squares"] < errors["nystroem"] < errors["neural"]
    K = network.kernel(x.double(), network.W.double())
    F = network.kernel(x.double(), x.double())
    basis = torch.linalg.qr(K).Q
    best = basis @ basis.mT @ F @ basis @ basis.mT
    M = least_squares_matrix(network.kernel, network.W, x)
    assert_close(K @ M @ M.mT @ K.mT, best, rtol=1e-6, atol=1e-7)


def test_landmark_features_compute_in_the_dtype_of_the_matrices(network, x):
    W, M = network.W.detach().double(), torch.randn(7, 3, dtype=torch.float64)  # fewer features than landmarks
    expected = network.kernel(x.double(), W) @ M
    assert torch.equal(LandmarkFeatures(network.kernel, W, M)(x), expected)
    assert torch.equal(LandmarkFeatures(network.kernel, W, M, torch.float32)(x), expected.float())
    assert LandmarkFeatures(network.kernel, W.float(), M.float())(x.double()).dtype == torch.float32


def test_landmark_features_keep_their_values_when_the_network_changes(network, x):
    network, x = network.double(), x.double()
    features = LandmarkFeatures.of(network, "nystroem")
    before = features(x)
    with torch.no_grad():
        network.W.add_(1)
    assert torch.equal(features(x), before)
    assert features.half().W.dtype == torch.float64


def test_landmarks_and_readout_must_match():
    with pytest.raises(ValueError, match=r"must match in n and dtype, got \(3, 2\) in torch.float32 and \(2, 2\)"):
        LandmarkFeatures(GaussianKernel(), torch.zeros(3, 2), torch.eye(2))
    with pytest.raises(ValueError, match="must match in n and dtype"):
        LandmarkFeatures(GaussianKernel(), torch.zeros(2, 2), torch.eye(2).double())


def test_every_point_a_landmark_makes_both_matrices_exact(x):
    kernel = GaussianKernel(0.5)
    W = x[:40]
    for M in (nystroem_matrix(kernel, W), least_squares_matrix(kernel, W, W)):
        y = kernel(W.double(), W.double()) @ M
        assert kernel_nrmse(kernel, W.double(), y).item() < 1e-6


def test_unknown_readouts_and_missing_samples_are_refused(network, x):
    with pytest.raises(ValueError, match="There is no readout 'pca': choose one of neural, nystroem, least_squares"):
        read_out(network, "pca", x)
    with pytest.raises(ValueError, match="needs a sample"):
        make_encoder(network, "least_squares")
    with pytest.raises(ValueError, match="the sample is empty"):
        make_encoder(network, "least_squares", x[:0])
    with pytest.raises(ValueError, match="There is no readout"):
        KernelErrorEvaluation(["neural", "pca"])


def test_evaluations_and_predictions_use_the_named_readout(tmp_path):
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


def test_prediction_does_not_change_the_model(tmp_path):
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
    """10,000 of the 12,000 inputs are used, drawn at random."""
    x = torch.cat([torch.randn(6000, 2, generator=rng), torch.randn(6000, 2, generator=rng) + 6])
    net = KSMNetwork(GaussianKernel(2.0), in_features=2, num_neurons=12, init=DataInit(x[::100]), generator=rng)
    y = read_out(net, "least_squares", x)
    for part in (slice(0, 1000), slice(-1000, None)):
        assert kernel_nrmse(net.kernel, x[part], y[part]).item() < 0.1
