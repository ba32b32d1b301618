"""Training without Lightning: seeds, batches, progress and the exact end."""

import pytest
import torch

from ksm_lightning.data import HalfMoonsDataModule
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, Phase, PhaseSchedule, train
from ksm_lightning.learning.exact import solve_inner


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


@pytest.mark.parametrize("ridge", [-1.0, 0.0, float("nan")])
def test_an_impossible_ridge_is_refused(moons, ridge):
    with pytest.raises(ValueError, match="`ridge` must be positive and finite"):
        train(GaussianKernel(), moons, 3, AdaptiveSchedule(5), ridge=ridge)
