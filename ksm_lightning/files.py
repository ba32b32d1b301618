"""Atomic file writing: a file is written completely or not at all, and never by two processes at once.

A file is written under a name of its own first, its draft: ``.NAME.MACHINE-PROCESS-RANDOM.draft``. Two processes never
share a draft, and what a killed process leaves behind is removed by the next one that writes the same file.
"""

import csv
import errno
import hashlib
import os
import platform
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Errors of a file system that has no hard links.
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}
_MAX_NAME = 180  # bytes of a file's name that leave room for the rest of a draft's name


# ---------------------------------------------------------------------- drafts


@contextmanager
def draft_of(path: Path, *, is_new: bool = False) -> Iterator[Path]:
    """Temporary path next to ``path``; the file written there gets that name if the block raises no exception.

    Args:
        path: The file to write. Its folder is created.
        is_new: Whether ``path`` must not exist. By default it is replaced.

    Raises:
        FileExistsError: If ``path`` must be new, and exists when the block ends. It is left as it is.
        OSError: If a file cannot be written, with a message that names ``path``.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "new" / "numbers.txt"
        >>> with draft_of(path) as draft:
        ...     _ = draft.write_text("1 2 3")
        >>> path.read_text(), draft.exists()
        ('1 2 3', False)
    """
    with naming_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_drafts(path)
        draft = draft_path(path, draft_tag())
        try:
            yield draft
            if is_new:
                publish_together({draft: path})
            else:
                os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def draft_tag() -> str:
    """Part of a draft's name that no other draft has: the machine, the process and a random number."""
    return f"{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"


def draft_path(path: Path, tag: str, part: str = "") -> Path:
    """Path of a draft of ``path``; ``part`` names one of several that belong together."""
    return path.with_name(f".{_short(path.name)}.{tag}{part and '.'}{part}.draft")


def publish_together(drafts: Mapping[Path, Path]) -> None:
    """Give drafts their final names, which must be new, in the given order; on failure none of them.

    The drafts remain, as second names of the same files, where the file system has hard links: so
    :func:`remove_unfinished` recognises the files of a process that was killed between two of them.
    """
    published: list[Path] = []
    try:
        for draft, path in drafts.items():
            with naming_errors(path):
                _link(draft, path)
            published.append(path)
    except OSError:
        for path in published:
            path.unlink(missing_ok=True)
        raise


def _link(draft: Path, path: Path) -> None:
    try:
        try:
            os.link(draft, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            os.replace(draft, path)
    except FileExistsError as error:
        raise FileExistsError(
            f"{path} was written by another process in the meantime and is left as it is: choose another file."
        ) from error


def stale_drafts(path: Path) -> list[Path]:
    """Drafts of ``path`` by processes of this machine that have ended."""
    pattern = re.compile(rf"\.+{re.escape(_short(path.name))}\.{_machine()}-(\d+)-[0-9a-f]{{8}}\..*")
    try:
        matches = [pattern.fullmatch(name) for name in os.listdir(path.parent)]
    except OSError:
        return []
    return [path.with_name(match[0]) for match in matches if match and not _is_running(int(match[1]))]


def remove_stale_drafts(path: Path) -> None:
    """Remove what killed processes of this machine left of ``path``."""
    for draft in stale_drafts(path):
        with suppress(OSError):
            draft.unlink()


def remove_unfinished(path: Path, beside: Iterable[Path]) -> None:
    """Remove the files of a process that was killed while it published ``path``, which comes last, and others."""
    stale = stale_drafts(path)
    for other in beside:
        if not path.exists() and other.exists() and any(draft.samefile(other) for draft in stale):
            other.unlink()
    remove_stale_drafts(path)


@cache
def _machine() -> str:
    """Eight digits for the system in which process ids are unique: the host and its process namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{platform.node()} {namespace}".encode()).hexdigest()[:8]


def _is_running(process: int) -> bool:
    if os.name != "posix":  # `os.kill` would end it
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _short(name: str) -> str:
    """A file's name, or a hash of one that leaves no room for the name of its draft."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= _MAX_NAME else hashlib.sha256(encoded).hexdigest()[:32]


# ---------------------------------------------------------------------- locks and errors


@contextmanager
def claimed(path: Path, advice: str) -> Iterator[None]:
    """Reserve a file or a folder for the block. Others that reserve it are refused, with the name of this process.

    The lock belongs to the operating system and ends with the process. Where a file system has no locks, nothing is
    reserved.

    Args:
        path: A folder, which exists, or a file in an existing folder.
        advice: What to do if it is reserved by another process or thread, for the message.

    Raises:
        BlockingIOError: If ``path`` is reserved.
    """
    lock = path / ".lock" if path.is_dir() else path.with_name(f".{_short(path.name)}.lock")
    with naming_errors(path):
        descriptor = _open_locked(lock)
    if descriptor is None:
        try:
            holder = lock.read_text().strip()
        except OSError:
            holder = ""
        raise BlockingIOError(f"{path} is being written by {holder or 'another process'}: {advice}")
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with naming_errors(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()} since {since}\n".encode())
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # while it is locked, so that a process that has opened it sees that it is gone
        os.close(descriptor)


def _open_locked(lock: Path) -> int | None:
    """A descriptor of the locked file, or None if another process or thread has locked it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.exists() and os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except OSError:  # no locks on this file system
            return descriptor
        os.close(descriptor)


@contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Errors of the operating system as a sentence about ``path``; that of a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # not of the operating system, or a sentence already
            raise
        where = f" ({error.filename})" if error.filename and path.name not in str(error.filename) else ""
        kind = type(error) if type(error).__module__ == "builtins" else OSError
        failure = kind(f"{path} could not be written: {error.strerror}{where}.")
        failure.errno = error.errno
        raise failure from error


# ---------------------------------------------------------------------- formats


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    with draft_of(path) as draft:
        draft.write_text(text)


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a ``.npy`` file."""
    # NumPy writes to a file that is also readable in pieces; its other way does not report why a write failed.
    with draft_of(path) as draft, draft.open("w+b") as file:
        np.save(file, array)


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write an image (height, width, 3) of bytes."""
    from PIL import Image  # most processes never write an image

    with draft_of(path) as draft:
        Image.fromarray(pixels).save(draft, format="PNG")


def write_csv(path: Path, fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table with a header; floats keep all digits, so that reading them gives the same values."""
    with draft_of(path) as draft, draft.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(fields)
        writer.writerows(rows)
