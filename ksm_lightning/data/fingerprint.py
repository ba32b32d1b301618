"""A fingerprint of training points, by which a resumed run recognises its data."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ksm_lightning.network.preprocessing import ROWS_AT_ONCE

# Points up to this number of bytes in float32 are hashed completely; of larger data, blocks of this size in total.
_WHOLE, _SAMPLED, _BLOCKS = 2**28, 2**26, 256
_LARGE_OFFSET = 1e4


@dataclass(frozen=True)
class Fingerprint:
    """Size and hash of raw training points (samples, m).

    The hash is over the values in float32, in which the network computes. So the same numbers have the same fingerprint
    in a file of another format or dtype, and generated points keep theirs if another machine rounds the last digit of a
    float64 differently. Data with an offset of more than 10,000 times its spread is hashed relative to its first row.
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
        with np.errstate(over="ignore", invalid="ignore"):
            offset = _offset(np.asarray(x[:1000], dtype=np.float64))
            for start, stop in _blocks(num_points, num_features):
                rows = x[start:stop] if offset is None else np.asarray(x[start:stop], dtype=np.float64) - offset
                digest.update(np.ascontiguousarray(rows, dtype="<f4").data)
        return cls(num_points, num_features, digest.hexdigest())


def _offset(x: np.ndarray) -> np.ndarray | None:
    """The first row of the rows (samples, m), if float32 cannot tell the others from it; None otherwise."""
    spread = np.abs(x - x[:1]).max(initial=0.0)
    return x[:1] if np.abs(x[:1]).max(initial=0.0) > _LARGE_OFFSET * spread > 0 else None


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
