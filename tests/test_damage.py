"""A small part of the stress test of damaged files: 200 cases that must be refused or read as the original."""

import importlib
from collections import Counter
from pathlib import Path

import pytest

from helpers.paths import ROOT

KINDS = ("checkpoint", "extractor", "npz", "config")


@pytest.fixture(scope="module")
def damage():
    """The module scripts/stress/damage.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts" / "stress"))
        yield importlib.import_module("damage")


@pytest.fixture(scope="module")
def originals(damage, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    damage.make_originals(folder)
    return folder


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # NumPy does not close an archive that it refuses
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_read_as_the_original(damage, originals, kind):
    """Before checkpoints had a digest, changed values and keys of them were believed in most cases."""
    outcomes: Counter[str] = Counter()
    jobs = [job for job in damage.jobs_of(quick=True) if job["kind"] == kind]
    for job in jobs:
        # A few cases per kind of damage; those of a configuration that `ksm fit` parses, too, take longest.
        first, count = (1, 4) if kind == "config" else (0, 8)
        found = damage.run_cases(originals, kind, job["damage"], range(first, first + count))
        assert found["details"] == [], job["damage"]
        outcomes.update(found["outcomes"])
        assert found["megabytes"] < 200
    assert set(outcomes) == {"refused", "equal to the original"}
    assert outcomes["refused"] > outcomes["equal to the original"]


def test_the_full_stress_test_has_ten_thousand_different_cases(damage):
    jobs = damage.jobs_of(quick=False)
    cases = {(job["kind"], job["damage"], job["first"] + i) for job in jobs for i in range(job["count"])}
    assert len(cases) == sum(job["count"] for job in jobs) == 10_000


def test_what_should_not_happen_is_counted(damage, originals, tmp_path, monkeypatch):
    """The stress test itself: a reader that believes anything, fails in another way or hangs is reported."""

    def result(read, cases=3):
        monkeypatch.setattr(damage, "read", read)
        return damage.run_cases(originals, "npz", "flipped bits", range(cases))

    def fail(kind, path):
        if path.parent != originals:
            raise KeyError("x")
        return ""

    def hang(kind, path):
        while path.parent != originals:
            pass
        return ""

    assert result(lambda kind, path: str(path))["outcomes"] == {"believed": 3}
    found = result(fail)
    assert found["outcomes"] == {"unexpected exception": 3}
    assert found["details"][0] == "case 0: unexpected exception KeyError: 'x'"
    monkeypatch.setattr(damage, "TIME_LIMIT", 0.05)
    assert result(hang, cases=1)["outcomes"] == {"too slow": 1}
