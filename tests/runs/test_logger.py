"""Run folders and the logger."""

import pytest

from ksm_lightning.runs import logger
from ksm_lightning.runs.logger import RunLogger


def test_every_run_gets_its_own_folder(tmp_path):
    loggers = [RunLogger(str(tmp_path), "x") for _ in range(3)]
    assert [logger.version for logger in loggers] == [0, 1, 2]
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["version_0", "version_1", "version_2"]
    assert loggers[0].version == 0


def test_two_runs_that_start_together_get_different_numbers(tmp_path, monkeypatch):
    guesses = iter([0, 0, 1])  # the second run reads 0 before the first has created its folder
    monkeypatch.setattr(logger, "_next_version", lambda root: next(guesses))
    assert [RunLogger(str(tmp_path), "x").version for _ in range(2)] == [0, 1]


def test_a_named_run_is_never_overwritten(tmp_path):
    assert RunLogger(str(tmp_path), "x", version="mine").version == "mine"
    with pytest.raises(FileExistsError, match="exists already"):
        _ = RunLogger(str(tmp_path), "x", version="mine").version


def test_a_writer_that_hangs_does_not_keep_the_process(tmp_path, monkeypatch):
    """The lock stands for a disk that does not answer, or a thread that never gives it back."""
    monkeypatch.setattr(logger, "PATIENCE", 0.1)
    run = RunLogger(str(tmp_path), "x")
    run.log_metrics({"a": 1.0}, 0)
    lock = run.experiment._get_file_writer().event_writer._async_writer._lock
    with lock, pytest.warns(UserWarning, match=r"could not write its last events to .*version_0; the file may end"):
        run.finalize("failed")


def test_a_failure_of_the_writer_is_still_an_error(tmp_path, monkeypatch):
    run = RunLogger(str(tmp_path), "x")
    run.log_metrics({"a": 1.0}, 0)

    def fail():
        raise OSError("No space left on device")

    monkeypatch.setattr(run.experiment, "flush", fail)
    with pytest.raises(OSError, match="No space left"):
        run.finalize("success")
