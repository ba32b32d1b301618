"""The tables of the ablation: what each variant changes in each part of the panel."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

import sklearn
from ablation_panel import LONGEST, PARTS, Run
from ablation_variants import OTHER_SEEDS, UNCHANGED, Variant
from real_data import ROUNDING, Record
from results import machine, table, write_sections

MEDIAN_LIMIT, WORST_LIMIT = 0.01, 0.05  # a mechanism whose removal changes less than this is not needed
Key = tuple[str, str, str, int]  # variant, part, configuration, seed
Results = dict[Key, Record]
NOT_ERRORS = ("finite", "seconds", "reason")
CHANCE = tuple(variant.name for variant in OTHER_SEEDS)


def key_of(variant: Variant, run: Run) -> Key:
    return variant.name, run.part, run.configuration, run.seed


class Change:
    """What a variant changes in a part of the panel. The longest responses of streams count as a part of their own."""

    def __init__(self, variant: str, part: str, found: Results) -> None:
        self.variant, self.part = variant, part
        ratios: dict[tuple[str, str], list[float]] = {}  # by configuration and kind of error, one per seed
        self.failed, self.failed_before, seconds, seconds_before = 0, 0, 0.0, 0.0
        for (name, of_part, *rest), record in found.items():
            if name != variant or of_part != ("streams" if part == LONGEST else part):
                continue
            base = found.get((UNCHANGED.name, of_part, *rest), {})
            self.failed += not record["finite"] and part != LONGEST
            self.failed_before += not base.get("finite", True) and part != LONGEST
            if record["finite"] and base.get("finite"):
                seconds, seconds_before = seconds + record["seconds"], seconds_before + base["seconds"]
            for kind in record.keys() & base.keys() - {*NOT_ERRORS}:
                if (kind == LONGEST) == (part == LONGEST) and max(record[kind], base[kind]) >= ROUNDING:
                    ratio = max(record[kind], ROUNDING) / max(base[kind], ROUNDING)
                    ratios.setdefault((rest[0], kind), []).append(ratio)
        values = [ratio for each in ratios.values() for ratio in each]
        logs = {", ".join(key): list(map(math.log, each)) for key, each in ratios.items()}
        means = {name: math.exp(fmean(each)) - 1 for name, each in logs.items()}
        # Standard errors over seeds, and what configurations change by at least with that uncertainty.
        errors = {name: stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0 for name, each in logs.items()}
        self.least = max((math.exp(fmean(each) - 2 * errors[name]) - 1 for name, each in logs.items()), default=0.0)
        self.is_empty = not values and not self.failed
        self.has_effect = self.failed != self.failed_before or any(value != 1 for value in values)
        self.where = max(means, key=means.__getitem__) if means else ""
        self.uncertainty = errors.get(self.where, 0.0)
        self.median, self.worst = (median(values) - 1, means[self.where]) if values else (math.nan, math.nan)
        self.worst_run = max(values) - 1 if values else math.nan
        self.time = seconds / seconds_before - 1 if seconds_before else math.nan

    @property
    def is_small(self) -> bool:
        return self._is_harmless and self.worst < WORST_LIMIT

    @property
    def is_unclear(self) -> bool:
        return self._is_harmless and self.least < WORST_LIMIT

    @property
    def _is_harmless(self) -> bool:
        return self.failed <= self.failed_before and self.median < MEDIAN_LIMIT

    def row(self) -> tuple[str, ...]:
        worst = f"{percent(self.worst)} ({100 * self.uncertainty:.1f})" if self.uncertainty else percent(self.worst)
        shown = (percent(self.median), worst, self.where, percent(self.worst_run))
        shown = shown if self.has_effect else ("no effect", "", "", "")
        return self.variant, self.part, *shown, percent(self.time), str(self.failed)


def percent(change: float) -> str:
    return "" if math.isnan(change) else f"{100 * change:+.1f} %"


def changes_text(found: Results, variants: Mapping[str, Variant]) -> list[str]:
    measured = {key[0] for key in found}
    parts = (*PARTS[:3], LONGEST, *PARTS[3:])
    changes = {
        name: [change for part in parts if not (change := Change(name, part, found)).is_empty]
        for name in variants
        if name in measured
    }
    groups: dict[str, list[str]] = {"none": [], "small": [], "unclear": [], "larger": []}
    for name, of_variant in changes.items():
        if name in CHANCE:
            continue
        if not any(each.has_effect for each in of_variant):
            groups["none"].append(name)
        elif all(each.is_small for each in of_variant):
            groups["small"].append(name)
        else:
            groups["unclear" if all(each.is_unclear for each in of_variant) else "larger"].append(name)
    lists = {name: "; ".join(members) or "none" for name, members in groups.items()}
    header = ("variant", "part", "median", "worst", "where", "worst run", "seconds", "failed")
    return [
        "Changes of the error relative to the unchanged code. The median is over runs, the worst change is that of a "
        "configuration (geometric mean over its seeds, with the standard error in brackets), the worst run is a single "
        "one. Seconds are those of the processor, and below 20 % mostly noise. A run has failed if a number is not "
        "finite or an exception is raised, a random fit also if its error is more than twice that of random landmarks, "
        "without a warning. Other seeds show what chance alone changes. In all parts that were measured:",
        "",
        f"- No effect on any run: {lists['none']}.",
        f"- Median below {100 * MEDIAN_LIMIT:.0f} %, no configuration above {100 * WORST_LIMIT:.0f} %, no further "
        f"failure: {lists['small']}.",
        f"- The same up to two standard errors: {lists['unclear']}.",
        f"- Larger changes: {lists['larger']}.",
        "",
        *table(header, [each.row() for of_variant in changes.values() for each in of_variant]),
    ]


def panel_text(found: Results, runs: Sequence[Run]) -> list[str]:
    records: dict[tuple[str, str], list[Record]] = {}
    for run in runs:
        if key_of(UNCHANGED, run) in found:
            records.setdefault((run.part, run.configuration), []).append(found[key_of(UNCHANGED, run)])
    rows = []
    for (part, configuration), of_cell in records.items():
        finite = [record for record in of_cell if record["finite"]]
        kinds = [kind for kind in dict.fromkeys(kind for each in finite for kind in each) if kind not in NOT_ERRORS]
        medians = {kind: median(each[kind] for each in finite if kind in each) for kind in kinds}
        errors = ", ".join(f"{kind} {value:.4f}" for kind, value in medians.items())
        seconds = f"{fmean(record['seconds'] for record in finite):.2f}" if finite else ""
        rows.append((part, configuration, str(len(of_cell)), errors, seconds, str(len(of_cell) - len(finite))))
    return [
        "The unchanged code, medians over seeds.",
        "",
        *table(("part", "configuration", "runs", "errors", "s per run", "failed"), rows),
    ]


def variants_text(variants: Mapping[str, Variant]) -> list[str]:
    rows = [
        (variant.name, variant.meaning, ", ".join(dict.fromkeys(f"`{target}`" for target, _ in variant.patches)))
        for variant in variants.values()
    ]
    return table(("variant", "what it does", "changed attributes"), rows)


def write(found: Results, runs: Sequence[Run], variants: Mapping[str, Variant], output: Path) -> None:
    head = (
        f"# Ablation\n\n{machine('one thread', scikit_learn=sklearn.__version__)}. Written by "
        "`scripts/benchmark/ablation.py`. All updates are torch operations, also those of small networks."
    )
    titles = {"reading": "Reading", "changes": "Changes", "panel": "The panel", "variants": "The variants"}
    texts = {
        "changes": changes_text(found, variants),
        "panel": panel_text(found, runs),
        "variants": variants_text(variants),
    }
    write_sections(output, head, titles, texts)
