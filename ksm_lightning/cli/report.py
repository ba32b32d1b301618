"""``ksm report``: a run as one page."""

from pathlib import Path

from tqdm import tqdm

from ksm_lightning.cli.device import find_device
from ksm_lightning.files import write_text
from ksm_lightning.report import load, measure, render
from ksm_lightning.report.measure import SECTIONS
from ksm_lightning.report.page import MARK
from ksm_lightning.runs.finished_run import Run


def report(
    run: str,
    out: str | None = None,
    ckpt_path: str | None = None,
    max_points: int = 3000,
    device: str = "auto",
    progress: bool = True,
) -> None:
    """Write one page about a run that needs no network to be read: summary, curves, features, probes, comparison with
    other methods, and what to try next.

    Everything but the curves is measured anew from the checkpoint and the data. Example: ksm report
    runs/half_moons/version_0

    Args:
        run: The run folder, or a checkpoint in it.
        out: The page; report.html in the run folder unless given. An earlier report is replaced, nothing else is.
        ckpt_path: The checkpoint; checkpoints/last.ckpt of the run unless given.
        max_points: Errors are those of all pairs of so many random training points at most; the time that kernel PCA
            takes grows with its cube.
        device: Where to compute: cpu, cuda, or auto for cuda where there is one.
        progress: Whether to show a progress bar.
    """
    if max_points < 2:
        raise ValueError(f"`max_points` must be at least 2, got {max_points}.")
    place = find_device(device)
    source = _open(run, ckpt_path)
    page = Path(out) if out is not None else source.folder / "report.html"
    if page.is_dir():
        raise ValueError(f"{page} is a folder: give --out the name of a file, such as {page / 'report.html'}.")
    if page.exists() and MARK not in page.read_bytes():
        raise FileExistsError(f"{page} exists already and is no report: name another file with --out.")
    model, data = load(source, place)
    with tqdm(total=SECTIONS, disable=not progress, bar_format="{percentage:3.0f}% |{bar:20}| {elapsed} {desc}") as bar:
        finished = iter(range(SECTIONS + 1))

        def watch(text: str) -> None:
            bar.set_description_str(text)
            bar.update(next(finished) - bar.n)

        found = measure(source, model, data, max_points, watch)
        text = render(found)
        bar.set_description_str("done")
        bar.update(SECTIONS - bar.n)
    write_text(page, text)
    print(f"Report: {page}\n")
    for finding in found.findings:
        print(f"{finding.severity}: {finding.title}. {finding.measured} {finding.advice}")
    if not found.findings:
        print("Nothing is wrong with this run.")


def _open(run: str, ckpt_path: str | None) -> Run:
    if not Path(run).is_file():
        return Run(run, ckpt_path)
    found = Run.of_checkpoint(run)
    if found is None or ckpt_path is not None:
        raise ValueError(f"{run} is a file: give the run folder that has its config.yaml, and the file as --ckpt_path.")
    return found
