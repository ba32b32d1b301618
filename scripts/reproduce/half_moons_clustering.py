"""KMeans on half moons and on their representations, and the conditions for success (the paper's Fig. 4).

.venv/bin/python scripts/reproduce/half_moons_clustering.py     ten minutes on two cores
"""

from functools import partial

import numpy as np
import torch
from figure_script import Arrays, Claim, Script, Workspace, panel_letter, percent, piece
from half_moons_overview import KERNEL, moons, paper_network
from matplotlib.figure import Figure
from tqdm import tqdm

from ksm_lightning import figures
from ksm_lightning.baselines import KernelPCA, SimilarityMatching
from ksm_lightning.evaluation.clustering import kmeans, matched_accuracy
from ksm_lightning.evaluation.linear_probe import fit_softmax, linear_probe
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.network.readout import READOUTS

NAME = "half_moons_clustering"
SEEDS, SWEPT_SEEDS, STARTS, UPDATES = 20, 10, 100, 2000
BASE = {"sigma": 0.3, "noise": 0.1, "n": 16}
SWEEPS = {
    "sigma": (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5),
    "noise": (0.0, 0.05, 0.1, 0.15, 0.2),
    "n": (4, 8, 16, 32, 64),
}
EXACT = "exact kernel"
COLOURS = np.array(["#1f77b4", "#e08a00"])


def clustering(y: torch.Tensor, labels: torch.Tensor, starts: int) -> tuple[float, float]:
    """Accuracy of the start with the lowest energy, and the best accuracy of any start."""
    runs = [kmeans(y, 2, seed=seed) for seed in range(starts)]
    scores = [matched_accuracy(run.assignment, labels) for run in runs]
    least = min(range(starts), key=lambda run: runs[run].energy)
    return scores[least], max(scores)


def base_row(workspace: Workspace, seed: int) -> np.ndarray:
    """Accuracies for one seed of data, start and batches, with the paper's and the adaptive schedule."""
    starts = 5 if workspace.is_quick else STARTS
    data = moons(seed)
    x, labels = data.train_points.data, data.train_labels
    fits = {
        "paper": paper_network(workspace, 16, seed).fit(x),
        "adaptive": SimilarityMatching(KERNEL, 16, updates=100 if workspace.is_quick else UPDATES, seed=seed).fit(x),
    }
    exact = KernelPCA(KERNEL, 100).fit_transform(x)
    row = [*clustering(x, labels, starts), *clustering(exact, labels, starts)]
    for fitted in fits.values():
        row += clustering(fitted.transform(x), labels, starts)
    row += clustering(fits["adaptive"].features(x, "nystroem"), labels, starts)
    sets = data.probe_sets()
    assert sets is not None
    for encode in (lambda x: x, fits["paper"].transform):
        row.append(linear_probe(**sets, per_class=0, seeds=(0,), encode=encode).accuracy)
    return np.array(row)


def swept(workspace: Workspace, name: str, value: float) -> np.ndarray:
    """Accuracies (seeds, readouts and exact kernel) with one condition changed."""
    setting = {**BASE, name: value}
    kernel = GaussianKernel(setting["sigma"])
    found = np.zeros((1 if workspace.is_quick else SWEPT_SEEDS, len(READOUTS) + 1))
    for seed in range(len(found)):
        data = moons(seed, setting["noise"])
        x, labels = data.train_points.data, data.train_labels
        updates = 100 if workspace.is_quick else UPDATES
        fitted = SimilarityMatching(kernel, int(setting["n"]), updates=updates, seed=seed).fit(x)
        features = [fitted.features(x, readout) for readout in READOUTS]
        features.append(KernelPCA(kernel, 100).fit_transform(x))
        for column, y in enumerate(features):
            clusters = kmeans(y, 2, starts=5 if workspace.is_quick else STARTS)
            found[seed, column] = matched_accuracy(clusters.assignment, labels)
    return found


def compute(workspace: Workspace) -> Arrays:
    """Accuracies for all seeds and conditions, and the panels of the first seed."""
    data = moons()
    x, labels = data.train_points.data, data.train_labels
    y = paper_network(workspace, 16).fit(x).transform(x)
    arrays = {
        "x": x.numpy(), "y": y.numpy(), "labels": labels.numpy(),
        "clusters_x": kmeans(x, 2, starts=STARTS).assignment.numpy(),
        "clusters_y": kmeans(y, 2, starts=STARTS).assignment.numpy(),
    }  # fmt: skip
    seeds = tqdm(range(1 if workspace.is_quick else SEEDS), desc="seeds")
    rows = [piece(workspace, NAME, f"seed_{seed}", partial(base_row, workspace, seed)) for seed in seeds]
    arrays["base"] = np.stack(rows)
    for name, values in SWEEPS.items():
        chosen = values[2:4] if workspace.is_quick else values
        rows = [
            piece(workspace, NAME, f"{name}_{value:g}", partial(swept, workspace, name, value))
            for value in tqdm(chosen, desc=name)
        ]
        arrays[f"sweep_{name}"], arrays[f"values_{name}"] = np.stack(rows), np.array(chosen, dtype=float)
    return arrays


def draw(arrays: Arrays) -> dict[str, Figure]:
    """Draw the paper's four panels, and the accuracy by condition below."""
    x, y = arrays["x"], arrays["y"]
    figure = figures.new_figure(18, 8, columns=4, rows=2)

    def points(index: int, letter: str, values: np.ndarray, colours: np.ndarray, title: str) -> None:
        axes = figure.add_subplot(2, 4, index)
        centred = values - values.mean(0)
        shown = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
        axes.scatter(shown[:, 0], shown[:, 1], s=5, c=COLOURS[colours])
        axes.set(xlabel="principal component 1", ylabel="principal component 2", title=title)
        panel_letter(axes, letter)

    def agreeing(clusters: np.ndarray) -> np.ndarray:
        return clusters if np.mean(clusters == arrays["labels"]) >= 0.5 else 1 - clusters

    points(1, "a", x, arrays["labels"], "x, true labels")
    points(2, "b", y, arrays["labels"], "y, true labels")
    for index, letter, clusters, name in ((3, "c", "clusters_x", "x"), (4, "d", "clusters_y", "y")):
        right = np.mean(agreeing(arrays[clusters]) == arrays["labels"])
        points(index, letter, x, agreeing(arrays[clusters]), f"KMeans on {name}: {percent(right)} correct")
    labels = {"sigma": r"kernel width $\sigma$", "noise": "noise of the moons", "n": "neurons $n$"}
    styles = (("#d81f2a", "o--"), ("#d81f2a", "s-"), ("#f08a90", "d-"), ("black", "o-"))
    for index, (name, label) in enumerate(labels.items(), start=5):
        axes = figure.add_subplot(2, 4, index)
        values, found = arrays[f"values_{name}"], 100 * arrays[f"sweep_{name}"]
        for column, (reading, (colour, style)) in enumerate(zip((*READOUTS, EXACT), styles, strict=True)):
            low, middle, high = np.percentile(found[:, :, column], [25, 50, 75], axis=1)
            axes.plot(values, middle, style, color=colour, markersize=4, linewidth=1.3, label=reading)
            axes.fill_between(values, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.axvline(BASE[name], color="0.6", linestyle=":", linewidth=1)
        axes.set(xlabel=label, ylabel="KMeans accuracy, %", ylim=(48, 101), title=f"KMeans on y by {label}")
        if name == "n":
            axes.set_xscale("log", base=2)
            axes.set_xticks(values, [f"{value:.0f}" for value in values])
        axes.legend(loc="lower right", fontsize=7)
    axes = figure.add_subplot(2, 4, 8)
    names = ("x", EXACT, "network,\npaper", "network,\nadaptive", "Nystroem\non W")
    columns = 100 * arrays["base"][:, 0:10:2]
    axes.boxplot(columns, tick_labels=names, medianprops={"color": "#d81f2a"})
    axes.set(ylabel="KMeans accuracy, %", ylim=(48, 101), title=f"{len(columns)} seeds, the paper's conditions")
    axes.tick_params(axis="x", labelsize=8)
    return {"half_moons_clustering": figure}


def separable(values: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy of softmax regression on its training points."""
    x, wanted = torch.tensor(values, dtype=torch.float32), torch.tensor(labels)
    return float(fit_softmax(x[None], wanted[None], [1e-4], 2).accuracy(x, wanted)[0, 0])


def claims(arrays: Arrays) -> list[Claim]:
    """Statements about Fig. 4."""
    found = arrays["base"]
    mean, least, most = found.mean(0), found.min(0), found.max(0)
    perfect = (found > 0.95).mean(0)
    best = {}
    for name in SWEEPS:
        middle = np.median(arrays[f"sweep_{name}"], axis=1)  # (values, readings)
        row, column = np.unravel_index(middle[:, :3].argmax(), middle[:, :3].shape)
        best[name] = (middle[row, column], READOUTS[column], arrays[f"values_{name}"][row])
    reliable = float((arrays["sweep_n"][-1, :, READOUTS.index("nystroem")] > 0.95).mean())
    conditions = "; ".join(
        f"{name} = {where:g}: {percent(value)} ({reading})" for name, (value, reading, where) in best.items()
    )
    two, inputs = (centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T for centred in
                   (values - values.mean(0) for values in (arrays["y"], arrays["x"])))  # fmt: skip
    on_two, on_inputs = (separable(values, arrays["labels"]) for values in (two, inputs))
    axes = np.linalg.svd(arrays["x"] - arrays["x"].mean(0), full_matrices=False)[2]
    turned = float(np.degrees(np.arccos(min(1.0, abs(axes[0, 0])))))
    return [
        Claim(
            "KMeans on y yields nearly perfect labels",
            f"n = 16, sigma 0.3, noise 0.1, lowest energy of {STARTS} starts, mean over {len(found)} seeds: "
            f"{percent(mean[4])} with the paper's schedule ({percent(least[4])} to {percent(most[4])}; above 95 % in "
            f"{percent(perfect[4])} of the seeds), {percent(mean[6])} with the adaptive schedule "
            f"({percent(perfect[6])}), {percent(mean[8])} for Nystroem on W ({percent(perfect[8])}), "
            f"{percent(mean[2])} for the exact kernel ({percent(perfect[2])}), {percent(mean[0])} on x",
            True if perfect[4] > 0.9 else None if np.median(found[:, 4]) > 0.9 else False,
            "Two clusterings of y have nearly the same energy, one along the moons and one across them. The random "
            f"data decide which one is lower. Best medians when one condition changes: {conditions}. With the most "
            f"neurons and the Nystroem readout, {percent(reliable)} of the seeds are above 95 %.",
        ),
        Claim(
            "the start with the lowest energy of 100 gives these labels",
            f"the best accuracy of any start: {percent(mean[5])} on average, above 95 % in {percent(perfect[5])} of "
            "the seeds",
            bool(perfect[5] == perfect[4]),
            "More starts do not help: if the lowest energy belongs to another clustering, no start finds the moons."
            if perfect[5] == perfect[4]
            else "If the lowest energy belongs to another clustering, some starts still find the moons.",
        ),
        Claim(
            "the representations are better suited to downstream learning tasks than the inputs",
            f"a linear classifier on held-out points: {percent(mean[11])} on y, {percent(mean[10])} on x; KMeans: "
            f"{percent(mean[4])} on y, {percent(mean[0])} on x",
            bool(mean[11] > mean[10] and mean[4] > mean[0]),
        ),
        Claim(
            "the top two components of y are more linearly separable than the inputs",
            f"training accuracy of a linear classifier, first seed: {percent(on_two)} on two components of y, "
            f"{percent(on_inputs)} on x",
            bool(on_two > on_inputs),
        ),
        Claim(
            "the principal components of x are just a reflected version of the data",
            f"they are rotated by {turned:.0f} degrees",
            turned < 20,
        ),
    ]


SCRIPT = Script(NAME, compute, draw, claims, minutes=12)

if __name__ == "__main__":
    SCRIPT.main()
