"""What `fusepatch doctor` found, as records."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from . import text
from .cuda_libraries import Library
from .findings import PROBLEM, Finding


@dataclass(frozen=True)
class Version:
    """One line of the list of versions."""

    name: str
    version: str | None
    note: str


@dataclass(frozen=True)
class Gpu:
    """One visible GPU."""

    device: str
    name: str
    capability: str
    family: str | None
    """None where the capability is not in the table of `arch.py`, and no native kernel runs."""
    fused: bool
    """Whether kernels of the fused route are made for it."""


@dataclass(frozen=True)
class CheckResult:
    """The verdict of one self-check, from disk or from a run just now."""

    case: str
    device: str
    outcome: str | None
    """`passed`, `failed` or `inconclusive`; None where it has not run here."""
    what: str
    seconds: float | None = None
    """How long it took just now; None where it did not run just now."""


@dataclass(frozen=True)
class Kernel:
    """One backend of one op, on one route and one kind of device."""

    op: str
    backend: str
    route: str
    devices: tuple[str, ...]
    serves: str
    """`yes`; `unchecked` (its self-check runs first); `in part` (some checks failed); `if named` (only where
    `FUSEPATCH_<OP>_BACKEND` names it); `no`."""
    reason: str | None
    fix: str | None
    checks: tuple[CheckResult, ...]
    drift: tuple[str, ...] = ()
    """Where an installed package is not what the backend was written against."""


@dataclass(frozen=True)
class Setting:
    """One environment variable."""

    name: str
    value: str
    is_set: bool


@dataclass(frozen=True)
class Cache:
    """The folder where compiled kernels, self-check verdicts and profiles are kept."""

    path: str
    writable: bool
    why_not: str


@dataclass(frozen=True)
class Diagnosis:
    """What `examine()` found; `print()` it for people, `to_dict()` it for programs."""

    package: str
    """The folder that fusepatch was imported from."""
    versions: tuple[Version, ...]
    gpus: tuple[Gpu, ...]
    kernels: tuple[Kernel, ...]
    libraries: tuple[Library, ...]
    settings: tuple[Setting, ...]
    cache: Cache
    selfcheck: str
    """What `--selfcheck` did, in a sentence; empty where it was not asked for."""
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 where something is a problem; warnings alone are not."""
        return int(any(finding.level == PROBLEM for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, fit for JSON."""
        made: dict[str, Any] = json.loads(json.dumps({**dataclasses.asdict(self), "exit_code": self.exit_code}))
        for library, found in zip(made["libraries"], self.libraries, strict=True):
            library["version"] = found.version
        return made

    def __str__(self) -> str:
        return "\n\n".join(text.sections(self))
