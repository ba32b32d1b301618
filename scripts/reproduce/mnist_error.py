"""Error against the number of features on MNIST, power-cosine kernel with alpha 1 and 3 (the paper's Fig. 5).

.venv/bin/python scripts/reproduce/mnist_error.py             40 minutes on two cores; goes on where it stopped
.venv/bin/python scripts/reproduce/mnist_error.py --quick     half a minute
"""

from typing import Any

from figure_script import (
    MNIST_PHASES,
    Arrays,
    Claim,
    Place,
    Script,
    curves_of,
    entries_of,
    extent_of,
    many,
    mnist_points,
    panel_letter,
    where,
)
from figure_script import run_comparison as compare
from matplotlib.figure import Figure

from ksm_lightning import PowerCosineKernel, figures
from ksm_lightning.baselines import METHODS

ALPHAS, SIZES, UPDATES = (1, 3), (16, 32, 64, 128, 256, 512, 800, 1024), 4000
# Two seeds where a method's luck can be seen; from here on they differ by a few parts in a hundred.
ONE_SEED_FROM = 512
# Of the paper's own schedule, which is in the second figure only.
PAPER = ("ksm", "ksm_nystroem")


def compute(place: Place) -> Arrays:
    """Two comparisons for each kernel: every method, and the network with the paper's schedule."""
    x = mnist_points(place)
    sizes = (4, 16) if place.quick else SIZES
    phases = [{**phase, "updates": 100} for phase in MNIST_PHASES] if place.quick else MNIST_PHASES
    arrays: Arrays = {}
    for alpha in ALPHAS:
        kernel = PowerCosineKernel(alpha)
        options: dict[str, Any] = {"updates": 100 if place.quick else UPDATES}
        few = [n for n in sizes if n < ONE_SEED_FROM]
        compare(place, f"mnist_error_all_{alpha}", kernel, x, few, seeds=(0, 1), **options)
        arrays |= compare(place, f"mnist_error_all_{alpha}", kernel, x, sizes, seeds=(0,), **options)
        options = {"methods": PAPER, "phases": phases, "init_scale": 1.0}
        arrays |= compare(place, f"mnist_error_paper_{alpha}", kernel, x, sizes, seeds=(0,), **options)
    return arrays


def draw(arrays: Arrays) -> dict[str, Figure]:
    """A panel a kernel, with the network twice: our schedule, and the paper's."""
    figure = figures.new_figure(14, 5.6, columns=2)
    for place, alpha in enumerate(ALPHAS):
        axes = figure.add_subplot(1, 2, place + 1)
        figures.error_panel(axes, curves_of(arrays, f"mnist_error_all_{alpha}"), f"MNIST, alpha = {alpha}")
        for method, curve in curves_of(arrays, f"mnist_error_paper_{alpha}").items():
            style = {"ksm": (":", "o"), "ksm_nystroem": ("-.", "s")}[method]
            axes.plot(
                curve.sizes, curve.mean, style[0], marker=style[1], color="#7a1015", markersize=4, linewidth=1.4,
                label=f"{METHODS[method].label}, paper's schedule",
            )  # fmt: skip
        axes.legend(loc="lower left", fontsize=6.5, framealpha=0.9)
        panel_letter(axes, "ab"[place])
    return {"mnist_error": figure}


def claims(arrays: Arrays) -> list[Claim]:
    ours = {alpha: entries_of(arrays, f"mnist_error_all_{alpha}") for alpha in ALPHAS}
    paper = {alpha: entries_of(arrays, f"mnist_error_paper_{alpha}") for alpha in ALPHAS}
    sizes = sorted(ours[3]["ksm"])
    large = [n for n in sizes if n > 100] or sizes[-1:]

    def row(entries: dict, method: str, chosen: list[int]) -> str:
        return many((entries[method][n].mean for n in chosen), 4)

    def rising(entries: dict, above: int = 0) -> list[int]:
        values = [entries["ksm"][n].mean for n in sizes]
        steps = zip(sizes[1:], values, values[1:], strict=False)
        return [n for n, before, now in steps if now > before and n > above]

    worst = max(entries[n].mean for entries in ours[1].values() for n in large)
    worst_paper = max(paper[1]["ksm"][n].mean for n in large)
    low = [e[sizes[0]].mean for name, e in ours[1].items()]
    theirs = {name: ours[3][name] for name in ("nystroem_uniform", "nystroem_kmeans")}
    theirs |= {"ksm": paper[3]["ksm"], "ksm_nystroem": paper[3]["ksm_nystroem"]}
    ratios = [min(e[n].mean for e in theirs.values()) / ours[3]["kernel_pca"][n].mean for n in sizes]
    uniform = {n: ours[3]["nystroem_uniform"][n].mean for n in sizes}
    beaten = [
        n for n in sizes if max(ours[3]["nystroem_kmeans"][n].mean, paper[3]["ksm_nystroem"][n].mean) < uniform[n]
    ]
    behind = [n for n in sizes if uniform[n] < paper[3]["ksm"][n].mean]
    behind_ours = [n for n in sizes if uniform[n] < ours[3]["ksm"][n].mean]
    is_crossing = bool(behind) and behind == [n for n in sizes if n >= behind[0]] and behind[0] > sizes[0]
    up, up_ours = ({alpha: rising(entries[alpha]) for alpha in ALPHAS} for entries in (paper, ours))
    at = where(sizes)
    values = {n: ours[3]["ksm"][n].mean for n in sizes}
    triples = zip(sizes, sizes[1:], sizes[2:], strict=False)
    odd = [b for a, b, c in triples if values[b] > 1.3 * max(values[a], values[c])]
    outlier = (
        f" Our schedule fails at {where(odd)}: with as many neurons as samples in a batch its steps of L, 0.25, are "
        "too large for a kernel with such unequal eigenvalues (0.18 would do)."
        if odd
        else ""
    )
    return [
        Claim(
            "alpha = 1: all methods yield a relatively small error even for low dimensionality",
            f"n = {sizes[0]}: {min(low):.3f} to {max(low):.3f}",
            max(low) < 0.2,
        ),
        Claim(
            "alpha = 1: all methods give a relatively small error once n > 100",
            f"the largest error of any method for {where(large)}: {worst:.4f}; of the network with the paper's "
            f"schedule {worst_paper:.4f}",
            (worst_paper < 0.05 or None) if worst < 0.05 else False,
        ),
        Claim(
            "alpha = 1: the network's error does not continue to decrease beyond n = 200",
            f"{at}: the paper's schedule {row(paper[1], 'ksm', sizes)}; ours {row(ours[1], 'ksm', sizes)}",
            bool(rising(paper[1], 200)),
            f"With our schedule and the exact L it rises at {where(rising(ours[1], 200))} only, and stays below 0.01 "
            "there; at small n our shorter schedule is behind the paper's.",
        ),
        Claim(
            "alpha = 1, 3: the network bottoms out, and the error begins to increase with n",
            f"alpha = 3, {at}: the paper's schedule {row(paper[3], 'ksm', sizes)}; ours {row(ours[3], 'ksm', sizes)}; "
            f"it rises with the paper's schedule at {where(up[1])} (alpha 1) and {where(up[3])} (alpha 3), with ours "
            f"at {where(up_ours[1])} and {where(up_ours[3])}",
            extent_of([alpha for alpha in ALPHAS if up[alpha]], ALPHAS),
            "The paper suspects the convergence of descent and ascent: for alpha = 1 the exact L takes most of it "
            "away. For alpha = 3 the bound itself has a floor, which its exact solution shares (see below)." + outlier,
        ),
        Claim(
            "alpha = 3: kernel PCA largely outperforms all methods",
            f"kernel PCA {row(ours[3], 'kernel_pca', sizes)}; the best of the paper's other methods has "
            f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} times as much",
            extent_of([ratio for ratio in ratios if ratio > 1.2], sizes),
        ),
        Claim(
            "alpha = 3: Nystroem with either our features or KMeans outperforms sampled Nystroem",
            f"uniform {row(ours[3], 'nystroem_uniform', sizes)}; features of the paper's schedule "
            f"{row(paper[3], 'ksm_nystroem', sizes)}, of ours {row(ours[3], 'ksm_nystroem', sizes)}; KMeans "
            f"{row(ours[3], 'nystroem_kmeans', sizes)}",
            extent_of(beaten, sizes),
            f"Least squares on our W: {row(ours[3], 'ksm_least_squares', sizes)}; landmarks moved by gradients with "
            f"all data at once: {row(ours[3], 'nystroem_gradient', sizes)}.",
        ),
        Claim(
            "alpha = 3: sampled Nystroem is worse than the network for low n, then catches up and surpasses it",
            f"uniform Nystroem is better for {where(behind)} (the paper's schedule), {where(behind_ours)} (ours)",
            is_crossing,
        ),
    ]


SCRIPT = Script("mnist_error", compute, draw, claims, minutes=40, needs_mnist=True)

if __name__ == "__main__":
    SCRIPT.main()
