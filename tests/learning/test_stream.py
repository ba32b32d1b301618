"""Learning from a stream: statistics of the reservoir, restarts, step sizes and limit cases."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.testing import assert_close

from ksm_lightning.kernels import GaussianKernel, LinearKernel, PowerCosineKernel, make_kernel
from ksm_lightning.learning import AdaptiveSchedule, Stream, TightSchedule, fit_network, native, train
from ksm_lightning.learning.exact import similarity_moment, solve_inner
from ksm_lightning.learning.reservoir import Reservoir
from ksm_lightning.learning.stream_schedule import StreamSchedule, TightStreamSchedule
from ksm_lightning.network.readout import READOUTS, read_out


def numbered(first, last) -> torch.Tensor:
    return torch.arange(first, last, dtype=torch.float64)[:, None]


# ---------------------------------------------------------------------- the reservoir


def test_all_rows_are_kept_in_order_until_it_is_full():
    reservoir = Reservoir(5)
    for first, last in ((0, 2), (2, 3), (3, 5)):
        reservoir.add(numbered(first, last))
        assert reservoir.rows[:, 0].tolist() == list(range(last))
        assert reservoir.seen == last


@pytest.mark.parametrize("batch", [7, 50])
def test_every_row_is_kept_with_the_same_probability(batch):
    """Ten of 50 rows, 2,000 times: each is kept 400 times on average, with a standard deviation of 18."""
    counts = np.zeros(50)
    for seed in range(2000):
        reservoir = Reservoir(10, seed)
        for first in range(0, 50, batch):
            reservoir.add(numbered(first, min(first + batch, 50)))
        kept = reservoir.rows[:, 0].numpy().astype(int)
        assert len(np.unique(kept)) == 10  # without repetition
        counts[kept] += 1
    deviation = np.sqrt(2000 * 0.2 * 0.8)
    # The sum of 50 squares has mean 40 (10 of 50 are drawn without repetition) and standard deviation 9.
    assert ((counts - 400) ** 2).sum() / deviation**2 < 90
    assert np.abs(counts - 400).max() < 4.5 * deviation


def test_kept_rows_do_not_depend_on_the_batch_size():
    """The same seed keeps the same rows for every split into batches."""
    kept = []
    for batch in (1, 3, 100):
        reservoir = Reservoir(10, seed=4)
        for part in torch.split(numbered(0, 100), batch):
            reservoir.add(part)
        kept.append(reservoir.rows.clone())
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


def test_it_never_exceeds_its_capacity_and_copies_its_rows():
    x = numbered(0, 30)
    reservoir = Reservoir(8)
    reservoir.add(x[:8])
    reservoir.add(x[8:])
    assert len(reservoir.rows) == 8
    assert torch.equal(x, numbered(0, 30))  # the argument is not changed
    x.zero_()
    assert reservoir.rows.sum() > 0
    assert reservoir.seen == 30


def test_seeds_of_any_size_are_accepted():
    reservoirs = [Reservoir(3, seed) for seed in (5, 5 + 2**32)]
    for reservoir in reservoirs:
        reservoir.add(numbered(0, 40))
    assert torch.equal(reservoirs[0].rows, reservoirs[1].rows)


# ---------------------------------------------------------------------- the stream


def points(count, seed=0, features=2) -> torch.Tensor:
    return torch.tensor(np.random.RandomState(seed).randn(count, features))


def test_it_restarts_at_doublings_and_is_revised_in_between(monkeypatch):
    restarted, revised = [], []
    restart, revise = Stream._restart, Stream._revise

    def spy_restart(self, like):
        restarted.append(self.seen)
        restart(self, like)

    def spy_revise(self, learner):
        revised.append(self.seen)
        revise(self, learner)

    monkeypatch.setattr(Stream, "_restart", spy_restart)
    monkeypatch.setattr(Stream, "_revise", spy_revise)
    stream = Stream(GaussianKernel(), 3)
    for row in torch.split(points(4200), 1)[:600]:
        stream.learn(row)
    assert restarted == [4, 8, 16, 32, 64, 128, 256, 512]  # three landmarks are enough for three samples
    # The powers of 1.2, rounded up, without those at which it restarts.
    stages = sorted({math.ceil(1.2**k) for k in range(8, 36)} - set(restarted))
    assert stages[:6] == [5, 6, 7, 9, 11, 13]
    assert revised == stages
    revised.clear()
    stream.learn(points(3600))
    assert restarted[-1] == 512  # 1,024 samples are more than the reservoir holds
    assert len(revised) == 10  # 1.2^36 is 709, 1.2^45 is 3,657, and 1.2^46 is 4,388
    assert stream.seen == 4200


@pytest.mark.parametrize("bound", ["paper", "tight"])
@pytest.mark.parametrize("kernel", [GaussianKernel(0.3), PowerCosineKernel(2)], ids=["gaussian", "power cosine"])
def test_every_sample_is_represented_while_there_are_free_landmarks(bound, kernel):
    """Row by row, the samples since the last restart had features of 0: the last seven of fifteen."""
    x = points(16, features=20)
    stream = Stream(kernel, 16, bound=bound)
    for count in range(1, 17):
        stream.learn(x[count - 1 : count])
        F, y = kernel(x[:count], x[:count]), stream.features("nystroem")(x[:count])
        assert (y @ y.mT - F).norm() < 1e-6 * F.norm()
        own = stream.settled()(x[:count])
        assert (own @ own.mT - F).norm() < (1e-3 if bound == "tight" else 0.5) * F.norm()
        assert stream.network.num_landmarks == count
    assert stream.updates == 0


def test_a_sample_seen_before_needs_no_landmark():
    x = points(3).repeat(400, 1)
    stream = Stream(GaussianKernel(), 5)
    stream.learn(x)
    stream.learn(-0.0 * x[:2])  # 0 and -0 are the same sample
    stream.learn(0.0 * x[:2])
    assert (stream.seen, stream.network.num_landmarks) == (1204, 4)


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_rare_samples_are_landmarks_of_the_first_restart(bound):
    """A thousand equal samples have pushed them out of the reservoir."""
    stream = Stream(GaussianKernel(0.3), 4, bound=bound, seed=1)
    rare, common = points(3), torch.full((4000, 2), 9.0).double()
    stream.learn(torch.cat([rare, common]))
    assert stream.network.num_landmarks == 4
    stream.learn(torch.full((1, 2), -9.0).double())  # the fifth different sample
    assert len(stream.reservoir.rows) == 1000
    # Four landmarks for five samples: one is at the common ones, and two of the others share a mean.
    assert (torch.cdist(stream.network.W.detach(), common[:1]) > 5).sum() == 3
    assert (stream.features("nystroem")(rare).square().sum(1) > 0.5).any()


def test_with_fewer_samples_than_neurons_the_others_are_silent():
    """The response to a sample far away is close to 0, not amplified rounding error."""
    for kernel, n in ((GaussianKernel(), 6), (LinearKernel(), 2)):
        stream = Stream(kernel, n)
        x = torch.tensor([[1.0, 0.0]]).double()
        stream.learn(x)
        y = stream.settled()(torch.cat([x, torch.tensor([[0.0, 9.0]]).double()]))
        assert (y.abs() > 1e-6).sum(1).tolist() == [1, 0]
        assert float(y[0].square().sum()) == pytest.approx(1, abs=0.02)


def test_earlier_samples_are_not_forgotten():
    """Two clusters, one after the other: the first is still represented after the second. With an L that follows only
    the latest samples, the error was 38; with half the neurons for each cluster, 0.2 is possible."""
    first, second = points(1500, seed=1), points(1500, seed=2) + 20
    stream = Stream(GaussianKernel(), 24)
    for x in (first, second):
        for row in torch.split(x, 1):
            stream.learn(row)
    for x in (first[:300], second[:300]):
        F, y = stream.kernel(x, x), stream.settled()(x)
        assert (F - y @ y.mT).norm() < 0.4 * F.norm()


def test_between_restarts_every_batch_is_one_update():
    stream = Stream(GaussianKernel(), 3, batch_size=10)
    stream.learn(points(10))
    assert (stream.seen, stream.updates) == (10, 0)
    before = {name: value.clone() for name, value in stream.network.state_dict().items()}
    network = stream.network
    stream.learn(points(5, seed=1))
    assert (stream.seen, stream.updates) == (15, 1)
    assert stream.network is network
    assert all(not torch.equal(value, before[name]) for name, value in network.state_dict().items())
    stream.learn(points(25, seed=2))  # 25, 35 and 40: the first and the second cross a power of 2
    assert (stream.seen, stream.updates) == (40, 2)


def test_steps_decay_with_the_number_of_samples():
    """As samples^-0.75, in units of four samples per neuron."""
    for schedule, whole in ((StreamSchedule(), AdaptiveSchedule()), (TightStreamSchedule(), TightSchedule())):
        first = whole.rates(0, 5, 1)
        assert schedule.rates(0, 5, 1) == first
        for seen, age in ((20, 2), (60, 4), (20 * (10**4 - 1), 10**4)):
            expected = tuple(first.scaled(age**-0.75))
            assert tuple(schedule.rates(seen, 5, 1)) == pytest.approx(expected, rel=1e-12)
    schedule = StreamSchedule()
    assert schedule.rates(20, 5, 64).L > schedule.rates(20, 5, 1).L  # a batch carries more information than a sample


def test_one_neuron_learns_the_direction_of_a_line():
    """A linear kernel in one dimension: y = c x, and the best c is 1."""
    stream = Stream(LinearKernel(), 1)
    for row in torch.split(points(400, features=1), 1):
        stream.learn(row)
    x = torch.tensor([[1.0], [2.0]]).double()
    y = read_out(stream.network, "nystroem", x)
    assert_close(y @ y.mT, x @ x.mT)
    y = stream.network(x)
    assert float(y[0, 0] ** 2) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("kernel", [GaussianKernel(), LinearKernel()])
@pytest.mark.parametrize("batch", [1, 64])
def test_identical_samples_are_learned(kernel, batch):
    x = torch.tensor([[1.0, 2.0, 2.0]]).double()
    stream = Stream(kernel, 4)
    for _ in range(200):
        stream.learn(x.expand(batch, 3))
    assert all(value.isfinite().all() for value in stream.network.parameters())
    y = read_out(stream.network, "nystroem", x)
    assert float(y @ y.mT) == pytest.approx(float(kernel(x, x)), rel=1e-3)
    assert torch.unique(stream.reservoir.rows, dim=0).shape == (1, 3)


def test_a_stream_can_start_with_a_zero():
    """Afterwards three landmarks in two dimensions represent the linear kernel exactly."""
    x = points(40)
    stream = Stream(LinearKernel(), 3)
    stream.learn(torch.zeros(1, x.shape[1]).double())
    stream.learn(x)
    assert stream.seen == 41
    y = read_out(stream.network, "nystroem", x)
    assert_close(y @ y.mT, x @ x.mT)


def test_a_stream_after_training_starts_with_small_steps():
    x = points(300)
    network = train(GaussianKernel(), x, 6, AdaptiveSchedule(100), batch_size=32)
    stream = Stream.after(network, x, 100, batch_size=32)
    assert torch.equal(stream.network.W, network.W)
    assert (stream.seen, stream.updates, stream.reservoir.seen) == (300, 100, 300)
    assert torch.equal(stream.reservoir.rows, x)
    assert stream._learner.rates(stream.seen, 32).L < 0.5 * stream._learner.rates(0, 32).L
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    stream.learn(points(10, seed=3))  # it continues and does not restart
    assert 0 < (stream.network.W - network.W).norm(dim=1).max() < 0.2
    for name, value in network.state_dict().items():  # the argument is not changed
        assert torch.equal(value, weights[name])


def test_a_network_of_few_samples_gets_more_landmarks(monkeypatch):
    """From ten samples per landmark on, the stream continues without a restart."""
    restarted, restart = [], Stream._restart

    def spy(self, like):
        restarted.append(self.seen)
        restart(self, like)

    monkeypatch.setattr(Stream, "_restart", spy)
    x = points(200)
    few = fit_network(GaussianKernel(), x[:5], 10, 50)
    stream = Stream.after(few, x[:5], 0, num_neurons=10, num_landmarks=10)
    for row in torch.split(x[5:10], 1):
        stream.learn(row)
    assert torch.equal(stream.network.W, x[:10])
    for row in torch.split(x[10:], 1):
        stream.learn(row)
    assert restarted == [11, 16, 32, 64]
    assert stream.network.num_landmarks == 10


def test_a_large_sample_is_thinned_to_the_capacity():
    x = points(1500)
    network = train(GaussianKernel(), x, 4, AdaptiveSchedule(5))
    stream = Stream.after(network, x, 5)
    assert len(stream.reservoir.rows) == stream.reservoir.capacity == 1000
    assert (stream.seen, stream.reservoir.seen) == (1500, 1500)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
@pytest.mark.parametrize(("n", "has_numba"), [(5, True), (16, True), (16, False)])
def test_a_copy_continues_bitwise(monkeypatch, again, n, has_numba):
    """Without numba, 16 neurons and one sample at a time, the inverse is tracked, and must be copied."""
    monkeypatch.setattr(native, "is_available", lambda: has_numba)
    x = points(150)
    stream = Stream(GaussianKernel(), n, seed=2)
    for row in torch.split(x[:100], 1):
        stream.learn(row)
    assert bool(stream._learner.responses.state_dict()) == (not has_numba)
    copied = again(stream)
    for either in (stream, copied):
        for row in torch.split(x[100:], 1):
            either.learn(row)
    for name, value in stream.network.state_dict().items():
        assert torch.equal(copied.network.state_dict()[name], value), name
    assert torch.equal(copied.reservoir.rows, stream.reservoir.rows)


@pytest.mark.parametrize("bound", ["paper", "tight"])
@pytest.mark.parametrize("size", [1, 7])
def test_many_batches_at_once_equal_one_batch_at_a_time(bound, size):
    """Samples are learned in stretches in which nothing is revised; the stretches do not change a bit."""
    x = points(1500)
    at_once, apart = (Stream(GaussianKernel(), 6, bound=bound, batch_size=size, seed=1) for _ in range(2))
    at_once.learn(x)
    for batch in torch.split(x, size):
        apart.learn(batch)
    assert (at_once.seen, at_once.updates) == (apart.seen, apart.updates) == (1500, apart.updates)
    assert torch.equal(at_once.reservoir.rows, apart.reservoir.rows)
    for name, value in at_once.network.state_dict().items():
        assert torch.equal(apart.network.state_dict()[name], value), name


def test_the_seed_determines_the_result():
    def landmarks(seed):
        stream = Stream(GaussianKernel(), 4, seed=seed)
        stream.learn(points(100))
        return stream.network.W.detach()

    torch.manual_seed(8)
    first = landmarks(1)
    torch.manual_seed(9)
    assert torch.equal(landmarks(1), first)
    assert not torch.allclose(landmarks(2), first, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_network_has_the_dtype_of_the_samples(dtype):
    stream = Stream(GaussianKernel(), 4)
    stream.learn(points(100).to(dtype))
    assert {value.dtype for value in stream.network.parameters()} == {dtype}


def test_without_a_sample_there_is_no_network():
    with pytest.raises(ValueError, match="No sample was seen yet: call `learn` with samples first"):
        _ = Stream(GaussianKernel(), 4).network


# ---------------------------------------------------------------------- results


def digits() -> torch.Tensor:
    return torch.tensor(load_digits().data / 16)[torch.randperm(1797, generator=torch.Generator().manual_seed(0))]


def error(network, x) -> float:
    F, y = network.kernel(x, x), network(x)
    return float((F - y @ y.mT).norm() / F.norm())


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    ("kernel", "bound"),
    [
        (GaussianKernel(3.0), 0.05),
        (LinearKernel(), 0.04),
        (make_kernel("arc_cosine", order=1), 0.12),
        (make_kernel("power_cosine", alpha=3), 0.1),
    ],
    ids=["gaussian", "linear", "arc-cosine", "power-cosine"],
)
def test_continuing_with_the_same_data_keeps_the_error(kernel, bound, batch):
    """Wide kernels, whose exact L has tiny eigenvalues: a stream that continued with this L had errors above 1 within
    three updates. The trained networks have 0.027, 0.020, 0.076 and 0.058."""
    x = digits()
    network = train(kernel, x[:1400], 32, AdaptiveSchedule(1000), seed=1)
    stream = Stream.after(network, x[:1400], 1000)
    for part in torch.split(x[:700], batch):
        stream.learn(part)
    assert error(network, x) < bound
    assert error(stream.settled(), x) < bound


def test_the_error_is_low_after_every_batch():
    x = digits()
    stream, errors = Stream(GaussianKernel(3.0), 32), []
    for part in torch.split(x[:1400], 64):
        stream.learn(part)
        errors.append(error(stream.settled(), x))
    assert max(errors[3:]) < 0.05


@pytest.mark.parametrize("name", ["linear", "power_cosine", "arc_cosine", "polynomial"])
def test_a_stream_that_starts_with_zeros_learns_later_samples(name):
    kernel, x = make_kernel(name), digits()
    stream = Stream(kernel, 12)
    stream.learn(torch.zeros(1100, 64).double())  # more than the reservoir holds
    assert not stream.network.W.any()
    for part in torch.split(x, 64):
        stream.learn(part)
    assert error(stream.settled(), x) < 0.5


def test_settled_has_the_exact_L_and_does_not_change_the_stream():
    stream = Stream(GaussianKernel(), 8)
    stream.learn(points(300))
    before = {name: value.clone() for name, value in stream.network.state_dict().items()}
    settled = stream.settled()
    for name, value in stream.network.state_dict().items():
        assert torch.equal(value, before[name])
    B = similarity_moment(settled.kernel, [points(300)], settled.W).of_drive(settled.q)
    exact = solve_inner(B, settled.kernel.diag(settled.W), settled.q, settled.ridge).L
    assert_close(settled.L.detach(), exact)


def test_a_sample_that_is_too_large_is_refused_and_does_not_change_the_stream():
    stream = Stream(GaussianKernel(), 4)
    stream.learn(points(50))
    rows = stream.reservoir.rows.clone()
    bad = torch.cat([points(2), torch.full((1, 2), 1e200, dtype=torch.float64)])
    with pytest.raises(ValueError, match=r"Sample 2 has values of up to 1\.0e\+200, whose powers are out of the range"):
        stream.learn(bad)
    assert stream.seen == 50
    assert torch.equal(stream.reservoir.rows, rows)


# ---------------------------------------------------------------------- rare values


def with_rare_values(count: int, seed: int) -> torch.Tensor:
    """Normal columns, and ten that are far from 0 in one of 2,000 samples each."""
    random = np.random.RandomState(seed)
    rare = 8.0 * (random.rand(count, 10) < 1 / 2000)
    return torch.tensor(np.hstack([random.randn(count, 3), rare]))


@pytest.mark.parametrize("bound", ["paper", "tight"])
@pytest.mark.parametrize("readout", READOUTS)
def test_no_response_is_longer_than_allowed_where_a_rare_value_was_forgotten(bound, readout):
    """A landmark on a rare value that has left the reservoir had responses of any size, and errors of up to 1,000."""
    kernel, x = GaussianKernel(2.0), with_rare_values(12_000, seed=0)
    stream = Stream(kernel, 24, bound=bound, seed=3)
    stream.learn(x)
    forgotten = x[(x[:, 3:] > 4).any(1) & ~(x[:, None] == stream.reservoir.rows).all(2).any(1)]
    with torch.no_grad():
        stream.network.W[:4] = forgotten[:4]
    y = stream.features(readout)(torch.cat([x, stream.network.W.detach()]))
    assert y.square().sum(1).max() <= 4 * (1 + 1e-6)
    F, y = kernel(x[:2000], x[:2000]), y[:2000]
    assert (F - y @ y.mT).norm() < 0.3 * F.norm()


# ---------------------------------------------------------------------- streams that change


def error_at(stream: Stream, mean: float, readout: str = "nystroem") -> float:
    x = points(1000, seed=77) + torch.tensor([mean, 0.0])
    F, y = stream.kernel(x, x), stream.features(readout)(x)
    return float((F - y @ y.mT).norm() / F.norm())


def moved(stream: Stream, means: Any, seed: int = 5) -> Stream:
    random = np.random.RandomState(seed)
    for mean in means:
        stream.learn(torch.tensor(random.randn(64, 2) + np.array([mean, 0.0])))
    return stream


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_a_stream_with_a_half_life_follows_a_moving_mean(bound):
    """The mean moves by 10 standard deviations in 300 batches. A fit to the last 2,000 samples has an error of .05."""
    means = np.linspace(0, 10, 300)
    follows = moved(Stream(GaussianKernel(), 16, bound=bound, half_life=500), means)
    remembers = moved(Stream(GaussianKernel(), 16, bound=bound), means)
    assert error_at(follows, 10) < 0.1
    assert error_at(remembers, 10) > 0.3
    assert error_at(follows, 0) > 0.9  # and it has forgotten where the stream began


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_a_stream_with_a_half_life_follows_a_jump(bound):
    stream = moved(Stream(GaussianKernel(), 16, bound=bound, half_life=500), [0] * 60)
    assert error_at(stream, 0) < 0.1
    moved(stream, [8] * 20, seed=6)
    assert error_at(stream, 8) < 0.15


def test_half_of_the_reservoir_is_replaced_in_a_half_life():
    kept = []
    for seed in range(20):
        reservoir = Reservoir(400, seed, half_life=1000)
        reservoir.add(numbered(0, 10_000))
        before = set(reservoir.rows.flatten().tolist())
        reservoir.add(numbered(10_000, 11_000))
        kept.append(len(before & set(reservoir.rows.flatten().tolist())) / 400)
    assert np.mean(kept) == pytest.approx(0.5, abs=0.02)


def test_a_young_reservoir_with_a_half_life_is_uniform():
    first, second = Reservoir(50, 4, half_life=10_000), Reservoir(50, 4)
    for reservoir in (first, second):
        reservoir.add(numbered(0, 14_000))
    assert torch.equal(first.rows, second.rows)


def test_a_reservoir_is_no_larger_than_its_memory():
    assert Reservoir(1000, half_life=100).capacity == 144  # 100 / ln 2


def test_steps_stop_to_decrease_at_the_age_of_the_memory():
    forgets, remembers = StreamSchedule(half_life=1000), StreamSchedule()
    assert forgets.rates(1000, 8, 64) == remembers.rates(1000, 8, 64)
    assert forgets.rates(10**6, 8, 64) == pytest.approx(remembers.rates(1443, 8, 64), rel=1e-3)
    tight_forgets, tight_remembers = TightStreamSchedule(half_life=1000), TightStreamSchedule()
    assert tight_forgets.rates(10**6, 8, 64) == pytest.approx(tight_remembers.rates(1443, 8, 64), rel=1e-3)


def test_a_forgetful_stream_is_revised_for_ever(monkeypatch):
    revised = []
    monkeypatch.setattr(Stream, "_revise", lambda self, learner: revised.append(self.seen))
    stream = Stream(GaussianKernel(), 3, half_life=1000)
    stream.learn(points(20_000))
    late = [count for count in revised if count > 10_000]
    assert np.diff(late).mean() == pytest.approx(0.2 * 1000 / math.log(2), rel=0.02)


@pytest.mark.parametrize("half_life", [7, 0, -1, math.nan, math.inf])
def test_an_impossible_half_life_is_refused(half_life):
    with pytest.raises(ValueError, match="`half_life` must be a finite number, at least the number of landmarks, 8"):
        Stream(GaussianKernel(), 8, half_life=half_life)
