"""Every figure of the paper, and REPORT.md: its measurable sentences beside what was measured here.

scripts/reproduce/all             everything: about 80 minutes on two cores the first time; goes on where it stopped
scripts/reproduce/all --quick     everything in small, to see that it works: two minutes; the repository stays as it is
scripts/reproduce/all --only half_moons_overview half_moons_matching

What is computed is kept in runs/reproduce and not computed again: remove a file there after a change of the code.
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
from figure_script import Arrays, Claim, Place, Script

from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.files import write_text

SECTIONS = {
    "half_moons_overview": "Half moons: overview (Fig. 2)",
    "half_moons_matching": "Half moons: matching (Fig. 3)",
    "half_moons_clustering": "Half moons: clustering (Fig. 4)",
    "mnist_error": "MNIST: error against n (Fig. 5)",
    "mnist_classification": "MNIST: responses and linear classification (Fig. 6)",
    "mnist_weights": "MNIST: feedforward weights (Fig. 8)",
    "mnist_linearised": "MNIST: linearised responses (Fig. 9)",
    "mnist_spectra": "MNIST: spectra (Fig. 10)",
    "exact_solution": "What the exact solution of the bound says",
    "mnist_readouts": "What another readout does",
}
VERDICTS = {True: "holds", False: "**does not hold**", None: "in part"}


def main() -> None:
    """Parse, run, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small version of everything")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="figures to make")
    options = parser.parse_args()
    place = Place(options.quick)
    scripts = [importlib.import_module(name).SCRIPT for name in options.only]
    try:
        done = run(scripts, place)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"reproduce: error: {' '.join(str(error).split())}")
    if len(done) == len(SECTIONS):
        path = place.folder / "REPORT.md" if place.quick else Path(__file__).parent / "REPORT.md"
        write_text(path, report(done, place))
        print(f"Report: {path}")
    else:
        print("No report was written: it needs every figure.")


def run(scripts: list[Script], place: Place) -> dict[str, tuple[Script, Arrays]]:
    """Results of the scripts, with an estimate of the time first; those that need MNIST are left out without it."""
    if any(script.needs_mnist for script in scripts) and not _has_mnist():
        print("MNIST is not there (KSM_DATA_DIR names the folder above MNIST/raw): its figures are left out.")
        scripts = [script for script in scripts if not script.needs_mnist]
    missing = [script for script in scripts if not script.path(place).exists()]
    minutes = sum(script.minutes for script in missing) / (60 if place.quick else 1)
    print(f"{len(scripts)} figures, {len(missing)} to compute: about {max(minutes, 1):.0f} minutes on two cores.")
    done = {}
    for number, script in enumerate(scripts, start=1):
        started = time.perf_counter()
        is_new = script in missing
        print(f"[{number}/{len(scripts)}] {script.name}" + (" ..." if is_new else ": computed before"), flush=True)
        done[script.name] = (script, script.run(place))
        if is_new:
            print(f"    {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    return done


def _has_mnist() -> bool:
    return CroppedMNISTDataModule().raw_folder.is_dir()


def report(done: dict[str, tuple[Script, Arrays]], place: Place) -> str:
    """The report as Markdown."""
    claims = {name: script.claims(arrays) for name, (script, arrays) in done.items()}
    counts = Counter(VERDICTS[claim.holds].strip("*") for found in claims.values() for claim in found)
    lines = [
        "# The paper's claims, measured",
        "",
        f"Made by `scripts/reproduce/all` on {os.cpu_count()} cores ({platform.machine()}), no GPU, Python "
        f"{platform.python_version()}, torch {torch.__version__.partition('+')[0]}, lightning {lightning.__version__}. "
        "Each row is a sentence of *Kernel similarity matching with Hebbian neural networks* in short, what was "
        "measured here, and whether it holds (in part: for some sizes or seeds, or as far as the row says). The "
        "paper's schedule is its own, but for MNIST, where the phases after the warm-up are those of the authors' "
        "released notebook, 5,000 and 5,000 updates; ours is the adaptive one, this package's default. Errors are over "
        "all pairs of the 1,600 points of half moons, and of a random 10,000 of the 70,000 digits; kernel PCA is "
        "fitted to these, everything else to all of them.",
        "",
        f"{sum(counts.values())} rows: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".",
        "",
    ]
    for name, title in SECTIONS.items():
        pictures = sorted(path.name for path in place.pictures.glob(f"{name}*.png"))
        lines += [f"## {title}", "", *(f"![{title}](figures/{picture})" for picture in pictures), ""]
        lines += ["| the paper says | measured here | | |", "| --- | --- | --- | --- |"]
        lines += [_row(claim) for claim in claims[name]] + [""]
    return "\n".join(lines)


def _row(claim: Claim) -> str:
    cells = (claim.words, claim.ours, VERDICTS[claim.holds], claim.why)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()
