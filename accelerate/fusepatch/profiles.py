"""What `fusepatch tune` measured on this kind of GPU, and where choosing a backend looks it up.

A leaf, besides settings.py, disk.py and selfcheck.py. A profile is one JSON file per kind of GPU, driver, versions and
kernel sources: with any other of these its measurements say nothing, and it is not read. It is read once per
`accelerate()`, so that a tuning in another process changes no decision of this one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import disk, selfcheck, settings

log = logging.getLogger("fusepatch")

FOLDER = "profiles"


@dataclass(frozen=True)
class Measured:
    """One kind of module at one number of tokens."""

    op: str
    module: str
    """What was measured, for people: class and sizes."""
    problems: tuple[str, ...]
    """The problems, as kernels/backends.py writes them, that a call of it asks about, one per route."""
    tokens: int
    backend: str | None
    """The fastest; None where the library's own code was, or nothing else was apart from it."""
    over_library: Mapping[str, Mapping[str, float]]
    """Time over the library's own, by backend and by `train` (forward + backward) or `forward`: medians."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Backends that could not be measured, and why."""


@dataclass(frozen=True)
class Profile:
    """All that was measured on one kind of GPU."""

    identity: Mapping[str, str]
    measured: tuple[Measured, ...] = ()

    def find(self, op: str, module: str, tokens: int) -> Measured | None:
        """What was measured of this module and number of tokens."""
        return next((m for m in self.measured if (m.op, m.module, m.tokens) == (op, module, tokens)), None)

    def with_(self, new: Measured) -> Profile:
        """The profile with one more; in place of what was measured of the same before."""
        key = (new.op, new.module, new.tokens)
        kept = tuple(m for m in self.measured if (m.op, m.module, m.tokens) != key)
        return Profile(self.identity, (*kept, new))


def winners(op: str, problem: str, device: torch.device) -> tuple[tuple[int, str | None], ...]:
    """(number of tokens, the fastest backend or None) of what was measured of this problem, by number of tokens."""
    measured = _measured_on(device)
    return tuple(sorted((m.tokens, m.backend) for m in measured if m.op == op and problem in m.problems))


def fewest_tokens(op: str, device: torch.device) -> tuple[int, ...]:
    """The numbers of tokens at which some backend won."""
    return tuple(each.tokens for each in _measured_on(device) if each.op == op and each.backend is not None)


def _measured_on(device: torch.device) -> tuple[Measured, ...]:
    current = settings.current()
    if not _are_any(current):
        return ()
    found = _in_force(current, selfcheck.device_kind(device))
    return () if found is None else found.measured


@functools.lru_cache(maxsize=8)
def _are_any(current: settings.Settings) -> bool:
    """Whether anything was ever tuned here: where it was not, the GPU need not be asked what it is."""
    return bool(_files(current))


def _files(current: settings.Settings) -> list[Path]:
    try:
        return sorted((current.cache_dir / FOLDER).glob("*.json"))
    except OSError:
        return []


_asked: ContextVar[list[str] | None] = ContextVar("fusepatch_asked", default=None)


@contextlib.contextmanager
def asked() -> Iterator[list[str]]:
    """The problems that are asked about within it, in this thread, for the first time under the settings in force."""
    found: list[str] = []
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)


def note_asked(problem: str) -> None:
    """For `asked()`: a problem that is looked up for the first time under the settings in force."""
    found = _asked.get()
    if found is not None:
        found.append(problem)


@functools.lru_cache(maxsize=8)
def _in_force(current: settings.Settings, kind: str) -> Profile | None:
    """Read once per `accelerate()`, which makes new settings."""
    identity = selfcheck.versions(kind)
    found = read(identity)
    if found is not None:
        log.info("the profile that `fusepatch tune` made for %s is in force: %d sizes", kind, len(found.measured))
        return found
    others = others_than(identity)
    if others:
        log.info("%s. `fusepatch tune` makes one for here", "; ".join(others))
    return None


# --------------------------------------------------------------------------------------------------------- on disk


def place(identity: Mapping[str, str]) -> Path:
    """Where the profile for what `identity` says lies."""
    name = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:24]
    return settings.current().cache_dir / FOLDER / f"{name}.json"


def read(identity: Mapping[str, str]) -> Profile | None:
    """The profile made for exactly this; None where there is none, or it can't be read."""
    path = place(identity)
    found = _parse(path)
    if found is None and path.exists():
        log.warning("the profile %s is damaged, and is ignored: run `fusepatch tune` again", path)
    return found if found is not None and found.identity == dict(identity) else None


def write(profile: Profile) -> bool:
    """Puts the profile on disk; whether that could be done."""
    path = place(profile.identity)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return disk.write_whole(path, (json.dumps(asdict(profile), indent=1) + "\n").encode())


def others_than(identity: Mapping[str, str]) -> list[str]:
    """What to say of each profile on disk that was made for something else."""
    said = []
    for path in _files(settings.current()):
        found = _parse(path)
        if found is None or found.identity == dict(identity):
            continue
        differs = [
            f"{name} {found.identity.get(name, '-')} (here {identity.get(name, '-')})"
            for name in sorted({*identity, *found.identity})
            if found.identity.get(name) != identity.get(name)
        ]
        said.append(f"a profile is ignored, since it was made with {', '.join(differs)}")
    return said


def _parse(path: Path) -> Profile | None:
    try:
        stored: Any = json.loads(path.read_text())
        measured = tuple(
            Measured(
                op=str(each["op"]),
                module=str(each["module"]),
                problems=tuple(map(str, each["problems"])),
                tokens=int(each["tokens"]),
                backend=None if each["backend"] is None else str(each["backend"]),
                over_library={str(name): dict(ratios) for name, ratios in each["over_library"].items()},
                why_not={str(name): str(why) for name, why in each["why_not"].items()},
            )
            for each in stored["measured"]
        )
        return Profile({str(name): str(value) for name, value in stored["identity"].items()}, measured)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
