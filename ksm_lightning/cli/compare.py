"""``ksm compare``: kernel errors of all methods on one kernel and one data set."""

from collections.abc import Sequence
from pathlib import Path

from ksm_lightning.baselines.comparison import Comparison
from ksm_lightning.baselines.methods import METHODS
from ksm_lightning.baselines.networks import Phases
from ksm_lightning.baselines.tables import Summary, markdown, summarise
from ksm_lightning.cli.device import find_device
from ksm_lightning.cli.step_bar import step_bar
from ksm_lightning.data import KSMDataModule
from ksm_lightning.files import write_png
from ksm_lightning.kernels import Auto, auto_width, chooses_width, make_kernel, with_width
from ksm_lightning.kernels.pairs import random_subset


def compare(
    data: KSMDataModule,
    kernel: str = "gaussian",
    kernel_params: dict[str, float | Auto] | None = None,
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
    show_progress: bool = True,
) -> None:
    """Compare all methods on one kernel and one data set: a table and a plot of the kernel error (NRMSE) by n.

    Writes errors.csv (all runs), summary.csv (statistics over seeds) and errors.png to the folder `out`. Run the same
    command again to continue an interrupted comparison, or with more sizes, methods or seeds to add them. A second
    command that writes to the same folder at the same time is refused.

    Args:
        data: The data. Use ArrayDataModule with --data.path for your own.
        kernel: Name of the kernel.
        kernel_params: Parameters of the kernel, such as {sigma: 0.3}. Default: those of the kernel, and for a kernel
            with a width {sigma: auto}, 0.7 times the median distance of two points.
        sizes: Numbers of features n to compare.
        methods: Methods to compare: NAMES. Default: all that the kernel supports, except linear, which approximates
            x . x instead of the kernel.
        seeds: Number of runs of each random method.
        updates: Number of updates of the adaptive schedule of the paper's network and its predecessors. Default: 5,000.
            The tight networks (ksm_tight, ksm_compressed) make 25 to 200 updates with batches of 1,024 points; their
            features are determined up to a rotation only.
        phases: Phases of the paper's rule for this package's network, or one of paper_half_moons, paper_mnist and
            released_mnist.
        init_scale: Initialise that network's W with init_scale * N(0, 1). Default: at data points.
        fourier_features: Random features per neuron of neural_fourier; the paper uses 1.
        max_points: Maximum number of random points to score; the error is over all their pairs. Kernel PCA is fitted
            to them.
        fit_points: Maximum number of random points that the other methods are fitted to.
        out: Folder of the results. Default: runs/compare/DATA_KERNEL.
        device: Device: cpu, cuda, or auto for cuda if available.
        show_progress: Whether to show a progress bar.
    """
    if seeds < 1:
        raise ValueError(f"`seeds` must be at least 1, got {seeds}.")
    if max_points < 2 or fit_points < 2:
        raise ValueError(f"`max_points` and `fit_points` must be at least 2, got {max_points} and {fit_points}.")
    make_kernel(kernel, **with_width(kernel, kernel_params, 1.0))  # raises its errors before the data are read
    target = find_device(device)
    data.prepare_data()
    points = data.train_points
    x = points.take(random_subset(len(points), fit_points)).to(target)
    sigma = auto_width(x) if chooses_width(kernel, kernel_params) else 1.0
    similarity = make_kernel(kernel, **with_width(kernel, kernel_params, sigma))
    name = type(data).__name__.removesuffix("DataModule")
    folder = Path(out) if out is not None else Path("runs") / "compare" / f"{name}_{kernel}"
    comparison = Comparison(
        similarity, x, folder, sizes, methods, range(seeds), max_points, updates, phases, init_scale,
        fourier_features,
    )  # fmt: skip
    picture = folder / "errors.png"
    with comparison.claimed():
        with step_bar(show_progress) as on_step:
            comparison.on_step = on_step
            summaries = summarise(comparison.run())
        draw(summaries, f"{similarity}", picture)
    chosen = [entry for entry in summaries if entry.n in set(sizes)]
    print(
        f"NRMSE over all pairs of {len(comparison.scored):,} points, {similarity}, mean and standard deviation over "
        "seeds:\n"
    )
    print(markdown(chosen))
    print(f"\nTable: {comparison.table_path}\nPlot:  {picture}")


# The option's help lists the registered methods.
compare.__doc__ = (compare.__doc__ or "").replace("NAMES", ", ".join(METHODS))


def draw(summaries: Sequence[Summary], title: str, path: Path) -> None:
    """Write the plot of a comparison as PNG."""
    from ksm_lightning import figures  # Matplotlib is slow to import

    groups: dict[str, list[Summary]] = {}
    for entry in summaries:
        groups.setdefault(entry.method, []).append(entry)
    curves = {name: figures.curve(entries) for name, entries in groups.items()}
    figure = figures.draw(lambda axes: figures.error_panel(axes, curves, title), 7.0, 5.5)
    write_png(path, figures.render(figure))
