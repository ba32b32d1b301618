"""Phases by update count."""

import pytest

from ksm_lightning.schedule import Phase, Schedule, half_moons_phases


def test_a_phase_begins_where_the_one_before_ends():
    schedule = Schedule([Phase(3, eta_w=0.3), Phase(2, eta_w=0.2), Phase(1, eta_w=0.1)])
    assert [schedule.at(update).eta_w for update in range(8)] == [0.3, 0.3, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1]
    assert schedule.total_updates == 6


def test_the_papers_schedule_for_half_moons():
    schedule = Schedule(half_moons_phases())
    assert schedule.total_updates == 20_000
    assert schedule.at(9_999).rates() == {"W": 0.01, "q": 0.01, "L": 0.1}
    assert schedule.at(10_000).rates() == {"W": 0.001, "q": 0.001, "L": 0.01}


def test_primitives_make_the_same_schedule_again():
    schedule = Schedule([Phase(3, kernel_params={"alpha": 1}), Phase(2)])
    assert Schedule(schedule.as_primitives()).phases == schedule.phases
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
        (lambda: Schedule([]), "at least one phase"),
        (lambda: Schedule([{"updates": 1, "eta_x": 1}]), "Not a phase of the schedule"),
    ],
)
def test_impossible_phases_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
