"""Linearised responses of the MNIST networks, alpha 1 to 4, as images (the paper's Fig. 9).

.venv/bin/python scripts/reproduce/mnist_linearised.py     a minute, after the networks (6 minutes on two cores)
"""

import numpy as np
import torch
from figure_script import Arrays, Claim, Place, Script, extent_of, image_rows, many, mnist_points
from matplotlib.figure import Figure
from mnist_networks import ALPHAS, aligned, network

from ksm_lightning.network.functional import linearised_responses

SHOWN = 35


def compute(place: Place) -> Arrays:
    """``(0.1 I + <x x^T>)^-1 <y_i x>``, its spatial frequency, and how near to a digit each is."""
    x = mnist_points(place)
    few = x[:: 1 if place.quick else 7]
    directions = (few / few.norm(dim=1, keepdim=True)).numpy()
    arrays: Arrays = {}
    for alpha in ALPHAS:
        _, y = aligned(network(place, alpha), x)
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
    """Squared differences of neighbouring pixels over squared pixels: 4 for white noise, less for smooth images."""
    side = round(images.shape[1] ** 0.5)
    grid = images.reshape(-1, side, side)
    rows, columns = np.diff(grid, axis=1), np.diff(grid, axis=2)
    return ((rows**2).sum((1, 2)) + (columns**2).sum((1, 2))) / (grid**2).sum((1, 2))


def extent(images: np.ndarray) -> np.ndarray:
    """How many pixels an image spreads over: ``(sum s^2)^2 / sum s^4``."""
    square = images**2
    return square.sum(1) ** 2 / (square**2).sum(1)


def draw(arrays: Arrays) -> dict[str, Figure]:
    """A row of images a kernel."""
    images = {f"alpha = {alpha}": arrays[f"S_{alpha}"][:SHOWN] for alpha in ALPHAS}
    return {"mnist_linearised": image_rows(images, "Linearised responses $s_i$")}


def claims(arrays: Arrays) -> list[Claim]:
    def medians(name: str) -> list[float]:
        return [float(np.median(arrays[f"{name}_{alpha}"])) for alpha in ALPHAS]

    nearest, rough, wide = medians("nearest"), medians("roughness"), medians("extent")
    one_sign, digits = medians("one_sign"), float(np.median(arrays["roughness_digits"]))
    return [
        Claim(
            "alpha = 3: large responses of a single neuron are either always positive or always negative",
            "responses beyond three times a neuron's root mean square that share a sign, median over neurons, alpha 1 "
            f"to 4: {many(one_sign, 2)}",
            one_sign[2] > 0.95,
        ),
        Claim(
            "as alpha increases, neurons become increasingly selective to whole digits",
            f"median cosine with the nearest digit, alpha 1 to 4: {many(nearest, 2)}",
            extent_of([step for step in np.diff(nearest) if step > 0.005], ALPHAS[1:]),
        ),
        Claim(
            "alpha = 1: not digits, but images of high spatial frequency",
            f"squared differences of neighbours over squared pixels, alpha 1 to 4: {many(rough, 2)}; of digits "
            f"{digits:.2f}, of white noise 3.8; cosine with the nearest digit {nearest[0]:.2f}",
            bool(rough[0] > 2 * digits and nearest[0] == min(nearest)),
        ),
        Claim(
            "alpha = 2: selective for small regions; the filters grow with alpha to resemble whole digits",
            f"pixels that a filter spreads over, alpha 1 to 4: {many(wide, 0)}",
            extent_of([step for step in np.diff(wide[1:]) if step > 0], ALPHAS[2:]),
            "By this measure they differ little; the linear ones are spread over the whole image.",
        ),
    ]


SCRIPT = Script("mnist_linearised", compute, draw, claims, minutes=1, needs_mnist=True)

if __name__ == "__main__":
    SCRIPT.main()
