"""The Learner: units, start, consolidation, moved landmarks, observations, blocks, processes and state."""

import copy
import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from helpers.kernels import KERNELS
from helpers.learning_cases import blocks, network_for, rates_for, started
from helpers.plain_rules import compute_step, largest_difference, learner_of
from helpers.runs import fit, model, moons
from ksm_lightning.baselines import Nystroem
from ksm_lightning.data import ArrayDataModule, HalfMoonsDataModule
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import GaussianKernel, Kernel, LinearKernel, PowerCosineKernel, make_kernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, Rates, natural_ridge, train
from ksm_lightning.learning.exact import minimise_bound, similarity_moment, solve_inner
from ksm_lightning.learning.relocation import find_moves, relocate
from ksm_lightning.network import DataInit, KSMNetwork, functional
from ksm_lightning.network.readout import read_out


def trained(kernel: Kernel, x: torch.Tensor, n: int = 8, updates: int = 300, seed: int = 0, dtype=torch.float64):
    """A network after a complete adaptive run without Lightning."""
    generator = torch.Generator().manual_seed(seed)
    x = x.to(dtype)
    net = KSMNetwork(kernel, x.shape[1], n, init=DataInit(x), generator=generator).to(dtype)
    learner = Learner(net, AdaptiveSchedule(updates), chooses_ridge=True)
    learner.start(x)
    batches = x[torch.randint(len(x), (updates, 32), generator=generator)]
    learner.learn(batches, sample=lambda update, batch: x)
    learner.finish([x])
    return net


def points(count=300) -> torch.Tensor:
    return HalfMoonsDataModule(num_points=count).train_points.data.double()


@pytest.mark.parametrize(("kernel", "n"), [(GaussianKernel(36), 40), (make_kernel("polynomial", degree=2), 40)])
def test_wide_kernels_keep_their_landmarks_among_the_data(kernel, n):
    """One eigenvalue is far above the others, and L oscillates under large steps. With a step of 0.25, responses were
    twice too long, landmarks ended five times as far out as the data, and the error exceeded that of random landmarks.
    """
    x = torch.tensor(load_digits().data)
    network = train(kernel, x, n, AdaptiveSchedule(2000))
    uniform = Nystroem(kernel, n).fit_transform(x)
    ours, drawn = kernel_nrmse(kernel, x, read_out(network, "nystroem", x), uniform).tolist()
    assert ours < 0.75 * drawn
    if kernel.is_radial:
        centre = x.mean(0)
        assert (network.W - centre).norm(dim=1).max() < (x - centre).norm(dim=1).max()


# ---------------------------------------------------------------------- units


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_training_does_not_depend_on_the_units_of_x(scale):
    x = points()
    ours, theirs = trained(GaussianKernel(0.3), x), trained(GaussianKernel(0.3 * scale), scale * x)
    assert_close(theirs.W, scale * ours.W, rtol=1e-6, atol=1e-7 * scale)
    assert_close(theirs.q, ours.q, rtol=1e-6, atol=1e-9)
    assert_close(theirs.L, ours.L, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**10])
@pytest.mark.parametrize(
    ("name", "params"), [spec for spec in KERNELS if make_kernel(spec[0], **spec[1]).is_homogeneous]
)
def test_training_does_not_depend_on_the_scale_of_the_similarity(name, params, scale):
    """Scaled data gives a homogeneous kernel scaled values; with a power of 2, rounding scales as well."""
    x, kernel = points(150), make_kernel(name, **params)
    x = torch.cat([x, 0.3 * torch.ones(len(x), 1, dtype=torch.float64)], 1)
    n = 3 if name == "linear" or params.get("alpha") == 1 else 8  # at most the rank: features are unique
    ours, theirs = (trained(kernel, s * x, n, updates=100) for s in (1.0, scale))
    assert theirs.ridge == pytest.approx(ours.ridge * scale ** (2 * kernel.degree))
    y, z = ours(x), theirs(scale * x)
    assert_close(z / scale**kernel.degree, y, rtol=1e-6, atol=1e-6 * y.abs().max().item())


class Scaled(Kernel):
    """A Gaussian kernel times a constant, without closed forms."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def gram(self, u, v):
        return self.factor * GaussianKernel(0.3).gram(u, v)


@pytest.mark.parametrize("factor", [1.0, 1e-4, 1e4])
def test_natural_steps_work_with_a_users_kernel(factor):
    x = points(150)
    ours = trained(GaussianKernel(0.3), x, updates=100)
    theirs = trained(Scaled(factor), x, updates=100)
    y, z = ours(x), theirs(x)
    assert_close(z / math.sqrt(factor), y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_curvature_is_that_of_the_feature_map(rng, spec):
    """Closed forms against ``|phi(w + d) - phi(w)|^2 / |d|^2``, averaged over directions. At cusps: a convention."""
    kernel = make_kernel(spec[0], **spec[1])
    w = torch.randn(5, 3, generator=rng, dtype=torch.float64)
    found = kernel.curvature(w)
    assert found.shape == (5,)
    assert (found > 0).all()
    if spec[0] == "laplacian" or spec == ("arc_cosine", {"order": 0}):
        return
    if kernel.is_homogeneous:
        # Natural steps rely on this: diag_gradient / 2 = curvature w.
        assert_close(kernel.diag_gradient(w) / 2, found[:, None] * w)
        assert torch.equal(kernel.curvature(torch.zeros(2, 3, dtype=torch.float64)), torch.ones(2).double())
        return
    d = 1e-5 * torch.nn.functional.normalize(torch.randn(200, 5, 3, generator=rng, dtype=torch.float64), dim=2)
    distance = torch.stack([kernel.diag(w) + kernel.diag(w + s) - 2 * kernel(w, w + s).diagonal() for s in d])
    assert_close(found, (distance / 1e-10).mean(0), rtol=0.05, atol=0.0)


# ---------------------------------------------------------------------- start and consolidation


def test_the_start_has_the_exact_L_and_the_best_scale(rng):
    x = points()
    net = KSMNetwork(GaussianKernel(0.3), 2, 6, 1e-5, DataInit(x), generator=rng).double()
    started(net, x)
    moment = similarity_moment(net.kernel, [x], net.W)
    inner = solve_inner(moment.of_drive(net.q.detach()), net.kernel.diag(net.W), net.q.detach(), net.ridge)
    assert_close(net.L.detach(), inner.L, rtol=0.1, atol=0.02 * inner.L.diagonal().mean().item())
    for factor in (0.7, 1.4):
        other = factor * net.q.detach()
        elsewhere = solve_inner(moment.of_drive(other), net.kernel.diag(net.W), other, net.ridge)
        assert inner.bound < elsewhere.bound


class Inhomogeneous(Kernel):
    """``(u . v + 1)^2``: self-similarities differ, and scaling w does not replace the gain q."""

    def gram(self, u, v):
        return (u @ v.mT + 1) ** 2


def test_the_start_is_exact_after_neurons_were_moved(rng):
    x = 2 * torch.randn(3000, 2, generator=rng, dtype=torch.float64)
    net = KSMNetwork(Inhomogeneous(), 2, 5, 1e-4, generator=rng).double()
    with torch.no_grad():
        net.W.fill_(0.3)  # all at the same point: four of them move
    started(net, x)
    q = net.q.detach()
    assert q.max() / q.min() > 1.5
    B = (b := q * net.kernel(x, net.W)).mT @ b / len(x)
    exact = solve_inner(B, net.kernel.diag(net.W), q, net.ridge).L
    assert (net.L - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("init", ["data", "normal"])
def test_the_start_is_computed_on_the_training_device_for_any_default_device(init):
    """Lightning calls ``configure_model`` with the training device as the default one."""
    from types import SimpleNamespace

    module = model(phases=None, in_features=None, init=init)
    module.__dict__["_trainer"] = SimpleNamespace(
        datamodule=moons(), state=SimpleNamespace(fn="fit"), global_step=0, world_size=1, is_global_zero=True,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    with torch.device("meta"):
        module.configure_model()
    assert {parameter.device.type for parameter in module.network.parameters()} == {"cpu"}
    assert module.hparams["in_features"] == 2
    assert module.hparams["ridge"] == pytest.approx(0.005 / 6)


class Twin:
    """Collectives of two processes that have the same batch."""

    size = 2

    def mean(self, value):
        return value

    def sum(self, value):
        return 2 * value

    def gather(self, rows):
        return torch.cat([rows, rows])


class Absent(Twin):
    """Collectives that no other process joins: they would wait for ever."""

    is_first = True

    def broadcast(self, value):
        pytest.fail("the other processes do not call this")

    mean = sum = gather = broadcast


def test_the_start_asks_no_other_process(rng):
    """The first process computes it, while the others wait for its weights."""
    x = points(300)
    net = KSMNetwork(GaussianKernel(0.3), 2, 6, init=lambda *_: x[:6] + 50.0, generator=rng).double()
    Learner(net, AdaptiveSchedule(), collectives=Absent()).start(x)
    assert net.W.abs().max() < 5


def test_a_start_with_fewer_samples_than_neurons_has_bounded_responses(rng):
    """In directions without samples, responses must not be of size 1 / ridge."""
    x = torch.randn(300, 10, generator=rng)
    net = KSMNetwork(GaussianKernel(4.0), 10, 40, 1e-6, DataInit(x), generator=rng)
    started(net, x[:20])
    y = net(x)
    assert (y.square().sum(1) < 5).all()  # f(x, x) = 1; without shrinkage of L it is 1e5


def test_consolidation_is_exact_and_lowers_the_error(rng):
    x = points()
    net = trained(GaussianKernel(0.3), x, n=16)
    with torch.no_grad():
        net.L.add_(0.01 * torch.eye(16))
    before = kernel_nrmse(net.kernel, x, net(x)).item()
    bound = Learner(net, AdaptiveSchedule()).finish(x.split(100))
    q = net.q.detach()
    B = (k := q * net.kernel(x, net.W)).mT @ k / len(x)
    inner = solve_inner(B, net.kernel.diag(net.W), q, net.ridge)
    assert_close(net.L.detach(), inner.L, rtol=1e-9, atol=1e-12)
    assert bound == pytest.approx(inner.bound.item(), rel=1e-12)
    y = net(x)
    assert_close(y.mT @ y / len(x), net.L.detach(), rtol=1e-6, atol=1e-9)  # L = C, the fixed point
    assert kernel_nrmse(net.kernel, x, y).item() < before
    with pytest.raises(ValueError, match="needs data, but there are no inputs"):
        Learner(net, AdaptiveSchedule()).finish([])


def test_consolidation_of_more_neurons_than_the_data_has_directions(rng):
    """Rounding errors in the null directions of B are not multiplied by 1 / ridge."""
    x = torch.randn(500, 3, generator=rng)
    net = KSMNetwork(LinearKernel(), 3, 12, natural_ridge(LinearKernel(), x, 12), DataInit(x), generator=rng)
    wide = KSMNetwork(LinearKernel(), 3, 12, net.ridge).double()
    with torch.no_grad():
        wide.W.copy_(net.W)
    for network, points in ((net, x), (wide, x.double())):
        Learner(network, AdaptiveSchedule()).finish([points])
    y, exact = net(x), wide(x.double())
    assert_close((y @ y.mT).double(), exact @ exact.mT, rtol=1e-3, atol=1e-3)


def test_phases_do_not_consolidate_and_the_adaptive_schedule_does():
    data = moons()
    x = data.train_points.data

    def distance_from_exact(module):
        net = module.network
        B = (k := net.q * net.kernel(x, net.W)).detach().double().mT @ k.detach().double() / len(x)
        exact = solve_inner(B, net.kernel.diag(net.W), net.q, net.ridge).L
        return (net.L.detach() - exact).norm().item() / exact.norm().item()

    modules = {
        "adaptive": model(phases=None, updates=50),
        "adaptive, not consolidated": model(phases=None, updates=50, consolidate=False),
        "phases": model(),
        "phases, consolidated": model(consolidate=True),
    }
    found = {}
    for name, module in modules.items():
        fit(module, data)
        found[name] = distance_from_exact(module)
    assert found["adaptive"] < 1e-5
    assert found["phases, consolidated"] < 1e-5
    assert found["adaptive, not consolidated"] > 0.01
    assert found["phases"] > 0.1


def test_a_run_that_is_stopped_early_is_not_consolidated():
    """Otherwise a resumed run could not be bitwise equal to an uninterrupted one."""
    cut, whole = model(phases=None, updates=50), model(phases=None, updates=50)
    fit(cut, moons(), max_steps=30)
    fit(whole, moons())
    net = cut.network
    x = moons().train_points.data
    y = net(x)
    assert (y.mT @ y / len(x) - net.L).abs().max() > 1e-3
    assert whole.global_step == 50


def test_a_plain_dataloader_gets_start_relocation_and_consolidation():
    import lightning

    x = moons(num_points=400).train_points.data
    module = model(phases=None, updates=60, init="normal", init_scale=50.0)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=-1
    )
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=40, shuffle=True))
    assert trainer.global_step == 60
    y = module(x)
    assert_close(y.mT @ y / len(x), module.network.L.detach(), rtol=1e-3, atol=1e-5)
    # All landmarks started far from the data.
    assert module.network.W.norm(dim=1).max() < 3
    assert module.hparams["ridge"] == module.network.ridge == pytest.approx(0.005 / 6)


# ---------------------------------------------------------------------- relocation


def test_a_landmark_far_away_moves_to_the_largest_residual(rng):
    x = torch.cat([0.1 * torch.randn(50, 2, generator=rng), 5 + 0.1 * torch.randn(50, 2, generator=rng)])
    W = torch.tensor([[0.0, 0.0], [100.0, 100.0]])
    ((neuron, point),) = find_moves(GaussianKernel(1.0), x, W, most=5)
    assert neuron == 1
    assert point >= 50


@pytest.mark.parametrize("kernel", [GaussianKernel(1.0), PowerCosineKernel(3)], ids=str)
def test_one_of_two_equal_landmarks_moves(rng, kernel):
    x = torch.cat([0.1 * torch.randn(50, 2, generator=rng) + c for c in torch.tensor([[3.0, 0], [0, 3.0], [-3.0, 0]])])
    W = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
    if kernel.is_homogeneous:  # the third cluster is the mirror image of the first
        x, W = x[:100], W[:2]
    moves = find_moves(kernel, x, W, most=1)
    assert len(moves) == 1
    assert moves[0].neuron in (0, 1)
    assert moves[0].point >= (50 if kernel.is_homogeneous else 100)


def test_landmarks_that_explain_data_stay(rng):
    x = torch.cat([0.1 * torch.randn(50, 2, generator=rng) + c for c in torch.tensor([[3.0, 0], [0, 3.0]])])
    assert find_moves(GaussianKernel(1.0), x, torch.tensor([[3.0, 0.0], [0.0, 3.0]]), most=2) == []


def test_rank_one_corrections_are_exact(rng):
    """After the moves, the residual is that of the new landmarks: a second search finds nothing to move."""
    x = torch.randn(200, 2, generator=rng)
    W = 30 + torch.randn(8, 2, generator=rng)
    kernel = GaussianKernel(1.0)
    moves = dict(find_moves(kernel, x, W, most=100))
    assert len(moves) == 8
    for neuron, point in moves.items():
        W[neuron] = x[point]
    assert find_moves(kernel, x, W, most=100) == []


def test_no_landmark_moves_if_they_exceed_the_rank_of_the_kernel(rng):
    """Everything is explained; the residual is rounding error."""
    x = torch.randn(800, 100, generator=rng)
    assert find_moves(LinearKernel(), x, x[:300], most=300) == []


def test_no_landmark_moves_with_fewer_points_than_neurons(rng):
    x = torch.randn(5, 2, generator=rng)
    assert find_moves(GaussianKernel(1.0), x, x[[0, 1, 2, 3, 4, 0, 1]], most=7) == []


def test_a_moved_neuron_gets_average_weights(rng):
    x = points()
    net = KSMNetwork(GaussianKernel(0.3), 2, 6, 1e-3, DataInit(x), generator=rng).double()
    started(net, x)
    with torch.no_grad():
        net.W[2] = 1000.0
        net.q[2] = 1e-12
    others = [0, 1, 3, 4, 5]
    before = net.L.detach().clone()
    assert relocate(net, x) == 1
    assert net.W[2].abs().max() < 3
    assert net.q[2].item() == pytest.approx((net.q[others].square().sum() / 6).sqrt().item(), rel=1e-6)
    assert net.L[2, others].abs().max() == 0
    assert net.L[2, 2] == before.diagonal().median()
    assert torch.equal(net.L[others][:, others], before[others][:, others])
    torch.linalg.cholesky(net.L + net.ridge * torch.eye(6))


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("n", [12])
@pytest.mark.parametrize("begin", ["data", "normal", "far"])
def test_a_short_run_ends_near_the_exact_minimum(n, begin):
    x = HalfMoonsDataModule(num_points=800).train_points.data
    module = model(
        num_neurons=n, phases=None, updates=1000, init="data" if begin == "data" else "normal",
        init_scale={"data": 1.0, "normal": 1.0, "far": 300.0}[begin],
    )  # fmt: skip
    fit(module, HalfMoonsDataModule(num_points=800, seed=1))
    error = kernel_nrmse(module.network.kernel, x, module(x)).item()
    generator = torch.Generator().manual_seed(0)
    truth = minimise_bound(module.network.kernel, x, n, module.network.ridge, starts=4, generator=generator)
    exact = kernel_nrmse(
        module.network.kernel, x.double(), truth.responses(module.network.kernel, x, module.network.ridge)
    )
    assert error <= 1.1 * exact.item()
    assert read_out(module.network, "nystroem", x).isfinite().all()


def hostile_data(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(300, 5, generator=generator)
    return {
        "constant feature": torch.cat([normal, torch.full((300, 1), 7.0)], 1),
        "duplicates": normal[:7].repeat(40, 1),
        "fewer points than neurons": normal[:5],
        "one point": normal[:1],
        "zeros": torch.zeros(50, 5),
        "zeros among others": torch.cat([torch.zeros(50, 5), normal]),
        "far from the origin": normal + 1000,
        "tiny": 1e-12 * normal,
    }[name]


HOSTILE = ("constant feature", "duplicates", "fewer points than neurons", "one point", "zeros", "zeros among others",
           "far from the origin", "tiny")  # fmt: skip
TRIED = (("gaussian", {"sigma": 1.0}), ("polynomial", {"degree": 3}), ("arc_cosine", {"order": 0}),
         ("power_cosine", {"alpha": 3}), ("laplacian", {"sigma": 1.0}))  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("spec", TRIED, ids=str)
def test_difficult_data_is_learned_or_refused(tmp_path, name, spec):
    """The Nystroem readout of the landmarks must come near kernel PCA, which is the optimum."""
    x = hostile_data(name)
    np.save(tmp_path / "x.npy", x.numpy())
    is_homogeneous = spec[0] in ("polynomial", "power_cosine")
    unfit = (is_homogeneous and name == "tiny") or (spec[0] == "polynomial" and name == "far from the origin")
    module = model(
        num_neurons=12, in_features=None, kernel=spec[0], kernel_params=spec[1], init="data", phases=None, updates=60
    )
    data = ArrayDataModule(str(tmp_path / "x.npy"), batch_size=16)
    if unfit:  # the squared similarity overflows or underflows in float32
        with pytest.raises(ValueError, match="scale the data"):
            fit(module, data)
        return
    fit(module, data)
    for parameter in module.network.parameters():
        assert parameter.isfinite().all()
    nystroem = read_out(module.network, "nystroem", x)
    if name == "zeros" and is_homogeneous:
        assert not module(x).any()
        assert not nystroem.any()
        return
    neural, error = kernel_nrmse(module.network.kernel, x, module(x), nystroem).tolist()
    spectrum = torch.linalg.eigvalsh(module.network.kernel(x.double(), x.double())).flip(0)
    optimum = float((spectrum[12:].square().sum() / spectrum.square().sum()).sqrt())
    assert error <= 1.5 * optimum + 0.05
    assert neural < 0.75


@pytest.mark.parametrize(
    ("kernel", "natural"),
    [(GaussianKernel(0.7), False), (PowerCosineKernel(3), True), (GaussianKernel(0.7), True)],
    ids=str,
)
def test_an_observation_shows_the_weights_before_the_update(kernel, natural):
    x = blocks(updates=1)
    net = network_for(kernel, x, natural)
    step = compute_step(net, x[0], natural)
    energy = functional.energy_terms(step.k, step.y, step.self_similarity, net.q, net.L, net.ridge)
    smallest = net.q.detach().abs().min()
    observed = []
    learner_of(net, rates_for(kernel, natural), natural, inverse="exact").learn(
        x, observe=lambda update: True, on_observation=lambda *args: observed.append(args)
    )
    ((update, seen, rates),) = observed
    assert (update, rates) == (0, rates_for(kernel, natural))
    assert_close(seen.k, step.k)
    assert_close(seen.y, step.y)
    assert_close(seen.energy.total, energy.total)
    wanted = [g.norm() for g in step.gradients]
    if kernel.is_homogeneous:
        wanted[1] = torch.zeros_like(wanted[1])  # q does not learn
    assert_close(torch.stack(seen.gradient_norms), torch.stack(wanted))
    assert_close(seen.smallest_gain, smallest)


def test_training_does_not_depend_on_the_block_size():
    kernel, x = make_kernel("laplacian", sigma=0.7), blocks()
    one, many = (network_for(kernel, x, natural=True) for _ in range(2))
    rates = rates_for(kernel, natural=True)
    learner_of(one, rates, True).learn(x)
    learner = learner_of(many, rates, True)
    for batch in x:
        learner.learn(batch[None])
    assert largest_difference(one, many) == 0


def test_should_stop_ends_a_block_early():
    kernel, x = GaussianKernel(0.7), blocks()
    cut, whole = (network_for(kernel, x, natural=True) for _ in range(2))
    rates, calls = rates_for(kernel, natural=True), []
    made = learner_of(cut, rates, True).learn(x, should_stop=lambda: calls.append(None) or len(calls) == 5)
    assert made == 5
    learner_of(whole, rates, True).learn(x[:5])
    assert largest_difference(cut, whole) == 0


@pytest.mark.parametrize("n", [7, 64])
def test_two_processes_with_the_same_batch_equal_one_with_twice_the_batch(n):
    """With 7 neurons L is factorised, with 64 its inverse is tracked."""
    kernel, x = GaussianKernel(0.7), blocks(updates=5, batch=4)
    doubled = torch.cat([x, x], 1)
    ours, theirs = (network_for(kernel, doubled, True, n) for _ in range(2))
    rates = Rates(0.01, 0.01, 0.03)
    learner = learner_of(ours, rates, True, collectives=Twin())
    learner.learn(x)
    learner_of(theirs, rates, True).learn(doubled)
    assert bool(learner.responses.state_dict()) == (n == 64)
    assert largest_difference(ours, theirs) < 1e-8
    assert learner.finish(x) == pytest.approx(learner_of(theirs, rates, True).finish(doubled), rel=1e-8)


def test_the_state_is_restored_from_a_checkpoint():
    x = blocks(updates=4, batch=4)
    net, rates = network_for(PowerCosineKernel(3), x, True, 64), Rates(0.004, 0.0, 0.02)
    learner = learner_of(net, rates, True)
    learner.rate_factor = 0.5
    learner.learn(x[:2])
    saved, other = learner.state_dict(), copy.deepcopy(net)
    again = learner_of(other, rates, True)
    again.load_state_dict(saved)
    assert again.rates(0, 4) == rates.scaled(0.5)
    for one in (learner, again):
        one.learn(x[2:], 2)
    assert largest_difference(net, other) == 0
