"""A fingerprint of training points, by which a resumed run recognises its data."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ksm_lightning.kernels.limits import BYTES_AT_ONCE, FLOAT32_ROUNDING, ROWS_AT_ONCE, TILE


@dataclass(frozen=True)
class Fingerprint:
    """Size and hash of raw training points (samples, m).

    The hash is over the values in float32, in which the network computes. So the same numbers have the same fingerprint
    in a file of another format or dtype, and generated points keep theirs if another machine rounds the last digit of a
    float64 differently. Data with a spread of less than 1e-5 of its offset is hashed relative to its first row.
    """

    num_points: int
    num_features: int
    sha256: str

    @classmethod
    def of(cls, x: np.ndarray) -> "Fingerprint":
        """The fingerprint of raw rows (samples, m), possibly memory-mapped.

        Of more than 0.5 GB in float32, it reads about as much: blocks of rows at equal distances, the first and the
        last rows among them.

        Example:
            >>> x = np.arange(6.0).reshape(3, 2)
            >>> Fingerprint.of(x) == Fingerprint.of(x.astype(np.uint8)), Fingerprint.of(x) == Fingerprint.of(x[::-1])
            (True, False)
        """
        digest = hashlib.sha256()
        num_points, num_features = x.shape
        with np.errstate(over="ignore", invalid="ignore"):
            offset = _offset(np.asarray(x[:TILE], dtype=np.float64))
            for start, stop in _blocks(num_points, num_features):
                rows = x[start:stop] if offset is None else np.asarray(x[start:stop], dtype=np.float64) - offset
                digest.update(np.ascontiguousarray(rows, dtype="<f4").data)
        return cls(num_points, num_features, digest.hexdigest())


def _offset(x: np.ndarray) -> np.ndarray | None:
    """The first row of the rows (samples, m), if float32 cannot tell the others from it; None otherwise."""
    spread = np.abs(x - x[:1]).max(initial=0.0)
    return x[:1] if 0 < spread < FLOAT32_ROUNDING * np.abs(x[:1]).max(initial=0.0) else None


def _blocks(num_points: int, num_features: int) -> Iterator[tuple[int, int]]:
    """Start and stop of the blocks of rows to hash."""
    most = BYTES_AT_ONCE // (4 * num_features)  # rows
    if num_points <= most:
        for start in range(0, num_points, ROWS_AT_ONCE):
            yield start, min(start + ROWS_AT_ONCE, num_points)
        return
    rows = max(1, min(ROWS_AT_ONCE, most // 2))
    count = max(2, most // rows)
    for index in range(count):
        start = (num_points - rows) * index // (count - 1)
        yield start, start + rows
