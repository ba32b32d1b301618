"""What a matrix of similarities must be like."""

import numpy as np

from ksm_lightning.kernels import symmetric_tiles
from ksm_lightning.kernels.limits import FLOAT32_ROUNDING


def check_similarities(matrix: np.ndarray, name: str) -> None:
    """Raise ValueError if a matrix (samples, samples) cannot be one of similarities of the samples among themselves.

    It must be finite and symmetric, and no value may be larger than the largest of its diagonal, which holds for every
    positive semi-definite matrix and for no matrix of distances.

    Args:
        matrix: The matrix.
        name: What it is called in an error.

    Example:
        >>> check_similarities(np.array([[0.0, 2.0], [2.0, 0.0]]), "`kernel`")
        Traceback (most recent call last):
        ValueError: `kernel` must give similarities, but that of samples 0 and 1 is 2, and the largest of a sample \
with itself is 0: a similarity is largest between equal samples, unlike a distance.
    """
    if not np.isfinite(matrix).all():
        row, column = np.argwhere(~np.isfinite(matrix))[0]
        raise ValueError(f"{name} must be finite, but the similarity of samples {row} and {column} is not.")
    own = np.diagonal(matrix)
    scale = np.abs(matrix).max()
    if own.min() < -FLOAT32_ROUNDING * scale:
        row = own.argmin()
        raise ValueError(
            f"{name} must have no negative similarity of a sample with itself, but that of sample {row} is "
            f"{own[row]:.4g}."
        )
    for rows, columns, _ in symmetric_tiles(len(matrix)):
        difference = np.abs(matrix[rows, columns] - matrix[columns, rows].T)
        if difference.max() > FLOAT32_ROUNDING * scale:
            row, column = np.unravel_index(difference.argmax(), difference.shape)
            row, column = row + rows.start, column + columns.start
            raise ValueError(
                f"{name} must be symmetric, but the similarity of samples {row} and {column} is "
                f"{matrix[row, column]:.4g} in one order and {matrix[column, row]:.4g} in the other."
            )
    if scale > (1 + FLOAT32_ROUNDING) * own.max():
        row, column = np.unravel_index(np.abs(matrix).argmax(), matrix.shape)
        raise ValueError(
            f"{name} must give similarities, but that of samples {row} and {column} is {matrix[row, column]:.4g}, and "
            f"the largest of a sample with itself is {own.max():.4g}: a similarity is largest between equal samples, "
            "unlike a distance."
        )
