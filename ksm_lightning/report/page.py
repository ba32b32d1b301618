"""The HTML of a report: one file without scripts or external resources, for desktops and phones."""

import base64
import re
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from ksm_lightning.baselines.methods import METHODS, READOUT_METHODS
from ksm_lightning.network import KSMNetwork
from ksm_lightning.report.diagnosis import Finding
from ksm_lightning.report.measure import Probes, Report

MARK = b"Made by ksm report"
"""A file that contains this is a report, and may be replaced."""
_STYLE = Path(__file__).with_name("style.css").read_text()
_WORDS = {"error": "Error", "warning": "Warning", "advice": "Advice"}
# Long cells are wrapped.
_WIDE = ' class="wide"'
# An option of `ksm`, or a whole `ksm` command.
_COMMAND = re.compile(r"(ksm \w+(?: --\S+)+|--[a-z_]+(?:\.[a-z_]+)*(?:=[^\s,;)]*[^\s,;.)])?)")


def render(report: Report) -> str:
    """The page in ASCII, which every encoding displays correctly."""
    sections = {
        "Summary": _summary(report),
        "What to try next": findings_list(report.findings),
        "Energy and errors": _pictures(report, "curves")
        or "<p>The run folder contains no TensorBoard events, so there are no training curves.</p>",
        "Landmarks": _pictures(report, "landmarks"),
        "Similarities and responses": _pictures(report, "similarities"),
        "Linear probe": _probes(report.probes) if report.errors else "",
        "Other methods": _comparison(report),
        "Configuration": _configuration(report),
    }
    shown = {title: content for title, content in sections.items() if content}
    ids = {title: title.lower().replace(" ", "-") for title in shown}
    title = escape(_title(report))
    links = "".join(f'<li><a href="#{ids[name]}">{name}</a></li>' for name in shown)
    body = "\n".join(
        f'<section aria-labelledby="{ids[name]}"><h2 id="{ids[name]}">{name}</h2>\n{content}</section>'
        for name, content in shown.items()
    )
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>{title}</h1>
<p class="soft">{escape(_in_words(report))}</p>
<nav aria-label="Contents"><ul>{links}</ul></nav></header>
<main>
{body}
</main>
<footer><p>{escape(_origin(report))}</p></footer>
</body>
</html>
"""
    return page.encode("ascii", "xmlcharrefreplace").decode()


def _title(report: Report) -> str:
    folder = report.run.folder.absolute()
    return f"{folder.parent.name} / {folder.name}"


def _in_words(report: Report) -> str:
    network = report.model.network
    return (
        f"{network.num_neurons:,} neurons with {network.kernel} on {report.data_name}: {report.points:,} points with "
        f"{network.in_features:,} features."
    )


def _origin(report: Report) -> str:
    path = report.run.checkpoint_path
    saved = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    return f"{MARK.decode()} from {path}, update {report.updates:,}, saved {saved}."


def number(value: float, like: float | None = None) -> str:
    """Format an error: four decimals, or two significant digits if it (or ``like``) is below 0.001."""
    size = abs(value if like is None else like)
    return f"{value:.4f}" if size >= 1e-3 or size == 0 else f"{value:.1e}"


def percent(value: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * value:.1f} %"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], own: Iterable[str] = ()) -> str:
    """A table in a scrollable container. The first cell of a row is its name; rows named in ``own`` are bold."""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = []
    for name, *cells in rows:
        mark = ' class="own"' if name in own else ""
        content = "".join(f"<td{_WIDE if len(cell) > 40 else ''}>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr{mark}><th scope="row">{escape(name)}</th>{content}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{names}</tr></thead>\n<tbody>\n"
        + "\n".join(lines)
        + "\n</tbody></table></div>\n"
    )


def findings_list(findings: Sequence[Finding]) -> str:
    """The diagnosis as a list, or a sentence if there are no findings."""
    if not findings:
        return (
            '<ul class="findings"><li class="good"><h3>No problems found</h3><p>Checked: divergence, dead neurons, '
            "idle landmarks, the condition of L, randomly drawn landmarks, the limit of the bound, an early stop, a "
            "falling energy, and the kernel's width.</p></li></ul>"
        )
    items = "\n".join(
        f'<li class="{finding.severity}"><span class="mark">{_WORDS[finding.severity]}</span>'
        f"<h3>{escape(finding.title)}</h3><p>{escape(finding.measured)}</p><p>{_with_code(finding.advice)}</p></li>"
        for finding in findings
    )
    return f'<ul class="findings">\n{items}\n</ul>'


def _with_code(text: str) -> str:
    return _COMMAND.sub(r"<code>\1</code>", escape(text))


def _pictures(report: Report, section: str) -> str:
    figures = []
    for picture in report.pictures.get(section, []):
        source = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
        caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
        figures.append(
            f'<figure><img src="{source}" width="{picture.width}" height="{picture.height}" '
            f'alt="{escape(picture.alt)}">{caption}</figure>'
        )
    return f'<div class="pictures">{"".join(figures)}</div>\n' if figures else ""


def _summary(report: Report) -> str:
    cards = {"neurons n": f"{report.model.network.num_neurons:,}", "updates": f"{report.updates:,}"}
    for readout, method in READOUT_METHODS.items():
        if method.name in report.errors:
            is_compressed = report.num_features is not None and readout != "neural"
            count = f", {report.num_features:,} features" if is_compressed else ""
            cards[f"NRMSE, {readout}{count}"] = number(report.errors[method.name][0])
    if report.probes is not None:
        index = report.probes.typical
        labels = report.probes.labels_per_class[index]
        accuracy = report.probes.found["neural"][index].accuracy
        cards[f"linear probe, {labels:,} {'label' if labels == 1 else 'labels'} per class"] = percent(accuracy)
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in cards.items())
    about = (
        f"NRMSE: ||F - YY\u1d40|| / ||F|| over all pairs of {report.scored:,} training points, for three readouts of "
        f"the same landmarks. {_compression(report)}"
    ).rstrip()
    return f'<dl class="cards">{items}</dl>\n<p class="small soft">{escape(about)}</p>\n'


def _compression(report: Report) -> str:
    """A sentence about readouts with another number of features than neurons, if there are any."""
    if report.num_features is None:
        return ""
    k, n = f"{report.num_features:,}", f"{report.model.network.num_neurons:,}"
    return f"The readouts nystroem and least_squares have {k} features here; the advice is about n = {n} features."


def _probes(probes: Probes | None) -> str:
    if probes is None:
        return "<p>The data has no labels.</p>"
    rows = []
    for name, found in probes.found.items():
        cells = [
            percent(probe.accuracy) + (f" \u00b1 {100 * probe.deviation:.1f}" if probe.deviation else "")
            for probe in found
        ]
        rows.append(["x, the inputs" if name == "x" else name, *cells])
    head = ["features", *(f"{labels:,} {'label' if labels == 1 else 'labels'}" for labels in probes.labels_per_class)]
    notes = [
        "Accuracy of softmax regression by number of labels per class: mean and standard deviation over random draws "
        "of the labelled points. The penalty is selected on validation labels; the accuracy is on test labels."
    ]
    if not probes.has_test_points:
        notes.append("The data has no labelled test points, so the accuracy is on validation labels.")
    elif probes.is_test_learned:
        notes.append("The network was also trained on the test points, without their labels.")
    return table("Accuracy of linear probes", head, rows) + f'<p class="small soft">{escape(" ".join(notes))}</p>\n'


def _comparison(report: Report) -> str:
    if not report.errors:
        return ""
    means = {name: statistics.fmean(values) for name, values in report.errors.items()}
    best = min(means.values())
    rows = []
    for name in sorted(means, key=lambda name: means[name]):
        values = report.errors[name]
        spread = f" \u00b1 {number(statistics.pstdev(values), like=means[name])}" if len(values) > 1 else ""
        ratio = f"{means[name] / best:.3g}" if best > 0 else ""
        rows.append([METHODS[name].label, number(means[name]) + spread, ratio])
    n = report.model.network.num_neurons
    caption = f"NRMSE over all pairs of {report.scored:,} training points with n = {n:,} features"
    note = (
        "Kernel PCA is fitted to the scored points and is optimal for them: no other n features have a smaller error. "
        "Nystroem selects its landmarks from up to 10,000 training points, with three seeds. This run is in bold. "
        f"{_compression(report)}"
    ).rstrip()
    own = [method.label for method in READOUT_METHODS.values()]
    return (
        _pictures(report, "comparison")
        + table(caption, ["method", "NRMSE", "\u00f7 smallest"], rows, own)
        + f'<p class="small soft">{escape(note)}</p>\n'
    )


def _configuration(report: Report) -> str:
    text = escape(report.run.config_text)
    return (
        table("Main options", ["option", "value"], main_values(report).items())
        + f"<details><summary>Full configuration (config.yaml)</summary>\n<pre>{text}</pre></details>\n"
    )


def main_values(report: Report) -> dict[str, str]:
    """The main options of a run, as text."""
    hparams, schedule = report.model.hparams, report.model.schedule
    config, arguments = report.run.config, report.run.config["data"].get("init_args") or {}
    phases = " then ".join(_phase(phase) for phase in hparams["phases"] or [])
    start = "data points" if hparams["init"] == "data" else f"{hparams['init_scale']:g} N(0, 1)"
    data = ", ".join(f"{name}={value}" for name, value in arguments.items() if value is not None)
    return {
        "kernel": str(report.model.kernel),
        "neurons n": f"{report.model.network.num_neurons:,}",
        "bound": _bound(report.model.network),
        "ridge": f"{report.model.network.ridge:.4g}",
        "initial W": start,
        "schedule": f"adaptive, {schedule.total_updates:,} updates" if schedule.is_natural else phases,
        "updates made": f"{report.updates:,}",
        "exact L at the end": "yes" if hparams["consolidate"] else "no",
        "data": f"{report.data_name}({data})",
        "seed": str(config.get("seed_everything")),
    }


def _bound(network: KSMNetwork) -> str:
    if network.bound == "paper":
        return "the paper's: one landmark per neuron"
    return f"tight: {network.num_landmarks:,} landmarks; responses are determined up to a rotation only"


def _phase(phase: dict[str, Any]) -> str:
    rates = ", ".join(f"{name}={phase[name]:g}" for name in ("eta_w", "eta_q", "eta_l"))
    kernel = "".join(f", {name}={value:g}" for name, value in phase["kernel_params"].items())
    return f"{phase['updates']:,} updates at {rates}{kernel}"
