"""Runs somebody's script or module as `__main__`, accelerated and unedited.

`runpy` does nearly this, but takes its `__main__` away again when the code has run, and threads, exit handlers and
pools that outlive the last line then find ours. Here, as under Python itself, the script's `__main__` stays.
"""

from __future__ import annotations

import builtins
import functools
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from .errors import CommandError, first_line


def run_script(
    script: str, arguments: Sequence[str], ops: Sequence[str] | None = None, *, strict: bool = False
) -> None:
    """`python script arguments...`, after `accelerate(ops, strict=strict)`.

    Raises CommandError for a script that can't be read, and whatever the script raises.
    """
    path = Path(script)
    if path.is_dir():
        raise CommandError(f"{script} is a directory, not a script")
    if not path.exists():
        raise CommandError(f"there is no script {script}")
    _check_ops(ops)
    absolute = os.path.join(os.getcwd(), script)  # as Python spells __file__: not normalised
    loader: Any = importlib.machinery.SourceFileLoader("__main__", absolute)
    if script.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", absolute)
    try:
        data = None if script.endswith(".pyc") else loader.get_data(absolute)
    except OSError as error:
        raise CommandError(f"can't read {script}: {error.strerror or error}") from None

    _set_first_path(os.path.dirname(os.path.realpath(script)))
    sys.argv = [script, *arguments]
    _accelerate(ops, strict)
    main = _new_main({"__file__": absolute, "__cached__": None, "__loader__": loader, "__package__": None})
    _execute(main, lambda: loader.get_code("__main__") if data is None else loader.source_to_code(data, absolute))


def run_module(
    module: str, arguments: Sequence[str], ops: Sequence[str] | None = None, *, strict: bool = False
) -> None:
    """`python -m module arguments...`, after `accelerate(ops, strict=strict)`.

    Raises CommandError for a module that is not there or can't be run, and whatever the module raises.
    """
    _check_ops(ops)
    _set_first_path(os.getcwd())
    sys.argv = ["-m", *arguments]
    if not module or module.startswith(".") or _find_top(module.partition(".")[0]) is None:
        raise CommandError(f"there is no module named {module}")
    _accelerate(ops, strict)  # before the packages that `module` lies in are imported
    spec = _find_runnable(module)
    sys.argv[0] = spec.origin or module
    main = _new_main(
        {
            "__file__": spec.origin,
            "__cached__": spec.cached,
            "__loader__": spec.loader,
            "__package__": spec.parent,
            "__spec__": spec,
        }
    )
    loader: Any = spec.loader
    _execute(main, lambda: loader.get_code(spec.name))


# ----------------------------------------------------------------------------------------------------- accelerating


def _check_ops(ops: Sequence[str] | None) -> None:
    """Raises CommandError for an unknown op, before torch is imported."""
    from . import settings

    for name in ops or ():
        if name not in settings.OPS:
            raise CommandError(f"unknown op {name!r}; ops: {', '.join(settings.OPS)}")


def _accelerate(ops: Sequence[str] | None, strict: bool) -> None:
    from . import entry, settings

    try:
        entry.accelerate(ops, strict=strict)
    except (ImportError, settings.SettingsError) as error:
        raise CommandError(str(error)) from None
    _accelerate_spawned_children(ops, strict)


def _accelerate_spawned_children(ops: Sequence[str] | None, strict: bool) -> None:
    """Arranges that processes which multiprocessing starts afresh are accelerated as this one is.

    What such a child is told first, before it imports the script, is a pickled dictionary; one more entry in it calls
    `accelerate_child` as it is unpickled, and is ignored otherwise.
    """
    from multiprocessing import spawn

    made: Any = getattr(spawn, "get_preparation_data")  # noqa: B009  not in the type stubs
    order = _InChild(None if ops is None else tuple(ops), strict)

    @functools.wraps(made)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**made(name), "fusepatch": order}

    setattr(spawn, "get_preparation_data", get_preparation_data)


class _InChild:
    """Unpickling one calls `accelerate_child`."""

    def __init__(self, ops: tuple[str, ...] | None, strict: bool) -> None:
        self.arguments = (ops, strict)

    def __reduce__(self) -> tuple[Any, ...]:
        # The child's sys.path is not the parent's yet, so it is told where this package is. What is appended is gone
        # a moment later, when multiprocessing puts the parent's sys.path in place.
        root = str(Path(__file__).parent.parent)
        code = (
            f"import sys; sys.path.append({root!r}); import fusepatch.run; "
            f"fusepatch.run.accelerate_child(*{self.arguments!r})"
        )
        return exec, (code, {})


def accelerate_child(ops: tuple[str, ...] | None, strict: bool) -> None:
    """`accelerate()` in a spawned child, which starts in any case."""
    try:
        _accelerate(ops, strict)
    except Exception as error:
        logging.getLogger("fusepatch").warning("a spawned process runs unaccelerated: %s", first_line(error))


# ---------------------------------------------------------------------------------------------------------- running


def _set_first_path(folder: str) -> None:
    """Puts `folder` where Python puts the folder of what it runs: instead of ours, and not at all under `-P`."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder


def _new_main(attributes: dict[str, Any]) -> ModuleType:
    """A new `__main__`, in place of ours."""
    main = ModuleType("__main__")
    vars(main).update({"__builtins__": builtins, "__spec__": None, **attributes})
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}  # as Python sets it there
    sys.modules["__main__"] = main
    return main


def _execute(main: ModuleType, compiled: Any) -> None:
    """Runs the code that `compiled()` returns in `main`; an exception that leaves it is printed without our frames."""
    try:
        try:
            code: CodeType = compiled()
        except SyntaxError as error:
            raise error.with_traceback(None) from None
        exec(code, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        _print_from(error, error.__traceback__.tb_next if error.__traceback__ is not None else None)
        raise


def _print_from(error: BaseException, traceback: TracebackType | None) -> None:
    """Arranges that Python, should `error` end the process, prints it from `traceback` on.

    Python still does all the rest: the exit code, and what KeyboardInterrupt means to the shell.
    """
    hook = sys.excepthook

    @functools.wraps(hook)
    def excepthook(kind: type[BaseException], value: BaseException, found: TracebackType | None) -> None:
        if value is error:
            found = traceback
            value.__traceback__ = traceback
        hook(kind, value, found)

    sys.excepthook = excepthook


# -------------------------------------------------------------------------------------------------- finding a module


def _find_top(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module without a spec: __main__
        return None


def _find_runnable(module: str) -> ModuleSpec:
    """The spec of `module`, or of its `__main__` where it is a package. Importing its parents may raise anything."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a parent was found, and what it imports was not
        spec = None
    if spec is None:
        raise CommandError(f"there is no module named {module}")
    if spec.submodule_search_locations is not None:
        if module.endswith("__main__"):
            raise CommandError(f"{module} is a package, and can't be run as a module")
        inner = importlib.util.find_spec(f"{module}.__main__")
        if inner is None:
            raise CommandError(f"{module} is a package without a __main__ module, and can't be run")
        spec = inner
    machine_code = isinstance(spec.loader, importlib.machinery.ExtensionFileLoader) or spec.origin == "built-in"
    if machine_code or not hasattr(spec.loader, "get_code"):
        raise CommandError(f"{module} has no Python code to run")
    return spec
