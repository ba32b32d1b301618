"""Feedforward weights of the MNIST networks, alpha 1 to 4, as images (the paper's Fig. 8).

.venv/bin/python scripts/reproduce/mnist_weights.py     seconds, after the networks (6 minutes on two cores)
"""

import numpy as np
from figure_script import Arrays, Claim, Script, Workspace, extent_of, image_rows, many, mnist_points
from matplotlib.figure import Figure
from mnist_networks import ALPHAS, aligned, network, some_of

SHOWN = 35


def compute(workspace: Workspace) -> Arrays:
    """Weights, and their cosine with the nearest digit after the mean digit is removed from both."""
    few = some_of(workspace, mnist_points(workspace))
    mean = few.mean(0).numpy() / np.linalg.norm(few.mean(0))

    def own(vectors: np.ndarray) -> np.ndarray:
        rest = vectors - (vectors @ mean)[:, None] * mean
        return rest / np.linalg.norm(rest, axis=1, keepdims=True)

    digits = own(few.numpy())
    arrays: Arrays = {}
    for alpha in ALPHAS:
        W, _ = aligned(network(workspace, alpha), few)
        arrays[f"W_{alpha}"] = W
        arrays[f"nearest_{alpha}"] = (own(W) @ digits.T).max(1)
    among = digits[:500] @ digits.T
    among[np.arange(len(among)), np.arange(len(among))] = -1
    return arrays | {"digits": among.max(1)}


def draw(arrays: Arrays) -> dict[str, Figure]:
    """Draw one block of images per kernel."""
    images = {f"alpha = {alpha}": arrays[f"W_{alpha}"][:SHOWN] for alpha in ALPHAS}
    return {"mnist_weights": image_rows(images, "Feedforward weights $w_i$")}


def claims(arrays: Arrays) -> list[Claim]:
    """Statements about Fig. 8."""
    nearest = [float(np.median(arrays[f"nearest_{alpha}"])) for alpha in ALPHAS]
    # Nine in ten digits are at least this close to another digit.
    limit = float(np.percentile(arrays["digits"], 10))
    like = [float(np.mean(arrays[f"nearest_{alpha}"] > limit)) for alpha in ALPHAS]
    blends = [alpha for alpha, share in zip(ALPHAS[:3], like, strict=False) if 0.05 < share < 0.95]
    text = ", ".join(f"{100 * value:.0f} %" for value in like)
    return [
        Claim(
            "alpha = 1: complicated combinations of inputs; as alpha increases, weights resemble whole digits",
            "median cosine of a weight with the nearest digit, after the mean digit is removed from both, alpha 1 to "
            f"4: {many(nearest, 2)} (of a digit with the nearest other digit: {np.median(arrays['digits']):.2f})",
            bool(np.all(np.diff(nearest) > 0)),
        ),
        Claim(
            "alpha = 2: clear digits begin to emerge",
            f"weights as close to a digit as nine in ten digits are to another (cosine {limit:.2f}), alpha 1 to 4: "
            f"{text}",
            like[1] > like[0] + 0.2,
        ),
        Claim(
            "alpha = 1, 2, 3: a blend of templates and more complicated combinations",
            f"by the same measure {text}; a blend for alpha = {', '.join(map(str, blends)) or 'none'}",
            extent_of(blends, ALPHAS[:3]),
        ),
        Claim(
            "alpha = 4: nearly all the features look like whole digits",
            f"by the same measure {100 * like[3]:.0f} %",
            like[3] > 0.9,
        ),
    ]


SCRIPT = Script("mnist_weights", compute, draw, claims, minutes=6, needs_mnist=True)

if __name__ == "__main__":
    SCRIPT.main()
