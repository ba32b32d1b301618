"""The fast update against the rules in plain words, the tracked inverse against a factorisation, and acceleration."""

import copy
import warnings
from contextlib import nullcontext
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from conftest import KERNELS
from test_module import fit, model
from torch.testing import assert_close

from ksm_lightning.data import ArrayDataModule
from ksm_lightning.kernels import GaussianKernel, Kernel, PowerCosineKernel, make_kernel
from ksm_lightning.learning import rules, updater
from ksm_lightning.learning import train as learning
from ksm_lightning.learning.schedule import Phase, Rates
from ksm_lightning.learning.updater import Collectives, Updater
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network import functional
from ksm_lightning.network.initialisation import NormalInit
from ksm_lightning.network.ksm_network import KSMNetwork


class Plain(Kernel):
    """A user's kernel: a Gaussian times a number, with derivatives by autograd."""

    def gram(self, u, v):
        return 3.0 * GaussianKernel(0.7).gram(u, v)


def blocks(updates=20, batch=24, m=5, seed=0) -> torch.Tensor:
    return torch.randn(updates, batch, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(kernel: Kernel, x: torch.Tensor, natural: bool, n: int = 7) -> KSMNetwork:
    torch.manual_seed(1)
    ridge = learning.natural_ridge(kernel, x[0], n) if natural else 1e-3
    net = KSMNetwork(kernel, x.shape[2], n, ridge, NormalInit(0.7)).double()
    if natural:
        learning.start(net, x.flatten(0, 1))
    elif not kernel.is_homogeneous:
        with torch.no_grad():
            net.q.copy_(torch.linspace(0.6, 1.4, n))
    return net


def rates_for(kernel: Kernel, natural: bool) -> Rates:
    rates = Rates(0.04, 0.03, 0.1) if natural else Rates(0.01, 0.02, 0.1)
    return rates._replace(q=0.0) if kernel.is_homogeneous else rates


def by_the_rules(net: KSMNetwork, x: torch.Tensor, rates: Rates, natural: bool) -> None:
    step = rules.compute_step(net, x, natural)
    rules.apply(net, rules.descent(net, step.gradients, step.self_similarity, rates, natural), rates)


def run(net: KSMNetwork, x: torch.Tensor, rates: Rates, natural: bool, **options) -> Updater:
    found = Updater(net, natural, **options)
    with found.block(x):
        for place in range(len(x)):
            found.update(place, rates)
    return found


def largest_difference(ours: KSMNetwork, theirs: KSMNetwork) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)


# ---------------------------------------------------------------------- the same updates


@pytest.mark.parametrize("natural", [True, False], ids=["natural", "paper"])
@pytest.mark.parametrize("spec", [*KERNELS, None], ids=str)
def test_the_fast_update_equals_the_rules(spec, natural):
    kernel = Plain() if spec is None else make_kernel(spec[0], **spec[1])
    x = blocks() * (0.5 if spec and spec[0] == "polynomial" else 1.0)  # the paper's rates are not for large powers
    ours = network(kernel, x, natural)
    theirs, rates = copy.deepcopy(ours), rates_for(kernel, natural)
    before = copy.deepcopy(ours)
    run(ours, x, rates, natural, inverse="exact")
    for batch in x:
        by_the_rules(theirs, batch, rates, natural)
    assert largest_difference(theirs, before) > 1e-3
    assert largest_difference(ours, theirs) < 1e-9


def test_responses_and_steps_are_limited_as_the_rules_say():
    """A start that answers far too strongly, with a gain near 0 and a landmark far away."""
    kernel, x = GaussianKernel(0.7), blocks(updates=3)
    ours = network(kernel, x, natural=True)
    with torch.no_grad():
        ours.L.mul_(1e-3)
        ours.q[0], ours.W[1] = 1e-8, 4.0
    theirs, rates = copy.deepcopy(ours), Rates(0.3, 0.3, 0.25)
    limited = rules.compute_step(ours, x[0], natural=True).y
    assert not torch.allclose(limited, rules.compute_step(ours, x[0], natural=False).y)
    run(ours, x, rates, natural=True, inverse="exact")
    for batch in x:
        by_the_rules(theirs, batch, rates, natural=True)
    assert largest_difference(ours, theirs) < 1e-9


def test_an_observation_is_of_the_state_before():
    for kernel, natural in ((GaussianKernel(0.7), False), (PowerCosineKernel(3), True), (GaussianKernel(0.7), True)):
        x = blocks(updates=1)
        net = network(kernel, x, natural)
        step = rules.compute_step(net, x[0], natural)
        energy = functional.energy_terms(step.k, step.y, step.self_similarity, net.q, net.L, net.ridge)
        smallest = net.q.detach().abs().min()
        fast = Updater(net, natural, inverse="exact")
        with fast.block(x):
            seen = fast.update(0, rates_for(kernel, natural), observe=True)
        assert_close(seen.k, step.k)
        assert_close(seen.y, step.y)
        assert_close(seen.energy.total, energy.total)
        wanted = [g.norm() for g in step.gradients]
        if kernel.is_homogeneous:
            wanted[1] = torch.zeros_like(wanted[1])  # q does not learn
        assert_close(torch.stack(seen.gradient_norms), torch.stack(wanted))
        assert_close(seen.smallest_gain, smallest)


def test_the_block_does_not_matter():
    kernel, x = make_kernel("laplacian", sigma=0.7), blocks()
    one, many = (network(kernel, x, natural=True) for _ in range(2))
    rates = rates_for(kernel, natural=True)
    run(one, x, rates, natural=True)
    fast = Updater(many, natural=True)
    for place in range(len(x)):
        with fast.block(x[place : place + 1]):
            fast.update(0, rates)
    assert largest_difference(one, many) == 0


def test_a_failed_factorisation_is_remembered_until_reset():
    x = blocks(updates=2)
    net = network(GaussianKernel(0.7), x, natural=False)
    with torch.no_grad():
        net.L.copy_(-torch.eye(7))
    fast = Updater(net, natural=False)
    with fast.block(x):
        fast.update(0, Rates(0.0, 0.0, 0.0))
    assert int(fast.failed) > 0
    fast.forget()  # a moved landmark changes L, and undoes no failure
    assert int(fast.failed) > 0
    fast.reset()
    assert int(fast.failed) == 0


# ---------------------------------------------------------------------- the tracked inverse


@pytest.mark.parametrize("natural", [True, False], ids=["natural", "paper"])
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_tracked_responses_stay_with_the_exact_ones(spec, natural):
    """Over several renewals of the inverse, at the largest step that is tracked for so few samples."""
    kernel, n = make_kernel(spec[0], **spec[1]), 64
    x = blocks(updates=60, batch=8)
    net = network(kernel, x, natural, n)
    rates = Rates(0.004, 0.0 if kernel.is_homogeneous else 0.004, 0.03125 if natural else 0.0625)
    fast = Updater(net, natural)
    errors, renewals = [], 0
    with fast.block(x):
        for place in range(len(x)):
            exact = rules.compute_step(net, x[place], natural).y
            seen = fast.update(place, rates, observe=True)
            errors.append(float((seen.y - exact).norm() / exact.norm()))
            renewals += fast.state_dict()["age"] == 1
    assert renewals >= 3
    assert max(errors) < 1e-4


def test_one_tracked_update_equals_the_rules():
    """At the end of a period, where the tracked ridge is farthest from the network's."""
    kernel, x = PowerCosineKernel(3), blocks(updates=40, batch=8)
    net, rates = network(kernel, x, natural=True, n=64), Rates(0.004, 0.0, 0.03125)
    fast = Updater(net, natural=True)
    worst = 0.0
    with fast.block(x):
        for place in range(len(x)):
            theirs = copy.deepcopy(net)
            fast.update(place, rates)
            by_the_rules(theirs, x[place], rates, natural=True)
            worst = max(worst, largest_difference(net, theirs))
    assert 0 < worst < 1e-5


def test_an_update_can_do_without_the_tracked_inverse_for_once():
    x, rates = blocks(updates=6), Rates(0.01, 0.0, 0.02)
    tracked, exact = (network(PowerCosineKernel(2), x, False) for _ in range(2))
    found, other = Updater(tracked, False, inverse="tracked"), Updater(exact, False, inverse="exact")
    with found.block(x), other.block(x):
        for place in range(4):
            found.update(place, rates, factorise=True)
            other.update(place, rates)
            assert found.state_dict() == {}
        assert largest_difference(tracked, exact) == 0
        found.update(4, rates)
    assert found.state_dict()["age"] == 1


def test_auto_tracks_where_neurons_are_many_and_steps_small():
    kernel = PowerCosineKernel(3)
    for n, batch, step, tracks in (
        (64, 8, 0.02, True),
        (63, 8, 0.02, False),
        (64, 8, 0.06, False),
        (64, 8, 0.0, False),
    ):
        x = blocks(updates=1, batch=batch)
        found = run(network(kernel, x, True, n), x, Rates(0.001, 0.0, step), natural=True)
        assert bool(found.state_dict()) == tracks


def test_a_changed_L_is_factorised_anew():
    kernel, x = PowerCosineKernel(3), blocks(updates=2, batch=8)
    net = network(kernel, x, True, 64)
    fast, rates = Updater(net, natural=True), Rates(0.001, 0.0, 0.02)
    with fast.block(x), torch.no_grad():
        fast.update(0, rates)
        net.L.mul_(2)
        fast.reset()
        theirs = copy.deepcopy(net)
        fast.update(1, rates)
    by_the_rules(theirs, x[1], rates, natural=True)
    assert largest_difference(net, theirs) < 1e-5


def test_state_of_another_size_is_refused():
    x = blocks(updates=1, batch=8)
    state = run(network(PowerCosineKernel(3), x, True, 64), x, Rates(0.001, 0.0, 0.02), natural=True).state_dict()
    with pytest.raises(ValueError, match=r"should be \(7, 7\), got \(64, 64\)"):
        Updater(network(PowerCosineKernel(3), x, True), natural=True).load_state_dict(state)


def train(module: KernelSimilarityMatching, data: Path, max_steps: int = -1, ckpt_path: Path | None = None):
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=-1,
        enable_model_summary=False, max_steps=max_steps,
    )  # fmt: skip
    trainer.fit(module, datamodule=ArrayDataModule(str(data), batch_size=4, updates_per_epoch=25), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("interrupted", [17, 30])
def test_a_tracked_run_resumes_to_the_same_bits(tmp_path, interrupted):
    """In the middle of a period, so that the inverse itself is in the checkpoint."""
    np.save(tmp_path / "x.npy", np.random.default_rng(3).normal(size=(400, 6)).astype(np.float32))
    options = {"num_neurons": 40, "in_features": 6, "kernel": "power_cosine", "kernel_params": {"alpha": 3}}
    whole, first, second = (model(**options, updates=60, phases=None) for _ in range(3))
    train(whole, tmp_path / "x.npy")
    trainer = train(first, tmp_path / "x.npy", max_steps=interrupted)
    assert first.updater.state_dict()["age"] > 1
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    train(second, tmp_path / "x.npy", ckpt_path=tmp_path / "half.ckpt")
    for ours, theirs in zip(second.network.parameters(), whole.network.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------------- ranks


@pytest.mark.parametrize("n", [7, 64])
def test_ranks_that_agree_change_nothing(n):
    """All processes with the same batch, of which two are one of twice the size; exact and tracked."""
    kernel, x = GaussianKernel(0.7), blocks(updates=5, batch=4)
    ours, theirs = (network(kernel, torch.cat([x, x], 1), True, n) for _ in range(2))
    ranks = Collectives(2, lambda value: value, lambda rows: torch.cat([rows, rows]))
    rates = Rates(0.01, 0.01, 0.03)
    found = run(ours, x, rates, natural=True, ranks=ranks)
    run(theirs, torch.cat([x, x], 1), rates, natural=True)
    assert bool(found.state_dict()) == (n == 64)
    assert largest_difference(ours, theirs) < 1e-8


# ---------------------------------------------------------------------- acceleration


def test_what_cannot_be_compiled_falls_back_with_a_warning(monkeypatch):
    def refuse(function, **options):
        def call(*args):
            function(*args)  # half of it happens, and is undone
            raise RuntimeError("no compiler\nwas found")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    kernel, x = GaussianKernel(0.7), blocks()
    ours, theirs = (network(kernel, x, natural=True) for _ in range(2))
    rates = rates_for(kernel, natural=True)
    with pytest.warns(UserWarning, match="without acceleration, which is not possible here: no compiler$"):
        run(ours, x, rates, natural=True, acceleration="compile")
    run(theirs, x, rates, natural=True)
    assert largest_difference(ours, theirs) == 0


def test_a_cuda_graph_without_a_gpu_falls_back_with_a_warning():
    module = model(phases=[Phase(5)], acceleration="cuda_graph")
    plain = model(phases=[Phase(5)])
    fit(plain)
    has_gpu = torch.cuda.is_available()
    with nullcontext() if has_gpu else pytest.warns(UserWarning, match="a CUDA graph needs a CUDA device"):
        fit(module)
    assert_close(module.network.W, plain.network.W)


@pytest.mark.parametrize("n", [7, 64])
def test_a_recorded_update_is_replayed_with_new_inputs(monkeypatch, n):
    """Recording replaced by remembering the work: what is left is which tensors a replay reads and writes."""

    class Graph:
        def __init__(self, work):
            self.replay = work

    def record(work):
        for _ in range(3):
            work()  # as a real recording does, and what must not count
        return Graph(work)

    monkeypatch.setattr(updater, "_record", record)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kernel, x = GaussianKernel(0.7), blocks(updates=60, batch=8)
    ours, theirs = (network(kernel, x, True, n) for _ in range(2))
    rates = Rates(0.01, 0.01, 0.03)
    run(ours, x, rates, natural=True, acceleration="cuda_graph")
    run(theirs, x, rates, natural=True)
    assert largest_difference(ours, theirs) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 64])
def test_a_compiled_update_is_the_same_and_is_compiled_once(n):
    import torch._dynamo as dynamo

    kernel, x = GaussianKernel(0.7), blocks(updates=30, batch=8)
    ours, theirs = (network(kernel, x, True, n) for _ in range(2))
    fast, plain = Updater(ours, natural=True, acceleration="compile"), Updater(theirs, natural=True)
    dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!The update is made without)")
        for one in (fast, plain):
            for step in (0.03, 0.02, 0.01):  # phases that differ in their rates alone
                with one.block(x):
                    for place in range(len(x)):
                        one.update(place, Rates(step / 3, step / 3, step))
    assert fast.acceleration == "compile"
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert largest_difference(ours, theirs) < 1e-6


@pytest.mark.parametrize(("option", "value"), [("inverse", "fast"), ("acceleration", "jit")])
def test_unknown_options_are_refused(option, value):
    with pytest.raises(ValueError, match=f"`{option}` must be .* got '{value}'"):
        model(**{option: value})
