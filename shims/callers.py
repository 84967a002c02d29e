"""Which modules call a function of a library: told by what their code and attributes hold, and not by their names.

A layer may have imported the function under any name, keep it as an attribute, or hold what wraps it: a partial, or a
function whose closure has it, as the layers of transformers do. A function that is looked up in another module on each
call (`fla.ops.kda.chunk_kda(...)`) is not found, nor one that only the forward of a base class reads.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn


def holders(module: nn.Module, function: Any) -> list[Any]:
    """What `module` holds, or its methods read among the globals of their modules, by which a call gets to `function`.

    Empty where it does not call it. A holder that is itself an nn.Module is how transformers holds a function that a
    kernel from the hub may stand in for.
    """
    return [value for value in (*vars(module).values(), *_read_by(type(module))) if _leads_to(value, function)]


def _leads_to(value: Any, function: Any, depth: int = 4) -> bool:
    if value is function:
        return True
    if isinstance(value, nn.Module):
        value = type(value).forward
    if isinstance(value, MethodType):
        value = value.__func__
    if not depth:
        return False
    if isinstance(value, functools.partial):
        return _leads_to(value.func, function, depth - 1)
    cells = value.__closure__ or () if isinstance(value, FunctionType) else ()
    return any(_leads_to(_content(cell), function, depth - 1) for cell in cells)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: what it names was deleted, or is not there yet
        return None


def _read_by(kind: type) -> list[Any]:
    """The globals that the methods of `kind` read, as they are now."""
    members: dict[str, Any] = {}
    for owner in reversed(kind.__mro__):
        if owner not in (object, nn.Module):
            members |= vars(owner)
    found = []
    for member in members.values():
        method = inspect.unwrap(getattr(member, "__func__", member)) if callable(member) else None
        if isinstance(method, FunctionType):
            names = _globals_of(method.__code__) & method.__globals__.keys()
            found += [method.__globals__[name] for name in names]
    return found


@functools.lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> frozenset[str]:
    """The names that a code object, and what is defined in it, look up among the globals."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    nested = (_globals_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(own.union(*nested))


def without_hooks(module: nn.Module) -> nn.Module:
    """A copy of `module` that shares its weights, in which no hook of it or of a module inside it fires."""
    copied = copy.copy(module)
    state = vars(copied)
    state.update({name: type(hooks)() for name, hooks in state.items() if name.endswith("_hooks")})
    state["_modules"] = {name: child and without_hooks(child) for name, child in copied._modules.items()}
    return copied
