"""What `fusepatch tune` measured on this kind of GPU, and where choosing a backend looks it up.

A leaf, besides settings.py, disk.py and selfcheck.py. A profile is one JSON file per kind of GPU, driver, versions and
kernel sources: with any other of these its measurements say nothing, and it is not read. It is read once per
`accelerate()`, so that a tuning in another process changes no decision of this one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import disk, selfcheck, settings

log = logging.getLogger("fusepatch")

FOLDER = "profiles"
MOST_TOKENS = 2**40
"""More than any call has."""
_BASELINES = ("transformers", "flash-linear-attention", "apache-tvm-ffi")
"""Distributions whose code a measurement depends on, besides those of a self-check."""


@dataclass(frozen=True)
class Measured:
    """One kind of module at one number of tokens."""

    op: str
    module: str
    """What was measured, for people: class, sub-modules and dtype."""
    problems: tuple[str, ...]
    """The problems, as kernels/backends.py writes them, that a call of it asks about, one per route."""
    tokens: int
    modes: tuple[str, ...]
    """What must not become slower; the first decided which is fastest."""
    backend: str | None
    """The fastest, and after a slash the choice that it was fastest with; None where the library's own code was, or
    nothing else was apart from it."""
    over_library: Mapping[str, Mapping[str, float]]
    """Time over the library's own, by backend or choice, and mode: medians."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Backends and choices that could not be measured, and why."""


@dataclass(frozen=True)
class Profile:
    """All that was measured on one kind of GPU."""

    identity: Mapping[str, str]
    measured: tuple[Measured, ...] = ()

    def find(self, op: str, module: str, tokens: int, modes: tuple[str, ...]) -> Measured | None:
        """What was measured of this module and number of tokens, for these modes."""
        key = (op, module, tokens, modes)
        return next((m for m in self.measured if (m.op, m.module, m.tokens, m.modes) == key), None)

    def with_(self, new: Measured) -> Profile:
        """The profile with one more; in place of what was measured of the same before, for whatever modes."""
        key = (new.op, new.module, new.tokens)
        kept = tuple(m for m in self.measured if (m.op, m.module, m.tokens) != key)
        return Profile(self.identity, (*kept, new))


def identity(kind: str) -> dict[str, str]:
    """All that a profile holds for, on this kind of device."""
    return {**selfcheck.versions(kind), **{name: selfcheck.version(name) for name in _BASELINES}}


# ---------------------------------------------------------------------------------------------------- looking up


def winners(op: str, problem: str, device: torch.device) -> dict[int, tuple[str | None, ...]]:
    """By number of tokens, ascending: the fastest backends or choices of the modules that pose this problem, each once.

    None among them is the library's own code.
    """
    found: dict[int, tuple[str | None, ...]] = {}
    for each in sorted(_measured_on(device), key=lambda each: each.tokens):
        if each.op == op and problem in each.problems:
            found[each.tokens] = tuple(dict.fromkeys((*found.get(each.tokens, ()), each.backend)))
    return found


def fewest_tokens(op: str, device: torch.device) -> tuple[int, ...]:
    """The numbers of tokens at which some backend won."""
    return tuple(each.tokens for each in _measured_on(device) if each.op == op and each.backend is not None)


_read: weakref.WeakKeyDictionary[settings.Settings, dict[str, tuple[Measured, ...]]] = weakref.WeakKeyDictionary()
"""By the settings of an `accelerate()` and the kind of device."""


def _measured_on(device: torch.device) -> tuple[Measured, ...]:
    current = settings.current()
    by_kind = _read.get(current)
    if by_kind is None:
        by_kind = _read[current] = {}
        if not _files():  # nothing was ever tuned here: the GPU need not be asked what it is
            by_kind[""] = ()
    if "" in by_kind:
        return ()
    kind = selfcheck.device_kind(device)
    if kind not in by_kind:
        by_kind[kind] = _in_force(kind)
    return by_kind[kind]


def _in_force(kind: str) -> tuple[Measured, ...]:
    wanted = identity(kind)
    found = read(wanted)
    if found is not None:
        log.info("the profile that `fusepatch tune` made for %s is in force: %d sizes", kind, len(found.measured))
        return found.measured
    others = _others_than(wanted)
    if others:
        log.info("%s. `fusepatch tune` makes one for here", "; ".join(others))
    return ()


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


# --------------------------------------------------------------------------------------------------------- on disk

WAIT_LIMIT_S = 20.0


def place(wanted: Mapping[str, str]) -> Path:
    """Where the profile for what `wanted` says lies."""
    return settings.current().cache_dir / FOLDER / f"{disk.name_of(wanted)}.json"


def read(wanted: Mapping[str, str]) -> Profile | None:
    """The profile made for exactly this; None where there is none, it can't be read or trusted, or names a choice that
    there is not."""
    path = place(wanted)
    if path not in _files():
        return None
    found = _parse(path)
    if found is None:
        log.warning("the profile %s is damaged, and is ignored: run `fusepatch tune` again", path)
    if found is None or found.identity != dict(wanted):
        return None
    unknown = sorted({each.backend for each in found.measured if each.backend and not _is_known(each)})
    if unknown:
        log.info("%s. `fusepatch tune` makes one for here", _ignored([f"{name} (here -)" for name in unknown]))
    return None if unknown else found


def _is_known(found: Measured) -> bool:
    """Whether the choice that won is one of this version's; one that won without a choice always is."""
    known = settings.OPS[found.op].choices if found.op in settings.OPS else ()
    return "/" not in str(found.backend) or found.backend in known


def add(wanted: Mapping[str, str], new: Measured) -> bool:
    """Adds to the profile on disk, to which another process may be adding too; whether that could be done."""
    if disk.private_folder(FOLDER) is None:
        return False
    path = place(wanted)
    with disk.one_process(path.with_suffix(".lock"), WAIT_LIMIT_S):
        profile = (read(wanted) or Profile(wanted)).with_(new)
        return disk.write_whole(path, (json.dumps(asdict(profile), indent=1) + "\n").encode())


def _files() -> list[Path]:
    folder = disk.private_folder(FOLDER, make=False)
    try:
        return [] if folder is None else sorted(folder.glob("*.json"))
    except OSError:
        return []


def _others_than(wanted: Mapping[str, str]) -> list[str]:
    """What to say of each profile on disk that was made for something else."""
    said = []
    for path in _files():
        found = _parse(path)
        if found is None or found.identity == dict(wanted):
            continue
        differs = [
            f"{name} {found.identity.get(name, '-')} (here {wanted.get(name, '-')})"
            for name in sorted({*wanted, *found.identity})
            if found.identity.get(name) != wanted.get(name)
        ]
        said.append(_ignored(differs))
    return said


def _ignored(differs: Sequence[str]) -> str:
    return f"a profile is ignored, since it was made with {', '.join(differs)}"


def _parse(path: Path) -> Profile | None:
    try:
        stored: Any = json.loads(path.read_text())
        return Profile(_texts(stored["identity"]), tuple(map(_parse_one, stored["measured"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _parse_one(each: Any) -> Measured:
    """Raises one of the above where it is not what `add` writes."""
    tokens, backend = each["tokens"], each["backend"]
    if type(tokens) is not int or not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(tokens)
    over = {_text(name): {_text(mode): _number(n) for mode, n in r.items()} for name, r in each["over_library"].items()}
    return Measured(
        _text(each["op"]),
        _text(each["module"]),
        tuple(map(_text, each["problems"])),
        tokens,
        tuple(map(_text, each["modes"])),
        None if backend is None else _text(backend),
        over,
        _texts(each["why_not"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(value)
    return float(value)


def _texts(values: Any) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in values.items()}
