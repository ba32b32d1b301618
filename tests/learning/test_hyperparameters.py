"""Hyper-parameters: defaults, allowed values, their form in a checkpoint, and which ones a resumed run may change."""

import inspect

import pytest

from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.learning import AdaptiveSchedule, HyperParameters, Phase, PhaseSchedule, TightSchedule
from ksm_lightning.network import KSMNetwork, TightNetwork


def test_unset_values_are_filled_in_from_the_others():
    adaptive = HyperParameters()
    assert (adaptive.updates, adaptive.phases, adaptive.ridge, adaptive.consolidate) == (5000, None, None, True)
    assert adaptive.kernel_params == {"sigma": "auto"}
    phases = HyperParameters(phases=[Phase(10)])
    assert (phases.updates, phases.ridge, phases.consolidate) == (None, 1e-3, False)
    assert phases.phases == [{"updates": 10, "eta_w": 0.01, "eta_q": 0.01, "eta_l": 0.1, "kernel_params": {}}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bound": "tight", "num_landmarks": 20},
        {"phases": "released_mnist", "kernel": "power_cosine"},
        {"ridge": 0.5},
    ],
)
def test_saved_hyper_parameters_describe_the_same_model(options):
    """Saving them a second time gives the same values."""
    hyper = HyperParameters(**options)
    again = HyperParameters(**hyper.as_primitives())
    assert again.as_primitives() == hyper.as_primitives()
    assert list(hyper.as_primitives()) == HyperParameters.names() == list(inspect.signature(HyperParameters).parameters)


def test_they_make_the_kernel_the_schedule_and_the_network():
    hyper = HyperParameters(num_neurons=5, kernel_params={"sigma": 0.3}, updates=7)
    network = hyper.make_network(in_features=3)
    assert isinstance(network, KSMNetwork)
    assert (network.W.shape, network.ridge) == ((5, 3), 1e-3)
    assert str(hyper.make_kernel()) == str(GaussianKernel(0.3))
    assert isinstance(hyper.make_schedule(), AdaptiveSchedule)
    assert hyper.make_schedule().total_updates == 7
    paper = HyperParameters(phases="paper_half_moons").make_schedule()
    assert isinstance(paper, PhaseSchedule)
    assert paper.total_updates == 20_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "random"}, "`init` must be one of 'normal', 'data', got 'random'"),
        ({"solver": "guess"}, "`solver` must be one of 'closed_form', 'dynamics', got 'guess'"),
        ({"inverse": "fast"}, "`inverse` must be one of 'auto', 'exact', 'tracked', got 'fast'"),
        (
            {"acceleration": "jit"},
            "`acceleration` must be one of 'auto', 'none', 'native', 'compile', got 'jit'",
        ),
        ({"num_neurons": 0}, "`num_neurons` must be at least 1, got 0"),
        ({"in_features": -3}, "`in_features` must be at least 1, got -3"),
        ({"in_features": 0}, "`in_features` must be at least 1, got 0"),
        ({"ridge": 0.0}, "`ridge` must be positive and finite, got 0.0"),
        ({"ridge": float("nan")}, "`ridge` must be positive and finite, got nan"),
        ({"init_scale": -1.0}, "must be positive and finite, got -1.0"),
        ({"kernel": "nonsense"}, "No kernel is registered as 'nonsense'"),
        ({"kernel_params": {"sigma": -1}}, "`sigma` must be positive"),
        ({"updates": 0}, "at least 1 update"),
        ({"updates": 5, "phases": "paper_mnist"}, "give only one"),
        ({"phases": "paper_cifar"}, "No phases are called 'paper_cifar'"),
        ({"phases": [Phase(5, kernel_params={"alpha": 2})]}, "has no parameter 'alpha'"),
        ({"bound": "loose"}, "`bound` must be one of 'paper', 'tight', got 'loose'"),
        ({"bound": "tight", "phases": [Phase(5)]}, "`phases` are rates of the paper's rules: leave them out"),
        ({"bound": "tight", "phases": "paper_mnist"}, "`phases` are rates of the paper's rules: leave them out"),
        (
            {"bound": "tight", "acceleration": "compile"},
            "`acceleration` compile exists for the paper's bound only: set",
        ),
        ({"bound": "tight", "num_landmarks": 15}, "`num_landmarks` must be at least the number of neurons, 16, got 15"),
        ({"num_landmarks": 15}, "every neuron has one landmark, but `num_landmarks` is 15 and `num_neurons` is 16"),
        ({"num_landmarks": 17}, "leave `num_landmarks` out, or choose bound=tight"),
    ],
)
def test_values_that_are_not_allowed_are_refused(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        HyperParameters(**options)
    assert "\n" not in str(caught.value)


def test_the_tight_bound_has_a_schedule_and_a_network_of_its_own():
    hyper = HyperParameters(num_neurons=5, bound="tight", num_landmarks=8)
    assert (hyper.updates, hyper.ridge, hyper.consolidate) == (1000, None, True)
    assert isinstance(hyper.make_schedule(), TightSchedule)
    network = hyper.make_network(in_features=3)
    assert isinstance(network, TightNetwork)
    assert (network.W.shape, network.Q.shape, network.L.shape) == ((8, 3), (5, 8), (5, 5))
    assert (
        HyperParameters(num_neurons=5, bound="tight").num_landmarks == HyperParameters(num_neurons=5).num_landmarks == 5
    )


def test_a_resumed_run_may_not_change_the_network():
    saved = HyperParameters(in_features=2, ridge=0.01).as_primitives()
    assert HyperParameters.fixed_names() == [
        "num_neurons", "bound", "num_landmarks", "in_features", "kernel", "kernel_params", "ridge"
    ]  # fmt: skip
    HyperParameters.check_same_network({**saved, "in_features": None, "ridge": None, "updates": 9}, saved)
    for name, value in (("num_neurons", 3), ("in_features", 3), ("kernel_params", {"sigma": 2.0}), ("ridge", 0.1)):
        with pytest.raises(ValueError, match=f"The checkpoint has {name}="):
            HyperParameters.check_same_network({**saved, name: value}, saved)
