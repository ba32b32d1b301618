"""Reproduce every figure of the paper, and write REPORT.md: measurable statements of the paper and our measurements.

scripts/reproduce/all             all figures: about 80 minutes on two cores the first time; continues where it stopped
scripts/reproduce/all --quick     small versions, as a check: two minutes; changes no committed files
scripts/reproduce/all --only half_moons_overview half_moons_matching

Results are stored in runs/reproduce and not computed again. Delete a file there after a change of the code.
"""

import argparse
import importlib
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path

import lightning
import torch
from figure_script import Arrays, Claim, Script, Workspace

from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.files import write_text

SECTIONS = {
    "half_moons_overview": "Half moons: overview (Fig. 2)",
    "half_moons_matching": "Half moons: matching (Fig. 3)",
    "half_moons_clustering": "Half moons: clustering (Fig. 4)",
    "mnist_error": "MNIST: error by number of features (Fig. 5)",
    "mnist_classification": "MNIST: responses and linear classification (Fig. 6)",
    "mnist_weights": "MNIST: feedforward weights (Fig. 8)",
    "mnist_linearised": "MNIST: linearised responses (Fig. 9)",
    "mnist_spectra": "MNIST: spectra (Fig. 10)",
    "exact_solution": "The exact solution of the bound",
    "mnist_readouts": "Other readouts",
    "tight_bound": "Beyond the paper: the tight bound and compressed features",
}
VERDICTS = {True: "holds", None: "holds in part", False: "**does not hold**"}
PLURALS = {True: "hold", None: "hold in part", False: "do not hold"}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small versions, written to runs/")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="figures to draw. Default: all"
    )
    options = parser.parse_args()
    workspace = Workspace(options.quick)
    scripts = [importlib.import_module(name).SCRIPT for name in options.only]
    try:
        done = run(scripts, workspace)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"reproduce: error: {' '.join(str(error).split())}")
    path = workspace.folder / "REPORT.md" if workspace.is_quick else Path(__file__).parent / "REPORT.md"
    if len(done) == len(SECTIONS) or path.exists():
        write_text(path, report(done, workspace, {} if len(done) == len(SECTIONS) else sections_of(path.read_text())))
        print(f"Report: {path}")
    else:
        print("No report was written: there is none yet, and a first one needs all figures.")


def run(scripts: list[Script], workspace: Workspace) -> dict[str, tuple[Script, Arrays]]:
    """Run scripts and return their results; without the files of MNIST, its scripts are skipped."""
    if any(script.needs_mnist for script in scripts) and not CroppedMNISTDataModule().raw_folder.is_dir():
        print("MNIST was not found: its figures are skipped. Set KSM_DATA_DIR to the folder that holds MNIST/raw.")
        scripts = [script for script in scripts if not script.needs_mnist]
    missing = [script for script in scripts if not script.path(workspace).exists()]
    minutes = sum(script.minutes for script in missing) / (60 if workspace.is_quick else 1)
    print(f"{len(scripts)} figures, {len(missing)} to compute: about {max(minutes, 1):.0f} minutes on two cores.")
    done = {}
    for number, script in enumerate(scripts, start=1):
        started = time.perf_counter()
        is_new = script in missing
        print(f"[{number}/{len(scripts)}] {script.name}" + (" ..." if is_new else ": stored"), flush=True)
        done[script.name] = (script, script.run(workspace))
        if is_new:
            print(f"    {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    return done


def sections_of(text: str) -> dict[str, str]:
    """The sections of an earlier report by title."""
    parts = text.split("\n## ")[1:]
    return {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in parts}


def section(title: str, name: str, claims: list[Claim], workspace: Workspace) -> str:
    """One section of the report."""
    pictures = sorted(path.name for path in workspace.pictures.glob(f"{name}*.png"))
    lines = [f"## {title}", "", *(f"![{title}](figures/{picture})" for picture in pictures), ""]
    lines += ["| the paper says | measured here | verdict | remark |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *map(_row, claims), ""])


def report(done: dict[str, tuple[Script, Arrays]], workspace: Workspace, earlier: dict[str, str]) -> str:
    """The report as Markdown. Sections that were not run are taken from an earlier report."""
    sections = dict(earlier)
    for name, title in SECTIONS.items():
        if name in done:
            script, arrays = done[name]
            sections[title] = section(title, name, script.claims(arrays), workspace)
    sections = {title: sections[title] for title in SECTIONS.values() if title in sections}
    text = "\n".join(sections.values())
    counts = Counter({holds: text.count(f"| {verdict} |") for holds, verdict in VERDICTS.items()})
    verdicts = ", ".join(f"{counts[holds]} {verb}" for holds, verb in PLURALS.items() if counts[holds])
    lines = [
        "# The paper's statements, measured",
        "",
        f"Written by `scripts/reproduce/all` on {os.cpu_count()} cores ({platform.machine()}), no GPU, Python "
        f"{platform.python_version()}, torch {torch.__version__.partition('+')[0]}, lightning {lightning.__version__}. "
        "Each row has a statement of *Kernel similarity matching with Hebbian neural networks*, shortened, what was "
        "measured here, and whether the statement holds. It holds in part if it holds for some sizes or seeds, or as "
        "far as the row says. On half moons, the paper's schedule means the phases `paper_half_moons`, those of its "
        "text. On MNIST it means the phases `released_mnist`, those of the authors' released notebook (5,000 and 5,000 "
        "updates after the warm-up), not the longer `paper_mnist` of the text. The adaptive schedule is this package's "
        "default. Errors are over all pairs of the 1,600 points of half moons, and of 10,000 random digits of the "
        "70,000. "
        "Kernel PCA is fitted to the points of the error, all other methods to all points.",
        "",
        f"{sum(counts.values())} statements: {verdicts}.",
        "",
    ]
    return "\n".join([*lines, text])


def _row(claim: Claim) -> str:
    cells = (claim.statement, claim.measured, VERDICTS[claim.holds], claim.remark)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()
