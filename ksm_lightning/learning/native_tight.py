"""A block of updates of the tight bound as plain loops over numbers, see :mod:`ksm_lightning.learning.native_block`.

The same rule as in :mod:`ksm_lightning.learning.tight_rule`. What depends on the landmarks alone is float64.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ksm_lightning.kernels.scalar import SelfFormula
from ksm_lightning.learning.native_algebra import (
    add_jitter,
    ascend,
    copy,
    copy_transposed,
    correlate_rows,
    count,
    factorise,
    limit_lengths,
    multiply_rows,
    part,
    respond,
    solve,
    transpose,
)
from ksm_lightning.learning.native_block import record
from ksm_lightning.learning.rules import RESPONSE_LIMIT
from ksm_lightning.learning.tight_rule import MEMORY


def observe_landmarks(Q: Any, k: Any, Y: Any, K: Any, gradient: Any, numbers: Any) -> None:
    """The terms of the energy that contain Q, the lengths of the gradients of W and Q, and the smallest column of Q."""
    (n, p), batch = Q.shape, Y.shape[1]
    feedforward, gain, gradient_W, gradient_Q, smallest = 0.0, 0.0, 0.0, 0.0, math.inf
    for j in range(p):
        column = 0.0
        for i in range(n):
            yk, QK = 0.0, 0.0
            for s in range(batch):
                yk += Y[i, s] * k[j, s]
            for f in range(p):
                QK += Q[i, f] * K[f, j]
            yk /= batch
            feedforward -= Q[i, j] * yk
            gain += 0.5 * Q[i, j] * QK
            gradient_Q += (QK - yk) * (QK - yk)
            column += Q[i, j] * Q[i, j]
        smallest = min(smallest, column)
        for f in range(gradient.shape[1]):
            gradient_W += gradient[j, f] * gradient[j, f]
    numbers[0], numbers[1], numbers[8] = feedforward, gain, math.sqrt(smallest)
    numbers[5], numbers[6] = math.sqrt(gradient_W), math.sqrt(gradient_Q)


def make_tight_block(fill: Callable[..., None], self_formula: SelfFormula) -> Callable[..., int]:
    """The function that runs a block of updates of the tight bound with a kernel.

    Its arguments are the batches x (updates, batch, m); the weights W (p, m), Q (n, p) and L (n, n), and in float64 the
    mean squared lengths of W's directions, square (p,), which are all changed in place; the number of updates that
    these contain; the step sizes of W, Q and L (updates, 3); the ridge; the kernel's numbers in the dtype of W and
    in float64; the smallest number; the jitter; whether landmarks keep their lengths; and what is observed, as for the
    paper's bound. It returns 0, or the column at which a factorisation failed.
    """

    def block(
        x: Any, weights_W: Any, weights_Q: Any, weights_L: Any, average_square: Any, steps: int,
        sizes: Any, ridge: Any, params: Any, wide_params: Any, tiny: Any, jitter: float, keeps_lengths: bool,
        observed: Any, seen_k: Any, seen_y: Any, seen: Any,
    ) -> int:  # fmt: skip
        updates, batch, m = x.shape
        (n, p), real, dtype, wide = weights_Q.shape, weights_W.dtype.type, weights_W.dtype, np.float64
        zero, share = real(0), real(1) / real(batch)
        root_m = m**-0.25
        shapes = ((4, p, p), (2, p, m), (1, m, p), (1, 3, p))
        narrow_shapes = (
            (1, m, batch), (1, 3, batch), (4, p, batch), (1, n, batch), (2, n, n), (2, p, n), (1, n, p), (1, p, p),
            (1, p, m), (1, 1, p),
        )  # fmt: skip
        memory, failed = np.empty(count(shapes) + count(narrow_shapes), wide), 0
        noted = 0
        pairs, flat, tall, singles = (
            part(memory, shapes, 0), part(memory, shapes, 1), part(memory, shapes, 2), part(memory, shapes, 3)[0],
        )  # fmt: skip
        K, KA, KB, M = pairs[0], pairs[1], pairs[2], pairs[3]
        gradient, W64, wT = flat[0], flat[1], tall[0]
        w2_64, lengths, square = singles[0], singles[1], singles[2]
        narrow = memory[count(shapes) :].view(dtype)
        of_batch, of_pairs = part(narrow, narrow_shapes, 1)[0], part(narrow, narrow_shapes, 2)
        squares, outputs = part(narrow, narrow_shapes, 4), part(narrow, narrow_shapes, 5)
        landmarks = part(narrow, narrow_shapes, 8)
        xT, x2, longest, work = part(narrow, narrow_shapes, 0)[0], of_batch[0], of_batch[1], of_batch[2]
        k, A, B, pull, Y = of_pairs[0], of_pairs[1], of_pairs[2], of_pairs[3], part(narrow, narrow_shapes, 3)[0]
        S, L, target, QT = squares[0], squares[1], outputs[0], outputs[1]
        Q, factor = part(narrow, narrow_shapes, 6)[0], part(narrow, narrow_shapes, 7)[0]
        W, w2 = landmarks[0], part(narrow, narrow_shapes, 9)[0, 0]
        copy(weights_W, W)
        copy(weights_Q, Q)
        copy(weights_L, L)
        for j in range(p):
            square[j] = average_square[j]
        for update in range(updates):
            # What depends on W alone.
            copy(W, W64)
            transpose(W64, wT, w2_64)
            fill(wT, w2_64, W64, wide_params, K, KA, KB, lengths)
            copy(K, M)
            add_jitter(M, jitter, tiny)
            failed = max(failed, factorise(M))
            copy(M, factor)
            step_W, step_Q, step_L = sizes[update, 0], sizes[update, 1], sizes[update, 2]
            # Responses.
            transpose(x[update], xT, x2)
            fill(xT, x2, W, params, k, A, B, w2)
            multiply_rows(Q, k, Y)
            failed = max(failed, respond(L, ridge, S, Y))
            for s in range(batch):
                own, _, _ = self_formula(x2[s], params)
                longest[s] = max(real(RESPONSE_LIMIT) * math.sqrt(max(real(own), zero)), tiny)
            limit_lengths(Y, longest, work)
            # The Q that is best for the batch.
            correlate_rows(k, Y, share, target)
            solve(factor, target)
            copy_transposed(Q, QT)
            # The gradient of W: -<(Q^T y)_j df(w_j,x)/dw_j> + sum_l (Q^T Q)_jl df(w_j,w_l)/dw_j.
            multiply_rows(target, Y, pull)
            for j in range(p):
                along = zero
                for s in range(batch):
                    along += pull[j, s] * B[j, s]
                    work[s] = pull[j, s] * A[j, s]
                for f in range(m):
                    total = zero
                    for s in range(batch):
                        total += work[s] * xT[f, s]
                    gradient[j, f] = real(-share * (total - along * W[j, f]))
            for j in range(p):
                for other in range(p):
                    total_64 = 0.0
                    for i in range(n):
                        total_64 += target[j, i] * target[other, i]
                    for f in range(m):
                        gradient[j, f] += total_64 * (KA[j, other] * W64[other, f] - KB[j, other] * W64[j, f])
            if noted < len(observed) and observed[noted] == update:
                observe_landmarks(Q, k, Y, K, gradient, seen[noted])
                record(k, Y, L, S, ridge, seen_k[noted], seen_y[noted], seen[noted])
                noted += 1
            # Steps of W, Q and L.
            steps += 1
            unbias = 1 - MEMORY**steps
            for j in range(p):
                own, curved, _ = self_formula(w2[j], params)
                length = math.sqrt(max(own, tiny) / curved)
                total_64 = 0.0
                for f in range(m):
                    direction = gradient[j, f] * length
                    total_64 += direction * direction
                square[j] += (1 - MEMORY) * (total_64 - square[j])
                norm = math.sqrt(square[j] / unbias)
                size = real(length * length / max(norm, 2.3e-308) * step_W * root_m)
                now, scale = zero, real(1)
                for f in range(m):
                    W[j, f] -= size * real(gradient[j, f])
                    now += W[j, f] * W[j, f]
                if keeps_lengths and now > zero:
                    scale = math.sqrt(w2[j] / now)
                for f in range(m):
                    W[j, f] *= scale
                for i in range(n):
                    QT[j, i] += step_Q * (target[j, i] - QT[j, i])
            copy_transposed(QT, Q)
            ascend(L, Y, step_L)
        copy(W, weights_W)
        copy(Q, weights_Q)
        copy(L, weights_L)
        for j in range(p):
            average_square[j] = square[j]
        return failed

    return block
