"""``ksm report``: an HTML report of a run."""

from pathlib import Path

from ksm_lightning.cli.device import find_device
from ksm_lightning.cli.run_options import checkpoint_of
from ksm_lightning.cli.step_bar import step_bar
from ksm_lightning.data import KSMDataModule
from ksm_lightning.files import write_text
from ksm_lightning.network.readout import feature_count
from ksm_lightning.report import load, measure, render
from ksm_lightning.report.page import MARK
from ksm_lightning.runs.finished_run import FinishedRun


def report(
    run: str,
    out: str | None = None,
    ckpt_path: str | None = None,
    max_points: int = 3000,
    device: str = "auto",
    show_progress: bool = True,
    num_features: int | None = None,
    data: KSMDataModule | None = None,
) -> None:
    """Write an HTML report of a run to one file.

    It has a summary, a diagnosis with advice, curves, landmarks, similarities, linear probes and a comparison with
    other methods. Everything except the curves is computed from the checkpoint and the data. Nothing that the run
    folder names is imported or run.

    Args:
        run: The run folder, or a checkpoint in it.
        out: Path of the report. Only an earlier report is overwritten. Default: report.html in the run folder.
        ckpt_path: A checkpoint. Default: checkpoints/last.ckpt of the run.
        max_points: Maximum number of random training points in the kernel errors; the time of kernel PCA grows with
            its cube.
        device: Device: cpu, cuda, or auto for cuda if available.
        show_progress: Whether to show a progress bar.
        num_features: Number of features of the readouts nystroem and least_squares, at most the number of landmarks.
            Default: the number of neurons.
        data: The data of the run, if its datamodule is your own: --data=my_module.MyDataModule. Default: the datamodule
            of this package that the run's config.yaml describes.
    """
    if max_points < 2:
        raise ValueError(f"`max_points` must be at least 2, got {max_points}.")
    target = find_device(device)
    source = _open(run, None if ckpt_path is None else checkpoint_of(ckpt_path))
    page = Path(out) if out is not None else source.folder / "report.html"
    _check_target(page)
    model, data = load(source, target, data)
    feature_count(model.network, "nystroem", num_features)
    with step_bar(show_progress) as on_step:
        content = measure(source, model, data, max_points, on_step, num_features)
        text = render(content)
    _check_target(page)  # again: other programs may have written it while this one measured
    write_text(page, text)
    print(f"Report: {page}\n")
    for finding in content.findings:
        print(f"{finding.severity}: {finding.title}. {finding.measured} {finding.advice}")
    if not content.findings:
        print("No problems found.")


def _check_target(page: Path) -> None:
    if page.is_dir():
        raise ValueError(f"--out must be a file, but {page} is a folder: use --out={page / 'report.html'}.")
    if page.exists() and MARK not in page.read_bytes():
        raise FileExistsError(f"{page} exists and is not a report: choose another file with --out.")


def _open(run: str, ckpt_path: str | None) -> FinishedRun:
    if not Path(run).is_file():
        return FinishedRun(run, ckpt_path)
    source = FinishedRun.of_checkpoint(run)
    if source is None or ckpt_path is not None:
        raise ValueError(
            f"{run} is a file outside of a run folder, or --ckpt_path names another one: pass the run folder with its "
            "config.yaml, and the checkpoint as --ckpt_path."
        )
    return source
