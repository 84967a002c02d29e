"""Files under FUSEPATCH_CACHE_DIR: whose folder it is, one process at a time, and never half a file.

A leaf, besides settings. A full or read-only disk costs speed and nothing else, so nothing here raises for one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import settings

log = logging.getLogger("fusepatch")

_warned: set[Path] = set()


def private_folder(name: str, *, make: bool = True) -> Path | None:
    """The folder `name` of the cache, for what decides which code runs; None where it may not or can't be used.

    Made with mode 0700 where it is not there, unless told not to. It, and the cache folder that it lies in, must belong
    to this user; it must be closed to all others, and the cache folder to their writing: else it is not used, with one
    warning.
    """
    cache = settings.current().cache_dir
    path = cache / name
    try:
        if make:
            _make(path)
        elif not os.path.lexists(path):
            return None
        # The cache folder may be a link, as home folders on clusters are; what lies in it may not.
        why_not = _why_not_private(cache, cache.stat(), 0o022) or _why_not_private(path, path.lstat(), 0o077)
    except OSError as error:
        why_not = f"{path}: {error.strerror or error}"
    if why_not is None:
        return path
    if path not in _warned:
        _warned.add(path)
        log.warning(
            "%s is not used: %s. Code and what decides on it must lie in its user's own folder, with mode 0700: mend "
            "that, or set %s_CACHE_DIR to another.",
            path,
            why_not,
            settings.PREFIX,
        )
    return None


def _make(path: Path) -> None:
    """Makes the folder and those above it that are missing, closed to others whatever the umask."""
    if not path.is_dir():
        if not path.parent.is_dir():
            _make(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def _why_not_private(path: Path, found: os.stat_result, closed: int) -> str | None:
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if found.st_uid != os.getuid():
        return f"{path} belongs to user {found.st_uid}"
    if found.st_mode & closed:
        return f"{path} has mode {stat.S_IMODE(found.st_mode):04o}"
    return None


def name_of(key: Mapping[str, str]) -> str:
    """A file name for what a file is kept for, in any order: 24 hexadecimal digits."""
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:24]


def write_whole(path: Path, data: bytes) -> bool:
    """Puts `data` at `path` at once; whether it did. Whoever reads meanwhile sees the whole file or none."""
    half = None
    try:
        # A name of its own: two containers on one home folder may have one process number.
        handle, half = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".half")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(half, path)
    except OSError:
        if half is not None:
            with contextlib.suppress(OSError):
                os.unlink(half)
        return False
    return True


@contextlib.contextmanager
def one_process(path: Path, wait_s: float) -> Iterator[bool]:
    """Holds the lock file `path`; yields whether it was had in time.

    Where no file can be made or locked that is at once, and each process is on its own.
    """
    try:
        import fcntl

        _make(path.parent)
        file = path.open("w")
    except (ImportError, OSError):
        yield True
        return
    with file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.2)
            except OSError:  # a file system without locks
                break
        try:
            yield True
        finally:
            with contextlib.suppress(OSError):
                # Closing is not enough: a child that was forked meanwhile has it open too.
                fcntl.flock(file, fcntl.LOCK_UN)
