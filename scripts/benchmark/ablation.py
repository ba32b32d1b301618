#!/usr/bin/env python3
"""Ablation: mechanisms turned off and constants changed, one at a time and in groups, on a fixed panel.

Writes scripts/benchmark/ABLATION.md: for each variant and part of the panel, how errors, seconds and the number of
non-finite runs change. ablation_variants.py lists the variants, ablation_panel.py the runs. Every finished run is
stored in runs/ablation, so an interrupted run continues where it stopped; start with an empty folder (or --again) when
the code has changed. real_data.py says which data is needed.

.venv/bin/python scripts/benchmark/ablation.py                                           about 2 hours on one core
.venv/bin/python scripts/benchmark/ablation.py --panel "half moons" stress               only some parts
.venv/bin/python scripts/benchmark/ablation.py --panel board --only "readout: ridge 0"   one variant
.venv/bin/python scripts/benchmark/ablation.py --list                                    the variants
.venv/bin/python scripts/benchmark/ablation.py --draw                                    only write the tables
"""

import argparse
import importlib
import json
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import ablation_panel
import torch
from ablation_panel import PARTS, Run, panel
from ablation_texts import Results, key_of, write
from ablation_variants import UNCHANGED, From, Patch, Variant, all_variants
from tqdm import tqdm

import ksm_lightning

ROOT = Path(__file__).resolve().parents[2]
# Machine code contains copies of the constants.
TORCH_ONLY: Patch = ("learning.native:is_available", lambda: False)


# ---------------------------------------------------------------------- patches


def package_modules() -> list[ModuleType]:
    """All modules that can hold an attribute, imported before anything is changed."""
    for folder in ("learning", "network", "sklearn"):
        package = importlib.import_module(f"ksm_lightning.{folder}")
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    return [module for name, module in list(sys.modules.items()) if name.startswith(ksm_lightning.__name__)]


def places_of(target: str) -> list[tuple[Any, str]]:
    """The objects that hold an attribute, and its name: public names and functions may be imported elsewhere."""
    module_name, is_alone, path = target.partition("!")
    if not is_alone:
        module_name, _, path = target.partition(":")
    module = (
        ablation_panel if module_name == "ablation_panel" else importlib.import_module(f"ksm_lightning.{module_name}")
    )
    *parents, name = path.split(".")
    owner: Any = module
    for parent in parents:
        owner = getattr(owner, parent)
    value = getattr(owner, name)  # AttributeError if the code has changed
    if parents or is_alone or (name.startswith("_") and not callable(value)):
        return [(owner, name)]
    return [(other, name) for other in package_modules() if vars(other).get(name) is value]


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    """Change attributes for the time of a run."""
    undone: list[tuple[Any, str, bool, Any]] = []
    try:
        for target, value in patches:
            places = places_of(target)
            for owner, name in places:
                has_own = name in vars(owner) or name.startswith("__")
                old = vars(owner).get(name, getattr(owner, name))
                undone.append((owner, name, has_own, old))
                setattr(owner, name, value.change(old) if isinstance(value, From) else value)
        yield
    finally:
        for owner, name, has_own, old in reversed(undone):
            setattr(owner, name, old) if has_own else delattr(owner, name)


def is_possible(variant: Variant) -> bool:
    """Whether the code still has what a variant changes."""
    try:
        return all(places_of(target) for target, _ in variant.patches)
    except (AttributeError, ImportError):
        return False


# ---------------------------------------------------------------------- running and storing


def stored(path: Path) -> Results:
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {tuple(record.pop("key")): record for record in records}


def measure_missing(variants: Sequence[Variant], runs: Sequence[Run], path: Path, found: Results) -> Iterator[Variant]:
    """Measure the pairs of a variant and a run that are not in ``found`` yet. Yields each variant that is finished."""
    pairs = [
        (variant, run)
        for variant in variants
        for run in runs
        if variant.may_change(run.part, run.bound) and key_of(variant, run) not in found
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file, tqdm(total=len(pairs), unit="run", disable=not pairs) as bar:
        for variant, of_variant in groupby(pairs, key=itemgetter(0)):
            for _, run in of_variant:
                bar.set_description(f"{variant.name}: {run.part}")
                with patched([TORCH_ONLY, *variant.patches]), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    record = run.measure(variant.is_readout)
                found[key_of(variant, run)] = record
                file.write(json.dumps({"key": key_of(variant, run), **record}) + "\n")
                file.flush()
                bar.update()
            yield variant


def main() -> None:
    """Run the command line."""
    variants = all_variants()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=variants, metavar="VARIANT", help="variants. Default: all, see --list"
    )
    parser.add_argument("--panel", nargs="+", choices=PARTS, default=PARTS, help="parts of the panel. Default: all")
    parser.add_argument("--match", nargs="+", metavar="TEXT", default=[""], help="only configurations with such a text")
    parser.add_argument("--list", action="store_true", help="only print the variants")
    parser.add_argument("--quick", action="store_true", help="few short runs, as a check of the code")
    parser.add_argument("--again", action="store_true", help="forget stored runs first")
    parser.add_argument("--draw", action="store_true", help="only write the tables of the stored runs")
    parser.add_argument("--folder", type=Path, help="stored runs. Default: runs/ablation, quick: runs/ablation_quick")
    parser.add_argument("--output", type=Path, help="result file. Default: ABLATION.md here, quick: in the folder")
    options = parser.parse_args()
    if options.list:
        for name, variant in variants.items():
            note = "" if is_possible(variant) else "  [not in the code any more]"
            print(f"{name:40}{', '.join(variant.touches):32}{variant.meaning}{note}")
        return
    folder = options.folder or ROOT / "runs" / ("ablation_quick" if options.quick else "ablation")
    output = options.output or (folder if options.quick else Path(__file__).parent) / "ABLATION.md"
    path, runs = folder / "runs.jsonl", panel(options.quick)
    if options.again:
        path.unlink(missing_ok=True)
    parts = set(options.panel)
    if not os.environ.get("KSM_DATA_DIR") and parts - {"half moons", "stress"}:
        print("Only half moons and stress are measured: set KSM_DATA_DIR, see real_data.py.", file=sys.stderr)
        parts &= {"half moons", "stress"}
    found = stored(path)
    if not options.draw:
        torch.set_num_threads(1)
        chosen = [variants[name] for name in options.only or variants]
        for variant in chosen:
            if not is_possible(variant):
                print(f"{variant.name} is skipped: the code has no such attribute any more.", file=sys.stderr)
        possible = [UNCHANGED, *filter(is_possible, chosen)]
        matching = [run for run in runs if any(text in run.configuration for text in options.match)]
        for _ in measure_missing(possible, [run for run in matching if run.part in parts], path, found):
            write(found, runs, variants, output)
    if found:
        write(found, runs, variants, output)
        print(output.read_text())


if __name__ == "__main__":
    main()
