"""The one kind of patch point there is so far: the `forward` of a class.

Set on the class, so it covers instances built before and after, aliases, copies and pickles. `undo()` puts the very
object back that was there, and only where ours is still in place; a forward of ours that somebody else captured turns
into a pass-through.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def apply(patch: ForwardPatch) -> None:
    """Puts our forward in place, unless it is there already, alone or inside another library's wrapper."""
    if vars(patch.owner).get("forward") is patch.original:
        setattr(patch.owner, "forward", patch.replacement)
    patch.switch.off = None


def is_in_place(patch: ForwardPatch) -> bool:
    """Whether the class's forward is exactly ours."""
    return vars(patch.owner).get("forward") is patch.replacement


def undo(patch: ForwardPatch) -> bool:
    """Turns the patch off and puts the original back where ours is in place. False where somebody else's is."""
    patch.switch.off = Reason.RESTORED
    if not is_in_place(patch):
        return False
    setattr(patch.owner, "forward", patch.original)
    return True
