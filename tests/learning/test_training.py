"""Training without Lightning: seeds, batches, progress and the exact end."""

import pytest
import torch
from torch.testing import assert_close

from ksm_lightning.data import HalfMoonsDataModule
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import GaussianKernel, PowerCosineKernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, Phase, PhaseSchedule, TightSchedule, train, training
from ksm_lightning.learning.exact import solve_inner
from ksm_lightning.learning.schedule import make_schedule
from ksm_lightning.learning.training import start_at, train_on_few
from ksm_lightning.learning.units import held_out_count, tight_updates, worthwhile_updates
from ksm_lightning.network import DataInit
from ksm_lightning.network.initialisation import lloyd
from ksm_lightning.network.landmark_error import LandmarkError


@pytest.fixture(scope="module")
def moons() -> torch.Tensor:
    return HalfMoonsDataModule(num_points=300).train_points.data


def test_training_uses_seed_batch_size_and_progress(moons, monkeypatch):
    shapes, ticks, learn = [], [], Learner.learn

    def watched(learner, batches, *args, **options):
        shapes.extend(batch.shape for batch in batches)
        return learn(learner, batches, *args, **options)

    monkeypatch.setattr(Learner, "learn", watched)
    runs = [
        train(GaussianKernel(), moons, 3, AdaptiveSchedule(30), batch_size=7, seed=seed, progress=ticks.append)
        for seed in (0, 0, 1)
    ]
    assert shapes == [(7, 2)] * 90
    assert sum(ticks) == 90
    assert all(torch.equal(a, b) for a, b in zip(runs[0].parameters(), runs[1].parameters(), strict=True))
    assert not torch.equal(runs[0].W, runs[2].W)


@pytest.mark.parametrize("schedule", [AdaptiveSchedule(40), PhaseSchedule([Phase(40)])], ids=["adaptive", "phases"])
@pytest.mark.parametrize("asked", [None, True, False])
def test_natural_steps_end_with_the_exact_L_by_default(moons, schedule, asked):
    network = train(GaussianKernel(0.5), moons, 4, schedule, consolidate_at_end=asked)
    W, q = network.W.detach().double(), network.q.detach().double()
    drive = q * network.kernel(moons.double(), W)
    exact = solve_inner(drive.mT @ drive / len(moons), network.kernel.diag(W), q, network.ridge).L
    is_consolidated = torch.allclose(network.L.double(), exact, rtol=1e-4, atol=1e-5)
    assert is_consolidated == (schedule.is_natural if asked is None else asked)


# ---------------------------------------------------------------------- the tight bound


@pytest.fixture(scope="module")
def many_moons() -> torch.Tensor:
    return HalfMoonsDataModule().train_points.data


def error_of(network, x) -> float:
    return float(kernel_nrmse(network.kernel, x, network(x)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("n", "online", "consolidated"), [(16, 0.112, 0.108), (32, 0.035, 0.028), (64, 0.02, 0.0045)])
def test_the_tight_bound_has_no_floor_on_half_moons(many_moons, n, online, consolidated, seed):
    """The paper's bound ends near .175, .142 and .140."""
    for limit, at_end in ((online, False), (consolidated, True)):
        network = train(
            GaussianKernel(0.3), many_moons, n, TightSchedule(400), bound="tight", seed=seed, consolidate_at_end=at_end
        )
        assert error_of(network, many_moons) <= limit


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("n", [16, 32])
def test_more_updates_never_hurt_the_tight_bound(many_moons, n, seed):
    few, many = (
        train(GaussianKernel(0.3), many_moons, n, TightSchedule(updates), bound="tight", seed=seed)
        for updates in (100, 400)
    )
    assert error_of(many, many_moons) <= 1.02 * error_of(few, many_moons)


def test_more_landmarks_than_neurons_come_close_to_kernel_pca(many_moons):
    F = GaussianKernel(0.3)(many_moons.double(), many_moons.double())
    values = torch.linalg.eigvalsh(F)
    floor = float(values[:-16].norm() / values.norm())
    network = train(GaussianKernel(0.3), many_moons, 16, TightSchedule(400), bound="tight", num_landmarks=32)
    assert floor < error_of(network, many_moons) < 1.02 * floor


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_tight_run_ends_with_the_exact_Q_and_L_by_default(moons, asked):
    network = train(GaussianKernel(0.5), moons, 4, TightSchedule(40), bound="tight", consolidate_at_end=asked)
    y = network(moons).double()
    is_consolidated = torch.allclose(y.mT @ y / len(moons), network.L.double(), rtol=1e-3, atol=1e-5)
    assert is_consolidated == (asked is not False)


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_with_a_landmark_for_every_sample_the_samples_are_the_landmarks(bound):
    x = torch.randn(4, 2).repeat(10, 1)
    made = []
    network = train_on_few(GaussianKernel(0.5), x, 6, 40, bound=bound, num_landmarks=6, progress=made.append)
    assert made == []
    assert network.num_neurons == network.num_landmarks == 4
    assert torch.equal(torch.unique(network.W.detach(), dim=0), torch.unique(x, dim=0))
    assert error_of(network, x) < (1e-3 if bound == "tight" else 0.5)


def test_a_tight_network_of_few_samples_has_no_more_neurons_than_asked():
    x = torch.randn(5, 2)
    network = train_on_few(GaussianKernel(0.5), x, 3, 40, bound="tight", num_landmarks=6)
    assert (network.num_neurons, network.num_landmarks) == (3, 5)
    values = torch.linalg.eigvalsh(GaussianKernel(0.5)(x, x).double())
    assert error_of(network, x) == pytest.approx(float(values[:2].norm() / values.norm()), rel=1e-3)


def test_without_updates_landmarks_stay_at_the_start_with_the_exact_Q_and_L(moons):
    kernel, made = GaussianKernel(0.5), []
    network = train_on_few(kernel, moons, 8, 0, bound="tight", num_landmarks=12, seed=3, progress=made.append)
    generator = torch.Generator().manual_seed(3)
    candidates = moons[torch.randperm(len(moons), generator=generator)]
    init = start_at(candidates, 12, 8, "tight", is_natural=True)
    assert (init.iterations, init.judges) == (10, None)
    assert torch.equal(network.W.detach(), init(kernel, 12, 2, generator))
    y = network(moons).double()
    assert made == []
    assert_close(y.mT @ y / len(moons), network.L.detach().double(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kernel", [GaussianKernel(0.5), PowerCosineKernel(3)], ids=str)
def test_landmarks_of_few_samples_are_means_of_those_that_they_are_nearest_to(kernel, moons):
    x = moons[:70]
    network = train_on_few(kernel, x, 8, 0, bound="tight", num_landmarks=12)
    W = network.W.detach()
    if kernel.is_radial:
        assert_close(lloyd(kernel, x, W, 1), W, rtol=0, atol=1e-5)  # another iteration changes nothing
    assert len(torch.unique(torch.cat([x, W]), dim=0)) > 70 + 6  # most are not samples
    y = network(x).double()
    assert_close(y.mT @ y / len(x), network.L.detach().double(), rtol=1e-3, atol=1e-5)


def test_updates_are_worthwhile_with_enough_samples_and_not_too_many_landmarks():
    assert worthwhile_updates(384, 32, 48) == tight_updates(48) == 200
    assert worthwhile_updates(383, 32, 48) == 0
    assert worthwhile_updates(10**6, 341, 512) == tight_updates(512) == 39
    assert worthwhile_updates(10**6, 342, 513) == 0


@pytest.mark.parametrize("ridge", [-1.0, 0.0, float("nan")])
def test_an_impossible_ridge_is_refused(moons, ridge):
    with pytest.raises(ValueError, match="`ridge` must be positive and finite"):
        train(GaussianKernel(), moons, 3, AdaptiveSchedule(5), ridge=ridge)


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_points_that_judge_landmarks_are_not_learned_from(bound, monkeypatch):
    """Neither at the start nor in updates."""
    x, learned, judged, learn, start = torch.randn(3000, 2), [], [], Learner.learn, DataInit.__call__

    def started(init, *args):
        learned.extend(init.points.tolist())
        return start(init, *args)

    def watched(learner, batches, *args, sample, **options):
        learned.extend(batches.flatten(0, 1).tolist())
        learned.extend(sample(7, batches[0]).tolist())
        judged.extend(sample(0, batches[0]).tolist())
        return learn(learner, batches, *args, sample=sample, **options)

    monkeypatch.setattr(Learner, "learn", watched)
    monkeypatch.setattr(DataInit, "__call__", started)
    train(GaussianKernel(1.0), x, 8, make_schedule(None, 60, bound), bound=bound, batch_size=100, keeps_landmarks=True)
    learned, judged = ({tuple(row) for row in rows} for rows in (learned, judged))
    assert len(judged) == 300  # a tenth
    assert len(learned) > 2000
    assert not learned & judged


def test_the_paper_bound_learns_from_all_points_unless_landmarks_are_kept(monkeypatch):
    x, starts = torch.randn(3000, 2), []
    monkeypatch.setattr(training, "start_at", lambda points, *rest: starts.append(len(points)) or DataInit(points))
    for keeps in (False, True):
        train(GaussianKernel(1.0), x, 8, AdaptiveSchedule(1), keeps_landmarks=keeps)
    assert starts == [3000, 2700]


def test_a_point_with_most_of_the_kernel_is_learned_wherever_it_is():
    """It would be among the last candidates, which judge."""
    kernel, order = PowerCosineKernel(3), torch.randperm(3000, generator=torch.Generator().manual_seed(0))
    for place in (order[0], order[-1], order[-150]):
        x = torch.randn(3000, 40, generator=torch.Generator().manual_seed(1))
        x[place] *= 1000
        network = train(kernel, x, 8, TightSchedule(20), bound="tight", num_landmarks=12, batch_size=100, seed=0)
        assert LandmarkError(kernel, x)(network.W.double()) < 0.01


def test_landmarks_without_updates_may_be_points_that_judged_them(monkeypatch):
    x, starts, start = torch.randn(3000, 2), [], training.start_at
    monkeypatch.setattr(training, "start_at", lambda *args: starts.append(start(*args)) or starts[-1])
    for updates in (0, 1):
        train_on_few(GaussianKernel(1.0), x, 8, updates, bound="tight")
    assert [init.takes_judges for init in starts] == [True, False]


@pytest.mark.parametrize(("samples", "landmarks", "count"), [(1999, 20, 0), (2000, 20, 200), (10**6, 20, 1000)])
def test_number_of_points_that_judge(samples, landmarks, count):
    assert held_out_count(samples, landmarks) == count


def test_a_start_without_updates_may_use_the_points_that_judged_it():
    x = torch.randn(2000, 2)
    assert start_at(x, 8, 8, "tight", is_natural=True, is_final=True).takes_judges
    init = start_at(x, 8, 4, "tight", is_natural=True)
    assert (len(init.points), len(init.judges), init.num_features, init.takes_judges) == (1800, 200, 4, False)
    assert start_at(x, 8, 8, "paper", is_natural=True).judges is None
    assert start_at(x, 8, 8, "tight", is_natural=False).iterations == 0
