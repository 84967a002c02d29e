"""Does a function compute exactly what a piece of source text computes?

Compared is the compiled code, not the name: a class that another library has patched, a look-alike with one more
operation, or a body that changed in a new release does not match. Local variable names, annotations and docstrings
do not count.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

Fingerprint = tuple[Any, ...]

# Interpreter bookkeeping that depends on where a function was defined, not on what it does.
_IGNORED_OPCODES = frozenset({"RESUME", "CACHE", "NOP", "EXTENDED_ARG"})
# *args, **kwargs, generator, coroutine, async generator. Other flags tell of nesting, docstrings, __future__ imports.
_RELEVANT_FLAGS = 0x04 | 0x08 | 0x20 | 0x80 | 0x200


def of(function: Any) -> Fingerprint | None:
    """The fingerprint of a plain Python function; None for anything else (a partial, a builtin, a callable object)."""
    if type(function) is not FunctionType:
        return None
    return _of_code(function.__code__)


@functools.cache
def _of_code(code: CodeType) -> Fingerprint:
    local_index = {name: index for index, name in enumerate(code.co_varnames)}

    def operand(instruction: dis.Instruction) -> Any:
        value = instruction.argval
        if "FAST" in instruction.opname:  # one local variable, or two from Python 3.13 on
            names = value if isinstance(value, tuple) else (value,)
            return tuple(local_index.get(name, name) for name in names)  # a closure keeps the name
        if isinstance(value, CodeType):
            return _of_code(value)
        if instruction.opname.startswith(("JUMP", "POP_JUMP", "FOR_ITER", "SETUP")):
            return value
        return repr(value)  # 0.0 is not -0.0, and (1,) not (True,)

    body = tuple(
        (instruction.opname, operand(instruction))
        for instruction in dis.get_instructions(code)
        if instruction.opname not in _IGNORED_OPCODES
    )
    signature = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _RELEVANT_FLAGS)
    return (*signature, code.co_freevars, getattr(code, "co_exceptiontable", b""), body)


# Calling `F.silu` compiles to one thing where F was imported and to another where it was assigned.
_PRELUDE = "import torch.nn as nn\nimport torch.nn.functional as F\n"


def of_source(source: str) -> Fingerprint:
    """The fingerprint of the one function that `source` defines, compiled by the running interpreter.

    `nn` and `F` in it are names that were imported, as in the libraries.
    """
    namespace: dict[str, Any] = {}
    exec(compile(_PRELUDE + source, "<fusepatch template>", "exec"), namespace)
    (function,) = (value for value in namespace.values() if type(value) is FunctionType)
    found = of(function)
    assert found is not None
    return found


def genuine(function: Any, source: str, globals_read: Mapping[str, Any]) -> Any:
    """`function` where it computes what `source` says and its global names mean what they should, else None."""
    is_same = of(function) == of_source(source) and reads_globals(function, globals_read)
    return function if is_same else None


def reads_globals(function: FunctionType, expected: Mapping[str, Any]) -> bool:
    """Whether every global name in `expected` means, to `function`, exactly the object given."""
    return all(function.__globals__.get(name) is value for name, value in expected.items())
