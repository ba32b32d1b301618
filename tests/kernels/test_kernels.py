"""Every kernel against its definition, autograd and limit cases."""

import pytest
import torch
from torch.testing import assert_close

from helpers import references
from helpers.kernels import Quadratic
from ksm_lightning.kernels import (
    ArcCosineKernel,
    CauchyKernel,
    GaussianKernel,
    Kernel,
    LaplacianKernel,
    OffsetPolynomialKernel,
    PolynomialKernel,
    PowerCosineKernel,
    full_precision,
    kernel_name,
    kernel_names,
    make_kernel,
    register_kernel,
)


def points(rows: int, columns: int = 5, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def pullback(kernel: Kernel, c: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return kernel.value_and_pullback(x, w)[1](c)


def test_block_equals_the_definition(spec, kernel):
    u, v = points(6), points(4, seed=1)
    u[2] = 0
    v[1] = u[3]
    # acos turns an error of eps at a cosine near 1 into sqrt(eps).
    tolerance = 2e-8 if spec == ("arc_cosine", {"order": 0}) else 1e-12
    assert_close(kernel(u, v), references.gram(*spec, u, v), rtol=tolerance, atol=tolerance)


def test_value_with_pullback_equals_the_block(kernel):
    x, w = points(6), points(4, seed=1)
    assert_close(kernel.value_and_pullback(x, w)[0], kernel(x, w), rtol=1e-13, atol=1e-13)


def test_diagonal_equals_that_of_the_block(spec, kernel):
    u = points(5)
    u[1] = 0
    expected = references.gram(*spec, u, u).diagonal()
    assert_close(kernel.diag(u), expected, rtol=1e-7, atol=1e-7)


def test_the_base_class_computes_the_whole_diagonal_in_tiles(kernel):
    u = points(150)
    assert_close(Kernel.diag(kernel, u), kernel.diag(u), rtol=1e-7, atol=1e-7)


def test_closed_pullback_equals_autograd(kernel):
    x, w, c = points(7), points(4, seed=1), points(7, 4, seed=2)
    by_autograd = Kernel.evaluate(kernel, (x,), w, kernel.self_terms(w))[1](c).dense()
    assert_close(pullback(kernel, c, x, w), by_autograd, rtol=1e-9, atol=1e-9)


def test_closed_diagonal_gradient_equals_autograd(kernel):
    w = points(4)
    by_autograd = torch.func.vmap(torch.func.grad(lambda p: kernel.diag(p[None])[0]))(w)
    assert_close(kernel.diag_gradient(w), by_autograd, rtol=1e-9, atol=1e-9)


def test_pullback_equals_finite_differences(spec, kernel):
    x, w, c, step = points(7), points(4, seed=1), points(7, 4, seed=2), 1e-6
    numeric = torch.empty_like(w)
    for i in range(4):
        for a in range(5):
            high, low = w.clone(), w.clone()
            high[i, a] += step
            low[i, a] -= step
            difference = references.gram(*spec, x, high) - references.gram(*spec, x, low)
            numeric[i, a] = (c * difference).sum() / (2 * step)
    assert_close(pullback(kernel, c, x, w), numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_vectors_give_no_nan(kernel, dtype):
    x, w = points(3, dtype=dtype), points(3, dtype=dtype, seed=1)
    x[0], w[1] = 0, 0
    c = torch.ones(3, 3, dtype=dtype)
    for value in (kernel(x, w), kernel.diag(w), pullback(kernel, c, x, w), kernel.diag_gradient(w)):
        assert value.isfinite().all()
    assert Kernel.evaluate(kernel, (x,), w, kernel.self_terms(w))[1](c).dense().isfinite().all()  # autograd fallback


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_landmarks_at_data_points_give_finite_derivatives(kernel, dtype):
    x = points(6, dtype=dtype)
    gradient = pullback(kernel, torch.eye(6, dtype=dtype), x, x.clone())
    assert gradient.isfinite().all()
    # A radial kernel has its maximum at distance 0, so the gradient is 0 up to rounding.
    if kernel.is_radial:
        assert gradient.abs().max() < (1e-3 if dtype == torch.float32 else 1e-6)


def test_block_is_positive_semidefinite(kernel):
    u = points(30)
    assert torch.linalg.eigvalsh(kernel(u, u)).min() > -1e-6


def test_homogeneous_kernels_scale_with_their_degree(kernel):
    u, v = points(4), points(3, seed=1)
    if kernel.degree is None:
        assert not kernel.is_homogeneous
        assert kernel.is_radial or isinstance(kernel, OffsetPolynomialKernel)
        assert (kernel(2 * u, v) - kernel(u, v)).abs().max() > 1e-3
    else:
        assert_close(kernel(2 * u, 3 * v), 6**kernel.degree * kernel(u, v))


def test_arc_cosine_of_order_0_has_degree_0_and_learns_its_gains():
    assert ArcCosineKernel(0).degree == 0
    assert not ArcCosineKernel(0).is_homogeneous
    assert ArcCosineKernel(1).is_homogeneous


def test_radial_kernels_ignore_a_common_shift(kernel):
    u, v = points(4), points(3, seed=1)
    is_same = torch.allclose(kernel(u + 1, v + 1), kernel(u, v), rtol=1e-10, atol=1e-10)
    assert is_same == kernel.is_radial


def test_odd_kernels_flip_with_their_argument(kernel):
    u, v = points(4), points(3, seed=1)
    is_flipped = torch.allclose(kernel(-u, v), -kernel(u, v))
    assert is_flipped == kernel.is_odd


@pytest.mark.parametrize("cls", [GaussianKernel, LaplacianKernel, CauchyKernel])
@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_nearly_equal_points_far_from_the_origin_keep_their_digits_in_float32(cls, offset):
    # These coordinates are exact in float32, so all errors come from the kernel.
    steps = torch.randint(-128, 128, (40, 3), generator=torch.Generator().manual_seed(0)).double() / 128
    far = steps + offset
    assert (far.float().double() == far).all()
    kernel = cls(sigma=0.5)
    exact = references.gram(kernel_name(kernel), kernel.params(), steps, steps)
    assert_close(kernel(far.float(), far.float()).double(), exact, rtol=0, atol=3e-4)
    c = torch.ones(40, 40)
    exact_pullback = pullback(kernel, c.double(), steps, steps[:40])
    assert_close(pullback(kernel, c, far.float(), far.float()).double(), exact_pullback, rtol=0, atol=2e-2)


def test_the_power_cosine_of_parallel_vectors_is_the_product_of_their_lengths():
    u = points(5, dtype=torch.float32)
    assert_close(PowerCosineKernel(3)(u, 2 * u).diagonal(), 2 * (u * u).sum(1), rtol=1e-6, atol=0)


def test_kernels_ignore_the_global_matmul_precision_and_restore_it():
    seen = []

    class Spy(GaussianKernel):
        def gram(self, u, v):
            seen.append(torch.backends.mkldnn.matmul.fp32_precision)
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().gram(u, v)

    u = points(3, dtype=torch.float32)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = Spy()(u, u)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == ["ieee", False]
    assert value.dtype == torch.float32


def test_full_precision_restores_the_setting_after_an_error():
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(RuntimeError, match="boom"), full_precision(torch.device("cpu")):
            raise RuntimeError("boom")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_kernel_with_only_gram_has_diagonal_and_derivatives():
    kernel, x, w, c = Quadratic(0.5), points(6), points(3, seed=1), points(6, 3, seed=2)
    assert_close(kernel.diag(w), (0.5 + (w * w).sum(1)) ** 2)
    assert_close(kernel.diag_gradient(w), 4 * (0.5 + (w * w).sum(1))[:, None] * w)
    assert_close(pullback(kernel, c, x, w), (2 * c * (0.5 + x @ w.mT)).mT @ x)
    with torch.inference_mode():
        assert_close(pullback(kernel, c, x, w), (2 * c * (0.5 + x @ w.mT)).mT @ x)
    assert repr(kernel.with_params(offset=2.0)) == "Quadratic(offset=2.0)"


def test_a_constant_diagonal_has_gradient_0():
    class Unit(Quadratic):
        def diag(self, u):
            return u.new_ones(len(u))

    assert Unit().diag_gradient(points(3)).eq(0).all()


@pytest.mark.parametrize("sigma", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("cls", [GaussianKernel, LaplacianKernel, CauchyKernel])
def test_invalid_widths_are_refused(cls, sigma):
    with pytest.raises(ValueError, match="`sigma` must be positive and finite"):
        cls(sigma)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PowerCosineKernel(2.5), "`alpha` must be a whole number"),
        (lambda: PowerCosineKernel(0), "`alpha` must be a whole number"),
        (lambda: PolynomialKernel(-1), "`degree` must be a whole number"),
        (lambda: ArcCosineKernel(2), "`order` must be 0 or 1"),
        (lambda: make_kernel("gaussian", width=1), "cannot be made from"),
        (lambda: GaussianKernel().with_params(alpha=1), "has no parameter 'alpha'; its parameters: sigma"),
        (lambda: GaussianKernel()(torch.zeros(3), torch.zeros(3)), "rows of two matrices"),
        (lambda: GaussianKernel()(torch.zeros(3, 2), torch.zeros(3, 3)), "rows of two matrices"),
    ],
)
def test_invalid_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_unregistered_name_says_what_to_import():
    with pytest.raises(ValueError, match="import the module that defines it under @register_kernel\\('mine'\\)"):
        make_kernel("mine")
    with pytest.raises(ValueError, match="has no registered name"):
        kernel_name(Quadratic())


def test_a_name_belongs_to_one_class_which_can_be_redefined():
    with pytest.raises(ValueError, match="belongs to GaussianKernel"):
        register_kernel("gaussian")(Quadratic)
    assert kernel_name(make_kernel("gaussian")) == "gaussian"
    assert {"gaussian", "laplacian", "cauchy", "linear", "polynomial", "power_cosine", "arc_cosine"} <= set(
        kernel_names()
    )
    register_kernel("test_quadratic")(Quadratic)
    register_kernel("test_quadratic")(Quadratic)
    assert make_kernel("test_quadratic", offset=3.0).offset == 3.0


def test_a_prepared_batch_does_not_depend_on_its_block(kernel):
    x = torch.stack([points(7, seed=seed) for seed in range(5)])
    together = kernel.prepare(x)
    for index, batch in enumerate(x):
        for whole, alone in zip(together, kernel.prepare(batch), strict=True):
            assert torch.equal(whole[index], alone)


def test_self_terms_equal_diag_curvature_and_diag_gradient(kernel):
    w = points(6)
    terms = kernel.self_terms(w)
    assert_close(torch.ones(6).double() if terms.value is None else terms.value, kernel.diag(w))
    assert_close(torch.as_tensor(terms.curvature, dtype=w.dtype).expand(6), kernel.curvature(w))
    slope = torch.as_tensor(terms.slope, dtype=w.dtype).expand(6)
    gradient = torch.zeros_like(w) if terms.direction is None else slope[:, None] * terms.direction
    assert_close(gradient, kernel.diag_gradient(w))


@pytest.mark.parametrize("kernel", [GaussianKernel, LaplacianKernel, CauchyKernel])
@pytest.mark.parametrize("sigma", [1e-200, 1e200])
def test_a_width_whose_square_is_not_a_number_is_refused(kernel, sigma):
    """Its square would raise OverflowError or ZeroDivisionError in the first update."""
    with pytest.raises(ValueError, match="`sigma` must be between 1e-100 and 1e100"):
        kernel(sigma)
