"""The registry of methods, the comparison (numbers, files, interruptions), and ``ksm compare``."""

import csv
import math
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import make_moons

from helpers import references
from helpers.commands import refused
from ksm_lightning import baselines
from ksm_lightning.baselines import METHODS, FeatureMap, Nystroem, comparison, landmarks
from ksm_lightning.baselines.comparison import Comparison
from ksm_lightning.baselines.methods import READOUT_METHODS, NetworkOptions
from ksm_lightning.baselines.tables import Row, Summary, markdown, read_rows, summarise
from ksm_lightning.cli import main
from ksm_lightning.cli.compare import draw
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.files import claimed, draft_of
from ksm_lightning.kernels import GaussianKernel, LinearKernel, PolynomialKernel, make_kernel
from ksm_lightning.learning.schedule import Phase

pytestmark = pytest.mark.usefixtures("in_tmp_path")

KERNEL = GaussianKernel(0.5)
X = torch.tensor(make_moons(120, noise=0.05, random_state=0)[0], dtype=torch.float32)
SOME = ["kernel_pca", "nystroem_uniform", "nystroem_kmeans", "ksm", "ksm_nystroem"]
HUGE = [Phase(50, eta_w=50.0, eta_q=50.0, eta_l=5.0)]
FILES = {"comparison.json", "errors.csv", "summary.csv"}


def make(folder: str = "out", **options) -> Comparison:
    given = {"kernel": KERNEL, "x": X, "sizes": [2, 4], "methods": SOME, "seeds": [0, 1], "updates": 50}
    return Comparison(folder=Path(folder), **{**given, **options})


def jobs(rows: list[Row]) -> list[tuple[str, int, int]]:
    return [row[:3] for row in rows]


def expected_jobs(methods=SOME, sizes=(2, 4), seeds=(0, 1)) -> set[tuple[str, int, int]]:
    return {(m, n, s) for m in methods for n in sizes for s in (seeds if m != "kernel_pca" else seeds[:1])}


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def picture(path: str) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def interrupt(*args) -> None:
    raise KeyboardInterrupt


def features(name: str, n: int, seed: int) -> torch.Tensor:
    """The features, computed without the registry."""
    if name.startswith("nystroem"):
        return Nystroem(KERNEL, n, landmarks=name.removeprefix("nystroem_"), seed=seed).fit_transform(X)
    if name == "ksm_tight":
        return baselines.SimilarityMatching(KERNEL, n, bound="tight", seed=seed).fit_transform(X)
    if name == "ksm_compressed":
        options = {"bound": "tight", "num_landmarks": 2 * n, "readout": "least_squares"}
        return baselines.SimilarityMatching(KERNEL, n, seed=seed, **options).fit_transform(X)
    if name.startswith("ksm"):
        readout = name.removeprefix("ksm").removeprefix("_") or "neural"
        return baselines.SimilarityMatching(KERNEL, n, readout=readout, updates=50, seed=seed).fit_transform(X)
    if name == "linear":
        return baselines.LinearSimilarityMatching(n, updates=50, seed=seed).fit_transform(X)
    if name == "neural_fourier":
        return baselines.NeuralFourier(KERNEL, n, num_features=3 * n, updates=50, seed=seed).fit_transform(X)
    method = {"kernel_pca": baselines.KernelPCA, "random_fourier": baselines.RandomFourier}[name]
    return method(KERNEL, n, seed=seed).fit_transform(X)


def test_every_row_is_the_error_of_that_method(monkeypatch):
    passes = []
    monkeypatch.setattr(comparison, "kernel_nrmse", lambda *args: passes.append(args) or kernel_nrmse(*args))
    started = time.perf_counter()
    rows = make(methods=list(METHODS), fourier_features=3).run()
    elapsed = time.perf_counter() - started
    found = read_rows(Path("out/errors.csv"))
    assert len(found) == 2 * (1 + 2 * 13)
    assert set(jobs(found)) == set(jobs(rows)) == expected_jobs(METHODS)
    F = references.gram("gaussian", {"sigma": 0.5}, X, X)
    for row in found:
        assert row.nrmse == pytest.approx(references.nrmse(F, features(*row[:3])), rel=1e-5), row
        assert 0 < row.seconds <= elapsed
    # One pass over the kernel matrix per size, with the representations of all methods and seeds.
    assert [len(args) - 2 for args in passes] == [27, 27]
    assert names("out") == FILES


def test_the_seeds_are_summarised():
    rows = make().run()
    with Path("out/summary.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["method"], int(line["n"])) for line in lines] == [(name, n) for name in SOME for n in (2, 4)]
    for line in lines:
        errors = [row.nrmse for row in rows if (row.method, row.n) == (line["method"], int(line["n"]))]
        assert int(line["seeds"]) == len(errors) == (1 if line["method"] == "kernel_pca" else 2)
        expected = [np.mean(errors), np.std(errors), min(errors), max(errors), 0]
        found = [float(line[name]) for name in ("mean", "deviation", "least", "most", "diverged")]
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_a_table_has_means_deviations_and_diverged_runs():
    rows = [Row("ksm", 4, 0, 0.25, 1.0), Row("ksm", 4, 1, 0.75, 1.0), Row("kernel_pca", 4, 0, 0.125, 1.0)]
    rows += [Row("ksm", 2, 0, math.nan, 1.0), Row("ksm", 2, 1, 0.5, 1.0), Row("ksm_nystroem", 2, 0, math.nan, 1.0)]
    assert markdown(summarise(rows)).splitlines() == [
        "| method | n = 2 | n = 4 |",
        "| --- | --- | --- |",
        "| kernel PCA (optimum) |  | 0.1250 |",
        "| network | 0.5000 ± 0.0000 (1 diverged) | 0.5000 ± 0.2500 |",
        "| Nystroem on the network's W | diverged |  |",
    ]


def test_all_methods_except_the_linear_network_are_compared_by_default():
    assert set(make("a", methods=None).methods) == set(METHODS) - {"linear"}
    without = make("b", methods=None, kernel=PolynomialKernel(2))
    assert set(without.methods) == set(METHODS) - {"linear", "random_fourier", "neural_fourier"}


def test_only_max_points_are_scored_but_all_are_fitted():
    rows = make(max_points=50, methods=["kernel_pca", "nystroem_uniform"], seeds=[0]).run()
    scored = make(max_points=50, methods=["kernel_pca"]).scored
    assert len({tuple(point) for point in scored.tolist()} & {tuple(point) for point in X.tolist()}) == 50
    F = references.gram("gaussian", {"sigma": 0.5}, scored, scored)
    spectrum = np.linalg.eigvalsh(F.numpy())[::-1]
    for row in rows:
        expected = math.sqrt((spectrum[row.n :] ** 2).sum() / (spectrum**2).sum())
        if row.method != "kernel_pca":
            expected = references.nrmse(F, Nystroem(KERNEL, row.n).fit(X).transform(scored))
        assert row.nrmse == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "stop", ["n = 4, Nystroem, KMeans, seed 1", "n = 4, network, seed 1, update 100", "n = 4, kernel error"]
)
def test_an_interrupted_comparison_continues_where_it_stopped(monkeypatch, stop):
    fits, fit = [], FeatureMap.fit

    def counted(self, x):
        fit(self, x)
        fits.append((type(self).__name__, self.n_components, self.seed))
        return self

    monkeypatch.setattr(FeatureMap, "fit", counted)
    undisturbed = make("whole", updates=100).run()
    all_fits, fits[:] = sorted(fits), []
    assert len(all_fits) == 2 * (1 + 2 + 2 + 2)  # both readouts are of one network
    with pytest.raises(KeyboardInterrupt):
        make(updates=100, on_step=lambda text, done, total: text == stop and interrupt()).run()
    assert names("out") == FILES | {"features"}
    assert set(jobs(read_rows(Path("out/errors.csv")))) == expected_jobs(sizes=[2])
    rows = make(updates=100).run()
    assert sorted(fits) == all_fits
    assert jobs(rows) == jobs(undisturbed)
    assert [row.nrmse for row in rows] == pytest.approx([row.nrmse for row in undisturbed], rel=1e-7)
    assert names("out") == FILES
    make(updates=100).run()
    assert sorted(fits) == all_fits


def test_an_interrupted_summary_is_written_by_the_next_run(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "write_summary", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(sizes=[2]).run()
    make(sizes=[2]).run()
    assert names("out") == FILES


def test_steps_count_features_up_to_the_total():
    seen = []
    make(sizes=[2, 5], on_step=lambda *step: seen.append(step)).run()
    done, totals = [step[1] for step in seen], {step[2] for step in seen}
    assert totals == {9 * 2 + 9 * 5}
    assert done == sorted(done)
    assert seen[0] == ("n = 2, kernel PCA (optimum), seed 0", 0, 63)
    assert seen[-1] == ("n = 5, kernel error", 63, 63)


def test_seeds_sizes_and_methods_can_be_added_without_changing_earlier_rows():
    steps = [
        {"methods": SOME[:2], "sizes": [2], "seeds": [0]},
        {"methods": SOME[:2], "sizes": [2], "seeds": [0, 1]},
        {"methods": SOME[:2], "sizes": [4, 2], "seeds": [0, 1]},
        {"methods": SOME, "sizes": [2, 4], "seeds": [0, 1]},
    ]
    before = ""
    for options in steps:
        make(**options).run()
        text = Path("out/errors.csv").read_text()
        assert text.startswith(before)
        found = jobs(read_rows(Path("out/errors.csv")))
        assert len(found) == len(set(found))
        assert set(found) == expected_jobs(**options)
        before = text


def test_kernel_pca_is_not_repeated_for_another_seed():
    make(seeds=[0], sizes=[2]).run()
    rows = make(seeds=[1, 0], sizes=[2]).run()
    assert [row.method for row in rows].count("kernel_pca") == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kernel": GaussianKernel(0.6)}, r"kernel=GaussianKernel\(sigma=0.5\), not GaussianKernel\(sigma=0.6\)"),
        ({"x": X + 1}, "of other data: choose"),
        ({"x": X[:60]}, r"points=\[120, 2\], not \[60, 2\]"),
        ({"updates": 60}, "updates=50, not 60"),
        ({"updates": None, "phases": [Phase(10)]}, "updates=50, not None"),
        ({"max_points": 100}, "max_points=10000, not 100"),
        ({"init_scale": 0.5}, "init_scale=None, not 0.5"),
        ({"fourier_features": 2}, "fourier_features=1, not 2"),
    ],
)
def test_a_folder_holds_only_one_comparison(changes, sentence):
    make()
    with pytest.raises(ValueError, match=f"The folder out holds a comparison (with )?{sentence}"):
        make(**changes)


def test_phases_are_part_of_the_identity_of_a_comparison():
    for phases in ([Phase(10, kernel_params={"sigma": 0.7})], "paper_half_moons"):
        folder = f"out_{type(phases).__name__}"
        make(folder, updates=None, phases=phases)
        make(folder, updates=None, phases=phases)
        with pytest.raises(ValueError, match="holds a comparison with phases="):
            make(folder, updates=None, phases=[Phase(11)])


def test_a_folder_with_other_files_is_refused():
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="The folder out holds other files: choose a new folder"):
        make()
    assert names("out") == {"notes.txt"}


HEADER = "method,n,seed,nrmse,seconds\n"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("comparison.json", "{", "comparison.json is damaged: remove the folder"),
        ("comparison.json", "\0\1", "comparison.json is damaged: remove the folder"),
        ("comparison.json", "[1]", "The folder out holds a comparison with kernel=None"),
        ("errors.csv", "method,n\nksm,2\n", "errors.csv is not the table of a comparison"),
        ("errors.csv", HEADER + "ksm,2,0\n", "errors.csv is not the table of a comparison"),
        ("errors.csv", HEADER + "ksm,two,0,0.5,1\n", "errors.csv is not the table of a comparison"),
        ("errors.csv", HEADER + "unknown,2,0,0.5,1\n", "errors.csv is not the table of a comparison"),
    ],
)
def test_damaged_files_are_refused_by_name(name, text, sentence):
    make(methods=["kernel_pca"]).run()
    Path("out", name).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        make(methods=["kernel_pca"], sizes=[3]).run()


def test_nan_features_have_error_nan_and_zero_kernels_error_0():
    y = torch.full((120, 2), torch.nan)
    assert math.isnan(kernel_nrmse(KERNEL, X, y)[0])
    assert kernel_nrmse(LinearKernel(), 0 * X, 0 * X).tolist() == [0.0]


@pytest.mark.parametrize("methods", [["kernel_pca", "ksm", "ksm_nystroem"], ["ksm", "ksm_nystroem"]])
@pytest.mark.parametrize("phases", [HUGE, [Phase(1, eta_l=3.0)]], ids=["infinite", "indefinite"])
def test_a_diverged_network_is_marked_and_the_rest_is_drawn(methods, phases):
    """A step of L above 1 makes it indefinite: the parameters are finite, but every response is NaN."""
    rows = make(methods=methods, updates=None, phases=phases).run()
    assert {row.method for row in rows if math.isnan(row.nrmse)} >= {"ksm"}
    assert all(math.isnan(row.nrmse) for row in rows if row.method == "ksm")
    assert names("out") == FILES
    summaries = summarise(read_rows(Path("out/errors.csv")))
    assert "| network | diverged | diverged |" in markdown(summaries)
    draw(summaries, "title", Path("errors.png"))
    assert picture("errors.png").shape == (660, 840, 3)


def test_a_plot_leaves_out_sizes_at_which_all_runs_diverged():
    nan = math.nan
    draw([Summary("ksm", 2, 1, nan, nan, nan, nan, 1), Summary("ksm", 4, 1, 0.5, 0, 0.5, 0.5, 0)], "", Path("a.png"))
    draw([Summary("ksm", 4, 1, 0.5, 0, 0.5, 0.5, 0)], "", Path("b.png"))
    assert np.array_equal(picture("a.png"), picture("b.png"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"methods": ["pca"]}, "Unknown method 'pca' in `methods`: choose from kernel_pca, nystroem_uniform"),
        (
            {"methods": ["random_fourier"], "kernel": PolynomialKernel(2)},
            r"PolynomialKernel\(degree=2\) does not support the method 'random_fourier'",
        ),
        ({"methods": []}, "at least one method, one size and one seed"),
        ({"sizes": []}, "at least one method, one size and one seed"),
        ({"seeds": []}, "at least one method, one size and one seed"),
        ({"sizes": [0, 2]}, r"`sizes` must be between 1 and 120 .* got \[0, 2\]"),
        ({"sizes": [121]}, r"`sizes` must be between 1 and 120 .* got \[121\]"),
        ({"max_points": 10, "sizes": [11]}, r"`sizes` must be between 1 and 10 .* got \[11\]"),
        ({"updates": 0}, "at least 1 update, got `updates`=0"),
        ({"phases": [Phase(10)]}, "`phases` have their own: give only one"),
        ({"updates": None, "phases": "paper"}, "No phases are called 'paper'"),
        ({"init_scale": -1.0}, "positive and finite, got -1.0"),
        ({"fourier_features": 0, "methods": ["neural_fourier"]}, "`fourier_features` must be at least 1, got 0"),
    ],
)
def test_invalid_arguments_are_refused_before_the_folder_is_created(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**options).run()
    assert not Path("out").exists()


def test_a_failed_write_leaves_the_old_file():
    Path("numbers.txt").write_text("1 2 3")

    def fail(name: str) -> None:
        with draft_of(Path(name)) as draft:
            draft.write_text("4")
            raise RuntimeError("disk full")

    for name in ("numbers.txt", "new.txt"):
        with pytest.raises(RuntimeError, match="disk full"):
            fail(name)
    assert Path("numbers.txt").read_text() == "1 2 3"
    assert names(".") == {"numbers.txt"}


# ---------------------------------------------------------------------- two comparisons in one folder


def test_rows_of_another_comparison_in_the_same_folder_are_kept():
    first, second = make(methods=["nystroem_uniform"]), make(methods=["nystroem_kmeans"])
    second.run()
    assert set(jobs(first.run())) == expected_jobs(["nystroem_uniform", "nystroem_kmeans"])
    rows = read_rows(Path("out/errors.csv"))
    assert rows == first.rows
    assert len(set(jobs(rows))) == len(rows) == 8


def test_a_comparison_is_refused_while_another_one_writes_to_its_folder():
    sentences = []

    def start_another(text: str, done: int, total: int) -> None:
        with pytest.raises(BlockingIOError) as caught:
            make(methods=["nystroem_kmeans"])
        sentences.append(str(caught.value))

    running = make(methods=["nystroem_uniform"], on_step=start_another)
    assert set(jobs(running.run())) == expected_jobs(["nystroem_uniform"])
    assert len(sentences) == 6  # four fits, two passes over the kernel matrix
    assert re.fullmatch(
        rf"out is being written by process {os.getpid()} on \S+ since 20\d\d-\d\d-\d\d [\d:]+: wait for its end, or "
        r"choose another folder\.",
        sentences[0],
    )
    assert names("out") == FILES


def test_a_draft_of_a_killed_comparison_does_not_stop_the_next_one():
    Path("out").mkdir()
    Path("out/.comparison.json.0-1-0.draft").write_text("{")
    Path("out/.lock").write_text("process 1 on elsewhere since yesterday")
    assert set(jobs(make(methods=["kernel_pca"]).run())) == expected_jobs(["kernel_pca"])
    assert names("out") == {".comparison.json.0-1-0.draft", *FILES}


QUICK = ["--data=ArrayDataModule", "--data.path=x.npy", "--kernel_params.sigma=0.5", "--seeds=2", "--updates=50"]


@pytest.fixture
def _own_array(in_tmp_path):
    np.save("x.npy", X.numpy())


@pytest.mark.usefixtures("_own_array")
def test_the_command_writes_tables_and_a_plot_and_prints_the_result(capsys):
    main(["compare", *QUICK, "--sizes=[2,4]", "--show_progress=false", "--out=deep/er"])
    out, err = capsys.readouterr()
    assert err == ""
    assert names("deep/er") == FILES | {"errors.png"}
    rows = read_rows(Path("deep/er/errors.csv"))
    assert set(jobs(rows)) == expected_jobs(set(METHODS) - {"linear"})
    assert [row.nrmse for row in rows if row.method == "ksm"] == pytest.approx(
        [row.nrmse for row in make(methods=["ksm"]).run()], rel=1e-6
    )
    assert "NRMSE over all pairs of 120 points, GaussianKernel(sigma=0.5), mean and standard deviation over" in out
    assert markdown(summarise(rows)) in out
    assert "Table: deep/er/errors.csv\nPlot:  deep/er/errors.png" in out
    pixels = picture("deep/er/errors.png")
    assert pixels.shape == (660, 840, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100


@pytest.mark.usefixtures("_own_array")
def test_the_command_is_refused_in_one_line_while_another_one_writes(capsys):
    Path("out").mkdir()
    with claimed(Path("out"), ""):
        sentence = refused(capsys, "compare", *QUICK, "--sizes=[2]", "--show_progress=false", "--out=out")
    assert sentence.startswith(f"out is being written by process {os.getpid()} on ")
    assert names("out") == set()


@pytest.mark.usefixtures("_own_array")
def test_the_command_reads_a_config_file_and_continues_after_an_interruption(capsys, monkeypatch):
    Path("moons.yaml").write_text(
        "data: {class_path: ArrayDataModule, init_args: {path: x.npy}}\nkernel_params: {sigma: 0.5}\nsizes: [2, 4]\n"
        "seeds: 2\nmethods: [kernel_pca, nystroem_uniform]\nout: out\nshow_progress: false\nupdates: 50\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(Nystroem, "_fit", interrupt)
        with pytest.raises(SystemExit) as stop:
            main(["compare", "--config", "moons.yaml"])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "ksm: stopped.\n"
    main(["compare", "--config", "moons.yaml", "--seeds=3"])
    assert set(jobs(read_rows(Path("out/errors.csv")))) == expected_jobs(SOME[:2], seeds=(0, 1, 2))
    # The table has the requested sizes, the plot all sizes.
    capsys.readouterr()
    main(["compare", "--config", "moons.yaml", "--sizes=[4]"])
    assert "| method | n = 4 |\n" in capsys.readouterr().out


@pytest.mark.usefixtures("_own_array")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--methods=[pca]"], "Unknown method 'pca'"),
        (["--sizes=[500]"], "`sizes` must be between 1 and 120 (the scored points), got [500]."),
        (["--seeds=0"], "`seeds` must be at least 1, got 0."),
        (["--max_points=1"], "`max_points` and `fit_points` must be at least 2"),
        (["--data.path=y.npy"], "There is no data file y.npy."),
        (["--kernel=magic"], "magic"),
        (["--device=abacus"], "abacus"),
        (["--out=."], "The folder . holds other files"),
    ],
)
@pytest.mark.parametrize("progress", [["--show_progress=false"], []], ids=["quiet", "bar"])
def test_invalid_options_give_one_line_of_error(capsys, options, sentence, progress):
    assert sentence in refused(capsys, "compare", *QUICK, *options, *progress)
    assert names(".") == {"x.npy"}


def test_the_help_lists_all_options_and_methods(capsys):
    for options, words in (
        (["compare", "--help"], ["sizes", "seeds", "errors.csv", *METHODS]),
        (["--help"], ["compare"]),
    ):
        with pytest.raises(SystemExit) as stop:
            main(options)
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


def test_similarities_beyond_the_range_of_the_dtype_are_refused():
    x = 255 * torch.rand(50, 400)
    kernel = make_kernel("polynomial", degree=8)
    with pytest.raises(ValueError, match=r"exceed the range of torch\.float32: scale the data"):
        Comparison(kernel, x, Path("out"), [2], ["nystroem_uniform"])
    assert not Path("out").exists()
    assert kernel_nrmse(kernel, x, torch.zeros(50, 2)).isnan().all()


def test_a_width_out_of_the_range_of_the_dtype_is_refused():
    with pytest.raises(ValueError, match=r"GaussianKernel\(sigma=1e-30\) is out of the range of torch\.float32"):
        Comparison(make_kernel("gaussian", sigma=1e-30), torch.rand(50, 4), Path("out"), [2], ["nystroem_uniform"])
    assert not Path("out").exists()


def test_the_registry_creates_every_method_with_its_options():
    options = NetworkOptions(updates=50, fourier_features=3)
    for name, method in METHODS.items():
        assert method.name == name
        expected = features(name, 4, seed=1)
        torch.testing.assert_close(method.make(KERNEL, 4, 1, options).fit_transform(X), expected, rtol=0, atol=0)
    assert {readout: method.name for readout, method in READOUT_METHODS.items()} == {
        "neural": "ksm", "nystroem": "ksm_nystroem", "least_squares": "ksm_least_squares"
    }  # fmt: skip


def test_every_landmark_selector_is_a_method():
    nystroem = [name.removeprefix("nystroem_") for name in METHODS if name.startswith("nystroem_")]
    assert nystroem == list(landmarks.LANDMARK_SELECTORS)
