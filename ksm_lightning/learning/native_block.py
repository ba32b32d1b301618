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
from ksm_lightning.learning.native_algebra import ascend, copy, count, limit_lengths, part, respond, transpose
from ksm_lightning.learning.rules import GAIN_FLOOR, RESPONSE_LIMIT  # compiled code contains their values


def record(k: Any, Y: Any, L: Any, S: Any, ridge: Any, seen_k: Any, seen_y: Any, numbers: Any) -> None:
    """Note what an update shows before L changes: similarities, responses, and those of ten numbers that depend on L.

    The numbers are, in the order of :class:`~.Observation`, five terms of the energy, the lengths of the gradients of
    W, q and L, the smallest gain, and the condition number of ``L + ridge I`` as the factor S shows it. The caller
    fills 0, 1, 5, 6 and 8.
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
            sum_gain = zero
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
            # Responses.
            failed = max(failed, respond(L, ridge, S, Y))
            if is_natural:
                for s in range(batch):
                    own, _, _ = self_formula(x2[s], params)
                    longest[s] = max(real(RESPONSE_LIMIT) * math.sqrt(max(real(own), zero)), tiny)
                limit_lengths(Y, longest, work)
            # Steps of W and q, from the mean of y (a x - b w) - q/2 df(w,w)/dw and of y k.
            floor = real(GAIN_FLOOR) * sum_gain / real(n)
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
