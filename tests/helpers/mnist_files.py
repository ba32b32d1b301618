"""Small files in MNIST's idx format."""

import numpy as np

TRAIN, TEST = 60, 20
SHAPES = {
    "train-images-idx3-ubyte": (TRAIN, 28, 28),
    "train-labels-idx1-ubyte": (TRAIN,),
    "t10k-images-idx3-ubyte": (TEST, 28, 28),
    "t10k-labels-idx1-ubyte": (TEST,),
}


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.RandomState(0)
    made = {name: rng.randint(0, 256, shape) for name, shape in SHAPES.items() if "images" in name}
    made |= {name: np.arange(shape[0]) % 10 for name, shape in SHAPES.items() if "labels" in name}
    return {name: made[name] for name in SHAPES}
