"""Calls back after a module has been imported, so that a library may be imported after `accelerate()`.

One finder on `sys.meta_path`. It finds nothing itself: it lets the others find the module, and runs the callback when
the loader has executed it. `remove()` leaves `sys.meta_path` as it was.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder:
    """A meta path finder (PEP 451) for the modules that `wanted` names."""

    def __init__(self, wanted: Callable[[str], bool], callback: Callable[[ModuleType], None]) -> None:
        self.wanted = wanted
        self.callback = callback
        self.looking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        looked_for: set[str] = vars(self.looking).setdefault("names", set())
        if name in looked_for or not self.wanted(name):
            return None
        looked_for.add(name)  # a finder that asks the others as we do must not find us asking it
        try:
            for finder in sys.meta_path:
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        self._watch(spec)
                        return spec
            return None
        finally:
            looked_for.discard(name)

    def _watch(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if loader is None or execute is None or not hasattr(loader, "__dict__"):
            return  # an extension module or a namespace: no library defines a model in one

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader is its own again, before anything can see it
            execute(module)
            self.callback(module)

        vars(loader)["exec_module"] = exec_module


_finder: _Finder | None = None


def install(wanted: Callable[[str], bool], callback: Callable[[ModuleType], None]) -> None:
    """Watches imports; replaces an earlier watch."""
    global _finder
    remove()
    _finder = _Finder(wanted, callback)
    sys.meta_path.insert(0, _finder)


def remove() -> None:
    """Stops watching."""
    global _finder
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _finder = None


def is_installed(library: str) -> bool:
    """Whether `library` could be imported, without importing it. A bare folder of that name does not count."""
    if library in sys.modules:
        return sys.modules[library] is not None
    try:
        spec = importlib.util.find_spec(library)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None
