"""Behaviour on a GPU, tested without one: fake CUDA tensors raise on a stray CPU tensor and on a synchronisation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch._subclasses.fake_tensor import DataDependentOutputException

from helpers.fake_cuda import CUDA, on_cuda
from ksm_lightning.data import Points, UpdateLoader
from ksm_lightning.evaluation.clustering import _distances
from ksm_lightning.evaluation.kernel_error import kernel_squared_errors, nrmse_from_sums
from ksm_lightning.evaluation.linear_probe import Classifiers, fit_softmax
from ksm_lightning.evaluation.portrait import portrait
from ksm_lightning.evaluation.ridge import fit_ridge
from ksm_lightning.extractor import FeatureExtractor
from ksm_lightning.kernels import make_kernel
from ksm_lightning.kernels.pairs import symmetric_tiles
from ksm_lightning.learning.acceleration import Accelerator, Batch
from ksm_lightning.learning.exact import optimal_scale, similarity_moment, solve_inner
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.learning.spectrum import leading_spectrum
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network import functional
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.network.readout import READOUTS, read_out


def test_fake_tensors_raise_on_mixed_devices_and_on_synchronisation(fake_cuda):
    with pytest.raises(RuntimeError, match="devices"):
        on_cuda(3) + torch.ones(3)
    with pytest.raises(DataDependentOutputException):
        on_cuda(1).item()


def model(
    kernel: str = "gaussian", phases=None, inverse="auto", bound="paper", num_landmarks=6, **params
) -> KernelSimilarityMatching:
    with CUDA:
        return KernelSimilarityMatching(
            num_neurons=6,
            bound=bound,
            num_landmarks=num_landmarks,
            in_features=4,
            kernel=kernel,
            kernel_params=params,
            init="normal",
            phases=phases,
            inverse=inverse,
        )


def learn_on_the_device(learner):
    """Three updates, of which the last one is observed; everything that it sees and changes must be on the device."""
    (block,) = UpdateLoader(Points(on_cuda(50, 4), device=CUDA), batch_size=8, updates_per_epoch=3)
    assert block.x.device == CUDA
    observed = []
    made = learner.learn(
        block.x, observe=lambda update: update == 2, on_observation=lambda _, seen, __: observed.append(seen)
    )
    assert (made, len(observed)) == (3, 1)
    values = [*observed[0].energy, *observed[0].gradient_norms, observed[0].smallest_gain, observed[0].condition]
    assert {value.device for value in (*values, learner.health(), *learner.network.parameters())} == {CUDA}


@pytest.mark.parametrize("inverse", ["exact", "tracked"])
@pytest.mark.parametrize("phases", [None, [Phase(100)]], ids=["adaptive", "phases"])
def test_updates_stay_on_the_device_and_do_not_synchronise(fake_cuda, spec, phases, inverse):
    """A block of three updates for every kernel; the last one is observed for the log."""
    learner = model(spec[0], phases, inverse=inverse, **spec[1]).learner
    learn_on_the_device(learner)
    if inverse == "tracked" and phases:
        assert learner.responses.state_dict()["inverse"].device == CUDA


@pytest.mark.parametrize("num_landmarks", [6, 9])
@pytest.mark.parametrize("inverse", ["exact", "tracked"])
def test_tight_updates_stay_on_the_device_and_do_not_synchronise(fake_cuda, spec, inverse, num_landmarks):
    learner = model(spec[0], None, inverse, "tight", num_landmarks, **spec[1]).learner
    learn_on_the_device(learner)
    state = learner.state_dict()["rule"]
    assert (state["square"].device, state["steps"]) == (CUDA, 3)


def test_a_tight_network_is_used_on_the_device(fake_cuda, spec):
    """Responses, energy, readouts and figures."""
    network = model(spec[0], None, "auto", "tight", 9, **spec[1]).network
    x = on_cuda(20, 4)
    assert (network(x).shape, network(x).device, network.energy_of(x).device) == ((20, 6), CUDA, CUDA)
    for readout in ("neural", "nystroem"):
        assert read_out(network, readout, x, sample=on_cuda(30, 4), num_features=6, block=8).device == CUDA
    assert {value.device for value in portrait(network, on_cuda(40, 4)).values()} == {CUDA}


@pytest.mark.parametrize("phases", [None, [Phase(100)]], ids=["adaptive", "phases"])
def test_a_training_step_stays_on_the_device_and_does_not_synchronise(fake_cuda, spec, phases, monkeypatch):
    """The module's own path, guarded and between two log entries, with the few attributes of a Trainer that it uses."""
    module = model(spec[0], phases, **spec[1])
    module.learner.stage, module.run_state.is_guarded = "learning", True  # the start and the health check synchronise
    optimizer = LightningOptimizer(module.configure_optimizers())
    optimizer._strategy = SimpleNamespace(optimizer_step=lambda optimizer, closure, **options: optimizer.step(closure))
    module.optimizers = lambda: optimizer
    module.__dict__["_trainer"] = SimpleNamespace(
        global_step=0,
        log_every_n_steps=50,
        world_size=1,
        loggers=[],
        is_last_batch=False,
        max_steps=-1,
        checkpoint_callbacks=[],
    )
    monkeypatch.setattr("ksm_lightning.module.count_updates", lambda trainer, more: None)
    (block,) = UpdateLoader(Points(on_cuda(50, 4), device=CUDA), batch_size=8, updates_per_epoch=3)
    outputs = module.training_step(block, 0)
    assert outputs["energy"].device == CUDA
    assert {parameter.device for parameter in module.network.parameters()} == {CUDA}


def test_energy_and_its_terms_stay_on_the_device(fake_cuda):
    step = functional.hebbian_step(
        make_kernel("gaussian"), on_cuda(8, 4), on_cuda(6, 4), on_cuda(6), on_cuda(6, 6), 1e-3
    )
    terms = functional.energy_terms(step.k, step.y, step.self_similarity, on_cuda(6), on_cuda(6, 6), 1e-3, C=step.C)
    assert terms.total.device == CUDA
    assert terms.total.dtype == torch.float64


def test_validation_stays_on_the_device(fake_cuda, spec):
    module = model(spec[0], **spec[1])
    logged = {}
    module.__dict__["_trainer"] = SimpleNamespace(state=SimpleNamespace(fn="validate"), world_size=1)
    module.log = lambda name, value, **options: logged.__setitem__(name, value)
    with torch.inference_mode():
        y = module.validation_step((on_cuda(10, 4), on_cuda(10, dtype=torch.int64)), 0)
    assert y.device == logged["val/energy"].device == CUDA
    assert module.features(on_cuda(20, 4)).shape == (20, 6)


@pytest.mark.parametrize("readout", READOUTS)
def test_readouts_stay_on_the_device(fake_cuda, spec, readout):
    network = model(spec[0], **spec[1]).network
    features = read_out(network, readout, on_cuda(20, 4), sample=on_cuda(30, 4), block=8)
    assert features.shape == (20, 6)
    assert features.device == CUDA
    assert features.dtype == torch.float32


@pytest.mark.parametrize("inside", [torch.float32, torch.float64])
def test_the_extractor_stays_on_the_device_and_does_not_synchronise(fake_cuda, spec, inside):
    """For raw inputs and for points, with preprocessing from the CPU, from the device, and without."""
    kernel = make_kernel(spec[0], **spec[1])
    W, M = on_cuda(6, 4, dtype=inside), on_cuda(6, 5, dtype=inside)
    here = Preprocessing(torch.zeros(4), torch.ones(4), image_shape=(2, 2), crop=1)
    for prepare in (None, here, Preprocessing(on_cuda(4), on_cuda(4))):
        extractor = FeatureExtractor(kernel, W, M, prepare)
        assert extractor.device == CUDA
        assert {value.device for value in extractor.state_dict().values()} == {CUDA}
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8):
            features = extractor(on_cuda(7, 1, 2, 2, dtype=dtype))
            assert (features.shape, features.device) == ((7, 5), CUDA)
            assert features.dtype == (dtype if dtype.is_floating_point else torch.float32)
        rows = extractor.features(on_cuda(7, 4))
        assert (rows.shape, rows.device, rows.dtype) == ((7, 5), CUDA, inside)
    assert here.mean.device.type == "cpu"  # the caller's object is not moved
    cropped = FeatureExtractor(kernel, W, M, here)(on_cuda(7, 4, 4))
    assert (cropped.shape, cropped.device) == ((7, 5), CUDA)


def test_the_extractor_moves_with_the_model_that_contains_it(fake_cuda):
    extractor = FeatureExtractor(make_kernel("gaussian"), torch.zeros(6, 4), torch.zeros(6, 5))
    model = torch.nn.Sequential(extractor, torch.nn.ReLU()).to(CUDA, torch.float16)
    assert {value.device for value in model.state_dict().values()} == {CUDA}
    assert extractor.W.dtype == torch.float32
    assert extractor.preprocessing.mean.dtype == torch.float64
    y = model(on_cuda(7, 4, dtype=torch.float16))
    assert (y.shape, y.device, y.dtype) == ((7, 5), CUDA, torch.float16)


def test_the_exact_L_stays_on_the_device(fake_cuda, spec):
    network = model(spec[0], **spec[1]).network
    total, count = similarity_moment(network.kernel, [on_cuda(30, 4)], network.W)
    found = solve_inner(total / count, network.kernel.diag(network.W), network.q, 1e-3)
    assert found.L.device == found.bound.device == CUDA
    assert found.L.dtype == torch.float64
    assert optimal_scale(total.diagonal(), network.kernel.diag(network.W), 1e-3).device == CUDA


def test_the_kernel_error_stays_on_the_device(fake_cuda, kernel):
    x, y, z = on_cuda(50, 4), on_cuda(50, 6), on_cuda(50, 3)
    sums = kernel_squared_errors(kernel, x, [y, z], symmetric_tiles(50, 16))
    assert nrmse_from_sums(sums).device == CUDA


@pytest.mark.parametrize("samples", [60, 10])
def test_the_probe_stays_on_the_device(fake_cuda, samples):
    """For nine iterations; every tenth checks for convergence, which synchronises."""
    x, labels = on_cuda(3, samples, 20), on_cuda(3, samples, dtype=torch.int64)
    weighted = {"weights": on_cuda(3, samples), "is_bias_penalised": False}
    for options in ({}, weighted):
        found = fit_softmax(x, labels, [1e-3, 1e-1], 4, max_iterations=9, **options)
        assert found.W.shape == (3, 2, 20, 4)
        assert found.W.device == found.b.device == CUDA
    accuracy = Classifiers(found.W, found.b, 0).accuracy(on_cuda(30, 20), on_cuda(30, dtype=torch.int64))
    assert accuracy.device == CUDA


def test_ridge_regression_stays_on_the_device(fake_cuda):
    found = fit_ridge(on_cuda(3, 40, 20), on_cuda(3, 40, 2), [1e-3, 1e-1], weights=on_cuda(3, 40))
    assert found.W.shape == (3, 2, 20, 2)
    assert found.W.device == found.b.device == CUDA


def test_the_distances_of_kmeans_stay_on_the_device(fake_cuda):
    assert _distances(on_cuda(40, 5), on_cuda(3, 4, 5)).shape == (40, 3, 4)


def test_the_values_of_the_figures_stay_on_the_device(fake_cuda, spec):
    computed = portrait(model(spec[0], **spec[1]).network, on_cuda(40, 4))
    assert {value.device for value in computed.values()} == {CUDA}


def test_the_leading_spectrum_stays_on_the_device(fake_cuda, spec):
    network = model(spec[0], **spec[1]).network
    found = leading_spectrum(network.kernel, on_cuda(30, 4), network.W, network.q, rank=3)
    assert found.dense().device == found.shrunk(0.1).rest.device == CUDA


def test_the_step_sizes_of_a_block_are_uploaded_at_once_from_pinned_memory(fake_cuda, monkeypatch):
    pinned, used, modes = [], [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(tuple(self.shape)) or self)
    monkeypatch.setattr(torch, "compile", lambda step, **options: modes.append(options["mode"]) or step)
    state = [on_cuda(6, 4), on_cuda(6), on_cuda(6, 6)]

    def step(batch, sizes, tracks):
        used.extend(size.device for size in sizes)

    accelerator = Accelerator(step, lambda: state, state[0])
    accelerator.begin(np.array([(0.1, 0.2, 0.3)] * 5))
    kernel, batch = make_kernel("gaussian"), Batch((on_cuda(8, 4),), None)
    for index in range(5):
        assert accelerator(kernel, batch, index, 1e-4, True)
    assert modes == ["reduce-overhead"]
    assert pinned == [(5, 3)]
    assert used == [CUDA] * 20
