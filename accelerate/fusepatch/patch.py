"""The kinds of patch points, one record each: the `forward` of a class, and a library's own registry of backends.

A forward is set on the class, so it covers instances built before and after, aliases, copies and pickles. `undo()` puts
the very object back that was there, and only where ours is still in place; a forward of ours that somebody else
captured turns into a pass-through. A backend is one entry beside those of others, reached by every captured reference
to the function that asks the registry; `undo()` takes ours out and leaves the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from .decline import Reason
from .ledger import Record

_MARK = "__fusepatch__"


class Switch:
    """What a patched forward asks on each call, and `accelerate()`, `restore()` and `disabled()` set."""

    __slots__ = ("off", "only", "strict")

    def __init__(self) -> None:
        self.off: Reason | None = Reason.RESTORED
        """Why the patch passes through; None while it is live."""
        self.only: weakref.WeakSet[nn.Module] | None = None
        """The modules that `accelerate(model=...)` chose; None for all."""
        self.strict = False

    def why_off(self, module: nn.Module) -> Reason | None:
        """Why this call passes through, if it does."""
        if self.off is not None:
            return self.off
        if self.only is not None and module not in self.only:
            return Reason.OTHER_MODEL
        return None


@dataclass(frozen=True, eq=False)
class ForwardPatch:
    """`owner.forward = replacement`, and how to take it back."""

    op: str
    target: str
    """The catalogue's name of the target, which says which library it is."""
    owner: type[nn.Module]
    original: Callable[..., Any]
    replacement: Callable[..., Any]
    switch: Switch
    record: Record

    def is_in_place(self) -> bool:
        """Whether the class's forward is exactly ours."""
        return vars(self.owner).get("forward") is self.replacement

    def put(self) -> None:
        """Puts our forward in place, unless it is there already, alone or inside another library's wrapper."""
        if vars(self.owner).get("forward") is self.original:
            setattr(self.owner, "forward", self.replacement)

    def take_out(self) -> None:
        """Puts the original back."""
        setattr(self.owner, "forward", self.original)

    def is_gone(self) -> bool:
        """Whether the original is back, so that nothing can lead to ours any more but what captured it."""
        return vars(self.owner).get("forward") is self.original


@dataclass(frozen=True)
class Slot:
    """A place for a backend of ours in the registry of one function of a library."""

    function: str
    """The full name of the function, such as `fla.ops.kda.chunk_kda`."""

    make_backend: Callable[[Switch, Record], Any] = field(compare=False)
    """The object to register."""
    backends: dict[str, Any] = field(compare=False, repr=False)
    """The registry's own dictionary, by the backends' names."""
    forget: Callable[[], None] = field(compare=False, repr=False)
    """Drops what the registry noted of ours besides."""


Place: TypeAlias = "type[nn.Module] | Slot"
BACKEND_NAME = "fusepatch"
"""Ours among the backends of a registry."""


@dataclass(frozen=True, eq=False)
class BackendPatch:
    """`slot.backends["fusepatch"] = backend`, and how to take it out again."""

    op: str
    target: str
    slot: Slot
    backend: Any
    switch: Switch
    record: Record

    def is_in_place(self) -> bool:
        """Whether the registry has our backend."""
        return self.slot.backends.get(BACKEND_NAME) is self.backend

    def put(self) -> None:
        """Registers our backend, unless there is one of that name."""
        self.slot.backends.setdefault(BACKEND_NAME, self.backend)

    def take_out(self) -> None:
        """Takes it out of the registry."""
        del self.slot.backends[BACKEND_NAME]
        self.slot.forget()

    def is_gone(self) -> bool:
        """Whether nothing can lead to ours any more."""
        return not self.is_in_place()


Patch: TypeAlias = "ForwardPatch | BackendPatch"


def make_backend(op: str, target: str, library: str, slot: Slot) -> BackendPatch:
    """A backend of ours for a function that asks a registry, not registered yet."""
    switch, record = Switch(), Record(op, library, slot.function)
    return BackendPatch(op, target, slot, slot.make_backend(switch, record), switch, record)


def make(
    op: str,
    target: str,
    library: str,
    owner: type[nn.Module],
    make_forward: Callable[[Callable[..., Any], Switch, Record], Callable[..., Any]],
) -> ForwardPatch:
    """A patch of `owner`, not applied yet; the earlier one where a forward of ours is still there or was kept."""
    current = vars(owner)["forward"]
    kept = ours_within(current)
    if kept is not None:
        return kept
    switch, record = Switch(), Record(op, library, f"{owner.__module__}.{owner.__qualname__}")
    replacement = make_forward(current, switch, record)
    patch = ForwardPatch(op, target, owner, current, replacement, switch, record)
    setattr(replacement, _MARK, patch)
    return patch


def ours(function: Any) -> ForwardPatch | None:
    """The patch whose replacement `function` is, if it is one."""
    mark = vars(function).get(_MARK) if hasattr(function, "__dict__") else None
    return mark if isinstance(mark, ForwardPatch) and mark.replacement is function else None


def ours_within(function: Any) -> ForwardPatch | None:
    """The patch whose replacement `function` is or wraps, following `__wrapped__`."""
    for _ in range(32):
        if function is None:
            break
        found = ours(function)
        if found is not None:
            return found
        function = getattr(function, "__wrapped__", None)
    return None


def apply(patch: Patch) -> None:
    """Puts the patch in place, where it is not, and turns it on."""
    patch.put()
    patch.switch.off = None


def undo(patch: Patch) -> bool:
    """Turns the patch off and puts the original back where ours is in place. False where somebody else's is."""
    patch.switch.off = Reason.RESTORED
    if not patch.is_in_place():
        return False
    patch.take_out()
    return True
