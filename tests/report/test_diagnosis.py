"""The diagnosis: measurements of networks made by hand, and the findings."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import references
from ksm_lightning.evaluation.plausibility import Similarity, compare_points
from ksm_lightning.kernels import GaussianKernel, LinearKernel
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.report.diagnosis import Errors, Evidence, diagnose, falling
from ksm_lightning.report.health import Health, examine

GOOD = Evidence(
    num_neurons=16,
    ridge=1e-3,
    health=Health(is_finite=True, smallest=0.02, largest=0.1),
    similarity=Similarity(mean=0.1, mean_square=0.07, distance=1.2),
    errors=Errors(neural=0.18, nystroem=0.12, uniform=0.4),
    energies=[-1.0] * 40,
    updates=1000,
    planned=1000,
    sigma=0.3,
)


def titles(**changes) -> list[str]:
    return [finding.title for finding in diagnose(replace(GOOD, **changes))]


def only(**changes):
    """The only finding after the changes."""
    (finding,) = diagnose(replace(GOOD, **changes))
    return finding


@pytest.mark.parametrize("distance", [0.0, float("nan")])
def test_equal_points_do_not_suggest_a_width_of_0(distance):
    assert diagnose(replace(GOOD, similarity=Similarity(1.0, 1.0, distance), sigma=1.0)) == []


def test_errors_that_differ_by_rounding_are_not_a_finding():
    assert diagnose(replace(GOOD, errors=Errors(neural=0.3, nystroem=0.2001, uniform=0.2))) == []


def made_by_hand(W: torch.Tensor, sigma: float = 0.5) -> KSMNetwork:
    network = KSMNetwork(GaussianKernel(sigma), W.shape[1], len(W))
    with torch.no_grad():
        network.W.copy_(W)
    return network


def line(count: int) -> torch.Tensor:
    """The centres of ``count`` equal parts of a line in the plane."""
    return torch.stack([8 * (torch.arange(count) + 0.5) / count, torch.zeros(count)], dim=1)


# ---------------------------------------------------------------------- measurements


def test_landmarks_that_cover_the_data_are_active():
    network = made_by_hand(line(8))
    x = line(200)
    health = examine(network, x, network(x))
    assert (health.is_finite, health.silent, health.idle) == (True, 0, 0)
    assert health.precision == torch.finfo(torch.float32).eps


def test_a_neuron_far_from_all_data_is_silent_and_idle():
    W = line(8)
    W[3] = torch.tensor([0.0, 100.0])
    network = made_by_hand(W)
    x = line(200)
    health = examine(network, x, network(x))
    assert (health.silent, health.idle) == (1, 1)
    assert "1 of 8 neurons is dead" in titles(num_neurons=8, health=health)


def test_a_landmark_at_the_position_of_another_is_idle_although_it_responds():
    W = line(8)
    W[3] = W[2]
    network = made_by_hand(W)
    x = line(200)
    health = examine(network, x, network(x))
    assert (health.silent, health.idle) == (0, 1)
    assert "1 of 8 landmarks are idle" in titles(num_neurons=8, health=health)


def test_a_neuron_below_1_percent_of_the_mean_is_silent():
    network = made_by_hand(line(4))
    x = line(50)
    strength = torch.tensor([1.0, 1.0, 1.0, math.sqrt(0.0301)])  # 1 % of the mean is 0.0075
    assert examine(network, x, strength * torch.ones(50, 4)).silent == 0
    strength[3] = math.sqrt(0.0074)
    assert examine(network, x, strength * torch.ones(50, 4)).silent == 1


def test_eigenvalues_are_computed_in_float64(rng):
    network = made_by_hand(line(6))
    root = torch.randn(6, 6, generator=rng)
    with torch.no_grad():
        network.L.copy_(root @ root.mT)
    health = examine(network, line(50), network(line(50)))
    expected = np.linalg.eigvalsh(network.L.detach().numpy().astype(np.float64))
    assert [health.smallest, health.largest] == pytest.approx([expected[0], expected[-1]], rel=1e-10)


@pytest.mark.parametrize("name", ["W", "q", "L"])
def test_a_parameter_that_is_not_finite_is_detected(name):
    network = made_by_hand(line(4))
    with torch.no_grad():
        getattr(network, name).view(-1)[1] = torch.nan
    assert not examine(network, line(20), torch.ones(20, 4)).is_finite


def test_responses_that_are_not_finite_are_detected():
    network = made_by_hand(line(4))
    with torch.no_grad():
        network.L.copy_(-torch.eye(4))  # finite, but not positive definite
    health = examine(network, line(20), network(line(20)))
    assert not health.is_finite


@pytest.mark.parametrize("name", ["gaussian", "linear"])
def test_similarities_and_distances_are_those_of_a_loop_over_pairs(name, rng):
    x = torch.randn(9, 3, generator=rng)
    kernel, params = (GaussianKernel(0.8), {"sigma": 0.8}) if name == "gaussian" else (LinearKernel(), {})
    F = references.gram(name, params, x, x).numpy()
    pairs = [(s, t) for s in range(9) for t in range(s + 1, 9)]
    alike = [F[s, t] / math.sqrt(F[s, s] * F[t, t]) for s, t in pairs]
    distances = [float(np.linalg.norm(x[s].double() - x[t].double())) for s, t in pairs]
    found = compare_points(kernel, x)
    assert found.mean == pytest.approx(np.mean(alike), abs=1e-9)
    assert found.mean_square == pytest.approx(np.mean(np.square(alike)), rel=1e-6)
    assert found.distance == pytest.approx(sorted(distances)[(len(pairs) - 1) // 2], rel=1e-6)


# ---------------------------------------------------------------------- findings


def test_a_good_run_has_no_findings():
    assert diagnose(GOOD) == []


def test_a_network_that_is_not_finite_is_the_only_finding():
    health = Health(is_finite=False, silent=16, smallest=-1.0)
    finding = only(health=health, errors=None)
    assert (finding.severity, finding.title) == ("error", "The network is not finite")
    assert "Leave out --model.phases" in only(health=health, errors=None, is_adaptive=False).advice


def test_a_rollback_is_a_finding():
    assert "multiplied the rates by 0.25" in only(rate_factor=0.25).measured


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"starts_at_data": False, "is_adaptive": False}, "Use --model.init=data, or leave out --model.phases"),
        ({"starts_at_data": False}, "The normal initialisation placed them far from the data"),
        ({"is_adaptive": False}, "Leave out --model.phases: the adaptive schedule moves such landmarks"),
        ({}, "use fewer neurons (--model.num_neurons=12)"),
    ],
)
def test_the_advice_for_dead_neurons_depends_on_start_and_schedule(changes, advice):
    finding = only(health=GOOD.health._replace(silent=4, idle=4), **changes)
    assert (finding.severity, finding.title) == ("warning", "4 of 16 neurons are dead")
    assert advice in finding.advice


def test_a_few_idle_landmarks_are_normal():
    assert titles(health=GOOD.health._replace(idle=1)) == []
    assert titles(health=GOOD.health._replace(idle=2)) == ["2 of 16 landmarks are idle"]


def test_the_condition_of_L_is_compared_with_the_precision():
    eps = torch.finfo(torch.float32).eps
    # The condition number is (1 + ridge) / (0 + ridge), and errors reach 1 % of a response at 0.01 / eps.
    limit = eps / 0.01
    health = GOOD.health._replace(smallest=0.0, largest=1.0)
    assert titles(health=health, ridge=1.1 * limit) == []
    finding = only(health=health, ridge=0.9 * limit)
    assert finding.title == "L is ill-conditioned"
    condition = (1 + 0.9 * limit) / (0.9 * limit)
    assert f"{condition:.1e}; the ridge of {0.9 * limit:.2g} allows up to {condition:.1e}" in finding.measured
    assert f"Raise --model.ridge to {eps / 0.001:.1g}" in finding.advice
    # In float64 the condition is harmless, and the advised ridge is large enough.
    assert titles(health=health._replace(precision=1e-16), ridge=0.9 * limit) == []
    assert titles(health=health, ridge=eps / 0.001) == []


def test_the_limit_of_the_bound_is_found_by_the_nystroem_readout():
    finding = only(errors=Errors(neural=0.14, nystroem=0.035, uniform=0.4))
    assert (finding.severity, finding.title) == (
        "advice",
        "The error of the network has reached the limit of its bound",
    )
    assert "0.1400" in finding.measured
    assert "0.0350" in finding.measured
    assert "More neurons will not help" in finding.advice
    assert "--features.readout=nystroem" in finding.advice
    assert titles(errors=Errors(neural=0.14, nystroem=0.071, uniform=0.4)) == []
    assert titles(errors=Errors(neural=9e-6, nystroem=1e-7, uniform=0.4)) == []  # rounding


def test_landmarks_worse_than_random_ones_need_a_longer_run():
    finding = only(errors=Errors(neural=0.3, nystroem=0.25, uniform=0.2))
    assert finding.title == "Random data points are better landmarks than the learned ones"
    assert finding.advice == "Train longer: --model.updates=2000."
    assert "longer --model.phases" in only(errors=Errors(0.3, 0.25, 0.2), is_adaptive=False).advice
    assert titles(errors=Errors(neural=9e-6, nystroem=8e-6, uniform=1e-6)) == []  # rounding


def test_a_run_that_stopped_early_is_a_finding():
    finding = only(updates=400)
    assert finding.measured == "400 of 1,000 updates were made."


def test_a_decreasing_energy_is_distinguished_from_noise():
    noise = 0.05 * torch.randn(400, generator=torch.Generator().manual_seed(0))
    constant = (-1 + noise).tolist()
    decreasing = (-1 + noise - torch.linspace(0, 0.5, 400)).tolist()
    assert falling(constant) is None
    quarters = np.mean(decreasing[200:300]), np.mean(decreasing[300:])
    assert falling(decreasing) == pytest.approx((quarters[0] - quarters[1]) / abs(quarters[1]), rel=1e-6)
    assert only(energies=decreasing).title == "The energy was still falling at the end"
    assert titles(energies=decreasing[::-1]) == []  # the divergence guard handles increases
    assert falling(decreasing[:31]) is None  # too few values
    assert falling([-1.0] * 24 + [-1.009] * 8) is None  # significant but small
    assert falling([-1.0] * 24 + [-1.02] * 8) == pytest.approx(0.02 / 1.02)
    assert falling([*constant[:-1], math.nan]) is None
    assert falling([0.0] * 40) is None


@pytest.mark.parametrize("sigma", [0.3, None])
def test_a_kernel_that_is_too_narrow_or_too_wide_is_a_finding(sigma):
    rank = 1 / 0.006  # 160 is the limit for 16 neurons
    narrow = only(similarity=Similarity(mean=1e-3, mean_square=0.006, distance=1.2), sigma=sigma)
    assert narrow.title == "The similarity is nearly diagonal"
    assert f"about {rank:,.0f} independent directions for 16 neurons" in narrow.measured
    assert titles(similarity=Similarity(mean=1e-3, mean_square=0.0063, distance=1.2)) == []
    wide = only(similarity=Similarity(mean=0.991, mean_square=0.983, distance=1.2), sigma=sigma)
    assert wide.title == "The similarity is nearly constant"
    assert titles(similarity=Similarity(mean=0.989, mean_square=0.979, distance=1.2)) == []
    for finding in (narrow, wide):
        assert ("--model.kernel_params.sigma=1.2" in finding.advice) == (sigma is not None)
    none = only(similarity=Similarity(0.0, 0.0, 1.2))
    assert "more than a million" in none.measured


def test_the_width_of_a_gaussian_kernel_is_diagnosed_on_points(rng):
    x = torch.randn(300, 5, generator=rng)
    found = {
        sigma: titles(similarity=compare_points(GaussianKernel(sigma), x), sigma=sigma) for sigma in (0.1, 2.0, 100.0)
    }
    assert found == {0.1: ["The similarity is nearly diagonal"], 2.0: [], 100.0: ["The similarity is nearly constant"]}


def test_the_most_severe_finding_comes_first():
    found = diagnose(
        replace(
            GOOD,
            health=GOOD.health._replace(silent=3),
            errors=Errors(neural=0.2, nystroem=0.05, uniform=0.3),
            updates=10,
        )
    )
    assert [finding.severity for finding in found] == ["warning", "warning", "advice"]
