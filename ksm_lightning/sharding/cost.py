"""What an update of a sharded network costs a process: operations, numbers received, memory.

n neurons, m features, batches of b points, g ranks that own ``n_r = ceil(n / g)`` rows each. Products of matrices are
counted, two operations per multiplication; a Cholesky factorisation and triangular systems of b rows are not, because
they are small.

=============== ============================================= ========================================================
what            operations per rank                           numbers received per rank
=============== ============================================= ========================================================
similarities, W ``4 b n_r m``
responses       ``4 b n n_r``                                 ``3 b n``: drive, responses, corrected responses
L               ``2 b n n_r``
inverse         ``4 b n n_r + 2 b^2 n_r``                     ``b n + b^2``: the factor of its change
means                                                         2
refresh         ``2 n^2 (n_r + 128) + 16 n n_r``              ``n^2 + 4 n``, in panels of 128 rows
=============== ============================================= ========================================================

A refresh recomputes the inverse every 64 updates, or earlier if steps of L are large.
"""

from typing import NamedTuple

from ksm_lightning.sharding.inversion import PANEL, PROBES


class Cost(NamedTuple):
    """Work of one process."""

    operations: int  # floating-point operations in products of matrices
    received: int  # numbers in the results of collectives
    largest: int  # numbers in the largest of these results

    def every(self, updates: int) -> "Cost":
        """The share of one of several updates."""
        return Cost(self.operations // updates, self.received // updates, self.largest)

    def __add__(self, other: object) -> "Cost":
        assert isinstance(other, Cost)
        return Cost(
            self.operations + other.operations, self.received + other.received, max(self.largest, other.largest)
        )


def update_cost(n: int, m: int, batch: int, ranks: int, *, means: int = 1) -> Cost:
    """An update between two refreshes of the inverse.

    ``means`` is the number of means over all neurons that the rule needs: 1 for natural steps, 0 for the paper's.

    Example:
        >>> update_cost(10_000, 400, 64, ranks=8).operations / update_cost(10_000, 400, 64, ranks=1).operations
        0.125
    """
    rows = -(-n // ranks)
    operations = 4 * batch * rows * m + 10 * batch * n * rows + 2 * batch**2 * rows
    return Cost(operations, 4 * batch * _padded(n, ranks) + batch**2 + means, batch * _padded(n, ranks))


def refresh_cost(n: int, ranks: int, panel: int = PANEL) -> Cost:
    """The inverse of ``L + ridge I`` computed again, and its residual."""
    rows, last = -(-n // ranks), n - (ranks - 1) * -(-n // ranks)
    squares = (ranks - 1) * _sum_of_squares(rows, panel) + _sum_of_squares(last, panel)
    operations = 2 * n * n * rows + 2 * n * squares + 4 * PROBES * n * rows
    received = n * n + PROBES * _padded(n, ranks) + 1
    return Cost(operations, received, max(min(panel, rows) * n, PROBES * _padded(n, ranks)))


def memory(n: int, m: int, batch: int, ranks: int, *, copies: int = 0, panel: int = PANEL) -> int:
    """Numbers in the memory of a process at the peak of a block of updates, without the data.

    Args:
        n: Number of neurons.
        m: Number of features.
        batch: Points per update.
        ranks: Number of processes.
        copies: Copies of the weights: the divergence guard keeps two.
        panel: Rows that are sent at once when the inverse is recomputed.
    """
    rows = -(-n // ranks)
    weights = rows * (n + m + 1)
    width = min(panel, rows)
    refresh = width * (2 * n + rows + 2 * width)  # a panel, the same times its inverse block, and columns
    update = 2 * batch * n + 4 * batch * rows + 2 * rows * m  # gathered matrices, similarities, W's direction
    return weights * (1 + copies) + rows * n + max(refresh, update)


def _sum_of_squares(rows: int, panel: int) -> int:
    """Sum of the squared numbers of rows of the panels of one process."""
    return rows // panel * panel**2 + (rows % panel) ** 2


def _padded(n: int, ranks: int) -> int:
    """Collectives need parts of equal size."""
    return -(-n // ranks) * ranks
