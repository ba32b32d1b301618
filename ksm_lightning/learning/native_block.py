"""A block of updates as plain loops over numbers, which :mod:`ksm_lightning.learning.native` compiles.

The same rules as in :mod:`ksm_lightning.learning.rules`, for networks so small that calling an operation of torch takes
longer than computing it. Arrays of a batch are (n, batch): the loops over samples, which are the innermost ones, run
over neighbouring numbers and become vector instructions. Only what numba compiles is used here.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ksm_lightning.kernels.scalar import Formula, SelfFormula

# As in ksm_lightning.learning.rules: compiled code contains their values.
_TRUST, _GAIN_FLOOR, _RESPONSE_LIMIT = 0.5, 0.01, 2.0
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


def subtract_rows(Y: Any, i: int, factors: Any, start: int, stop: int) -> None:
    """``y_i -= sum_j factors_j y_j`` for start <= j < stop, four rows at a time."""
    batch, row, j = Y.shape[1], Y[i], start
    while j + 4 <= stop:
        f0, f1, f2, f3 = factors[j], factors[j + 1], factors[j + 2], factors[j + 3]
        y0, y1, y2, y3 = Y[j], Y[j + 1], Y[j + 2], Y[j + 3]
        for s in range(batch):
            row[s] -= f0 * y0[s] + f1 * y1[s] + f2 * y2[s] + f3 * y3[s]
        j += 4
    while j < stop:
        f0, y0 = factors[j], Y[j]
        for s in range(batch):
            row[s] -= f0 * y0[s]
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
    """Replace the columns of Y (n, batch) by the solutions with the matrix whose factor is S (n, n)."""
    n, batch, one = Y.shape[0], Y.shape[1], S.dtype.type(1)
    for i in range(n):
        subtract_rows(Y, i, S[i], 0, i)
        inverse = one / S[i, i]
        for s in range(batch):
            Y[i, s] *= inverse
    for i in range(n - 1, -1, -1):
        subtract_rows(Y, i, S[:, i], i + 1, n)
        inverse = one / S[i, i]
        for s in range(batch):
            Y[i, s] *= inverse


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


def record(k: Any, Y: Any, L: Any, S: Any, ridge: Any, seen_k: Any, seen_y: Any, numbers: Any) -> None:
    """Note what an update shows of L before it changes: similarities, responses, and the last parts of ``numbers``.

    These are, in the order of :class:`~.Observation`, five terms of the energy, the lengths of the gradients of W, q
    and L, the smallest gain, and the condition number of ``L + ridge I`` as the factor S shows it.
    """
    n, batch = Y.shape
    lateral, squares, lengths, gradient = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        for j in range(n):
            C = 0.0
            for s in range(batch):
                C += Y[i, s] * Y[j, s]
            C /= batch
            lateral += L[i, j] * C
            squares += L[i, j] * L[i, j]
            gradient += (C - L[i, j]) * (C - L[i, j])
            if i == j:
                lengths += C
    largest, smallest = S[0, 0], S[0, 0]
    for i in range(n):
        largest, smallest = max(largest, S[i, i]), min(smallest, S[i, i])
    numbers[2], numbers[3], numbers[4] = 0.5 * lateral, -0.25 * squares, 0.5 * ridge * lengths
    numbers[7], numbers[9] = 0.5 * math.sqrt(gradient), (largest / smallest) ** 2
    copy(k, seen_k)
    copy(Y, seen_y)


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


def make_fill(formula: Formula, is_radial: bool) -> Callable[..., None]:
    """The function that computes similarities of points and landmarks with a kernel.

    Its arguments are points xT (m, batch) with their squared lengths x2 (batch,), landmarks W (n, m), the kernel's
    numbers, and what it computes: k = f(x, w) (n, batch), A and B (n, batch) with ``df(w, x)/dw = a x - b w``, and the
    squared lengths of W (n,).
    """

    def fill(xT: Any, x2: Any, W: Any, params: Any, K: Any, A: Any, B: Any, w2: Any) -> None:
        (n, m), batch, zero = W.shape, xT.shape[1], W.dtype.type(0)
        for i in range(n):
            length2, row = zero, K[i]
            for s in range(batch):
                row[s] = zero
            for f in range(m):
                w = W[i, f]
                length2 += w * w
                if is_radial:
                    for s in range(batch):
                        difference = xT[f, s] - w
                        row[s] += difference * difference
                else:
                    for s in range(batch):
                        row[s] += xT[f, s] * w
            w2[i] = length2
            for s in range(batch):
                k, a, b = formula(row[s], x2[s], length2, params)
                K[i, s], A[i, s], B[i, s] = k, a, b

    return fill


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


HELPERS: tuple[Callable[..., Any], ...] = (
    count, part, copy, subtract_rows, factorise, solve, respond, ascend, record, limit_lengths, transpose,
)  # fmt: skip


def make_block(fill: Callable[..., None], self_formula: SelfFormula) -> Callable[..., int]:
    """The function that runs a block of updates of the paper's bound with a kernel.

    Its arguments are the batches x (updates, batch, m), the weights W (n, m), q (n,) and L (n, n), which are changed in
    place, the step sizes of W, q and L (updates, 3), the ridge, the kernel's numbers, the smallest number, whether q is
    learned, whether steps are natural, and the updates to observe with the arrays for what they show, see `record`:
    similarities and responses (observed, n, batch) and numbers (observed, 10) in float64. All other numbers have the
    same dtype. It returns 0, or the column at which a factorisation failed.
    """

    def block(
        x: Any, weights_W: Any, weights_q: Any, weights_L: Any, sizes: Any, ridge: Any, params: Any, tiny: Any,
        learns_q: bool, is_natural: bool, observed: Any, seen_k: Any, seen_y: Any, seen: Any,
    ) -> int:  # fmt: skip
        updates, batch, m = x.shape
        n, real, dtype = weights_W.shape[0], weights_W.dtype.type, weights_W.dtype
        zero, one, half, share = real(0), real(1), real(0.5), real(1) / real(batch)
        shapes = ((1, m, batch), (1, 3, batch), (4, n, batch), (2, n, n), (1, 6, n), (1, n, m), (1, 1, m))
        memory, failed, noted = np.empty(count(shapes), dtype), 0, 0
        of_batch, of_pairs = part(memory, shapes, 1)[0], part(memory, shapes, 2)
        squares, of_neurons = part(memory, shapes, 3), part(memory, shapes, 4)[0]
        xT, x2, longest, work = part(memory, shapes, 0)[0], of_batch[0], of_batch[1], of_batch[2]
        K, A, B, Y, S, L = of_pairs[0], of_pairs[1], of_pairs[2], of_pairs[3], squares[0], squares[1]
        norm2, curvature, slope, gain = of_neurons[0], of_neurons[1], of_neurons[2], of_neurons[3]
        w2, q, W, direction = of_neurons[4], of_neurons[5], part(memory, shapes, 5)[0], part(memory, shapes, 6)[0, 0]
        copy(weights_W, W)
        copy(weights_L, L)
        for i in range(n):
            q[i] = weights_q[i]
        for update in range(updates):
            step_W, step_q, step_L = sizes[update, 0], sizes[update, 1], sizes[update, 2]
            transpose(x[update], xT, x2)
            fill(xT, x2, W, params, K, A, B, w2)
            sum_gain, sum_norm2 = zero, zero
            for i in range(n):
                gain_i = q[i] if learns_q else one
                for s in range(batch):
                    Y[i, s] = gain_i * K[i, s]
                own, curved, sloped = self_formula(w2[i], params)
                norm2[i], curvature[i], slope[i] = own, curved, sloped
                if is_natural and norm2[i] < tiny:
                    norm2[i] = tiny
                gain[i] = gain_i * gain_i * norm2[i]
                sum_gain += gain[i]
                sum_norm2 += norm2[i]
            # Responses.
            failed = max(failed, respond(L, ridge, S, Y))
            if is_natural:
                for s in range(batch):
                    own, _, _ = self_formula(x2[s], params)
                    longest[s] = max(real(_RESPONSE_LIMIT) * math.sqrt(max(real(own), zero)), tiny)
                limit_lengths(Y, longest, work)
            # Steps of W and q, from the mean of y (a x - b w) - q/2 df(w,w)/dw and of y k.
            floor, mean_norm2 = real(_GAIN_FLOOR) * sum_gain / real(n), sum_norm2 / real(n)
            feedforward, gradient_W, gradient_q, smallest = 0.0, 0.0, 0.0, math.inf
            for i in range(n):
                gain_i, drive, along = q[i] if learns_q else one, zero, zero
                for s in range(batch):
                    drive += Y[i, s] * K[i, s]
                    along += Y[i, s] * B[i, s]
                    work[s] = Y[i, s] * A[i, s]
                back, length2 = share * along + half * gain_i * slope[i], zero
                for f in range(m):
                    total = zero
                    for s in range(batch):
                        total += work[s] * xT[f, s]
                    direction[f] = share * total - back * W[i, f]
                    length2 += direction[f] * direction[f]
                feedforward -= gain_i * share * drive
                gradient_W += gain_i * gain_i * length2
                if learns_q:
                    gradient_q += (q[i] * norm2[i] - share * drive) ** 2
                smallest = min(smallest, abs(q[i]))
                if is_natural:
                    size = step_W * gain_i * norm2[i] / (max(gain[i], floor) * curvature[i])
                    if length2 > zero:
                        most = real(_TRUST) * math.sqrt(max(norm2[i], mean_norm2) / (length2 * curvature[i]))
                        size = min(max(size, -most), most)
                    step = step_q * (share * drive / norm2[i] - q[i])
                else:
                    size = step_W / gain_i
                    step = step_q * (share * drive - q[i] * norm2[i])
                if learns_q:
                    q[i] += step
                for f in range(m):
                    W[i, f] += size * direction[f]
            if noted < len(observed) and observed[noted] == update:
                numbers = seen[noted]
                numbers[0], numbers[1], numbers[8] = feedforward, 0.5 * sum_gain, smallest
                numbers[5], numbers[6] = math.sqrt(gradient_W), math.sqrt(gradient_q)
                record(K, Y, L, S, ridge, seen_k[noted], seen_y[noted], numbers)
                noted += 1
            ascend(L, Y, step_L)
        copy(W, weights_W)
        copy(L, weights_L)
        for i in range(n):
            weights_q[i] = q[i]
        return failed

    return block
