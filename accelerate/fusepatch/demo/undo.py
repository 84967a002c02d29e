"""Proof that `restore()` left nothing behind."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..report import Status


@dataclass(frozen=True)
class Before:
    """The attributes of every module class there was, and the import hooks, before anything was patched."""

    classes: dict[type, dict[str, Any]]
    meta_path: tuple[Any, ...]


def snapshot() -> Before:
    """What `leftovers()` compares with."""
    return Before({kind: dict(vars(kind)) for kind in _below(nn.Module)}, tuple(sys.meta_path))


def leftovers(before: Before, status: Status) -> list[str]:
    """What differs from before, among the classes that `status` says were patched, and in `sys.meta_path`."""
    names = {each.name for target in status.targets for each in target.classes}
    patched = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in _below(nn.Module)}
    found = [f"{name} is gone" for name in sorted(names - set(patched.values()))]
    for kind, name in patched.items():
        if name in names:
            was = before.classes.get(kind)
            if was is None:
                found.append(f"{name} was not there before")
            else:
                found += [f"{name}.{attribute}" for attribute in _differing(was, dict(vars(kind)))]
    if len(sys.meta_path) != len(before.meta_path) or any(
        now is not then for now, then in zip(sys.meta_path, before.meta_path, strict=True)
    ):
        found.append("sys.meta_path")
    return found


def _differing(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names whose object is another one, or that came or went; their order counts too."""
    missing = object()
    changed = [name for name in {**was, **now} if was.get(name, missing) is not now.get(name, missing)]
    return changed or ([] if list(was) == list(now) else ["(the order of attributes)"])


def _below(kind: type) -> list[type]:
    """Every class derived from `kind`, once each."""
    found: dict[type, None] = {}
    pending = [kind]
    while pending:
        derived: list[type] = pending.pop().__subclasses__()
        for each in derived:
            if each not in found:
                found[each] = None
                pending.append(each)
    return list(found)
