"""Files under FUSEPATCH_CACHE_DIR: whose folder it is, one process at a time, and never half a file.

A leaf, besides settings. A full or read-only disk costs speed and nothing else, so nothing here raises for one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from . import settings

log = logging.getLogger("fusepatch")

_warned: set[Path] = set()


def private_folder(name: str) -> Path | None:
    """The folder `name` of the cache, for what is run as code; None, with one warning, where others could write to it.

    Made with mode 0700 where it is not there. It, and the cache folder that it lies in, must belong to this user; it
    must be closed to all others, and the cache folder to their writing.
    """
    cache = settings.current().cache_dir
    path = cache / name
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        why_not = _why_not_private(cache, 0o022) or _why_not_private(path, 0o077)
    except OSError as error:
        why_not = f"{path}: {error.strerror or error}"
    if why_not is None:
        return path
    if path not in _warned:
        _warned.add(path)
        log.warning(
            "kernels are compiled again by every process: %s. A folder for code must be its user's own, with mode "
            "0700: mend that, or set %s_CACHE_DIR to another.",
            why_not,
            settings.PREFIX,
        )
    return None


def _why_not_private(path: Path, closed: int) -> str | None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if found.st_uid != os.getuid():
        return f"{path} belongs to user {found.st_uid}"
    if found.st_mode & closed:
        return f"{path} has mode {stat.S_IMODE(found.st_mode):04o}"
    return None


def write_whole(path: Path, data: bytes) -> bool:
    """Puts `data` at `path` at once; whether it did. Another process sees the whole file or none."""
    half = path.with_name(f"{path.name}.{os.getpid()}.half")
    try:
        half.write_bytes(data)
        half.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            half.unlink()
        return False
    return True


@contextlib.contextmanager
def one_process(path: Path, wait_s: float) -> Iterator[bool]:
    """Holds the lock file `path`; yields whether it was had in time, which is at once where no file can be made."""
    try:
        import fcntl

        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
            except OSError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.2)
        yield True
