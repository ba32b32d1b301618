"""``ksm report``: numbers against NumPy, the page in a parser and in a browser, and error messages."""

import base64
import contextlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from io import BytesIO, StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import make_moons

from helpers.checkpoints import changed
from helpers.commands import refused
from helpers.processes import PATIENCE
from ksm_lightning.baselines import Nystroem
from ksm_lightning.cli import main
from ksm_lightning.data import HalfMoonsDataModule
from ksm_lightning.evaluation.linear_probe import linear_probe
from ksm_lightning.kernels import GaussianKernel
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.report import page as page_module
from ksm_lightning.report.diagnosis import Finding
from ksm_lightning.report.measure import compare_methods
from ksm_lightning.runs.finished_run import FinishedRun

N, POINTS, SCORED, SIGMA = 8, 300, 250, 0.4
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.log_every_n_steps=10", "--figures.num_neurons=1"]
EVIL = '<script>alert("x")&amp;\'.npy'
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """A parsed page: texts, tables, pictures and links. Unbalanced tags are an error."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.words[self.open[-1]] = self.words.get(self.open[-1], "") + data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.attributes if name == tag]

    @property
    def table(self) -> dict[str, list[str]]:
        """All rows of all tables by their first cell."""
        return {name: cells for name, *cells in self.rows}

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words[tag] for tag in self.words if tag != "style").split())


def first(cell: str) -> float:
    return float(cell.split()[0])


def report(run: Path, *options: str) -> SimpleNamespace:
    """The page of a run, and the output of the command."""
    with contextlib.redirect_stdout(StringIO()) as printed:
        main(["report", str(run), *options, "--show_progress=false"])
    text = (run / "report.html").read_text()
    return SimpleNamespace(run=run, text=text, page=Page(text), printed=printed.getvalue())


def fit(folder: Path, name: str, *options: str) -> Path:
    main(["fit", *options, *QUIET, f"--trainer.logger.save_dir={folder}", f"--trainer.logger.name={name}"])
    return folder / name / "version_0"


@pytest.fixture(scope="module")
def moons(tmp_path_factory) -> SimpleNamespace:
    """A run on half moons with its page."""
    run = fit(
        tmp_path_factory.mktemp("moons"), "moons", "--data=HalfMoonsDataModule", f"--data.num_points={POINTS}",
        f"--model.num_neurons={N}", f"--model.kernel_params.sigma={SIGMA}", "--model.updates=400",
        "--data.updates_per_epoch=200",
    )  # fmt: skip
    return report(run, f"--max_points={SCORED}")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> SimpleNamespace:
    """A run on images with the paper's initialisation, stopped early."""
    run = fit(
        tmp_path_factory.mktemp("digits"), "digits", "--data=DigitsDataModule", "--data.test_fraction=0.8",
        "--model.num_neurons=12",
        "--model.kernel=power_cosine", "--model.kernel_params.alpha=3", "--model.init=normal",
        "--model.phases=[{updates: 50, kernel_params: {alpha: 1}}, {updates: 150, eta_w: 0.001}]",
        "--trainer.max_steps=150", "--kmeans.starts=1",
    )  # fmt: skip
    return report(run)


@pytest.fixture(scope="module")
def evil(tmp_path_factory) -> SimpleNamespace:
    """A run on an array with hostile names, without labels and events."""
    folder = tmp_path_factory.mktemp("evil")
    path = folder / EVIL
    x = np.random.RandomState(0).randn(60, 5)
    np.save(path, x)
    run = fit(
        folder, "<b>&bold", "--data=ArrayDataModule", f"--data.path={path}", "--data.centre=true",
        "--data.scaling=feature", "--model.num_neurons=3", "--model.kernel_params.sigma=2", "--model.updates=20",
    )  # fmt: skip
    for events in run.glob("events.*"):
        events.unlink()
    found = report(run)
    found.x, found.path = x, path
    return found


@pytest.fixture
def copy(evil, tmp_path) -> Path:
    """A copy of a run folder that may be damaged."""
    folder = tmp_path / "version_0"
    shutil.copytree(evil.run, folder)
    (folder / "report.html").unlink()
    return folder


# ---------------------------------------------------------------------- numbers


def points() -> np.ndarray:
    """The training points from scikit-learn, rounded to float32 as for the network."""
    x = make_moons(POINTS, noise=0.1, random_state=np.random.RandomState(0))[0]
    return (x - x.mean(0)).astype(np.float32).astype(np.float64)


def gram(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.exp(-((u[:, None] - v) ** 2).sum(-1) / (2 * SIGMA**2))


def error(F: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(F - y @ y.T) / np.linalg.norm(F))


def readouts(run: Path, x: np.ndarray, sample: np.ndarray) -> dict[str, np.ndarray]:
    """Features in float64 NumPy, from the checkpoint and the formulas."""
    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    W, q, L = (content["state_dict"][f"network.{name}"].numpy().astype(np.float64) for name in "WqL")
    ridge = content["hyper_parameters"]["ridge"]
    values, vectors = np.linalg.eigh(gram(W, W))
    root = (vectors / np.sqrt(values)) @ vectors.T
    basis = np.linalg.qr(gram(sample, W))[0]
    inside = basis @ basis.T @ gram(sample, sample) @ basis @ basis.T
    spectrum, axes = np.linalg.eigh(inside)
    best = axes[:, -N:] * np.sqrt(spectrum[-N:])
    M = np.linalg.lstsq(gram(sample, W), best, rcond=None)[0]
    k = gram(x, W)
    return {
        "neural": np.linalg.solve(L + ridge * np.eye(N), (q * k).T).T,
        "nystroem": k @ root,
        "least_squares": k @ M,
    }


def test_the_errors_agree_with_numpy(moons):
    x = points()[random_subset(POINTS, SCORED).numpy()]
    F = gram(x, x)
    expected = {name: error(F, y) for name, y in readouts(moons.run, x, points()).items()}
    table = moons.page.table
    found = {
        "neural": first(table["network"][0]),
        "nystroem": first(table["Nystroem on the network's W"][0]),
        "least_squares": first(table["least squares on the network's W"][0]),
    }
    assert found == pytest.approx(expected, abs=6e-5)
    for name, value in found.items():
        assert f"<dt>NRMSE, {name}</dt><dd>{value:.4f}</dd>" in moons.text
    spectrum = np.linalg.eigvalsh(F)[::-1]
    optimum = math.sqrt((spectrum[N:] ** 2).sum() / (spectrum**2).sum())
    assert first(table["kernel PCA (optimum)"][0]) == pytest.approx(optimum, abs=6e-5)
    assert f"over all pairs of {SCORED} training points with n = {N} features" in moons.page.text


def test_compressed_readouts_are_reported_with_their_number_of_features(moons):
    k, out = 2, moons.run / "compressed.html"
    main(["report", str(moons.run), f"--max_points={SCORED}", f"--num_features={k}", f"--out={out}",
          "--show_progress=false"])  # fmt: skip
    text = out.read_text()
    page = Page(text)
    x = points()[random_subset(POINTS, SCORED).numpy()]
    features, fitted = (readouts(moons.run, part, points()) for part in (x, points()))
    names = {"nystroem": "Nystroem on the network's W", "least_squares": "least squares on the network's W"}
    for readout, name in names.items():
        directions = np.linalg.svd(fitted[readout])[2][:k].T
        expected = error(gram(x, x), features[readout] @ directions)
        assert first(page.table[name][0]) == pytest.approx(expected, abs=6e-5)
        assert f"<dt>NRMSE, {readout}, {k} features</dt>" in text
    sentence = f"The readouts nystroem and least_squares have {k} features here; the advice is about n = {N} features."
    assert page.text.count(sentence) == 2
    assert sentence not in moons.page.text
    others = ["network", "kernel PCA (optimum)", "Nystroem, uniform", "Nystroem, KMeans"]
    assert {name: page.table[name][0] for name in others} == {name: moons.page.table[name][0] for name in others}
    assert page.words["h3"] == moons.page.words["h3"]  # the diagnosis compares equal numbers of features


def test_the_other_methods_are_fitted_to_all_points_and_scored_on_the_same(moons):
    everything = torch.tensor(points(), dtype=torch.float32)
    x = everything[random_subset(POINTS, SCORED)]
    F = gram(x.double().numpy(), x.double().numpy())
    for landmarks, name in (("uniform", "Nystroem, uniform"), ("kmeans", "Nystroem, KMeans")):
        maps = [Nystroem(GaussianKernel(SIGMA), N, landmarks=landmarks, seed=seed).fit(everything) for seed in range(3)]
        errors = [error(F, m.transform(x).double().numpy()) for m in maps]
        mean, deviation = re.fullmatch(r"([\d.]+) ± ([\d.]+)", moons.page.table[name][0]).groups()
        assert [float(mean), float(deviation)] == pytest.approx([np.mean(errors), np.std(errors)], abs=6e-5)


def test_the_methods_are_ranked(moons):
    names = [row[0] for row in moons.page.rows]
    ranked = names[names.index("method") + 1 : names.index("option")]
    errors = [first(moons.page.table[name][0]) for name in ranked]
    assert len(errors) == 6
    assert errors == sorted(errors)
    assert ranked[0] == "kernel PCA (optimum)"


def test_the_probes_agree_with_the_features(moons):
    data = HalfMoonsDataModule(num_points=POINTS)
    data.setup()
    sets = data.probe_sets()
    head = moons.page.table["features"]
    smallest = int(torch.unique(sets["train"][1], return_counts=True)[1].min())
    assert head == ["1 label", "10 labels", "100 labels", f"{smallest} labels"]

    def encode(x):
        return torch.tensor(readouts(moons.run, x.double().numpy(), points())[name])

    for name, row in (("x", "x, the inputs"), ("neural", "neural"), ("nystroem", "nystroem")):
        for place, count in enumerate((1, 10, 100, smallest)):
            probe = linear_probe(
                sets["train"], sets["validation"], sets["test"], per_class=count, seeds=range(3),
                **({} if name == "x" else {"encode": encode}),
            )  # fmt: skip
            # Rounding may change the class of one of 300 points.
            assert first(moons.page.table[row][place]) == pytest.approx(100 * probe.accuracy, abs=0.41), (name, count)
    typical = first(moons.page.table["neural"][2])
    assert f"linear probe, 100 labels per class</dt><dd>{typical:.1f} %" in moons.text


def test_the_summary_and_the_main_options_are_those_of_the_run(moons, digits):
    assert moons.page.words["title"] == "moons / version_0"
    assert "8 neurons with GaussianKernel(sigma=0.4) on HalfMoons: 300 points with 2 features." in moons.page.text
    for name, value in {
        "kernel": "GaussianKernel(sigma=0.4)",
        "neurons n": "8",
        "initial W": "data points",
        "schedule": "adaptive, 400 updates",
        "updates made": "400",
        "exact L at the end": "yes",
        "seed": "0",
    }.items():
        assert moons.page.table[name] == [value]
    assert "num_points=300" in moons.page.table["data"][0]
    assert digits.page.table["initial W"] == ["0.5 N(0, 1)"]
    warm_up, rest = digits.page.table["schedule"][0].split(" then ")
    assert warm_up == "50 updates at eta_w=0.01, eta_q=0.01, eta_l=0.1, alpha=1"
    assert rest == "150 updates at eta_w=0.001, eta_q=0.01, eta_l=0.1"
    config = (moons.run / "config.yaml").read_text()
    assert moons.page.words["pre"] == config


def test_the_findings_are_shown_and_printed(digits):
    assert "The run stopped early" in digits.page.words["h3"]
    assert "150 of 200 updates were made." in digits.page.text
    assert "<code>ksm fit --config=RUN/config.yaml --ckpt_path=RUN/checkpoints/last.ckpt" in digits.text
    assert digits.printed.startswith(f"Report: {digits.run}/report.html\n")
    sentence = "warning: The run stopped early. 150 of 200 updates were made. Continue it: ksm fit"
    assert sentence in digits.printed


def test_an_empty_diagnosis_is_reported():
    assert "No problems found" in page_module.findings_list([])
    found = page_module.findings_list([Finding("warning", "<b>", "1 < 2", "Use --model.updates=5.")])
    assert "&lt;b&gt;" in found
    assert "1 &lt; 2" in found
    assert "Use <code>--model.updates=5</code>." in found
    assert "No problems" not in found


# ---------------------------------------------------------------------- the page


@pytest.fixture(params=["moons", "digits", "evil"])
def any_page(request) -> SimpleNamespace:
    return request.getfixturevalue(request.param)


def test_every_picture_is_an_embedded_png_with_an_alternative_text(any_page):
    pictures = any_page.page.all("img")
    assert len(pictures) >= 5
    for picture in pictures:
        kind, _, content = picture["src"].partition(",")
        assert kind == "data:image/png;base64"
        with Image.open(BytesIO(base64.b64decode(content, validate=True))) as image:
            image.load()
            assert image.format == "PNG"
            assert (str(image.width), str(image.height)) == (picture["width"], picture["height"])
            assert len(np.unique(np.asarray(image.convert("L")))) > 5
        assert len(picture["alt"]) > 20
        assert picture["alt"].endswith(".")


def test_the_page_has_no_scripts_and_no_external_resources(any_page):
    tags = set(any_page.page.tags)
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form", "svg", "video", "audio"}
    assert not re.search(r"https?:|//www|@import|url\(|@font-face|javascript:", any_page.text)
    for tag, attributes in any_page.page.attributes:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert not set(attributes) & {"srcset", "style", "action", "poster"}
        assert attributes.get("src", "data:").startswith("data:")
        assert attributes.get("href", "#").startswith("#")


def test_the_page_is_valid_html(any_page):
    page = any_page.page
    assert any_page.text.startswith("<!DOCTYPE html>")
    assert any_page.text.isascii()
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert page.tags.count("h1") == page.tags.count("title") == page.tags.count("main") == 1
    headings = [int(tag[1]) for tag in page.tags if re.fullmatch(r"h\d", tag)]
    assert all(after <= before + 1 for before, after in pairwise(headings))
    ids = [attributes["id"] for _, attributes in page.attributes if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [link["href"].removeprefix("#") for link in page.all("a")] == ids
    containers = [attributes for attributes in page.all("div") if attributes.get("class") == "scroll"]
    assert page.tags.count("table") == page.tags.count("caption") == len(containers)


def test_images_are_shown_as_images_and_points_in_the_plane(moons, digits, evil):
    alts = {name: " ".join(i["alt"] for i in run.page.all("img")) for name, run in
            (("moons", moons), ("digits", digits), ("evil", evil))}  # fmt: skip
    assert "The data and 8 landmarks in the plane." in alts["moons"]
    assert "12 landmarks as images of 8 by 8 pixels." in alts["digits"]
    assert "Linearised responses of 12 neurons as images of 8 by 8 pixels." in alts["digits"]
    assert "The data and 3 landmarks on the first two principal components." in alts["evil"]


def test_the_curves_show_the_logged_values(moons, evil):
    scalars = FinishedRun(moons.run).scalars()
    alts = [picture["alt"] for picture in moons.page.all("img")]
    assert f"Energy of the batches over 400 updates; the last is {scalars['train/energy'].values[-1]:.4g}." in alts
    assert any(f"network {scalars['val/kernel_nrmse'].values[-1]:.4g}, Nystroem" in alt for alt in alts)
    assert any(f"linear probe, test {scalars['test/probe_accuracy'].values[-1]:.4g}" in alt for alt in alts)
    assert "contains no TensorBoard events" in evil.page.text
    assert "Energy of the batches" not in evil.text


def test_hostile_names_are_escaped(evil):
    assert "<script" not in evil.text
    assert "<b>" not in evil.text
    assert evil.page.words["title"] == "<b>&bold / version_0"
    assert str(evil.path) in evil.page.table["data"][0]
    assert "The data has no labels." in evil.page.text


# ---------------------------------------------------------------------- a browser


def browse(tmp_path: Path, *options: str) -> str:
    if BROWSER is None:
        pytest.skip("needs Chromium")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


HARNESS = """<!DOCTYPE html><body style="margin:0">
<iframe src="{url}" width="360" height="640" style="border:0"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  for (const details of page.querySelectorAll("details")) details.open = true;
  const outside = [...page.body.querySelectorAll("*")].filter(
    (element) => element.getBoundingClientRect().right > 360.5 && !element.closest(".scroll, pre"));
  document.body.textContent = "FOUND" + JSON.stringify({{
    scroll: page.documentElement.scrollWidth,
    outside: outside.map((element) => element.tagName),
    pictures: [...page.images].map((image) => [image.complete, image.naturalWidth, image.clientWidth]),
    loaded: view.performance.getEntriesByType("resource").map((entry) => entry.name.slice(0, 30)),
    background: view.getComputedStyle(page.body).backgroundColor,
    ink: view.getComputedStyle(page.body).color,
    font: parseFloat(view.getComputedStyle(page.body).fontSize),
    mode: page.compatMode,
  }}) + "END";
}};
</script></body>"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_without_horizontal_scrolling(any_page, scheme, tmp_path):
    address = (any_page.run / "report.html").as_uri()
    (tmp_path / "harness.html").write_text(HARNESS.format(url=address))
    dark = ["--force-dark-mode"] if scheme == "dark" else []
    dom = browse(tmp_path, *dark, "--virtual-time-budget=10000", "--dump-dom", (tmp_path / "harness.html").as_uri())
    found = json.loads(re.search("FOUND(.*)END", dom, re.DOTALL)[1])
    assert found["scroll"] <= 360
    assert found["outside"] == []
    assert len(found["pictures"]) == len(any_page.page.all("img"))
    assert all(complete and natural > 300 and 0 < shown <= 360 for complete, natural, shown in found["pictures"])
    assert all(name.startswith("data:") for name in found["loaded"])
    assert found["font"] >= 16
    assert found["mode"] == "CSS1Compat"
    page, ink = (np.mean([int(part) for part in re.findall(r"\d+", found[name])[:3]]) for name in ("background", "ink"))
    assert (page < 60 and ink > 200) if scheme == "dark" else (page > 230 and ink < 60)


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 1600)], ids=["phone", "desktop"])
def test_a_screenshot_of_the_page_is_not_blank(moons, tmp_path, width, height):
    target = tmp_path / "page.png"
    browse(tmp_path, f"--window-size={width},{height}", f"--screenshot={target}", (moons.run / "report.html").as_uri())
    with Image.open(target) as image:
        pixels = np.asarray(image.convert("L"), dtype=float)
    assert pixels.shape[1] == width
    assert pixels.std() > 5
    assert (pixels < 60).mean() > 0.005


# ---------------------------------------------------------------------- the run folder


def test_a_run_is_found_by_a_checkpoint_in_its_folder(moons, tmp_path, monkeypatch):
    path = moons.run / "checkpoints" / "last.ckpt"
    run = FinishedRun.of_checkpoint(path)
    assert run.folder == moons.run
    assert run.checkpoint_path == path
    assert run.config["model"]["num_neurons"] == N
    monkeypatch.chdir(path.parent)
    assert FinishedRun.of_checkpoint("last.ckpt").folder == moons.run
    shutil.copy(path, tmp_path / "last.ckpt")
    assert FinishedRun.of_checkpoint(tmp_path / "last.ckpt") is None


def test_the_data_of_a_run_is_scaled_as_in_training(evil, copy):
    x = FinishedRun(evil.run).data().train_points.data
    assert x.numpy() == pytest.approx((evil.x - evil.x.mean(0)) / evil.x.std(0), abs=1e-5)
    other = evil.path.with_name("other.npy")
    np.save(other, 3 * evil.x + 1)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace(EVIL, "other.npy"))
    moved = FinishedRun(copy).data().train_points.data
    assert moved.numpy() == pytest.approx((3 * evil.x + 1 - evil.x.mean(0)) / evil.x.std(0), abs=1e-4)


def test_the_batches_of_a_run_keep_their_seed(moons):
    torch.manual_seed(123)
    assert FinishedRun(moons.run).data().batch_seed() == 0


def test_a_truncated_event_file_is_read_up_to_the_damage(moons, tmp_path):
    shutil.copytree(moons.run, tmp_path / "run")
    (events,) = (tmp_path / "run").glob("events.*")
    whole = FinishedRun(tmp_path / "run").scalars()["train/energy"]
    assert whole.steps == list(range(10, 401, 10))
    assert all(map(math.isfinite, whole.values))
    content = events.read_bytes()
    places = [match.start() for match in re.finditer(rb"train/energy(?!_)", content)]
    events.write_bytes(content[: places[20]])
    part = FinishedRun(tmp_path / "run").scalars()["train/energy"]
    assert part == (whole.steps[:20], whole.values[:20])
    events.write_bytes(b"nonsense" * 100)
    assert FinishedRun(tmp_path / "run").scalars() == {}


def test_the_run_may_be_given_by_a_checkpoint_and_the_checkpoint_by_an_option(copy, tmp_path, capsys):
    checkpoint = copy / "checkpoints" / "last.ckpt"
    main(["report", str(checkpoint), "--show_progress=false"])
    assert f"Report: {copy}/report.html" in capsys.readouterr().out
    moved = shutil.move(checkpoint, tmp_path / "best.ckpt")
    out = tmp_path / "deep" / "er.html"
    main(["report", str(copy), f"--ckpt_path={moved}", f"--out={out}"])
    captured = capsys.readouterr()
    assert "100% |" in captured.err
    assert "best.ckpt, update 20" in Page(out.read_text()).text


def test_the_page_of_a_network_that_is_not_finite_reports_it(copy, capsys):
    path = copy / "checkpoints" / "last.ckpt"
    changed(path, lambda content: content["state_dict"].update({"network.L": -torch.eye(3)}))
    main(["report", str(copy), "--show_progress=false"])
    assert "error: The network is not finite." in capsys.readouterr().out
    page = Page((copy / "report.html").read_text())
    assert "The network is not finite" in page.words["h3"]
    assert page.all("img") == []
    assert "nan" not in str(page.rows).lower()
    assert "NRMSE" not in page.words["dt"]


def test_methods_can_be_compared_with_more_neurons_than_points():
    x = torch.randn(12, 2)
    errors = compare_methods(GaussianKernel(SIGMA), x, x, {"neural": torch.zeros(12, 20)})
    assert errors["ksm"] == [1.0]
    assert {name: len(values) for name, values in errors.items()} == {
        "ksm": 1, "kernel_pca": 1, "nystroem_uniform": 3, "nystroem_kmeans": 3
    }  # fmt: skip
    assert max(errors["kernel_pca"] + errors["nystroem_uniform"]) < 1e-5


def lose(*parts: str):
    def harm(folder: Path) -> None:
        path = folder.joinpath(*parts)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return harm


def replace(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def lose_data(folder: Path) -> None:
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(EVIL, "gone.npy"))


REFUSED = {
    "no folder": (lambda folder: shutil.rmtree(folder), "There is no run folder"),
    "no configuration": (lose("config.yaml"), "is not a run folder, as it has no config.yaml"),
    "no checkpoint": (lose("checkpoints"), "There is no checkpoint"),
    "damaged checkpoint": (replace("checkpoints/last.ckpt", b"PK\3\4no"), "last.ckpt is"),
    "damaged configuration": (replace("config.yaml", b"a: [1"), "config.yaml is damaged: it is not valid YAML"),
    "binary configuration": (replace("config.yaml", b"\xff\xfe\0"), "config.yaml is damaged: it is not text"),
    "empty configuration": (replace("config.yaml", b""), "config.yaml is damaged: its section `data` is missing"),
    "other class": (replace("config.yaml", b"data: {class_path: os.system}"), "does not describe any data"),
    "other options": (
        replace("config.yaml", b"data: {class_path: HalfMoonsDataModule, init_args: {moons: 3}}"),
        "does not describe any data",
    ),
    "other data": (replace("config.yaml", b"data: {class_path: DigitsDataModule}"), "The data has 64 features, but"),
    "no data": (lose_data, "The data of the run is missing: There is no data file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_run_gives_one_line_of_error_and_no_page(copy, capsys, case):
    harm, sentence = REFUSED[case]
    harm(copy)
    before = sorted(copy.rglob("*"))
    assert sentence in refused(capsys, "report", str(copy))
    assert sorted(copy.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--max_points=1"], "`max_points` must be at least 2, got 1."),
        (["--num_features=4"], "`num_features` must be between 1 and the number of landmarks, 3, got 4."),
        (["--num_features=0"], "`num_features` must be between 1 and the number of landmarks, 3, got 0."),
        (["--out=."], "--out must be a file, but . is a folder: use --out=report.html."),
        (["--device=cuda"], "No CUDA device is available"),
        (["--ckpt_path=none.ckpt"], "There is no checkpoint none.ckpt"),
        (["--colour=red"], "colour"),
    ],
)
def test_invalid_options_give_one_line_of_error(copy, capsys, options, sentence):
    if "--device=cuda" in options and torch.cuda.is_available():
        pytest.skip("CUDA is available")
    assert sentence in refused(capsys, "report", str(copy), "--show_progress=false", *options)
    assert not (copy / "report.html").exists()


def test_a_file_that_is_not_a_report_is_never_overwritten(copy, capsys):
    notes = copy / "notes.html"
    notes.write_text("mine")
    sentence = refused(capsys, "report", str(copy), "--show_progress=false", f"--out={notes}")
    assert sentence == f"{notes} exists and is not a report: choose another file with --out."
    assert notes.read_text() == "mine"


def test_a_file_that_appears_while_the_report_is_measured_is_kept(copy, capsys, monkeypatch):
    import ksm_lightning.cli.report as command

    def measure(*args):
        (copy / "report.html").write_text("mine")
        return measured(*args)

    measured = command.measure
    monkeypatch.setattr(command, "measure", measure)
    sentence = refused(capsys, "report", str(copy), "--max_points=50", "--show_progress=false")
    assert sentence == f"{copy / 'report.html'} exists and is not a report: choose another file with --out."
    assert (copy / "report.html").read_text() == "mine"


def test_a_run_folder_is_required(capsys, copy, tmp_path):
    assert "RUN is required" in refused(capsys, "report")
    loose = shutil.copy(copy / "checkpoints" / "last.ckpt", tmp_path / "loose.ckpt")
    assert "pass the run folder with its config.yaml" in refused(capsys, "report", str(loose))


def test_an_interrupted_report_keeps_the_old_page(copy, capsys, monkeypatch):
    (copy / "report.html").write_text("old. Made by ksm report")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("ksm_lightning.cli.report.measure", interrupt)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(copy), "--show_progress=false"])
    assert stop.value.code == 130
    assert (copy / "report.html").read_text() == "old. Made by ksm report"
    assert [path.name for path in copy.glob(".*")] == []


def test_the_help_lists_the_options(capsys):
    for options, words in (
        (["report", "--help"], ["max_points", "ckpt_path", "HTML report"]),
        (["--help"], ["report"]),
    ):
        with pytest.raises(SystemExit) as stop:
            main(options)
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)
