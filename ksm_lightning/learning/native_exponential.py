"""``e^x`` as arithmetic, so that LLVM computes it for several numbers at a time.

A call of :func:`math.exp` is for one number, and half of an update with a Gaussian kernel would be such calls. Only
:mod:`ksm_lightning.learning.native` imports this module, when numba is installed.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from ksm_lightning.kernels.scalar import exponential

# Sums are not reordered here: the remainder of x needs its two steps.
_OPTIONS: Any = {"fastmath": {"contract"}, "error_model": "numpy", "forceinline": True}


def _reinterpret(context: Any, bits: Any) -> Any:
    """The number whose bits are those of an integer of the same size."""
    number = types.float32 if bits == types.int32 else types.float64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return number(bits), generate


_from_bits: Any = intrinsic(_reinterpret)


def _make(
    real: Any, integer: Any, digits: int, bias: int, ln2: tuple[float, float], limits: tuple[float, float], degree: int
) -> Callable[..., Any]:
    """``e^x = 2^k e^r`` with an integer k and ``|r| <= ln(2) / 2``, for numbers with this many binary digits.

    The first part of ln(2) has so few digits that k times it is exact; ``e^r`` is a polynomial. Outside of the limits
    the result is 0 or infinite: the smallest numbers of a dtype, which have fewer digits, are not computed.
    """
    log2e, first, rest, half = real(1 / math.log(2)), real(ln2[0]), real(ln2[1]), real(0.5)
    lowest, highest, shift = real(limits[0]), real(limits[1]), integer(digits - 1)
    zero, one, infinite, exponent = real(0), real(1), real(math.inf), integer(bias)
    coefficients = tuple(real(1 / math.factorial(power)) for power in range(degree, 1, -1))

    def compute(x: Any) -> Any:
        clipped = min(max(x, lowest), highest)
        k = integer(clipped * log2e + (half if clipped > zero else -half))
        r = (clipped - real(k) * first) - real(k) * rest
        power = zero
        for coefficient in coefficients:
            power = power * r + coefficient
        result = (power * r * r + r + one) * _from_bits(integer((k + exponent) << shift))
        if x > highest:
            return infinite
        return result if x >= lowest else (zero if x < lowest else x)  # NaN stays NaN

    return compute


_32 = _make(np.float32, np.int32, 24, 127, (0.693359375, -2.12194440e-4), (-87.3, 88.3), degree=7)
_64 = _make(
    np.float64, np.int64, 53, 1023, (6.93147180369123816490e-1, 1.90821492927058770002e-10), (-708.3, 709.3), degree=13
)
_narrow, _wide = register_jitable(**_OPTIONS)(_32), register_jitable(**_OPTIONS)(_64)


@overload(exponential, jit_options=_OPTIONS)
def _exponential(x: Any) -> Any:
    def narrow(x: Any) -> Any:
        return _narrow(x)

    def wide(x: Any) -> Any:
        return _wide(x)

    return narrow if x == types.float32 else wide
