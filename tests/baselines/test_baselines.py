"""The baselines against NumPy, scikit-learn, probabilities computed by hand and limit cases."""

import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.datasets import make_moons
from sklearn.decomposition import KernelPCA as SklearnKernelPCA
from sklearn.kernel_approximation import Nystroem as SklearnNystroem
from sklearn.kernel_approximation import RBFSampler
from torch import Tensor
from torch.testing import assert_close

from helpers import references
from helpers.fake_cuda import CUDA, on_cuda
from ksm_lightning.baselines import LANDMARK_SELECTORS, KernelPCA, Nystroem, RandomFourier, kernel_pca, landmarks
from ksm_lightning.baselines.networks import LinearSimilarityMatching, NeuralFourier, SimilarityMatching
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import (
    ArcCosineKernel,
    GaussianKernel,
    LaplacianKernel,
    LinearKernel,
    PolynomialKernel,
    PowerCosineKernel,
    make_kernel,
)
from ksm_lightning.kernels.factorisation import robust_cholesky
from ksm_lightning.kernels.pairs import symmetric_tiles
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.network.readout import READOUTS, LandmarkFeatures, read_out

HUGE = [Phase(50, eta_w=50.0, eta_q=50.0, eta_l=5.0)]


@pytest.fixture
def x(rng) -> Tensor:
    return torch.randn(40, 3, generator=rng, dtype=torch.float64)


@pytest.fixture
def moons() -> Tensor:
    return torch.tensor(make_moons(200, noise=0.05, random_state=0)[0], dtype=torch.float32)


def gram(y: Tensor) -> Tensor:
    return y @ y.mT


def rows(points: Tensor) -> list[tuple[float, ...]]:
    return sorted(tuple(point) for point in points.tolist())


def low_rank(rng, rank: int = 4, samples: int = 30) -> Tensor:
    """Points in a subspace of R^7."""
    return torch.randn(samples, rank, generator=rng).double() @ torch.randn(rank, 7, generator=rng).double()


def trace_residual(kernel, x: Tensor, W: Tensor) -> float:
    """``tr(F - f(x,W) f(W,W)^+ f(W,x))``."""
    A, B = kernel(x, W).numpy(), kernel(W, W).numpy()
    return float(kernel.diag(x).sum()) - np.trace(A @ np.linalg.pinv(B, rcond=1e-12, hermitian=True) @ A.T)


def test_linear_kernel_pca_is_pca_without_centring(x):
    x = x + 2  # centring would matter
    found = KernelPCA(LinearKernel(), 2)
    y = found.fit_transform(x)
    u, s, _ = np.linalg.svd(x.numpy(), full_matrices=False)
    assert_allclose(found.eigenvalues_, s[:2] ** 2, rtol=1e-10)
    assert_allclose(gram(y), (u[:, :2] * s[:2] ** 2) @ u[:, :2].T, rtol=1e-9, atol=1e-9)


def test_the_error_of_kernel_pca_is_the_tail_of_the_spectrum(spec, kernel, x):
    F = references.gram(*spec, x, x)
    spectrum = np.linalg.eigvalsh(F.numpy())[::-1]
    for n in (1, 2, 5):
        expected = math.sqrt((spectrum[n:] ** 2).sum() / (spectrum**2).sum())
        assert references.nrmse(F, KernelPCA(kernel, n).fit_transform(x)) == pytest.approx(expected, abs=1e-7)


def test_kernel_pca_maps_new_points_by_the_definition(x, rng):
    kernel, new = GaussianKernel(1.0), torch.randn(15, 3, generator=rng, dtype=torch.float64)
    found = KernelPCA(kernel, 6)
    own = found.fit_transform(x)
    assert_close(found.transform(x), own, rtol=1e-9, atol=1e-10)
    values, vectors = np.linalg.eigh(kernel(x, x).numpy())
    expected = kernel(new, x).numpy() @ vectors[:, -6:] / np.sqrt(values[-6:])
    assert_allclose(gram(found.transform(new)), expected @ expected.T, rtol=1e-8, atol=1e-10)


def test_kernel_pca_agrees_with_scikit_learn_on_centred_data(x, rng):
    """scikit-learn centres the kernel matrix, which has no effect on centred data."""
    new = torch.randn(15, 3, generator=rng, dtype=torch.float64)
    x, new = x - x.mean(0), new - x.mean(0)
    found = KernelPCA(LinearKernel(), 2).fit(x)
    theirs = SklearnKernelPCA(2, kernel="precomputed").fit((x @ x.mT).numpy())
    assert_allclose(found.eigenvalues_, theirs.eigenvalues_, rtol=1e-9)
    for points in (x, new):
        expected = torch.tensor(theirs.transform((points @ x.mT).numpy()))
        assert_close(gram(found.transform(points)), gram(expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("most_bytes", [2**30, 0], ids=["stored", "tiled"])
def test_the_randomised_solver_finds_the_exact_eigenpairs(rng, monkeypatch, most_bytes):
    monkeypatch.setattr(kernel_pca, "symmetric_tiles", partial(symmetric_tiles, tile=64))
    kernel, x, ticks = GaussianKernel(1.5), torch.randn(200, 3, generator=rng, dtype=torch.float64), []
    exact = KernelPCA(kernel, 10, solver="exact")
    found = KernelPCA(kernel, 10, solver="randomised", oversampling=30, most_bytes=most_bytes, progress=ticks.append)
    assert_close(gram(found.fit_transform(x)), gram(exact.fit_transform(x)), rtol=1e-9, atol=1e-9)
    assert_close(found.eigenvalues_, exact.eigenvalues_, rtol=1e-10, atol=0)
    assert_close(gram(found.transform(x)), gram(exact.transform(x)), rtol=1e-9, atol=1e-9)
    # Ten products with ten tiles each: the upper half of four by four tiles.
    assert ticks == ([] if most_bytes else [1] * 100)


def test_the_randomised_solver_is_exact_if_the_rank_is_below_its_block_size(rng):
    x = low_rank(rng, samples=100).float()
    y = KernelPCA(LinearKernel(), 6, solver="randomised", oversampling=50).fit_transform(x)
    assert references.nrmse(gram(x.double()), y) < 1e-6


def test_the_randomised_solver_is_more_accurate_than_that_of_torch(rng):
    """With a slowly decaying spectrum, few directions and one iteration, neither is exact."""
    kernel, x, n, q = make_kernel("laplacian", sigma=0.7), torch.randn(200, 3, generator=rng).double(), 8, 12
    F = kernel(x, x)
    best = references.nrmse(F, KernelPCA(kernel, n, solver="exact").fit_transform(x))
    for seed in range(5):
        found = KernelPCA(kernel, n, solver="randomised", oversampling=q - n, power_iterations=1, seed=seed)
        torch.manual_seed(seed)
        u, s, v = torch.svd_lowrank(F, q, niter=1)
        theirs = torch.linalg.norm(F - (u[:, :n] * s[:n]) @ v[:, :n].mT) / torch.linalg.norm(F)
        assert best <= references.nrmse(F, found.fit_transform(x)) < float(theirs)


@pytest.mark.parametrize("in_features", [1, 3])
@pytest.mark.parametrize("name", ["gaussian", "laplacian", "cauchy"])
def test_random_fourier_features_converge_to_the_kernel_like_one_over_root_n(rng, name, in_features):
    kernel = make_kernel(name, sigma=0.7)
    x = 0.7 * torch.randn(20, in_features, generator=rng, dtype=torch.float64)
    F = references.gram(name, {"sigma": 0.7}, x, x)
    sizes, seeds = [64, 256, 1024, 4096], range(40)
    found = {n: [gram(RandomFourier(kernel, n, seed=seed).fit_transform(x)) for seed in seeds] for n in sizes}
    errors = [math.sqrt(np.mean([float((G - F).square().mean()) for G in found[n]])) for n in sizes]
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert -0.6 < slope < -0.4
    # The standard deviation of an entry over all 40 x 4096 features is at most 1 / sqrt(163,840) = 0.0025.
    assert_close(torch.stack(found[4096]).mean(0), F, rtol=0, atol=0.0125)


def test_random_fourier_agrees_with_scikit_learn(x):
    sigma = 0.7
    found = RandomFourier(GaussianKernel(sigma), 3000).fit(x)
    sampler = RBFSampler(gamma=1 / (2 * sigma**2), n_components=3000, random_state=0).fit(x.numpy())
    assert float(found.frequencies_.std()) == pytest.approx(sampler.random_weights_.std(), rel=0.03)
    assert float(found.phases_.max()) == pytest.approx(sampler.random_offset_.max(), rel=0.01)
    sampler.random_weights_, sampler.random_offset_ = found.frequencies_.mT.numpy(), found.phases_.numpy()
    assert_allclose(found.transform(x), sampler.transform(x.numpy()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "polynomial", "power_cosine", "arc_cosine"])
def test_a_kernel_without_a_spectral_density_is_refused(x, name):
    kernel = make_kernel(name)
    for method in (RandomFourier, NeuralFourier):
        with pytest.raises(ValueError, match=f"{type(kernel).__name__} has no random Fourier features"):
            method(kernel, 4).fit(x)


@pytest.mark.parametrize("selector", ["uniform", "leverage", "cholesky"])
def test_every_point_a_landmark_makes_nystroem_exact(spec, kernel, x, selector):
    found = Nystroem(kernel, len(x), landmarks=selector).fit(x)
    assert rows(found.landmarks_) == rows(x)
    assert references.nrmse(references.gram(*spec, x, x), found.transform(x)) < 1e-8


def test_nystroem_agrees_with_scikit_learn_on_its_landmarks(x):
    theirs = SklearnNystroem(kernel="rbf", gamma=1 / (2 * 0.7**2), n_components=12, random_state=0).fit(x.numpy())
    W = torch.tensor(theirs.components_)
    y = Nystroem(GaussianKernel(0.7), 12, landmarks=W).fit_transform(x)
    assert_close(gram(y), gram(torch.tensor(theirs.transform(x.numpy()))), rtol=1e-8, atol=1e-9)


def test_pivoted_cholesky_is_exact_with_as_many_landmarks_as_the_rank(rng):
    x = low_rank(rng).repeat(2, 1)  # every point twice
    for seed in range(20):
        found = Nystroem(LinearKernel(), 4, landmarks="cholesky", seed=seed).fit(x)
        assert len(set(rows(found.landmarks_))) == 4
        assert references.nrmse(gram(x), found.transform(x)) < 1e-10
    assert references.nrmse(gram(x), Nystroem(LinearKernel(), 3, landmarks="cholesky").fit_transform(x)) > 1e-3


@pytest.mark.parametrize("selector", ["uniform", "leverage", "cholesky"])
def test_more_landmarks_than_the_rank_are_still_distinct_points(rng, selector):
    x = low_rank(rng)
    for seed in range(5):
        found = Nystroem(LinearKernel(), 20, landmarks=selector, seed=seed).fit(x)
        assert len(set(rows(found.landmarks_)) & set(rows(x))) == 20
        assert references.nrmse(gram(x), found.transform(x)) < 1e-10
    twice = x.repeat(2, 1)
    assert rows(Nystroem(LinearKernel(), 60, landmarks=selector).fit(twice).landmarks_) == rows(twice)


@pytest.mark.parametrize("selector", LANDMARK_SELECTORS)
def test_points_that_are_all_0_have_features_0(selector):
    y = Nystroem(PolynomialKernel(2), 3, landmarks=selector).fit_transform(torch.zeros(10, 2))
    assert torch.equal(y, torch.zeros(10, 3))


def test_pivoted_cholesky_always_finds_isolated_points(rng):
    """Three of 303 points, which six uniformly drawn landmarks almost never include."""
    x = torch.cat([1e-3 * torch.randn(300, 2, generator=rng), torch.tensor([[50.0, 0], [0, 50], [-50, 0]])])
    for selector, is_found in (("cholesky", True), ("uniform", False)):
        for seed in range(20):
            found = Nystroem(GaussianKernel(), 6, landmarks=selector, seed=seed).fit(x)
            assert (set(rows(x[300:])) <= set(rows(found.landmarks_))) is is_found


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_leverage_scores_from_all_points_are_exact(spec, kernel, x, rank):
    F, everything = kernel(x, x).numpy(), torch.arange(len(x))
    spectrum = np.linalg.eigvalsh(F)[::-1].clip(min=0)
    ridge = max(spectrum[rank:].sum() / rank, 1e-10 * spectrum[0])
    expected = np.diag(F @ np.linalg.inv(F + ridge * np.eye(len(x))))
    found = landmarks._ridge_leverage(kernel, x, everything, everything, torch.ones(len(x)).double(), rank)
    # Scores are a difference divided by the ridge, so a small ridge amplifies rounding errors.
    assert_allclose(found, expected, rtol=1e-7, atol=1e-13 * spectrum[0] / ridge)


FORMULAS = {
    GaussianKernel(0.7): lambda u, v: (-(u[:, None] - v).square().sum(2) / (2 * 0.7**2)).exp(),
    PolynomialKernel(2): lambda u, v: (u @ v.mT) ** 2,
    PowerCosineKernel(3): lambda u, v: (u @ v.mT) ** 3 / (u.norm(dim=1)[:, None] * v.norm(dim=1)) ** 2,
}


@pytest.mark.parametrize("kernel", FORMULAS, ids=str)
def test_the_gradient_of_the_residual_is_that_of_autograd(kernel, x, rng):
    f, W = FORMULAS[kernel], torch.randn(4, 3, generator=rng, dtype=torch.float64)

    def trace(W: Tensor) -> Tensor:
        return f(x, x).trace() - (f(x, W) * torch.linalg.solve(f(W, W), f(W, x)).mT).sum()

    value, gradient = landmarks._residual(kernel, x, W)
    assert_close(value, trace(W), rtol=1e-7, atol=1e-7)
    assert_close(gradient, torch.func.grad(trace)(W), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", FORMULAS, ids=str)
def test_optimised_landmarks_have_a_smaller_residual_than_their_start(kernel, rng):
    x = torch.randn(150, 4, generator=rng, dtype=torch.float64)
    for seed in range(3):
        found = Nystroem(kernel, 5, landmarks="gradient", seed=seed).fit(x)
        generator = torch.Generator().manual_seed(seed)
        drawn = landmarks.uniform(kernel, x, 2000, generator)
        first = landmarks.cholesky_pivots(kernel, drawn, 5, generator)
        least = trace_residual(kernel, x, found.landmarks_)
        assert least < 0.99 * trace_residual(kernel, x, first)
        assert least < 0.99 * trace_residual(kernel, x, drawn[:5])


def test_the_seed_determines_the_features_of_a_network_bitwise(moons):
    first, again, other = (
        SimilarityMatching(GaussianKernel(0.5), 4, updates=60, seed=seed).fit_transform(moons) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(gram(first), gram(other), atol=1e-4)


@pytest.mark.parametrize("readout", READOUTS)
def test_the_readouts_of_a_network_are_available_by_name(moons, readout):
    found = SimilarityMatching(GaussianKernel(0.5), 4, readout=readout, updates=60).fit(moons[:150])
    expected = read_out(found.network_, readout, moons, sample=moons[:150])
    assert_close(found.transform(moons), expected, rtol=1e-5, atol=1e-6)
    assert_close(found.features(moons, readout), expected, rtol=1e-5, atol=1e-6)


def test_a_warm_up_ends_with_the_full_kernel(moons):
    warm, cold = ([Phase(20, kernel_params=params), Phase(20)] for params in ({"alpha": 1}, {}))
    found, other = (SimilarityMatching(PowerCosineKernel(3), 4, phases=phases).fit(moons) for phases in (warm, cold))
    assert found.network_.kernel.params() == {"alpha": 3}
    assert not torch.allclose(found.network_.W, other.network_.W, atol=1e-3)


def test_rates_that_are_too_large_raise_an_error(moons):
    with pytest.raises(FloatingPointError, match="The network of 4 neurons diverged: leave out `phases`"):
        SimilarityMatching(GaussianKernel(0.5), 4, phases=HUGE).fit(moons)


def test_a_network_whose_lateral_weights_cannot_be_inverted_has_diverged(moons):
    """A step of L above 1 makes it indefinite: the parameters are finite, but every response is NaN."""
    with pytest.raises(FloatingPointError, match="diverged"):
        SimilarityMatching(GaussianKernel(0.5), 4, phases=[Phase(1, eta_l=3.0)]).fit(moons)


def test_neural_fourier_learns_its_random_features_or_their_principal_components(moons):
    """With one feature per neuron, the ridge and the last steps leave an error of 0.01; without learning it is 1."""
    kernel = GaussianKernel(0.7)
    for seed in (0, 1):
        alone = RandomFourier(kernel, 8, seed=seed).fit_transform(moons)
        same = NeuralFourier(kernel, 8, updates=1500, seed=seed).fit_transform(moons)
        assert references.nrmse(gram(alone.double()), same) < 0.03
        many = NeuralFourier(kernel, 8, num_features=128, updates=300, seed=seed).fit_transform(moons)
        best, other = kernel_nrmse(kernel, moons, many, alone).tolist()
        assert best < 0.5 * other


def test_linear_similarity_matching_is_close_to_pca(rng):
    x = torch.randn(300, 6, generator=rng) * torch.tensor([3, 2, 1.5, 1, 0.7, 0.5])
    best = references.nrmse(gram(x.double()), KernelPCA(LinearKernel(), 3).fit_transform(x))
    found = references.nrmse(gram(x.double()), LinearSimilarityMatching(3, updates=1000).fit_transform(x))
    assert best < found < 1.02 * best


MISTAKES = {
    "no component": (lambda x: KernelPCA(LinearKernel(), 0).fit(x), "`n_components` must be at least 1, got 0"),
    "NaN": (lambda x: RandomFourier(GaussianKernel(), 2).fit(x * torch.nan), "points that hold NaN or infinity"),
    "empty": (lambda x: KernelPCA(LinearKernel(), 2).fit(x[:0]), r"needs points to be fitted to, got .*\(0, 3\)"),
    "integers": (lambda x: KernelPCA(LinearKernel(), 2).fit(x.long()), "floating-point numbers .*, got torch.int64"),
    "other features": (
        lambda x: KernelPCA(LinearKernel(), 2).fit(x).transform(x[:, :2]), r"points of 3 features, got shape \(40, 2\)"
    ),
    "not fitted": (lambda x: Nystroem(LinearKernel(), 2).transform(x), "This Nystroem is not fitted: call `fit`"),
    "no network": (lambda x: SimilarityMatching(LinearKernel(), 2).features(x, "neural"), "is not fitted: call `fit`"),
    "few points": (lambda x: KernelPCA(LinearKernel(), 41).fit(x), "of 41 features needs at least 41 points, got 40"),
    "few landmarks": (lambda x: Nystroem(LinearKernel(), 41).fit(x), "of 41 features needs at least 41 points, got 40"),
    "selector": (lambda x: Nystroem(LinearKernel(), 2, landmarks="best"), r"must be one of uniform, .* got 'best'"),
    "shape": (lambda x: Nystroem(LinearKernel(), 2, landmarks=x).fit(x), r"must have shape \(2, 3\), got \(40, 3\)"),
    "solver": (lambda x: KernelPCA(LinearKernel(), 2, solver="qr"), "'exact' or 'randomised', got 'qr'"),
    "readout": (lambda x: SimilarityMatching(LinearKernel(), 2, readout="pca"), "There is no readout 'pca'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_arguments_are_refused(x, mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        call(x)


def test_a_failed_fit_leaves_the_map_unfitted(x):
    found = Nystroem(LinearKernel(), 41)
    with pytest.raises(ValueError, match="at least 41 points"):
        found.fit(x)
    with pytest.raises(ValueError, match="This Nystroem is not fitted"):
        found.transform(x)


@pytest.mark.usefixtures("fake_cuda")
def test_features_of_new_points_stay_on_the_device(kernel):
    wide = {"dtype": torch.float64}
    fitted = {
        KernelPCA: {"points_": on_cuda(30, 4, **wide), "dual_": on_cuda(30, 6, **wide)},
        Nystroem: {"encoder_": LandmarkFeatures(kernel, on_cuda(6, 4, **wide), on_cuda(6, 6, **wide))},
        RandomFourier: {"frequencies_": on_cuda(6, 4), "phases_": on_cuda(6)},
    }
    for method, learned in fitted.items():
        found = method(kernel, 6)
        vars(found).update(learned, _in_features=4)
        y = found.transform(on_cuda(10, 4))
        assert (y.shape, y.device, y.dtype) == ((10, 6), CUDA, torch.float32)


def test_kernels_with_large_rounding_errors_are_approximated():
    """A root or an arc cosine near 0 has larger rounding errors than the dtype's precision."""
    x = torch.linspace(0, 1, 400)[:, None]
    found = KernelPCA(LaplacianKernel(1.0), 300, solver="randomised").fit_transform(x)
    assert float(kernel_nrmse(LaplacianKernel(1.0), x, found)) < 1e-3
    line = torch.arange(1.0, 61.0)[:, None] * torch.tensor([[1.0, 2.0]])  # two directions of the same angle
    for order in (0, 1):
        for selector in ("leverage", "gradient", "cholesky"):
            y = Nystroem(ArcCosineKernel(order), 10, landmarks=selector).fit_transform(line)
            assert float(kernel_nrmse(ArcCosineKernel(order), line, y)) < 1e-3


def test_a_matrix_that_is_not_a_kernel_matrix_is_refused():
    with pytest.raises(ValueError, match="not positive semi-definite"):
        robust_cholesky(-torch.eye(3))
    with pytest.raises(ValueError, match="not finite"):
        robust_cholesky(torch.full((3, 3), torch.nan))


def test_fitted_maps_can_be_pickled():
    x = torch.randn(60, 3)
    kernel = GaussianKernel(1.0)
    for found in (
        KernelPCA(kernel, 4),
        Nystroem(kernel, 4),
        RandomFourier(kernel, 4),
        SimilarityMatching(kernel, 4, updates=20, readout="least_squares"),
        NeuralFourier(kernel, 4, updates=20),
    ):
        y = found.fit(x).transform(x)
        assert torch.equal(pickle.loads(pickle.dumps(found)).transform(x), y)
