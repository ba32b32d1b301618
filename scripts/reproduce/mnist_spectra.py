"""Spectra of input and output similarities of the MNIST networks, alpha 1 to 4 (the paper's Fig. 10).

.venv/bin/python scripts/reproduce/mnist_spectra.py     two minutes, after the networks (6 minutes on two cores)
"""

import numpy as np
import torch
from figure_script import Arrays, Claim, Script, Workspace, many, mnist_points
from matplotlib.figure import Figure
from mnist_networks import ALPHAS, network, some_of

from ksm_lightning import PowerCosineKernel, figures
from ksm_lightning.baselines import KernelPCA
from ksm_lightning.network.readout import encode_in_blocks

COLOURS = ("black", "#1f77b4", "#d81f2a", "#e08a00")
# Eigenvalues below this fraction of the largest count as zero.
ZERO = 1e-5


def compute(workspace: Workspace) -> Arrays:
    """Leading eigenvalues over 10,000 digits, divided by the largest."""
    x = some_of(workspace, mnist_points(workspace))
    count = 100 if workspace.is_quick else 1024
    arrays: Arrays = {}
    for alpha in ALPHAS:
        y = encode_in_blocks(network(workspace, alpha), x).double()
        output = torch.linalg.eigvalsh(y.mT @ y).flip(0).clamp(min=0)
        found = KernelPCA(PowerCosineKernel(alpha), count, solver="randomised").fit(x).eigenvalues_
        arrays[f"output_{alpha}"] = (output / output[0]).numpy()
        arrays[f"input_{alpha}"] = (found / found[0]).double().numpy()
    return arrays


def draw(arrays: Arrays) -> dict[str, Figure]:
    """Draw all spectra in one panel: inputs solid, outputs dashed."""
    figure = figures.new_figure(7.5, 5.5)
    axes = figure.add_subplot()
    for alpha, colour in zip(ALPHAS, COLOURS, strict=True):
        for kind, style in (("input", "-"), ("output", "--")):
            values = arrays[f"{kind}_{alpha}"]
            shown = values > 1e-7
            ranks = np.arange(1, len(values) + 1)[shown]
            symbol = r"$f(x_s, x_t)$" if kind == "input" else r"$y_s \cdot y_t$"
            axes.plot(ranks, values[shown], style, color=colour, linewidth=1.3, label=f"alpha = {alpha}, {symbol}")
    axes.set(xlabel="rank", ylabel="eigenvalue / largest", yscale="log", title="Spectra of the similarities, MNIST")
    axes.legend(fontsize=8, ncol=2)
    return {"mnist_spectra": figure}


def effective_rank(values: np.ndarray) -> float:
    """``(sum of eigenvalues)^2 / sum of squares``, which is n for n equal eigenvalues."""
    return float(values.sum() ** 2 / (values**2).sum())


def claims(arrays: Arrays) -> list[Claim]:
    """Statements about Fig. 10."""
    nonzero = [int((arrays[f"output_{alpha}"] > ZERO).sum()) for alpha in ALPHAS]
    ranks = [effective_rank(arrays[f"input_{alpha}"]) for alpha in ALPHAS]
    out_ranks = [effective_rank(arrays[f"output_{alpha}"]) for alpha in ALPHAS]

    def ratio(alpha: int, first: int, last: int) -> float:
        part = slice(first, last)
        return float(np.median(arrays[f"output_{alpha}"][part] / arrays[f"input_{alpha}"][part]))

    neurons = len(arrays["output_1"])
    head, tail = (1, max(neurons // 40, 3)), (neurons * 3 // 4, neurons * 7 // 8)
    in_head = [ratio(alpha, *head) for alpha in ALPHAS]
    in_tail = [ratio(alpha, *tail) for alpha in ALPHAS[1:]]
    linear_tail = ratio(1, neurons // 8, neurons // 4)

    return [
        Claim(
            "increasing alpha flattens the spectrum of f: the effective rank increases",
            f"(sum of eigenvalues)^2 / sum of squares, alpha 1 to 4: {many(ranks, 1)}",
            bool(np.all(np.diff(ranks) > 0)),
        ),
        Claim(
            "larger eigenvalues are closely matched for alpha = 1 and approximately for alpha > 1",
            f"output divided by input, median over ranks {head[0] + 1} to {head[1]}, alpha 1 to 4: {many(in_head, 2)}",
            bool(abs(in_head[0] - 1) < 0.05 and all(abs(value - 1) < 0.25 for value in in_head)),
        ),
        Claim(
            "the learned spectra fall off more rapidly than the input's at small eigenvalues",
            f"output divided by input at ranks {tail[0]} to {tail[1]}, alpha 2 to 4: {many(in_tail, 2)}; alpha = 1, "
            f"ranks {neurons // 8} to {neurons // 4}: {linear_tail:.2f}",
            bool(all(value < 1 for value in in_tail) and linear_tail < 1),
        ),
        Claim(
            "alpha = 1 has roughly 200 nonzero eigenvalues, alpha = 2, 3, 4 nearly 800",
            f"eigenvalues above {ZERO:g} of the largest, alpha 1 to 4: {', '.join(map(str, nonzero))} of {neurons}; "
            f"above 1e-4: {', '.join(str(int((arrays[f'output_{alpha}'] > 1e-4).sum())) for alpha in ALPHAS)}",
            bool(150 <= nonzero[0] <= 300 and min(nonzero[1:]) > 0.9 * neurons),
            "The threshold for a nonzero eigenvalue is a choice.",
        ),
        Claim(
            "alpha = 1: at most 400 nonzero eigenvalues, as inputs are 400-dimensional",
            f"{int((arrays['input_1'] > 1e-6).sum())} above 1e-6 of the largest",
            bool((arrays["input_1"] > 1e-6).sum() <= 400),
        ),
        Claim(
            "increasing alpha brings up the tails of the responses' spectrum, approximately whitening them",
            f"effective rank of the output similarities, alpha 1 to 4: {many(out_ranks, 1)}",
            bool(np.all(np.diff(out_ranks) > 0)),
            f"The tails rise, but white responses would have an effective rank of {neurons}.",
        ),
    ]


SCRIPT = Script("mnist_spectra", compute, draw, claims, minutes=2, needs_mnist=True)

if __name__ == "__main__":
    SCRIPT.main()
