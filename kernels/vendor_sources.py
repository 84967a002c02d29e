"""The files of another vendor's package, and its version: read without importing any of it.

A backend of a vendor's kernels was written after reading their sources. Where other sources are installed, what was
read may no longer hold. Where nothing else is said, the package is `cudnn`, of nvidia-cudnn-frontend.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path

DISTRIBUTION = "nvidia-cudnn-frontend"
READ = "1.32.0"
"""The release that was read."""


def path_of(*parts: str, package: str = "cudnn") -> Path:
    """Where this part of the package would lie; it need not exist."""
    spec = importlib.util.find_spec(package)
    (folder, *_) = (spec and spec.submodule_search_locations) or [""]
    return Path(folder, *parts)


def why_not_as_read(
    what: str, files: Sequence[Path], sha256: str, *, distribution: str = DISTRIBUTION, release: str = READ
) -> tuple[str, ...]:
    """Where `files`, one after the other, are not those with this SHA-256, in words; `what` is their name there."""
    if not all(path.is_file() for path in files):
        return (f"{distribution} has no such {what} as {release} brings",)
    if hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() != sha256:
        return (f"{what} of {distribution} is not that of {release}, whose limits are known",)
    return ()


def version_of(distribution: str) -> str | None:
    """The version that is installed; None where none is."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def leading_numbers(version: str) -> tuple[int, ...]:
    """(major, minor) of a version, as far as they are numbers."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
