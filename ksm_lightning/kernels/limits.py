"""Numbers that several folders share: how much is computed at once, and which differences are rounding errors."""

TILE = 1000
"""Points whose kernel matrix is computed at once: the side of a tile, and the size of samples that show something."""
SMALL_TILE = 64
"""Points, or corrections of rank one, that are worked on together where only few are needed at a time."""
ROWS_AT_ONCE = 8192
"""Rows of points, of features or of a table that are computed or read at once."""
BYTES_AT_ONCE = 2**29
"""Bytes of points that are worked on at once, where a computation may use more memory to be faster."""
UPDATES_AT_ONCE, NUMBERS_AT_ONCE = 200, 2**22
"""Updates that a block has, if its batches have no more numbers than this."""
EXACT_UP_TO = 2000
"""Up to this number of points, costly computations take no shortcut."""
POINTS_PER_LANDMARK = 10
"""Points of a sample per landmark that is optimised on it."""
FIRST_SAMPLES = 256
"""Samples of a first estimate: of a width, of the precision of float32, of a direction."""
FEW = 20
"""Things that are looked at one by one: names in a message, classes, samples on which a slow function is tried."""
ROUNDING = 1e-10
"""Part of the largest value of a kernel matrix in float64 below which values are rounding errors."""
FLOAT32_ROUNDING = 1e-5
"""Relative difference of two results in float32 that is a rounding error."""
NOTICEABLE = 0.01
"""Relative difference below which a result is as good as another one."""
