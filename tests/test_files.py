"""Files that are written completely or not at all, by one process at a time, with errors that name them."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from helpers.limits import file_size_limit
from helpers.processes import PATIENCE
from ksm_lightning import files
from ksm_lightning.files import (
    claimed,
    draft_of,
    draft_path,
    draft_tag,
    publish_together,
    remove_unfinished,
    stale_drafts,
    write_array,
    write_csv,
    write_png,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def no_links(source, target):
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.fixture
def dead() -> int:
    """Id of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


# ---------------------------------------------------------------------- drafts


def test_two_writers_of_one_file_do_not_share_a_draft(tmp_path):
    path = tmp_path / "x.txt"
    with draft_of(path) as first:
        first.write_text("first")
        with draft_of(path) as second:
            assert second != first
            assert {first.name[0], second.name[0]} == {"."}
            second.write_text("second")
        assert path.read_text() == "second"
        assert first.read_text() == "first"
    assert path.read_text() == "first"
    assert names(tmp_path) == ["x.txt"]


@pytest.mark.parametrize("has_links", [True, False])
def test_of_two_writers_of_a_new_file_one_wins(tmp_path, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "x.txt"
    sentence = f"{path} was written by another process in the meantime and is left as it is: choose another file."

    def lose() -> None:
        with draft_of(path, is_new=True) as loser, draft_of(path, is_new=True) as winner:
            loser.write_text("loser")
            winner.write_text("winner")

    with pytest.raises(FileExistsError, match=f"^{re.escape(sentence)}$"):
        lose()
    assert path.read_text() == "winner"
    assert names(tmp_path) == ["x.txt"]


def test_many_threads_create_a_file_once(tmp_path):
    path, ready = tmp_path / "x.txt", threading.Barrier(8)
    outcomes = []

    def write(number: int) -> None:
        try:
            with draft_of(path, is_new=True) as draft:
                draft.write_text(str(number))
                ready.wait()
            outcomes.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_text()] == list(map(str, outcomes))
    assert names(tmp_path) == ["x.txt"]


def test_drafts_of_ended_processes_are_removed_and_others_are_kept(tmp_path, dead):
    path = tmp_path / "x.txt"
    machine, process, number = draft_tag().split("-")
    assert int(process) == os.getpid()
    stale = draft_path(path, f"{machine}-{dead}-{number}")
    kept = [
        draft_path(path, f"{machine}-{process}-{number}"),  # of a running process
        draft_path(path, f"{'0' * 8}-{dead}-{number}"),  # of another machine
        draft_path(tmp_path / "y.txt", f"{machine}-{dead}-{number}"),  # of another file
        tmp_path / ".x.txt.mine.draft",
    ]
    for draft in (stale, *kept):
        draft.write_text("half")
    assert stale_drafts(path) == [stale]
    write_text(path, "whole")
    assert path.read_text() == "whole"
    assert names(tmp_path) == sorted(["x.txt", *(draft.name for draft in kept)])


def test_the_longest_names_have_drafts(tmp_path):
    path = tmp_path / ("ü" * 127)  # 254 bytes of at most 255
    write_text(path, "1")
    assert path.read_text() == "1"


def test_files_that_belong_together_appear_together_or_not_at_all(tmp_path):
    drafts = {tmp_path / f".{name}": tmp_path / name for name in ("a", "b", "c")}
    for draft in drafts:
        draft.write_text(draft.name)
    (tmp_path / "c").write_text("precious")
    with pytest.raises(FileExistsError, match="c was written by another process in the meantime"):
        publish_together(drafts)
    assert names(tmp_path) == [".a", ".b", ".c", "c"]
    (tmp_path / "c").unlink()
    publish_together(drafts)
    assert [path.read_text() for path in drafts.values()] == [".a", ".b", ".c"]


def test_files_of_a_process_that_was_killed_while_it_published_them_are_removed(tmp_path, dead):
    path, labels, other = tmp_path / "x.npy", tmp_path / "x_labels.npy", tmp_path / "x.json"
    machine, _, number = draft_tag().split("-")
    draft = draft_path(path, f"{machine}-{dead}-{number}", "labels")
    draft.write_text("labels")
    os.link(draft, labels)
    other.write_text("precious")
    remove_unfinished(path, [labels, other])
    assert names(tmp_path) == ["x.json"]
    for target in (path, draft):
        target.write_text("whole")
    os.link(draft, labels)
    remove_unfinished(path, [labels, other])  # with the last file the set is complete
    assert names(tmp_path) == ["x.json", "x.npy", "x_labels.npy"]


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.txt", lambda path: write_text(path, "1" * 100_000)),
        ("x.npy", lambda path: write_array(path, np.zeros(100_000))),
        ("x.csv", lambda path: write_csv(path, ["a"], [[0.1]] * 50_000)),
        ("x.png", lambda path: write_png(path, np.random.RandomState(0).randint(256, size=(300, 300, 3), dtype="u1"))),
    ],
)
def test_a_file_that_cannot_be_written_is_named(tmp_path, name, write):
    path = tmp_path / name
    with file_size_limit(50_000), pytest.raises(OSError, match="could not be written") as caught:
        write(path)
    assert str(caught.value) == f"{path} could not be written: File too large."
    assert caught.value.errno == errno.EFBIG
    assert names(tmp_path) == []


def test_a_full_disk_and_a_missing_permission_name_the_file(tmp_path):
    path = tmp_path / "x.txt"

    def fail(error: OSError) -> None:
        with draft_of(path):
            raise error

    with pytest.raises(OSError, match=r"x\.txt could not be written: No space left on device\.$"):
        fail(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(PermissionError, match=r"x\.txt could not be written: Permission denied \(/other\)\.$"):
        fail(PermissionError(errno.EACCES, "Permission denied", "/other"))
    with pytest.raises(OSError, match=r"^a sentence$"):
        fail(OSError("a sentence"))


# ---------------------------------------------------------------------- locks

HOLD = """
import sys, time
from pathlib import Path
from ksm_lightning.files import claimed
with claimed(Path(sys.argv[1]), "go away."):
    print("claimed", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_claim_names_its_process_and_ends_with_it(tmp_path, is_folder):
    path = tmp_path if is_folder else tmp_path / "x.npy"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "claimed\n"
            sentence = rf"{path} is being written by process {process.pid} on \S+ since 20\d\d-.*: wait for it\."
            with pytest.raises(BlockingIOError, match=sentence), claimed(path, "wait for it."):
                pass
            assert len(names(tmp_path)) == 1
        finally:
            os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
    with claimed(path, ""):  # what the killed process left does not block
        assert len(names(tmp_path)) == 1
    assert names(tmp_path) == []


def test_a_claim_excludes_other_threads_and_is_released(tmp_path):
    with claimed(tmp_path, ""):
        for _ in range(2):
            with (
                pytest.raises(BlockingIOError, match=f"by process {os.getpid()} on .*: later"),
                claimed(tmp_path, "later"),
            ):
                pass
    with claimed(tmp_path, ""):
        pass


def test_threads_that_claim_in_turn_never_overlap(tmp_path):
    """The file of the lock is removed at the end of every claim, while others wait for it."""
    inside, overlaps, turns = [], [], []

    def work() -> None:
        while len(turns) < 300:
            try:
                with claimed(tmp_path, ""):
                    inside.append(1)
                    overlaps.extend(inside[1:])
                    turns.append(1)
                    inside.pop()
            except BlockingIOError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    assert names(tmp_path) == []


def test_without_locks_nothing_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with claimed(tmp_path, ""), claimed(tmp_path, ""):
        pass
    assert names(tmp_path) == []
