"""Schedules: phases, adaptive step sizes, relocations and settling as functions of the update count."""

import pytest

from ksm_lightning.learning.schedule import (
    NAMED_PHASES,
    AdaptiveSchedule,
    Phase,
    PhaseSchedule,
    Rates,
    TightSchedule,
    make_schedule,
)


def test_a_phase_starts_where_the_previous_one_ends():
    schedule = PhaseSchedule([Phase(3, eta_w=0.3), Phase(2, eta_w=0.2), Phase(1, eta_w=0.1)])
    assert [schedule.at(update).eta_w for update in range(8)] == [0.3, 0.3, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1]
    assert schedule.total_updates == 6


def test_the_papers_schedule_for_half_moons():
    schedule = make_schedule("paper_half_moons", None)
    assert schedule.total_updates == 20_000
    assert schedule.rates(9_999, 16, 64) == Rates(W=0.01, q=0.01, L=0.1)
    assert schedule.rates(10_000, 999, 1) == Rates(W=0.001, q=0.001, L=0.01)
    assert not schedule.is_natural
    assert not any(schedule.relocates_before(update) for update in range(20_000))


def test_the_papers_schedule_for_mnist():
    schedule = make_schedule("paper_mnist", None)
    assert schedule.total_updates == 16_000
    assert schedule.kernel_params(999) == {"alpha": 1}
    assert schedule.kernel_params(1_000) == {}
    assert [schedule.rates(update, 800, 64) for update in (999, 1_000, 10_999, 11_000)] == [
        Rates(0.01, 0.0, 0.1), Rates(0.001, 0.0, 0.01), Rates(0.001, 0.0, 0.01), Rates(0.0001, 0.0, 0.001),
    ]  # fmt: skip


def test_adaptive_steps_are_constant_and_then_decay():
    schedule = make_schedule(None, 1000)
    steps = [schedule.rates(update, 16, 64).L for update in (0, 300, 650, 1000, 2000)]
    assert steps == pytest.approx([0.1, 0.1, 0.05, 0, 0], abs=1e-15)
    assert schedule.rates(0, 16, 64).W == schedule.rates(0, 16, 64).q == pytest.approx(0.1 / 3)


def test_the_step_of_L_depends_on_the_rank_of_a_batch():
    schedule = AdaptiveSchedule(1000)
    assert pytest.approx(0.25 * 64 / 800) == schedule.rates(0, 800, 64).L
    assert schedule.rates(0, 800, 4000).L == 0.1  # with a larger one, L oscillates if eigenvalues differ much
    assert schedule.rates(0, 800, 64).W < schedule.rates(0, 800, 64).L


def test_the_tight_schedule_has_a_normalised_step_of_W():
    schedule, paper = make_schedule(None, 1000, "tight"), make_schedule(None, 1000)
    assert isinstance(schedule, TightSchedule)
    assert make_schedule(None, None, "tight").total_updates == 1000
    for n, batch in ((16, 1024), (640, 64)):
        for update, left in ((300, 1.0), (650, 0.5), (1000, 0.0)):
            rates = schedule.rates(update, n, batch)
            assert pytest.approx(0.25 * left) == rates.W
            assert rates.q == rates.L == paper.rates(update, n, batch).L


@pytest.mark.parametrize("make", [AdaptiveSchedule, TightSchedule])
@pytest.mark.parametrize(
    ("updates", "searches"),
    [(1000, [167, 500, 833]), (100, [17, 50, 83]), (7, [1, 4, 6]), (3, [2]), (1, [])],
)
def test_idle_landmarks_are_searched_in_the_middle_of_each_third_of_a_run(make, updates, searches):
    schedule = make(updates)
    assert [update for update in range(updates) if schedule.relocates_before(update)] == searches


def test_primitives_give_the_same_schedule():
    schedule = PhaseSchedule([Phase(3, kernel_params={"alpha": 1}), Phase(2)])
    assert PhaseSchedule(schedule.as_primitives()).phases == schedule.phases
    assert schedule.as_primitives()[0] == {
        "updates": 3,
        "eta_w": 0.01,
        "eta_q": 0.01,
        "eta_l": 0.1,
        "kernel_params": {"alpha": 1},
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Phase(0), "at least 1 update"),
        (lambda: Phase(1, eta_w=-0.1), "`eta_w` must be finite and not negative, got -0.1"),
        (lambda: Phase(1, eta_q=float("nan")), "`eta_q` must be finite"),
        (lambda: Phase(1, eta_l=float("inf")), "`eta_l` must be finite"),
        (lambda: AdaptiveSchedule(0), "at least 1 update"),
        (lambda: TightSchedule(0), "at least 1 update"),
        (lambda: make_schedule([Phase(1)], 5), "give only one"),
        (lambda: make_schedule([Phase(1)], None, "tight"), "leave them out with bound=tight"),
        (
            lambda: make_schedule("papers", None),
            "No phases are called .papers.: .*paper_mnist, released_mnist",
        ),
        (lambda: PhaseSchedule([]), "at least one phase"),
        (lambda: PhaseSchedule([{"updates": 1, "eta_x": 1}]), "Not a phase of the schedule"),
    ],
)
def test_impossible_phases_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_settles_only_after_a_kernel_change():
    phases = [Phase(100, kernel_params={"alpha": 1}), Phase(200), Phase(200, eta_w=0.001)]
    schedule = PhaseSchedule(phases)
    settling = [update for update in range(500) if schedule.is_settling(update)]
    assert settling == list(range(100, 150))
    assert not any(AdaptiveSchedule(500).is_settling(update) for update in range(500))


def test_the_named_phases_are_the_papers():
    """As printed in the paper, and as in the notebook of the released MNIST weights."""
    updates = {name: [phase.updates for phase in make_schedule(name, None).phases] for name in NAMED_PHASES}
    assert updates == {
        "paper_half_moons": [10_000, 10_000],
        "paper_mnist": [1_000, 10_000, 5_000],
        "released_mnist": [1_000, 5_000, 5_000],
    }
    assert [tuple(phase.rates()) for phase in make_schedule("released_mnist", None).phases] == [
        (0.01, 0.0, 0.1), (0.001, 0.0, 0.01), (0.0001, 0.0, 0.001),
    ]  # fmt: skip
    assert [phase.kernel_params for phase in NAMED_PHASES["paper_mnist"]] == [{"alpha": 1}, {}, {}]
