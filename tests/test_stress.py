"""Small parts of scripts/stress: processes that are killed or that compete, and threads."""

import json
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sklearn.datasets import make_moons

from helpers.paths import ROOT
from helpers.processes import PATIENCE
from ksm_lightning.sklearn import KSMTransformer

STRESS = ROOT / "scripts" / "stress"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict:
    """What became of killed and of competing processes."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "helpers" / "crash_points.py"), str(tmp_path_factory.mktemp("stress"))],
        env={**os.environ, "PYTHONPATH": f"{STRESS}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_a_kill_before_any_change_of_a_file_leaves_nothing_wrong(outcomes):
    """The next run ends as if there had been none, and removes what the killed one left."""
    kills = {name: count for name, (count, _) in outcomes["kills"].items()}
    assert {name: wrong for name, (_, wrong) in outcomes["kills"].items() if wrong} == {}
    assert kills["predict"] >= 6
    assert kills["compare"] >= 8
    assert kills["export"] >= 3
    assert kills["fit"] >= 3


def test_of_four_processes_that_write_the_same_features_one_wins(outcomes):
    found = outcomes["competition"]
    assert len(found["winners"]) == 1
    assert found["features of"] == found["winners"]
    assert found["files"] == ["f.json", "f.npy", "f_labels.npy"]
    assert len(found["errors"]) == 3
    for sentence in found["errors"]:
        assert re.search(
            r"f\.npy (is being written by (process \d+ on \S+ since|another process)|exists already: choose another "
            r"file|was written by another process in the meantime)",
            sentence,
        )


def test_transformers_in_threads_give_what_they_give_alone():
    x = make_moons(150, noise=0.1, random_state=0)[0]

    def fitted(seed: int) -> np.ndarray:
        return KSMTransformer(4, kernel_params={"sigma": 0.3}, random_state=seed).fit(x).transform(x)

    alone = [fitted(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(fitted, range(3)))
    for found, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_results_of_one_part_keep_all_others(tmp_path, monkeypatch):
    """Also those of a part that was added while it ran."""
    monkeypatch.syspath_prepend(str(STRESS))
    script = runpy.run_path(str(STRESS / "run.py"))
    write, path = script["_write"], tmp_path / "RESULTS.md"
    monkeypatch.setitem(write.__globals__, "RESULTS", path)
    monkeypatch.setitem(write.__globals__, "PARTS", {"a": "First", "b": "Second"})
    write({"b": "2"})
    monkeypatch.setitem(write.__globals__, "PARTS", {"a": "First"})
    write({"a": "1\n\n### More\n\n11"})
    assert path.read_text().partition("\n\n## ")[2] == "First\n\n1\n\n### More\n\n11\n\n## Second\n\n2\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "sentence"),
    [("kills", "No file was wrong, and every second run ended as expected."), ("concurrency", "No fault was found.")],
)
def test_the_stress_tests_of_files_find_nothing(tmp_path, part, sentence):
    result = subprocess.run(
        [sys.executable, str(STRESS / "run.py"), "--quick", "--only", part],
        capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert sentence in result.stdout, result.stdout
