"""Linearised responses of the MNIST networks, alpha 1 to 4, as images (the paper's Fig. 9).

.venv/bin/python scripts/reproduce/mnist_linearised.py     a minute, after the networks (6 minutes on two cores)
"""

import numpy as np
import torch
from figure_script import Arrays, Claim, Script, Workspace, extent_of, image_rows, many, mnist_points
from matplotlib.figure import Figure
from mnist_networks import ALPHAS, aligned, network, some_of

from ksm_lightning.network.functional import linearised_responses

SHOWN = 35


def compute(workspace: Workspace) -> Arrays:
    """``(0.1 I + <x x^T>)^-1 <y_i x>``, the spatial frequency, and the cosine with the nearest digit."""
    x = mnist_points(workspace)
    few = some_of(workspace, x)
    directions = (few / few.norm(dim=1, keepdim=True)).numpy()
    arrays: Arrays = {}
    for alpha in ALPHAS:
        _, y = aligned(network(workspace, alpha), x)
        large = y.abs() > 3 * y.square().mean(0).sqrt()
        positive = ((y > 0) & large).sum(0) / large.sum(0).clamp(min=1)
        arrays[f"one_sign_{alpha}"] = torch.maximum(positive, 1 - positive).numpy()
        S = linearised_responses(x, y).numpy()
        lengths = np.maximum(np.linalg.norm(S, axis=1, keepdims=True), 1e-12)
        arrays[f"S_{alpha}"] = S
        arrays[f"nearest_{alpha}"] = (S / lengths @ directions.T).max(1)
        arrays[f"roughness_{alpha}"] = roughness(S)
        arrays[f"extent_{alpha}"] = extent(S)
    return arrays | {"roughness_digits": roughness(few.numpy())}


def roughness(images: np.ndarray) -> np.ndarray:
    """Squared differences of neighbouring pixels, divided by squared pixels: 4 for white noise, less if smooth."""
    side = round(images.shape[1] ** 0.5)
    grid = images.reshape(-1, side, side)
    rows, columns = np.diff(grid, axis=1), np.diff(grid, axis=2)
    return ((rows**2).sum((1, 2)) + (columns**2).sum((1, 2))) / (grid**2).sum((1, 2))


def extent(images: np.ndarray) -> np.ndarray:
    """Effective number of pixels of an image: ``(sum s^2)^2 / sum s^4``."""
    square = images**2
    return square.sum(1) ** 2 / (square**2).sum(1)


def draw(arrays: Arrays) -> dict[str, Figure]:
    """Draw one block of images per kernel."""
    images = {f"alpha = {alpha}": arrays[f"S_{alpha}"][:SHOWN] for alpha in ALPHAS}
    return {"mnist_linearised": image_rows(images, "Linearised responses $s_i$")}


def claims(arrays: Arrays) -> list[Claim]:
    """Statements about Fig. 9."""

    def medians(name: str) -> list[float]:
        return [float(np.median(arrays[f"{name}_{alpha}"])) for alpha in ALPHAS]

    nearest, rough, wide = medians("nearest"), medians("roughness"), medians("extent")
    one_sign, digits = medians("one_sign"), float(np.median(arrays["roughness_digits"]))
    return [
        Claim(
            "alpha = 3: large responses of a single neuron are either always positive or always negative",
            "fraction of a neuron's large responses (above three times its root mean square) with the same sign, "
            f"median over neurons, alpha 1 to 4: {many(one_sign, 2)}",
            one_sign[2] > 0.95,
        ),
        Claim(
            "as alpha increases, neurons become increasingly selective to whole digits",
            f"median cosine with the nearest digit, alpha 1 to 4: {many(nearest, 2)}",
            extent_of([step for step in np.diff(nearest) if step > 0.005], ALPHAS[1:]),
        ),
        Claim(
            "alpha = 1: not digits, but images of high spatial frequency",
            f"squared differences of neighbours divided by squared pixels, alpha 1 to 4: {many(rough, 2)}; digits "
            f"{digits:.2f}, white noise 3.8; cosine with the nearest digit for alpha = 1: {nearest[0]:.2f}",
            bool(rough[0] > 2 * digits and nearest[0] == min(nearest)),
        ),
        Claim(
            "alpha = 2: selective for small regions; the filters grow with alpha to resemble whole digits",
            f"effective number of pixels of a filter, alpha 1 to 4: {many(wide, 0)}",
            extent_of([step for step in np.diff(wide[1:]) if step > 0], ALPHAS[2:]),
            "By this measure the nonlinear filters differ little. The linear ones extend over the whole image.",
        ),
    ]


SCRIPT = Script("mnist_linearised", compute, draw, claims, minutes=1, needs_mnist=True)

if __name__ == "__main__":
    SCRIPT.main()
