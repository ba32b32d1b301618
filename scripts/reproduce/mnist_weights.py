"""Feedforward weights of the MNIST networks, alpha 1 to 4, as images (the paper's Fig. 8).

.venv/bin/python scripts/reproduce/mnist_weights.py     seconds, after the networks (6 minutes on two cores)
"""

import numpy as np
from figure_script import Arrays, Claim, Place, Script, image_rows, mnist_points
from matplotlib.figure import Figure
from mnist_networks import ALPHAS, aligned, network

SHOWN = 35


def compute(place: Place) -> Arrays:
    """Weights, and how near to a digit each is."""
    x = mnist_points(place)
    few = x[:: 1 if place.quick else 7]
    directions = (few / few.norm(dim=1, keepdim=True)).numpy()
    arrays: Arrays = {}
    for alpha in ALPHAS:
        W, _ = aligned(network(place, alpha), few)
        arrays[f"W_{alpha}"] = W
        arrays[f"nearest_{alpha}"] = (W / np.linalg.norm(W, axis=1, keepdims=True) @ directions.T).max(1)
    among = directions[:500] @ directions.T
    among[np.arange(len(among)), np.arange(len(among))] = -1
    return arrays | {"digits": among.max(1)}


def draw(arrays: Arrays) -> dict[str, Figure]:
    """A row of images a kernel."""
    images = {f"alpha = {alpha}": arrays[f"W_{alpha}"][:SHOWN] for alpha in ALPHAS}
    return {"mnist_weights": image_rows(images, "Feedforward weights $w_i$")}


def claims(arrays: Arrays) -> list[Claim]:
    nearest = [float(np.median(arrays[f"nearest_{alpha}"])) for alpha in ALPHAS]
    # As near to a digit as a digit itself typically is, but for a tenth.
    limit = float(np.percentile(arrays["digits"], 10))
    like = [float(np.mean(arrays[f"nearest_{alpha}"] > limit)) for alpha in ALPHAS]
    text = ", ".join(f"{100 * value:.0f} %" for value in like)
    return [
        Claim(
            "alpha = 1: complicated combinations of inputs; as alpha increases, weights resemble whole digits",
            "median cosine of a weight with its nearest digit, alpha 1 to 4: "
            + ", ".join(f"{value:.2f}" for value in nearest)
            + f" (of a digit with its nearest other: {np.median(arrays['digits']):.2f})",
            bool(np.all(np.diff(nearest) > 0)),
        ),
        Claim(
            "alpha = 2: clear digits begin to emerge; alpha = 1, 2, 3: a blend of templates and combinations",
            f"as near to a digit as nine in ten digits are to another (cosine {limit:.2f}), alpha 1 to 4: {text}",
            bool(like[0] < like[1] < like[2] and like[1] > 0.05 and like[2] < 0.95),
        ),
        Claim("alpha = 4: nearly all the features look like whole digits", f"{100 * like[3]:.0f} %", like[3] > 0.9),
    ]


SCRIPT = Script("mnist_weights", compute, draw, claims, minutes=6, needs_mnist=True)

if __name__ == "__main__":
    SCRIPT.main()
