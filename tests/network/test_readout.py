"""Readouts and landmark features against their definitions and limit cases, and by name in evaluations."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from helpers import references
from helpers.runs import fit, model, moons, trainer
from ksm_lightning.baselines.kernel_pca import KernelPCA
from ksm_lightning.callbacks import FeatureWriter, KernelErrorEvaluation, KMeansProbe, LinearProbe
from ksm_lightning.data import HalfMoonsDataModule
from ksm_lightning.evaluation.clustering import kmeans
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.network.initialisation import DataInit
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.network.readout import (
    READOUTS,
    LandmarkFeatures,
    feature_count,
    make_encoder,
    needs_sample,
    read_out,
    readout_matrix,
)
from ksm_lightning.network.readout_matrices import (
    FEATURE_LIMIT,
    LEAST_SQUARES_RIDGE,
    compress,
    least_squares_matrix,
    limit_readout,
    nystroem_matrix,
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
    with pytest.raises(ValueError, match=r"must match in p and dtype, got \(3, 2\) in torch.float32 and \(2, 2\)"):
        LandmarkFeatures(GaussianKernel(), torch.zeros(3, 2), torch.eye(2))
    with pytest.raises(ValueError, match="must match in p and dtype"):
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


# ---------------------------------------------------------------------- readouts that compress

FITTED = ["nystroem", "least_squares"]


def similarities(network, x) -> tuple[torch.Tensor, torch.Tensor]:
    """F (samples, samples) and f(x, W) in float64, with loops for the kernel."""
    W = network.W.detach().double()
    return tuple(references.gram("gaussian", {"sigma": 1.0}, x.double(), points) for points in (x.double(), W))


def best_of_rank(gram: torch.Tensor, k: int) -> torch.Tensor:
    """The best approximation of a positive semi-definite matrix of rank k, by the SVD."""
    U, values, Vh = torch.linalg.svd(gram)
    return U[:, :k] * values[:k] @ Vh[:k]


def gram_of(y: torch.Tensor) -> torch.Tensor:
    return y @ y.mT


@pytest.mark.parametrize("readout", FITTED)
def test_as_many_features_as_landmarks_change_nothing(network, x, readout):
    usual = readout_matrix(network, readout, x)
    assert torch.equal(readout_matrix(network, readout, x, num_features=7), usual)
    _, k = similarities(network, x)
    turned = compress(network.kernel, network.W.detach(), usual, x, num_features=7)
    assert_close(gram_of(k @ turned), gram_of(k @ usual), rtol=0, atol=1e-10)


@pytest.mark.parametrize("count", range(1, 7))
def test_compressed_least_squares_features_have_the_smallest_error_of_their_rank(network, x, count):
    F, k = similarities(network, x)
    basis = torch.linalg.svd(k, full_matrices=False).U
    best = basis @ best_of_rank(basis.mT @ F @ basis, count) @ basis.mT
    y = k @ least_squares_matrix(network.kernel, network.W, x, count)
    assert y.shape == (90, count)
    assert_close(gram_of(y), best, rtol=0, atol=1e-9)
    assert_close(gram_of(k @ readout_matrix(network, "least_squares", x, count)), best, rtol=0, atol=1e-3)  # a ridge
    for readout in FITTED:  # no other features of this number in the span are better
        other = gram_of(k @ readout_matrix(network, readout, x))
        assert (F - best_of_rank(other, count)).norm() >= (F - gram_of(y)).norm() - 1e-12


@pytest.mark.parametrize("count", range(1, 7))
def test_compressed_nystroem_features_are_the_best_of_their_rank(network, x, count):
    _, k = similarities(network, x)
    y = k @ readout_matrix(network, "nystroem", x, count)
    assert y.shape == (90, count)
    assert_close(gram_of(y), best_of_rank(gram_of(k @ readout_matrix(network, "nystroem")), count), rtol=0, atol=1e-9)


def test_a_sample_is_compressed_in_blocks(rng):
    """More points than one block of 8,192."""
    x, W = torch.randn(9000, 2, generator=rng).double(), torch.randn(5, 2, generator=rng).double()
    kernel = GaussianKernel(1.0)
    y = kernel(x, W) @ nystroem_matrix(kernel, W)
    found = kernel(x, W) @ compress(kernel, W, nystroem_matrix(kernel, W), x, 2)
    U, values, _ = torch.linalg.svd(y, full_matrices=False)
    assert_close(gram_of(found[::100]), gram_of((U[:, :2] * values[:2])[::100]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("readout", FITTED)
def test_features_are_uncorrelated_in_descending_order_with_fixed_signs(network, x, readout):
    y = read_out(network, readout, x, num_features=5).double()
    moment = y.mT @ y
    assert (moment.diagonal().diff() < 0).all()
    assert_close(moment, moment.diagonal().diag(), rtol=0, atol=1e-4)
    at_landmarks = read_out(network, readout, network.W.detach(), sample=x, num_features=5)
    assert (at_landmarks.max(0).values >= -at_landmarks.min(0).values).all()


@pytest.mark.parametrize("readout", FITTED)
def test_every_point_a_landmark_makes_compressed_readouts_kernel_pca(x, readout):
    kernel, W = GaussianKernel(0.5), x[:40].double()
    net = KSMNetwork(kernel, 2, 40).double()
    with torch.no_grad():
        net.W.copy_(W)
    F = references.gram("gaussian", {"sigma": 0.5}, W, W)
    for count in (1, 5, 12):
        expected = references.nrmse(F, KernelPCA(kernel, count).fit_transform(W))
        assert references.nrmse(F, read_out(net, readout, W, num_features=count)) == pytest.approx(expected, abs=1e-8)


def test_twice_as_many_landmarks_as_features_are_nearly_kernel_pca():
    x = HalfMoonsDataModule(seed=0).train_points.data.double()
    kernel, F = GaussianKernel(0.3), torch.exp(-((x[:, None] - x) ** 2).sum(2) / (2 * 0.3**2))
    optimum = references.nrmse(F, KernelPCA(kernel, 16, solver="exact").fit_transform(x))
    W = kmeans(x, 32).centres
    compressed = references.nrmse(F, kernel(x, W) @ least_squares_matrix(kernel, W, x, 16))
    assert optimum <= compressed <= 1.02 * optimum
    few = kmeans(x, 16).centres
    assert references.nrmse(F, kernel(x, few) @ least_squares_matrix(kernel, few, x)) > 1.05 * optimum


class Wide(KSMNetwork):
    """A network with more landmarks than neurons, as far as readouts see it."""

    @property
    def num_neurons(self) -> int:
        return 4


@pytest.mark.parametrize("readout", FITTED)
def test_a_network_with_more_landmarks_than_neurons_compresses_to_its_neurons(x, rng, readout):
    wide = Wide(GaussianKernel(1.0), in_features=2, num_neurons=7, generator=rng)
    assert feature_count(wide, readout) == feature_count(wide, "neural") == 4
    assert needs_sample(wide, "nystroem")
    assert not needs_sample(wide, "nystroem", 7)
    assert torch.equal(readout_matrix(wide, readout, x), readout_matrix(wide, readout, x, 4))
    assert read_out(wide, readout, x).shape == (90, 4)
    assert read_out(wide, readout, x, num_features=7).shape == (90, 7)


@pytest.mark.parametrize("count", [-1, 0, 8])
@pytest.mark.parametrize("readout", FITTED)
def test_impossible_numbers_of_features_are_refused(network, x, readout, count):
    sentence = rf"^`num_features` must be between 1 and the number of landmarks, 7, got {count}\.$"
    W = network.W.detach()
    for make in (
        lambda: readout_matrix(network, readout, x, count),
        lambda: make_encoder(network, readout, x, count),
        lambda: read_out(network, readout, x, num_features=count),
        lambda: LandmarkFeatures.of(network, readout, x, num_features=count),
        lambda: compress(network.kernel, W, nystroem_matrix(network.kernel, W), x, count),
        lambda: least_squares_matrix(network.kernel, W, x, count),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()


def test_the_neural_readout_refuses_another_number_of_features(network, x):
    sentence = "The neural readout always has 7 features, one per neuron, but `num_features` is 5: leave it out, or"
    for make in (readout_matrix, make_encoder):
        with pytest.raises(ValueError, match=sentence):
            make(network, "neural", x, 5)
    assert torch.equal(read_out(network, "neural", x, num_features=7), network(x))


def test_only_a_compressed_nystroem_readout_needs_a_sample(network, x):
    for count in (None, 7):
        assert LandmarkFeatures.of(network, "nystroem", num_features=count).M.shape == (7, 7)
    sentence = "The readout nystroem with 5 features of 7 landmarks needs a sample of the data: pass one."
    with pytest.raises(ValueError, match=sentence):
        make_encoder(network, "nystroem", num_features=5)
    with pytest.raises(ValueError, match="the sample is empty"):
        make_encoder(network, "nystroem", x[:0], 5)
    assert make_encoder(network, "nystroem", x, 5)(x).shape == (90, 5)


# ---------------------------------------------------------------------- in runs


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
    """5,000 of the 12,000 inputs are used, drawn at random."""
    x = torch.cat([torch.randn(6000, 2, generator=rng), torch.randn(6000, 2, generator=rng) + 6])
    net = KSMNetwork(GaussianKernel(2.0), in_features=2, num_neurons=12, init=DataInit(x[::100]), generator=rng)
    y = read_out(net, "least_squares", x)
    for part in (slice(0, 1000), slice(-1000, None)):
        assert kernel_nrmse(net.kernel, x[part], y[part]).item() < 0.1


def test_least_squares_features_of_a_large_sample_are_limited():
    """Landmarks at the border of small clusters: the fit amplifies small similarities until they explain these."""
    x = torch.randn(6000, 2, generator=torch.Generator().manual_seed(0))
    rare = 20 + 10 * torch.arange(12.0)[:, None].expand(12, 2)
    kernel, W = GaussianKernel(1.0), torch.cat([x[:12], rare])
    x[-360:] = (rare + 1.5).repeat(30, 1)
    net = KSMNetwork(kernel, 2, 24, init=lambda *_: W)
    M = readout_matrix(net, "least_squares", x)
    values = torch.linalg.eigvalsh(M.mT @ kernel(W.double(), W.double()) @ M)
    assert 1.2 < float(values.max()) <= 4 + 1e-9
    unlimited = least_squares_matrix(kernel, W, x, ridge=LEAST_SQUARES_RIDGE)
    assert float(torch.linalg.eigvalsh(unlimited.mT @ kernel(W.double(), W.double()) @ unlimited).max()) > 4


def test_a_ridge_of_least_squares_equals_points_with_nystroem_features(network, x):
    F, k = similarities(network, x)
    kernel, W, ridge = network.kernel, network.W.detach().double(), 0.7
    Z = k @ nystroem_matrix(kernel, W)  # (90, 7)
    more = ridge**0.5 * torch.eye(7, dtype=torch.float64)
    together = torch.cat([torch.cat([F, Z @ more.mT], 1), torch.cat([more @ Z.mT, more @ more.mT], 1)])
    basis = torch.linalg.qr(torch.cat([Z, more])).Q
    best = (basis @ basis.mT @ together @ basis @ basis.mT)[:90, :90]
    assert_close(gram_of(k @ least_squares_matrix(kernel, W, x, ridge=ridge)), best, rtol=0, atol=1e-10)
    compressed = k @ least_squares_matrix(kernel, W, x, 4, ridge=ridge)
    assert_close(gram_of(compressed), best_of_rank(best, 4), rtol=0, atol=1e-10)


def test_a_large_ridge_of_least_squares_gives_nystroem_features(network, x):
    M = least_squares_matrix(network.kernel, network.W, x, ridge=1e9)
    assert_close(gram_of(M), gram_of(nystroem_matrix(network.kernel, network.W.detach())), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_weights_of_least_squares_equal_repetitions(network, x, ridge):
    counts = torch.tensor([1, 3, 2] * 30)
    _, k = similarities(network, x)
    weighted = k @ least_squares_matrix(network.kernel, network.W, x, 5, weights=counts, ridge=ridge)
    repeated = least_squares_matrix(network.kernel, network.W, x.repeat_interleave(counts, 0), 5, ridge=ridge)
    assert_close(gram_of(weighted), gram_of(k @ repeated), rtol=0, atol=1e-10)


def test_limited_readouts_bound_the_features_of_any_point(network, rng):
    kernel, W = network.kernel, network.W.detach().double()
    M = 5 * torch.randn(7, 4, generator=rng, dtype=torch.float64)
    limited = limit_readout(kernel, W, M)
    values, vectors = torch.linalg.eigh(M.mT @ kernel(W, W) @ M)
    assert (values > FEATURE_LIMIT).any()
    expected = M @ (vectors * (FEATURE_LIMIT / values).clamp(max=1).sqrt()) @ vectors.mT
    assert_close(limited, expected)
    x = torch.cat([3 * torch.randn(2000, 2, generator=rng, dtype=torch.float64), W])
    assert (kernel(x, W) @ M).square().sum(1).max() > FEATURE_LIMIT
    assert (kernel(x, W) @ limited).square().sum(1).max() <= FEATURE_LIMIT * (1 + 1e-9)
    assert torch.equal(limit_readout(kernel, W, nystroem_matrix(kernel, W)), nystroem_matrix(kernel, W))
