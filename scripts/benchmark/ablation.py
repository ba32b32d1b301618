#!/usr/bin/env python3
"""Ablation: mechanisms turned off and constants changed, one at a time and in groups, on a fixed panel.

Writes scripts/benchmark/ABLATION.md: for each variant and part of the panel, how errors, seconds and the number of
non-finite runs change. ablation_variants.py lists the variants, ablation_panel.py the runs. Every finished run is
stored in runs/ablation, so an interrupted run continues where it stopped; start with an empty folder (or --again) when
the code has changed. real_data.py says which data is needed.

.venv/bin/python scripts/benchmark/ablation.py --panel "half moons" stress streams mnist    about an hour on one core
.venv/bin/python scripts/benchmark/ablation.py --panel board --only "readout: ridge 0"      one variant, about 3 minutes
.venv/bin/python scripts/benchmark/ablation.py --list                                       the variants
.venv/bin/python scripts/benchmark/ablation.py --draw                                       only write the tables
"""

import argparse
import importlib
import json
import math
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any

import ablation_panel
import sklearn
import torch
from ablation_panel import LONGEST, PARTS, Run, panel
from ablation_variants import UNCHANGED, From, Patch, Variant, all_variants
from real_data import ROUNDING, Record
from results import machine, table, write_sections
from tqdm import tqdm

import ksm_lightning

ROOT = Path(__file__).resolve().parents[2]
MEDIAN_LIMIT, WORST_LIMIT = 0.01, 0.05  # a mechanism whose removal changes less than this is not needed
Key = tuple[str, str, str, int]  # variant, part, configuration, seed
Results = dict[Key, Record]
NOT_ERRORS = ("finite", "seconds", "reason")


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


def key_of(variant: Variant, run: Run) -> Key:
    return variant.name, run.part, run.configuration, run.seed


def measure_missing(variants: Sequence[Variant], runs: Sequence[Run], path: Path, found: Results) -> None:
    """Measure the pairs of a variant and a run that are not in ``found`` yet, one variant after the other."""
    pairs = [
        (variant, run)
        for variant in variants
        for run in runs
        if variant.may_change(run.part, run.bound) and key_of(variant, run) not in found
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file, tqdm(pairs, unit="run", disable=not pairs) as bar:
        for variant, run in bar:
            bar.set_description(f"{variant.name}: {run.part}")
            with (
                patched([("learning.native:is_available", lambda: False), *variant.patches]),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                record = run.measure(variant.is_readout)
            found[key_of(variant, run)] = record
            file.write(json.dumps({"key": key_of(variant, run), **record}) + "\n")
            file.flush()


# ---------------------------------------------------------------------- texts


def ratios_of(variant: str, part: str, found: Results) -> dict[tuple[str, str], list[float]]:
    """Errors over those of the unchanged code, by configuration and kind of error, one per seed."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for (name, of_part, configuration, seed), record in found.items():
        base = found.get((UNCHANGED.name, of_part, configuration, seed), {})
        for kind in sorted(record.keys() - NOT_ERRORS) if name == variant else ():
            if part == (LONGEST if kind == LONGEST else of_part) and max(record[kind], base.get(kind, 0)) >= ROUNDING:
                ratios.setdefault((configuration, kind), []).append(
                    max(record[kind], ROUNDING) / max(base.get(kind, 0), ROUNDING)
                )
    return ratios


class Change:
    """What a variant changes in a part of the panel."""

    def __init__(self, variant: str, part: str, found: Results) -> None:
        self.variant, self.part, self.ratios = variant, part, ratios_of(variant, part, found)
        records = {key: record for key, record in found.items() if key[:2] == (variant, part)}
        self.failed = sum(not record["finite"] for record in records.values())
        self.is_empty = not self.ratios and not self.failed
        values = [ratio for each in self.ratios.values() for ratio in each]
        means = {key: math.exp(fmean(map(math.log, each))) for key, each in self.ratios.items()}
        self.worst_cell = ", ".join(max(means, key=means.__getitem__)) if means else ""
        self.median = median(values) - 1 if values else math.nan
        self.worst, self.worst_run = (max(each) - 1 if each else math.nan for each in (means.values(), values))
        self.has_effect = any(value != 1 for value in values) or self.failed > 0
        pairs = [
            (r["seconds"], found[UNCHANGED.name, *key[1:]].get("seconds", math.nan))
            for key, r in records.items()
            if r["finite"]
        ]
        self.time = sum(a for a, _ in pairs) / max(1e-9, sum(b for _, b in pairs)) - 1 if pairs else math.nan

    @property
    def is_small(self) -> bool:
        return self.failed == 0 and abs(self.median) < MEDIAN_LIMIT and self.worst < WORST_LIMIT

    def row(self) -> tuple[str, ...]:
        if not self.has_effect:
            return (self.variant, self.part, "no effect", "", "", "", percent(self.time), "0")
        numbers = (
            percent(self.median),
            percent(self.worst),
            self.worst_cell,
            percent(self.worst_run),
            percent(self.time),
        )
        return (self.variant, self.part, *numbers, str(self.failed))


def percent(change: float) -> str:
    return "" if math.isnan(change) else f"{100 * change:+.1f} %"


def changes_text(found: Results, variants: Mapping[str, Variant]) -> list[str]:
    rows, small, none, noticed = [], [], [], []
    for name in [name for name in variants if any(key[0] == name for key in found)]:
        changes = [change for part in (*PARTS, LONGEST) if not (change := Change(name, part, found)).is_empty]
        rows += [change.row() for change in changes]
        group = noticed if not all(change.is_small for change in changes) else none if not any(
            change.has_effect for change in changes) else small  # fmt: skip
        if not name.startswith("other seeds"):
            group.append(name)
    header = ("variant", "part", "median", "worst", "where", "worst run", "seconds", "non-finite")
    return [
        "Changes of the error relative to the unchanged code. The median is over runs, the worst change is that of a "
        "configuration (mean over its seeds), the worst run is a single one. Seconds are those of the processor. "
        "Variants with other seeds show how large changes by chance are.",
        "",
        f"Median below {percent(MEDIAN_LIMIT)}, no configuration above {percent(WORST_LIMIT)}, nothing non-finite, in "
        f"all parts that were measured: {'; '.join(small) or 'none'}.",
        "",
        f"No effect on any run: {'; '.join(none) or 'none'}.",
        "",
        *table(header, rows),
    ]


def panel_text(found: Results, runs: Sequence[Run]) -> list[str]:
    rows: dict[tuple[str, str], list[Record]] = {}
    for run in runs:
        record = found.get(key_of(UNCHANGED, run))
        if record is not None:
            rows.setdefault((run.part, run.configuration), []).append(record)
    lines = []
    for (part, configuration), records in rows.items():
        finite = [record for record in records if record["finite"]]
        errors = [
            f"{kind} {median(r[kind] for r in finite):.4f}" for kind in (finite or [{}])[0] if kind not in NOT_ERRORS
        ]
        seconds = f"{fmean(r['seconds'] for r in finite):.2f}" if finite else ""
        lines.append(
            (part, configuration, str(len(records)), ", ".join(errors), seconds, str(len(records) - len(finite)))
        )
    return [
        "The unchanged code, medians over seeds.",
        "",
        *table(("part", "configuration", "runs", "errors", "s per run", "non-finite"), lines),
    ]


def variants_text(variants: Mapping[str, Variant]) -> list[str]:
    rows = [
        (name, variant.meaning, ", ".join(f"`{target}`" for target, _ in variant.patches))
        for name, variant in variants.items()
        if not name.startswith("other seeds")
    ]
    return table(("variant", "what it does", "changed attributes"), rows)


TITLES = {"changes": "Changes", "panel": "The panel", "variants": "The variants"}


def write(found: Results, runs: Sequence[Run], variants: Mapping[str, Variant], output: Path) -> None:
    head = (
        f"# Ablation\n\n{machine('one thread', scikit_learn=sklearn.__version__)}. Written by "
        "`scripts/benchmark/ablation.py`. All updates are torch operations, also those of small networks."
    )
    texts = {
        "changes": changes_text(found, variants),
        "panel": panel_text(found, runs),
        "variants": variants_text(variants),
    }
    write_sections(output, head, TITLES, texts)


def main() -> None:
    """Run the command line."""
    variants = all_variants()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=variants, metavar="VARIANT", help="variants. Default: all, see --list"
    )
    parser.add_argument("--panel", nargs="+", choices=PARTS, default=PARTS, help="parts of the panel. Default: all")
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
    if not os.environ.get("KSM_DATA_DIR") and parts & {"streams", "mnist", "board"}:
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
        measure_missing(possible, [run for run in runs if run.part in parts], path, found)
    if found:
        write(found, runs, variants, output)
        print(output.read_text())


if __name__ == "__main__":
    main()
