"""The built-in kernels, and one that a user could write."""

from ksm_lightning.kernels import Kernel

# Every built-in kernel, with parameters that make a difference.
KERNELS = [
    ("gaussian", {"sigma": 0.7}),
    ("laplacian", {"sigma": 0.7}),
    ("cauchy", {"sigma": 0.7}),
    ("linear", {}),
    ("polynomial", {"degree": 2}),
    ("polynomial", {"degree": 3}),
    ("offset_polynomial", {"power": 3, "gamma": 0.5, "coef0": 0.7}),
    ("power_cosine", {"alpha": 1}),
    ("power_cosine", {"alpha": 2}),
    ("power_cosine", {"alpha": 3}),
    ("arc_cosine", {"order": 0}),
    ("arc_cosine", {"order": 1}),
]


class Quadratic(Kernel):
    """A kernel as a user writes it, with the one method that is required."""

    def __init__(self, offset: float = 1.0) -> None:
        super().__init__()
        self.offset = offset

    def gram(self, u, v):
        return (self.offset + u @ v.mT) ** 2
