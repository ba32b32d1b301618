"""Linear algebra of small matrices as plain loops over numbers, for :mod:`ksm_lightning.learning.native_block`.

Matrices of a batch are (n, batch): the innermost loops run over samples, which are neighbours in memory. They combine
several rows at a time, because reading a number takes longer than multiplying it.
"""

import math
from collections.abc import Callable
from typing import Any

# Unused numbers between two arrays of a block.
_GAP = 16


def count(shapes: Any) -> int:
    """How many numbers stacks of matrices with these shapes (number, rows, columns) have, with gaps between them."""
    total = 0
    for number, rows, columns in shapes:
        total += number * rows * columns + _GAP
    return total


def part(memory: Any, shapes: Any, index: int) -> Any:
    """One of the stacks of matrices that share a memory.

    All arrays of a block share one, with the same distances in every run: LLVM makes several versions of a loop, each
    with its own rounding, and which one runs may depend on the distances between the arrays.
    """
    start = 0
    for i in range(index):
        start += shapes[i][0] * shapes[i][1] * shapes[i][2] + _GAP
    number, rows, columns = shapes[index]
    return memory[start : start + number * rows * columns].reshape((number, rows, columns))


def copy(source: Any, target: Any) -> None:
    """Copy a matrix."""
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


def transpose(x: Any, xT: Any, x2: Any) -> None:
    """Points x (batch, m) as xT (m, batch), and their squared lengths (batch,)."""
    batch, m = x.shape
    for f in range(m):
        for s in range(batch):
            xT[f, s] = x[s, f]
    for s in range(batch):
        x2[s] = x.dtype.type(0)
    for f in range(m):
        for s in range(batch):
            x2[s] += xT[f, s] * xT[f, s]


def subtract_rows(Y: Any, i: int, factors: Any, others: Any, start: int, stop: int) -> None:
    """``y_i -= sum_j factors_j y_j`` and ``y_i+1 -= sum_j others_j y_j`` for start <= j < stop, four j at a time."""
    batch, row, next_row, j = Y.shape[1], Y[i], Y[i + 1], start
    while j + 4 <= stop:
        f0, f1, f2, f3 = factors[j], factors[j + 1], factors[j + 2], factors[j + 3]
        g0, g1, g2, g3 = others[j], others[j + 1], others[j + 2], others[j + 3]
        y0, y1, y2, y3 = Y[j], Y[j + 1], Y[j + 2], Y[j + 3]
        for s in range(batch):
            row[s] -= f0 * y0[s] + f1 * y1[s] + f2 * y2[s] + f3 * y3[s]
            next_row[s] -= g0 * y0[s] + g1 * y1[s] + g2 * y2[s] + g3 * y3[s]
        j += 4
    while j < stop:
        f0, g0, y0 = factors[j], others[j], Y[j]
        for s in range(batch):
            row[s] -= f0 * y0[s]
            next_row[s] -= g0 * y0[s]
        j += 1


def factorise(S: Any) -> int:
    """Cholesky factorisation in place of the lower triangle of S (n, n), four rows at a time.

    Returns the number of the failed column, or 0.
    """
    n, one = S.shape[0], S.dtype.type(1)
    for j in range(n):
        row, pivot, i = S[j], S[j, j], j + 1
        for f in range(j):
            pivot -= row[f] * row[f]
        if not pivot > 0:
            return j + 1
        row[j] = math.sqrt(pivot)
        inverse = one / row[j]
        while i + 4 <= n:
            s0, s1, s2, s3 = S[i], S[i + 1], S[i + 2], S[i + 3]
            c0, c1, c2, c3 = s0[j], s1[j], s2[j], s3[j]
            for f in range(j):
                c0 -= s0[f] * row[f]
                c1 -= s1[f] * row[f]
                c2 -= s2[f] * row[f]
                c3 -= s3[f] * row[f]
            s0[j], s1[j], s2[j], s3[j] = c0 * inverse, c1 * inverse, c2 * inverse, c3 * inverse
            i += 4
        while i < n:
            s0 = S[i]
            c0 = s0[j]
            for f in range(j):
                c0 -= s0[f] * row[f]
            s0[j] = c0 * inverse
            i += 1
    return 0


def solve(S: Any, Y: Any) -> None:
    """Replace the columns of Y (n, batch) by the solutions with the matrix whose factor is S (n, n), pairs of rows at a
    time."""
    n, batch, one = Y.shape[0], Y.shape[1], S.dtype.type(1)
    last = n - 1
    for i in range(0, last, 2):
        subtract_rows(Y, i, S[i], S[i + 1], 0, i)
        row, next_row = Y[i], Y[i + 1]
        inverse, factor, next_inverse = one / S[i, i], S[i + 1, i], one / S[i + 1, i + 1]
        for s in range(batch):
            solved = row[s] * inverse
            row[s] = solved
            next_row[s] = (next_row[s] - factor * solved) * next_inverse
    if n % 2:
        row, inverse = Y[last], one / S[last, last]
        for j in range(last):
            factor, other = S[last, j], Y[j]
            for s in range(batch):
                row[s] -= factor * other[s]
        for s in range(batch):
            row[s] *= inverse * inverse
    for i in range(n - n % 2 - 2, -1, -2):
        subtract_rows(Y, i, S[:, i], S[:, i + 1], i + 2, n)
        row, next_row = Y[i], Y[i + 1]
        inverse, factor, next_inverse = one / S[i, i], S[i + 1, i], one / S[i + 1, i + 1]
        for s in range(batch):
            solved = next_row[s] * next_inverse
            next_row[s] = solved
            row[s] = (row[s] - factor * solved) * inverse


def respond(L: Any, ridge: Any, S: Any, Y: Any) -> int:
    """Replace drives Y (n, batch) by responses ``(L + ridge I)^-1 Y``; S (n, n) is memory. Returns as `factorise`."""
    for i in range(L.shape[0]):
        for j in range(i + 1):
            S[i, j] = L[i, j]
        S[i, i] += ridge
    failed = factorise(S)
    solve(S, Y)
    return failed


def ascend(L: Any, Y: Any, step: Any) -> None:
    """``L += step (<y y^T> - L)``, four columns at a time."""
    n, batch, real = Y.shape[0], Y.shape[1], L.dtype.type
    keep, part = real(1) - step, step / real(batch)
    for i in range(n):
        row, j = Y[i], 0
        while j + 4 <= i + 1:
            y0, y1, y2, y3 = Y[j], Y[j + 1], Y[j + 2], Y[j + 3]
            c0, c1, c2, c3 = real(0), real(0), real(0), real(0)
            for s in range(batch):
                c0 += row[s] * y0[s]
                c1 += row[s] * y1[s]
                c2 += row[s] * y2[s]
                c3 += row[s] * y3[s]
            L[i, j] = keep * L[i, j] + part * c0
            L[i, j + 1] = keep * L[i, j + 1] + part * c1
            L[i, j + 2] = keep * L[i, j + 2] + part * c2
            L[i, j + 3] = keep * L[i, j + 3] + part * c3
            j += 4
        while j <= i:
            y0, c0 = Y[j], real(0)
            for s in range(batch):
                c0 += row[s] * y0[s]
            L[i, j] = keep * L[i, j] + part * c0
            j += 1
        for f in range(i):
            L[f, i] = L[i, f]


def limit_lengths(Y: Any, longest: Any, norm: Any) -> None:
    """Shorten columns of Y (n, batch) to the lengths ``longest`` (batch,)."""
    n, batch, real = Y.shape[0], Y.shape[1], Y.dtype.type
    for s in range(batch):
        norm[s] = real(0)
    for i in range(n):
        for s in range(batch):
            norm[s] += Y[i, s] * Y[i, s]
    for s in range(batch):
        length = math.sqrt(norm[s])
        norm[s] = longest[s] / length if length > longest[s] else real(1)
    for i in range(n):
        for s in range(batch):
            Y[i, s] *= norm[s]


def multiply_rows(left: Any, right: Any, out: Any) -> None:
    """``out = left right`` for matrices (n, p) and (p, batch), four rows of the second one at a time."""
    (n, p), batch = left.shape, right.shape[1]
    for i in range(n):
        row, j = out[i], 0
        for s in range(batch):
            row[s] = out.dtype.type(0)
        while j + 4 <= p:
            f0, f1, f2, f3 = left[i, j], left[i, j + 1], left[i, j + 2], left[i, j + 3]
            r0, r1, r2, r3 = right[j], right[j + 1], right[j + 2], right[j + 3]
            for s in range(batch):
                row[s] += f0 * r0[s] + f1 * r1[s] + f2 * r2[s] + f3 * r3[s]
            j += 4
        while j < p:
            f0, r0 = left[i, j], right[j]
            for s in range(batch):
                row[s] += f0 * r0[s]
            j += 1


def correlate_rows(left: Any, right: Any, share: Any, out: Any) -> None:
    """``out = share left right^T`` for matrices (p, batch) and (n, batch), four rows of ``right`` at a time."""
    p, n, batch, zero = left.shape[0], right.shape[0], left.shape[1], out.dtype.type(0)
    for j in range(p):
        row, i = left[j], 0
        while i + 4 <= n:
            r0, r1, r2, r3 = right[i], right[i + 1], right[i + 2], right[i + 3]
            c0, c1, c2, c3 = zero, zero, zero, zero
            for s in range(batch):
                c0 += row[s] * r0[s]
                c1 += row[s] * r1[s]
                c2 += row[s] * r2[s]
                c3 += row[s] * r3[s]
            out[j, i], out[j, i + 1], out[j, i + 2], out[j, i + 3] = share * c0, share * c1, share * c2, share * c3
            i += 4
        while i < n:
            r0, c0 = right[i], zero
            for s in range(batch):
                c0 += row[s] * r0[s]
            out[j, i] = share * c0
            i += 1


def copy_transposed(source: Any, target: Any) -> None:
    """Copy the transpose of a matrix."""
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[j, i] = source[i, j]


def add_jitter(K: Any, jitter: float, tiny: float) -> None:
    """Make K (p, p) positive definite, as :func:`~.exact_tight.add_jitter`."""
    p, mean = len(K), 0.0
    for j in range(p):
        mean += K[j, j] / p
    for j in range(p):
        K[j, j] += jitter * (K[j, j] + 1e-6 * mean) + tiny


ALGEBRA: tuple[Callable[..., Any], ...] = (
    count, part, copy, copy_transposed, transpose, subtract_rows, factorise, solve, respond, ascend, limit_lengths,
    multiply_rows, correlate_rows, add_jitter,
)  # fmt: skip
