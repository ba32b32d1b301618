"""Updates in machine code: the same numbers as the plain rules, where they are used, and where their code is kept."""

import copy
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from helpers.kernels import KERNELS
from helpers.learning_cases import ScaledGaussian, blocks, network_for, rates_for
from helpers.plain_rules import largest_difference, learner_of, update
from helpers.processes import PATIENCE
from helpers.runs import fit, model
from ksm_lightning.kernels import GaussianKernel, LaplacianKernel, LinearKernel, PowerCosineKernel, make_kernel, scalar
from ksm_lightning.kernels.scalar import scalar_kernel
from ksm_lightning.learning import AdaptiveSchedule, Learner, Phase, Rates, TightSchedule, native, train
from ksm_lightning.learning.rules import NaturalRule
from ksm_lightning.learning.tight_rule import TightRule
from ksm_lightning.network import NETWORKS, NormalInit, TightNetwork

pytest.importorskip("numba", reason="machine code needs numba")

ROOT = Path(__file__).parents[2]

WITH_FORMULAS = [spec for spec in KERNELS if spec[0] != "offset_polynomial"]  # it needs the number of inputs


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("spec", WITH_FORMULAS, ids=str)
def test_scalar_formulas_equal_the_kernels(spec):
    """Also for zero and parallel vectors. The kernels themselves are compared with float64 references elsewhere."""
    kernel = make_kernel(spec[0], **spec[1])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    w = torch.cat([torch.randn(4, 3, generator=generator, dtype=torch.float64), torch.zeros(1, 3), 2 * x[:1], -x[:1]])
    x = torch.cat([x, torch.zeros(1, 3)])
    formula, self_formula, params = scalar_kernel(kernel, torch.finfo(x.dtype).eps)
    k, pullback = kernel.value_and_pullback(x, w)
    terms = kernel.self_terms(w)
    for i, wi in enumerate(w):
        w2 = float(wi @ wi)
        for s, xs in enumerate(x):
            near = float((xs - wi).square().sum()) if kernel.is_radial else float(xs @ wi)
            value, a, b = formula(near, float(xs @ xs), w2, params)
            assert value == pytest.approx(float(k[s, i]), rel=1e-12, abs=1e-12)
            chosen = torch.zeros_like(k)
            chosen[s, i] = 1
            assert_close(a * xs - b * wi, pullback(chosen)[i], rtol=1e-7, atol=1e-9)
        own, curvature, slope = self_formula(w2, params)
        assert own == pytest.approx(1.0 if terms.value is None else float(terms.value[i]), rel=1e-12)
        assert curvature == pytest.approx(float(kernel.curvature(w)[i]), rel=1e-12)
        assert_close(slope * wi, kernel.diag_gradient(w)[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("natural", [True, False], ids=["natural", "paper"])
@pytest.mark.parametrize("spec", WITH_FORMULAS, ids=str)
def test_a_thousand_native_updates_equal_the_plain_rules(spec, natural):
    """4 neurons for 5 inputs: more would be undetermined with a linear kernel."""
    kernel, x = make_kernel(spec[0], **spec[1]), blocks(updates=1000, batch=24)
    if spec[0] == "polynomial" and not natural:
        x = 0.4 * x  # the paper's rates are for similarities of about 1
    ours, torch_path, plain = (network_for(kernel, x, natural, 4) for _ in range(3))
    rates = rates_for(kernel, natural)
    if not natural:
        rates = rates.scaled(0.1)._replace(L=rates.L)
    learner = learner_of(ours, rates, natural, acceleration="native")
    learner.learn(x)
    assert learner._updates.is_native
    learner_of(torch_path, rates, natural).learn(x)
    for batch in x:
        update(plain, batch, rates, natural)
    assert largest_difference(ours, plain) < 1e-9
    assert largest_difference(torch_path, plain) < 1e-9


def tight_network(kernel, x, n=4, p=6) -> TightNetwork:
    torch.manual_seed(1)
    network = TightNetwork(kernel, x.shape[2], n, init=NormalInit(0.7), num_landmarks=p).double()
    Learner(network, TightSchedule(), chooses_ridge=True).start(x.flatten(0, 1))
    return network


SMOOTH = [
    spec
    for spec in WITH_FORMULAS
    if spec[0] not in ("linear", "laplacian") and spec[1] not in ({"order": 0}, {"alpha": 1})
]


@pytest.mark.parametrize("spec", SMOOTH, ids=str)
def test_native_updates_of_the_tight_bound_equal_the_torch_path(spec):
    """Which is compared with the plain rule elsewhere. At a cusp, K itself depends on the last digit of W; the linear
    kernel has fewer dimensions than landmarks here."""
    kernel, x, rates = make_kernel(spec[0], **spec[1]), blocks(updates=200, batch=40), Rates(0.05, 0.2, 0.1)
    ours = tight_network(kernel, x)
    theirs, before = copy.deepcopy(ours), copy.deepcopy(ours)
    learner, plain = (learner_of(net, rates, True, acceleration=m) for net, m in ((ours, "native"), (theirs, "none")))
    for part, first in ((x[:70], 0), (x[70:], 70)):  # averages continue in the next block
        for each in (learner, plain):
            each.learn(part, first)
    assert learner._updates.is_native
    assert largest_difference(ours, theirs) < 1e-9
    assert largest_difference(ours, before) > 1e-2
    state, other = learner.rule.state_dict(), plain.rule.state_dict()
    assert state["steps"] == other["steps"] == 200
    assert_close(state["square"], other["square"], rtol=1e-6, atol=1e-16)


def test_one_native_update_of_the_tight_bound_with_a_cusp_equals_the_torch_path():
    for kernel in (LaplacianKernel(0.9), LinearKernel()):
        x = blocks(updates=1, batch=40)
        ours = tight_network(kernel, x, 3, 4)
        theirs = copy.deepcopy(ours)
        learner_of(ours, Rates(0.05, 0.2, 0.1), True, acceleration="native").learn(x)
        learner_of(theirs, Rates(0.05, 0.2, 0.1), True).learn(x)
        assert largest_difference(ours, theirs) < 1e-7


@pytest.mark.parametrize("kernel", [GaussianKernel(0.7), PowerCosineKernel(3)], ids=str)
def test_float32_of_the_tight_bound_is_as_precise_as_the_torch_path(kernel):
    x, rates = blocks(updates=50, batch=40), Rates(0.05, 0.2, 0.1)
    exact = tight_network(kernel, x)
    single, plain = (copy.deepcopy(exact).float() for _ in range(2))
    learner_of(exact, rates, True).learn(x)
    learner_of(single, rates, True, acceleration="native").learn(x.float())
    learner_of(plain, rates, True).learn(x.float())
    assert largest_difference(single.double(), exact) < max(1e-4, 3 * largest_difference(plain.double(), exact))


@pytest.mark.parametrize("kernel", [GaussianKernel(0.7), PowerCosineKernel(3)], ids=str)
def test_float32_is_as_precise_as_the_torch_path(kernel):
    x = blocks(updates=300)
    exact = network_for(kernel, x, True)
    single, plain = (copy.deepcopy(exact).float() for _ in range(2))
    rates = rates_for(kernel, True)
    learner_of(exact, rates, True).learn(x)
    learner_of(single, rates, True, acceleration="native").learn(x.float())
    learner_of(plain, rates, True).learn(x.float())
    assert single.W.dtype == torch.float32
    assert largest_difference(single.double(), exact) < max(1e-5, 2 * largest_difference(plain.double(), exact))


def test_blocks_of_any_length_and_observers_do_not_change_a_bit():
    kernel, x = GaussianKernel(0.7), blocks(updates=60).float()
    networks = [network_for(kernel, x.double(), True).float() for _ in range(3)]
    whole, parts, observed = (
        Learner(net, AdaptiveSchedule(60), stage="learning", acceleration="native") for net in networks
    )
    whole.learn(x)
    for first, last in ((0, 7), (7, 8), (8, 40), (40, 60)):
        parts.learn(x[first:last], first)
    seen = []
    observed.learn(x, observe=lambda update: update % 7 == 3, on_observation=lambda *args: seen.append(args))
    for other in networks[1:]:
        for ours, theirs in zip(networks[0].parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert [update for update, _, _ in seen] == [3, 10, 17, 24, 31, 38, 45, 52, 59]
    assert seen[2][2] == pytest.approx(whole.rates(17, 24))


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_observations_are_those_of_the_torch_path(bound):
    kernel, x = GaussianKernel(0.7), blocks(updates=20)
    found = {}
    for method in ("native", "none"):
        network = network_for(kernel, x, True) if bound == "paper" else tight_network(kernel, x)
        learner_of(network, rates_for(kernel, True), True, acceleration=method).learn(
            x, observe=lambda update: update in (5, 19),
            on_observation=lambda update, seen, _, method=method: found.update({(method, update): seen}),
        )  # fmt: skip
    for number in (5, 19):
        ours, theirs = found["native", number], found["none", number]
        assert_close(ours.k, theirs.k, rtol=1e-10, atol=1e-12)
        assert_close(ours.y, theirs.y, rtol=1e-9, atol=1e-11)
        assert_close(torch.stack(ours.energy), torch.stack(theirs.energy), rtol=1e-9, atol=1e-11)
        assert_close(torch.stack(ours.gradient_norms), torch.stack(theirs.gradient_norms), rtol=1e-8, atol=1e-11)
        assert_close(ours.smallest_gain, theirs.smallest_gain, rtol=1e-9, atol=1e-11)
        assert_close(ours.condition, theirs.condition)


def test_a_failed_factorisation_is_reported():
    kernel, x = GaussianKernel(0.7), blocks(updates=3)
    network = network_for(kernel, x, True)
    with torch.no_grad():
        network.L.copy_(-torch.eye(7))
    learner = learner_of(network, Rates(0.0, 0.0, 0.01), True, acceleration="native")
    learner.learn(x)
    assert "the factorisation of L + ridge I" in learner.not_finite()


def test_a_weight_that_is_not_finite_stays_not_finite():
    """The compiler may reorder sums, but not assume that all numbers are finite."""
    kernel, x = GaussianKernel(0.7), blocks(updates=3)
    x[1, 0, 0] = torch.nan
    network = network_for(kernel, x[2:], True)
    learner = learner_of(network, rates_for(kernel, True), True, acceleration="native")
    learner.learn(x)
    assert learner.not_finite()


def test_the_kernel_of_a_phase_is_used():
    phases = [Phase(30, kernel_params={"alpha": 1}), Phase(30, 0.001, 0.001, 0.01)]
    options = {"kernel": "power_cosine", "kernel_params": {"alpha": 3}, "phases": phases}
    ours, theirs = (model(**options, acceleration=method) for method in ("native", "none"))
    fit(ours)
    fit(theirs)
    assert_close(ours.network.W, theirs.network.W, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- choice


def is_native(kernel, n=7, batch=24, **options) -> bool:
    x = blocks(updates=2, batch=batch)
    network = network_for(kernel, x, True, n)
    learner = learner_of(network, Rates(0.001, 0.001, 0.001), True, **({"acceleration": "auto"} | options))
    learner.learn(x)
    return learner._updates.is_native


class Wider(GaussianKernel):
    """A user's kernel that inherits from a built-in one."""

    def profile(self, t):
        return super().profile(t / 2)


def test_small_networks_with_built_in_kernels_are_native():
    assert is_native(GaussianKernel(0.7))
    assert is_native(LinearKernel(), 4)
    assert not is_native(GaussianKernel(0.7), 200)
    assert is_native(GaussianKernel(0.7), 200, acceleration="native")
    assert not is_native(GaussianKernel(0.7), acceleration="none")
    assert not is_native(GaussianKernel(0.7), inverse="tracked")
    assert not is_native(ScaledGaussian())
    x = blocks(updates=2)
    tight = learner_of(tight_network(GaussianKernel(0.7), x), Rates(0.01, 0.1, 0.1), True, acceleration="auto")
    tight.learn(x)
    assert tight._updates.is_native
    assert not is_native(Wider(0.7))


@pytest.mark.parametrize(("sigma", "scale"), [(1e-11, 1e-11), (1e11, 1e11), (1e25, 1.0)])
def test_widths_whose_squares_are_out_of_the_range_of_the_weights_are_left_to_torch(sigma, scale):
    """Regression test: 1 / sigma^2 was 0 in float32, and the weights became NaN."""
    x = scale * torch.randn(40, 16, 3, generator=torch.Generator().manual_seed(0))
    network = train(LaplacianKernel(sigma), x.flatten(0, 1), 4, AdaptiveSchedule(20), batch_size=16)
    assert all(bool(weights.isfinite().all()) for weights in network.parameters())
    F = LaplacianKernel(sigma)(x[0].double(), x[0].double())
    y = network(x[0]).double()
    assert float((F - y @ y.mT).norm() / F.norm()) < 0.9


@pytest.mark.parametrize("bound", ["paper", "tight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_last_digits_do_not_depend_on_where_arrays_are_in_memory(bound, dtype):
    """Regression test: one in ten runs of the tight bound rounded otherwise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 16, 2, generator=generator, dtype=dtype)
    if bound == "tight":
        first, rule = tight_network(GaussianKernel(0.3), x, 12, 15).to(dtype), TightRule
    else:
        first, rule = network_for(GaussianKernel(0.3), x, True, 12).to(dtype), NaturalRule
    sizes, kept, found = np.tile([0.2, 0.3, 0.3], (40, 1)), [], set()
    for run in range(300):
        network = copy.deepcopy(first)
        updates = native.NativeUpdates(network, rule())
        kept = [*kept[run % 3 :][:5], np.empty(1 + 997 * run % 5000)]  # moves what is allocated next
        split = 1 + run % 39
        updates.run(x[:split], sizes[:split])
        updates.run(x[split:], sizes[split:])
        found.add(b"".join(weights.detach().numpy().tobytes() for weights in network.parameters()))
    assert len(found) == 1


@pytest.mark.parametrize(("dtype", "lowest", "rtol"), [(np.float32, -87, 2e-7), (np.float64, -708, 4e-16)])
def test_the_exponential_of_machine_code_is_exact_to_the_last_digits(dtype, lowest, rtol):
    import numba

    from ksm_lightning.learning import native_exponential  # noqa: F401

    @numba.njit(fastmath=native._FAST, error_model="numpy")
    def compute(x, y):
        for i in range(len(x)):
            y[i] = scalar.exponential(x[i])

    x = np.random.default_rng(0).uniform(lowest, -lowest, 100_000).astype(dtype)
    x = np.concatenate([x, np.array([0, -1e-30, 1e-30], dtype)])
    y = np.empty_like(x)
    compute(x, y)
    np.testing.assert_allclose(y, np.exp(x.astype(np.longdouble)), rtol=rtol)
    ends, y = np.array([np.nan, np.inf, -np.inf, 10 * lowest, -10 * lowest], dtype), np.empty(5, dtype)
    compute(ends, y)
    np.testing.assert_array_equal(y, np.array([np.nan, np.inf, 0, 0, np.inf], dtype))


def test_without_numba_torch_operations_are_used(monkeypatch, caplog):
    kernel, x = GaussianKernel(0.7), blocks(updates=5)
    ours, theirs = (network_for(kernel, x, True) for _ in range(2))
    learner_of(ours, rates_for(kernel, True), True, acceleration="auto").learn(x)
    native.is_available.cache_clear()
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG, native.__name__):
        patch.setattr(native, "find_spec", lambda name: None)
        learner = learner_of(theirs, rates_for(kernel, True), True, acceleration="auto")
        learner.learn(x)
        assert not learner._updates.is_native
        assert caplog.messages == ["Small networks on the CPU learn by torch operations: no numba."]
    native.is_available.cache_clear()
    assert largest_difference(ours, theirs) < 1e-12


def test_signals_are_looked_at_every_200_updates():
    kernel, x = GaussianKernel(0.7), blocks(updates=2500, batch=4)
    looks = []
    learner = learner_of(network_for(kernel, x, True), rates_for(kernel, True), True, acceleration="native")
    assert learner.learn(x, should_stop=lambda: looks.append(None) or len(looks) == 2) == 400


# ---------------------------------------------------------------------- short trainings


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """A process that has compiled nothing, on a machine without compiled code; returns its folder for such code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_is_ready", {})
    monkeypatch.setattr(native, "_updates_without", Counter())
    monkeypatch.setattr(native, "PATIENCE", 1000)
    return next(native._folders())


def is_worth(updates, *, p=16, kernel=None, bound="paper", dtype=torch.float32):
    kernel = kernel or GaussianKernel(0.5)
    network = NETWORKS[bound](kernel, 2, 16, num_landmarks=p if bound == "tight" else None).to(dtype)
    return native.is_worth_compiling(network, 64, updates)


@pytest.mark.usefixtures("cold")
def test_a_process_compiles_when_torch_operations_have_taken_as_long():
    assert [is_worth(400) for _ in range(4)] == [False, False, True, True]
    assert not is_worth(400, bound="tight"), "other code was counted with it"
    assert not is_worth(400, dtype=torch.float64)
    assert is_worth(1000, bound="tight")


def test_compiled_code_on_disk_is_used_by_the_next_process(cold):
    assert not is_worth(10)
    cold.mkdir(parents=True)
    [code] = native._is_ready
    (cold / code).touch()
    assert not is_worth(10), "the trainings of a process would differ"
    native._is_ready.clear()
    assert is_worth(10)
    assert not is_worth(10, bound="tight")


@pytest.mark.usefixtures("cold")
def test_networks_that_never_run_in_machine_code_are_not_counted():
    class Own(GaussianKernel):
        pass

    assert is_worth(10, kernel=Own(0.5))
    assert is_worth(10, p=native.MOST_LANDMARKS + 1, bound="tight")
    assert not native._updates_without


def test_a_short_training_does_not_even_import_numba(tmp_path):
    code = (
        "import sys, torch\nfrom ksm_lightning.sklearn import KSMTransformer\n"
        "KSMTransformer(5, random_state=0).fit(torch.rand(100, 2).numpy()).transform([[0.0, 0.0]])\n"
        "print('numba' in sys.modules)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT, env=environment
    )
    assert done.stdout.strip() == "False", done.stderr


# ---------------------------------------------------------------------- compiled code on disk

TRAIN = """
import hashlib, sys, torch
from ksm_lightning import AdaptiveSchedule, GaussianKernel
from ksm_lightning.learning import native, train
native.PATIENCE = 0
x, digest = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0)), hashlib.sha256()
network = train(GaussianKernel(0.5), x, 16, AdaptiveSchedule(300), seed=0, batch_size=64)
for weights in network.parameters():
    digest.update(weights.detach().numpy().tobytes())
[compiled] = native.COMPILED
print(sum(compiled.stats.cache_hits.values()), compiled.stats.cache_path, digest.hexdigest(), sep="|")
"""


def run_training(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def test_compiled_code_is_kept_in_the_users_folder_and_gives_the_same_bits(tmp_path):
    """Regression test: code from disk called another version of a function than code that was just compiled."""
    first = run_training(XDG_CACHE_HOME=str(tmp_path))
    second = run_training(XDG_CACHE_HOME=str(tmp_path))
    assert (first[0], second[0]) == ("0", "1")
    assert Path(first[1]).is_relative_to(tmp_path / "ksm_lightning")
    assert first[1:] == second[1:]


def test_a_home_that_cannot_be_written_works(tmp_path):
    """A file in place of the folder: root may write everywhere."""
    (tmp_path / "home").write_text("")
    places = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home" / "x"), "TMPDIR": str(tmp_path)}
    found = run_training(**places)
    assert Path(found[1]).is_relative_to(tmp_path / f"ksm_lightning-{os.getuid()}")


def test_a_folder_that_others_can_write_is_not_used(tmp_path, monkeypatch):
    """Compiled code is run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    home, temporary = native._folders()
    assert native._is_usable(home)
    home.chmod(0o777)
    assert not native._is_usable(home)
    assert native._is_usable(temporary)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not native._is_usable(temporary)


def test_changed_formulas_have_a_folder_of_their_own(monkeypatch, tmp_path):
    before = next(native._folders())
    changed = tmp_path / "scalar.py"
    changed.write_text(Path(native.scalar.__file__).read_text() + "\n")
    monkeypatch.setattr(native.scalar, "__file__", str(changed))
    assert next(native._folders()).name != before.name
