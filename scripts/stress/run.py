"""Run the stress tests and write scripts/stress/RESULTS.md.

Finished jobs are stored in runs/stress and not repeated. Delete that folder after a change of the code.

.venv/bin/python scripts/stress/run.py                      all tests: about an hour on two cores
.venv/bin/python scripts/stress/run.py --only half_moons    one test; the results of the others are kept
.venv/bin/python scripts/stress/run.py --quick              small versions, as a check: a few minutes; writes no results
"""

import argparse
import importlib
import os
import platform
from pathlib import Path

import lightning
import torch

from ksm_lightning.files import write_text

PARTS = {
    "half_moons": "Half moons: sizes, seeds, starts, units",
    "kernels": "Other kernels and data",
    "mnist": "MNIST, 800 neurons, no warm-up",
    "numerics": "Random data, kernels and readouts",
    "kills": "SIGKILL at random moments",
    "concurrency": "Two writers of everything",
    "damage": "Damaged files",
    "signals": "SIGINT and SIGTERM at random moments",
    "requeue": "SLURM's requeue signal at random moments",
}
RESULTS = Path(__file__).parent / "RESULTS.md"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="tests to run. Default: all")
    parser.add_argument("--quick", action="store_true", help="small versions; results are only printed")
    options = parser.parse_args()
    sections = {name: "\n".join(importlib.import_module(name).main(options.quick)) for name in options.only}
    print("\n\n".join(f"## {PARTS[name]}\n\n{text}" for name, text in sections.items()))
    if not options.quick:
        _write(sections)


def _write(sections: dict[str, str]) -> None:
    """Replace the sections that were run and keep the others, also those of parts that were added since the start."""
    old = RESULTS.read_text() if RESULTS.exists() else ""
    found = {title: text.strip() for title, _, text in (part.partition("\n") for part in old.split("\n## ")[1:])}
    found |= {PARTS[name]: text for name, text in sections.items()}
    head = (
        "# Stress tests\n\n"
        f"Written by `.venv/bin/python scripts/stress/run.py` on {os.cpu_count()} cores ({platform.machine()}), no "
        f"GPU, with torch {torch.__version__.partition('+')[0]} and lightning {lightning.__version__}.\n"
    )
    titles = dict.fromkeys([*PARTS.values(), *found])
    body = "".join(f"\n## {title}\n\n{found[title]}\n" for title in titles if title in found)
    write_text(RESULTS, head + body)


if __name__ == "__main__":
    main()
