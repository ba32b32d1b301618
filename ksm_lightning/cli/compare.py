"""``ksm compare``: the errors of all methods on one kernel and one data set."""

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from ksm_lightning.baselines.comparison import Comparison
from ksm_lightning.baselines.networks import Phases
from ksm_lightning.baselines.tables import METHODS, Summary, markdown, summarise
from ksm_lightning.cli.device import find_device
from ksm_lightning.data import KSMDataModule
from ksm_lightning.files import write_png
from ksm_lightning.kernels import make_kernel
from ksm_lightning.kernels.pairs import random_subset


def compare(
    data: KSMDataModule,
    kernel: str = "gaussian",
    kernel_params: dict[str, float] | None = None,
    sizes: Sequence[int] = (2, 4, 8, 16, 32, 64),
    methods: Sequence[str] | None = None,
    seeds: int = 5,
    updates: int | None = None,
    phases: Phases | None = None,
    init_scale: float | None = None,
    fourier_features: int = 1,
    max_points: int = 10_000,
    fit_points: int = 100_000,
    out: str | None = None,
    device: str = "auto",
    progress: bool = True,
) -> None:
    """Compare all methods on one kernel and data set: a table and a plot of the kernel's NRMSE against n.

    Writes errors.csv (every run), summary.csv (seeds together) and errors.png into the folder `out`. A comparison that
    was interrupted goes on where it stopped when the command is given again; more sizes, methods or seeds can be added
    later in the same way. Example: ksm compare --data=HalfMoonsDataModule --kernel_params.sigma=0.3 --out=runs/moons

    Args:
        data: The data; your own is ArrayDataModule with --data.path.
        kernel: Name of the kernel.
        kernel_params: The kernel's numbers, such as {sigma: 0.3}.
        sizes: StepSizes of features n to compare.
        methods: Names out of kernel_pca, nystroem_uniform, nystroem_kmeans, nystroem_leverage, nystroem_cholesky,
            nystroem_gradient, random_fourier, neural_fourier, linear, ksm, ksm_nystroem, ksm_least_squares; all that
            the kernel allows unless given, but for linear, which matches x . x whatever the kernel.
        seeds: Runs of each method that depends on chance, averaged.
        updates: Updates of each network's adaptive schedule; 5,000 unless given.
        phases: Phases of rates for this package's network instead, or paper_half_moons or paper_mnist.
        init_scale: Start that network at so many times N(0, 1) instead of at data points.
        fourier_features: Random features below each neuron of neural_fourier; 1 is the paper's case.
        max_points: The error is that of all pairs of so many random points at most; kernel PCA is fitted to these.
        fit_points: The other methods are fitted to so many random points at most.
        out: Folder of the results; runs/compare/DATA_KERNEL unless given.
        device: Where to compute: cpu, cuda, or auto for cuda where there is one.
        progress: Whether to show a progress bar.
    """
    if seeds < 1:
        raise ValueError(f"`seeds` must be at least 1, got {seeds}.")
    if max_points < 2 or fit_points < 2:
        raise ValueError(f"`max_points` and `fit_points` must be at least 2, got {max_points} and {fit_points}.")
    similarity = make_kernel(kernel, **(kernel_params or {}))
    place = find_device(device)
    data.prepare_data()
    points = data.train_points
    x = points.take(random_subset(len(points), fit_points)).to(place)
    name = type(data).__name__.removesuffix("DataModule")
    folder = Path(out) if out is not None else Path("runs") / "compare" / f"{name}_{kernel}"
    comparison = Comparison(
        similarity, x, folder, sizes, methods, range(seeds), max_points, updates, phases, init_scale,
        fourier_features,
    )  # fmt: skip
    with tqdm(unit="n", disable=not progress, bar_format="{percentage:3.0f}% |{bar:20}| {elapsed} {desc}") as bar:

        def watch(text: str, done: int, total: int) -> None:
            bar.total = max(total, 1)
            bar.set_description_str(text, refresh=False)
            bar.update(done - bar.n)

        comparison.watch = watch
        summaries = summarise(comparison.run())
        watch("done", int(bar.total or 1), int(bar.total or 1))
    chosen = [entry for entry in summaries if entry.n in set(sizes)]
    picture = folder / "errors.png"
    draw(summaries, f"{similarity}", picture)
    print(f"NRMSE over all pairs of {len(comparison.scored):,} points, {similarity}, mean and deviation over seeds:\n")
    print(markdown(chosen))
    print(f"\nTable: {comparison.table_path}\nPlot:  {picture}")


def draw(summaries: Sequence[Summary], title: str, path: Path) -> None:
    """The plot of a comparison, as PNG."""
    from ksm_lightning.figures import panels as figures

    groups: dict[str, list[Summary]] = {}
    for entry in summaries:
        groups.setdefault(entry.method, []).append(entry)
    curves = {name: figures.curve(entries) for name, entries in groups.items()}
    figure = figures.draw(lambda axes: figures.error_panel(axes, curves, METHODS, title), 7.0, 5.5)
    write_png(path, figures.render(figure))
