"""A fingerprint of training points, by which a resumed run recognises its data."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ksm_lightning.network.preprocessing import ROWS_AT_ONCE

# Points up to this number of bytes in float32 are hashed completely; of larger data, blocks of this size in total.
_WHOLE, _SAMPLED, _BLOCKS = 2**28, 2**26, 256


@dataclass(frozen=True)
class Fingerprint:
    """Size and hash of raw training points (samples, m).

    The hash is over the values in float32, in which the network computes. So the same numbers have the same fingerprint
    in a file of another format or dtype, and generated points keep theirs if another machine rounds the last digit of a
    float64 differently.
    """

    num_points: int
    num_features: int
    sha256: str

    @classmethod
    def of(cls, x: np.ndarray) -> "Fingerprint":
        """The fingerprint of raw rows (samples, m), possibly memory-mapped.

        Of more than 256 MB in float32, it reads 64 MB: 256 blocks of rows at equal distances, the first and the last
        rows among them.

        Example:
            >>> x = np.arange(6.0).reshape(3, 2)
            >>> Fingerprint.of(x) == Fingerprint.of(x.astype(np.uint8)), Fingerprint.of(x) == Fingerprint.of(x[::-1])
            (True, False)
        """
        digest = hashlib.sha256()
        num_points, num_features = x.shape
        for start, stop in _blocks(num_points, num_features):
            with np.errstate(over="ignore"):
                rows = np.ascontiguousarray(x[start:stop], dtype="<f4")
            digest.update(rows.data)
        return cls(num_points, num_features, digest.hexdigest())


def _blocks(num_points: int, num_features: int) -> Iterator[tuple[int, int]]:
    """Start and stop of the blocks of rows to hash."""
    row = 4 * num_features  # bytes
    if num_points * row <= _WHOLE:
        for start in range(0, num_points, ROWS_AT_ONCE):
            yield start, min(start + ROWS_AT_ONCE, num_points)
        return
    count = max(2, min(_BLOCKS, _SAMPLED // row))
    rows = min(max(1, _SAMPLED // (count * row)), num_points)
    for index in range(count):
        start = (num_points - rows) * index // (count - 1)
        yield start, start + rows
