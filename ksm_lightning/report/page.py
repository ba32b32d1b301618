"""The HTML of a report: one file that needs no network, no script and no font, for phones and dark rooms too."""

import base64
import re
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import Any

from ksm_lightning.baselines.tables import METHODS
from ksm_lightning.report.diagnosis import Finding
from ksm_lightning.report.measure import Probes, Report
from ksm_lightning.report.pictures import Picture
from ksm_lightning.report.style import STYLE

MARK = b"Made by ksm report"
"""By which a page is known for a report."""
_WORDS = {"error": "Error", "warning": "Warning", "advice": "Advice"}
# A cell of so much text is broken into lines.
_WIDE = ' class="wide"'
# An option of `ksm`, or a whole command of it.
_COMMAND = re.compile(r"(ksm \w+(?: --\S+)+|--[a-z_]+(?:\.[a-z_]+)*(?:=[^\s,;)]*[^\s,;.)])?)")


def render(report: Report) -> str:
    """The whole page, in ASCII: no encoding can spoil it."""
    sections = {
        "Summary": _summary(report),
        "What to try next": findings_list(report.findings),
        "Energy and errors": _pictures(report, "curves")
        or "<p>The run folder holds no TensorBoard events, so that the way to here cannot be drawn.</p>",
        "Features": _pictures(report, "features"),
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
<style>{STYLE}</style>
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
        f"{network.num_neurons:,} neurons with {network.kernel} on {report.data_name}: {report.points:,} points of "
        f"{network.in_features:,} features."
    )


def _origin(report: Report) -> str:
    path = report.run.checkpoint_path
    saved = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    return f"{MARK.decode()} from {path}, update {report.updates:,}, saved {saved}."


def number(value: float, like: float | None = None) -> str:
    """An error for people: four decimals, or two digits where these would be zeros; its deviation is ``like`` it."""
    size = abs(value if like is None else like)
    return f"{value:.4f}" if size >= 1e-3 or size == 0 else f"{value:.1e}"


def percent(value: float) -> str:
    """A share for people."""
    return f"{100 * value:.1f} %"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], own: Iterable[str] = ()) -> str:
    """A table in a container that scrolls by itself; the first cell of a row is its name, and ``own`` rows are bold.

    Args:
        caption: What it is a table of.
        head: Names of the columns.
        rows: Text of the cells, escaped here.
        own: Names of rows to make bold.
    """
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
    """The diagnosis as a list, or a sentence where nothing is wrong."""
    if not findings:
        return (
            '<ul class="findings"><li class="good"><h3>Nothing is wrong</h3><p>Looked for and not found: dead neurons, '
            "an ill-conditioned L, an error at the floor of the bound, drawn landmarks that do better, an energy that "
            "still falls, and a kernel that is too narrow or too wide.</p></li></ul>"
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
    return _figures(report.pictures.get(section, []))


def _figures(pictures: Sequence[Picture]) -> str:
    figures = []
    for picture in pictures:
        source = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
        caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
        figures.append(
            f'<figure><img src="{source}" width="{picture.width}" height="{picture.height}" '
            f'alt="{escape(picture.alt)}">{caption}</figure>'
        )
    return f'<div class="pictures">{"".join(figures)}</div>\n' if figures else ""


def _summary(report: Report) -> str:
    cards = {"neurons n": f"{report.model.network.num_neurons:,}", "updates": f"{report.updates:,}"}
    for method, name in (("ksm", "neural"), ("ksm_nystroem", "nystroem"), ("ksm_least_squares", "least_squares")):
        if method in report.errors:
            cards[f"NRMSE, {name}"] = number(report.errors[method][0])
    if report.probes is not None:
        place = report.probes.typical
        labels = report.probes.labels_per_class[place]
        accuracy = report.probes.found["neural"][place].accuracy
        cards[f"linear probe, {labels:,} {'label' if labels == 1 else 'labels'} a class"] = percent(accuracy)
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in cards.items())
    about = (
        f"The NRMSE is ||F - YY\u1d40|| / ||F|| over all pairs of {report.scored:,} training points, for three "
        "readouts of the same landmarks."
    )
    return f'<dl class="cards">{items}</dl>\n<p class="small soft">{escape(about)}</p>\n'


def _probes(probes: Probes | None) -> str:
    if probes is None:
        return "<p>The data has no labels.</p>"
    rows = []
    for name, found in probes.found.items():
        cells = [
            percent(probe.accuracy) + (f" \u00b1 {100 * probe.deviation:.1f}" if probe.deviation else "")
            for probe in found
        ]
        rows.append(["x, the points themselves" if name == "x" else name, *cells])
    head = ["features", *(f"{labels:,} {'label' if labels == 1 else 'labels'}" for labels in probes.labels_per_class)]
    notes = [
        "Accuracy of softmax regression by the number of labels a class, mean and deviation over draws of the labelled "
        "points. The penalty is selected on validation labels and the accuracy is that of the test labels."
    ]
    if not probes.has_test_points:
        notes.append("The data has no labelled test points, so that the validation labels stand in for them.")
    elif probes.is_test_learned:
        notes.append("The representation was trained on the test points too, without their labels.")
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
        rows.append([METHODS[name], number(means[name]) + spread, f"{means[name] / best:.3g}" if best > 0 else ""])
    n = report.model.network.num_neurons
    caption = f"NRMSE over all pairs of {report.scored:,} training points with n = {n:,} features"
    note = (
        "Kernel PCA is fitted to the very points that are scored: no features of this number have a lower error there. "
        "Nystroem chooses its landmarks out of up to 10,000 training points, three times. Bold is this run."
    )
    own = [METHODS[name] for name in ("ksm", "ksm_nystroem", "ksm_least_squares")]
    return (
        _pictures(report, "comparison")
        + table(caption, ["method", "NRMSE", "\u00f7 least"], rows, own)
        + f'<p class="small soft">{escape(note)}</p>\n'
    )


def _configuration(report: Report) -> str:
    rows = [[name, value] for name, value in main_values(report).items()]
    text = escape(report.run.config_text)
    return (
        table("The main values", ["name", "value"], rows)
        + f"<details><summary>The whole configuration, config.yaml</summary>\n<pre>{text}</pre></details>\n"
    )


def main_values(report: Report) -> dict[str, str]:
    """What one asks first about a run, in words."""
    hparams, schedule = report.model.hparams, report.model.schedule
    config, arguments = report.run.config, report.run.config["data"].get("init_args") or {}
    phases = " then ".join(_phase(phase) for phase in hparams["phases"] or [])
    start = "data points" if hparams["init"] == "data" else f"{hparams['init_scale']:g} N(0, 1)"
    data = ", ".join(f"{name}={value}" for name, value in arguments.items() if value is not None)
    return {
        "kernel": str(report.model.kernel),
        "neurons n": f"{report.model.network.num_neurons:,}",
        "ridge": f"{report.model.network.ridge:.4g}",
        "start of W": start,
        "schedule": f"adaptive, {schedule.total_updates:,} updates" if schedule.is_natural else phases,
        "updates made": f"{report.updates:,}",
        "exact L at the end": "yes" if hparams["consolidate"] else "no",
        "data": f"{report.data_name}({data})",
        "seed": str(config.get("seed_everything")),
    }


def _phase(phase: dict[str, Any]) -> str:
    rates = ", ".join(f"{name}={phase[name]:g}" for name in ("eta_w", "eta_q", "eta_l"))
    kernel = "".join(f", {name}={value:g}" for name, value in phase["kernel_params"].items())
    return f"{phase['updates']:,} updates at {rates}{kernel}"
