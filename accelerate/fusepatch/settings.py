"""The table of environment variables, and the settings that `accelerate()` read from it.

A leaf: imports nothing of ours but the list of routes. `TABLE` is the one place where a variable is named; the docs'
page is made from it. Variables are read by `read()`, which `accelerate()` calls; a call of a patched module never
reads the environment, so that a forward pass and its recomputation always see the same settings.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .decline import Route

PREFIX = "FUSEPATCH"


class SettingsError(ValueError):
    """An environment variable that fusepatch does not know, or a value it does not take."""


@dataclass(frozen=True)
class OpOptions:
    """What the environment may say of one op."""

    name: str
    backends: tuple[str, ...]
    """Values of `FUSEPATCH_<OP>_BACKEND` besides `auto`."""
    choices: tuple[str, ...] = ()
    """What `fusepatch tune` tries of a backend that won: other ways to cut its work up, as `<backend>/<choice>`."""
    default: bool = True
    """Whether `accelerate()` without names turns the op on."""
    remark: str = ""
    """What whoever names a backend should know of it."""


OPS: dict[str, OpOptions] = {
    op.name: op
    for op in (
        OpOptions(
            "gated_mlp",
            backends=("triton", "hopper", "cudnn", "triton_gemm", "blackwell", "reference"),
            choices=(
                "hopper/small-groups",
                "hopper/large-groups",
                "hopper/swapped-backward",
                "hopper/own-products",
                "hopper/cublas-products",
            ),
        ),
        OpOptions("engram_gate", backends=("triton", "cudnn_engram", "reference"), default=False),
        OpOptions(
            "kda",
            backends=("cudnn_hopper", "cudnn_frost", "reference"),
            default=False,
            remark=" With `cudnn_hopper` the gradients of the gate's parameters are several times less exact than "
            "FLA's, and those of the gate and of the initial state are less exact too: see docs/evidence.md.",
        ),
        OpOptions("gated_delta_rule", backends=("flash_qla", "cudnn_frost", "reference"), default=False),
    )
}


@dataclass(frozen=True)
class EnvVar:
    """One environment variable: its name, the values it takes, its default, and what it does."""

    name: str
    values: str
    default: str
    meaning: str
    parse: Callable[[str], Any]
    """Text to value; raises ValueError for text that is not one of `values`."""


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _flag(text: str) -> bool:
    return _choice("0", "1")(text) == "1"


def _directory(text: str) -> Path:
    if not text.strip():
        raise ValueError(text)
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:  # ~somebody, who has no home here
        raise ValueError(text) from None


LOG_LEVELS = ("off", "warning", "info", "debug")


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        # A relative one is to be ignored, by the specification of these variables: children run in other folders.
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fusepatch"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"fusepatch-{os.getuid()}"


def _op_variables(op: OpOptions) -> tuple[EnvVar, ...]:
    name = f"{PREFIX}_{op.name.upper()}"
    routes = tuple(route.value for route in Route)
    return (
        EnvVar(name, "0, 1", "1" if op.default else "0", f"Turns the op `{op.name}` off or on.", _flag),
        EnvVar(
            f"{name}_ROUTE",
            ", ".join(routes),
            routes[0],
            "The fastest route that may be taken. When set, strict mode raises where a slower one runs.",
            lambda text: Route(_choice(*routes)(text)),
        ),
        EnvVar(
            f"{name}_BACKEND",
            ", ".join(("auto", *op.backends)),
            "auto",
            f"Whose kernels serve the op. `reference` is plain PyTorch, for any device.{op.remark}",
            _choice("auto", *op.backends),
        ),
    )


TABLE: dict[str, EnvVar] = {
    variable.name: variable
    for variable in (
        EnvVar(PREFIX, "0, 1", "1", "`0` turns every op off: `accelerate()` then changes nothing.", _flag),
        EnvVar(
            f"{PREFIX}_STRICT",
            "0, 1",
            "0",
            "`1` raises `DeclinedError` where a call would run the library's own code, as `strict=True` does.",
            _flag,
        ),
        EnvVar(
            f"{PREFIX}_CACHE_DIR",
            "a directory",
            "~/.cache/fusepatch",
            "Where compiled kernels, self-check verdicts and profiles are kept. Where `XDG_CACHE_HOME` is an absolute "
            "path, the default is the folder `fusepatch` in it.",
            _directory,
        ),
        EnvVar(
            f"{PREFIX}_LOG",
            ", ".join(LOG_LEVELS),
            "info",
            "How much is written to stderr: at `info` one summary line after the first step, at `debug` every first "
            "decline.",
            _choice(*LOG_LEVELS),
        ),
        *(variable for op in OPS.values() for variable in _op_variables(op)),
    )
}


@dataclass(frozen=True)
class OpSettings:
    """What the environment said of one op."""

    enabled: bool | None
    """None where the variable is unset: the op's default applies."""
    route: Route | None
    """The fastest route allowed; None where unset, which allows every route."""
    backend: str
    """`auto`, one of the op's backends, or, while `fusepatch tune` measures it, one of the op's choices."""


@dataclass(frozen=True, eq=False)
class Settings:
    """What the environment said, all of it. Compared by identity: each `accelerate()` makes a new one."""

    enabled: bool
    strict: bool
    cache_dir: Path
    log: str
    ops: Mapping[str, OpSettings]

    def allows(self, op: str, *, named: bool = False) -> bool:
        """Whether `op` may be patched: switched on, or not switched off and asked for by name or by default."""
        choice = self.ops[op].enabled
        return self.enabled and (choice if choice is not None else named or OPS[op].default)

    def considers(self, op: str) -> bool:
        """Whether `op` is on by default or turned on in the environment; another is not spoken of until it is named."""
        return OPS[op].default or bool(self.ops[op].enabled)


def _describe_table() -> str:
    width = max(len(name) for name in TABLE)
    return "\n".join(f"  {name:<{width}}  {variable.values}" for name, variable in TABLE.items())


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Parses every `FUSEPATCH*` variable of `environ` (default: the process's).

    An empty value counts as unset. Raises SettingsError for a variable that is not in TABLE, naming every valid one and
    its values, and for a value that a variable does not take, naming those that it does.
    """
    environ = os.environ if environ is None else environ
    given = {name: text for name, text in environ.items() if name == PREFIX or name.startswith(PREFIX + "_")}
    values: dict[str, Any] = {}
    for name, text in given.items():
        variable = TABLE.get(name)
        if variable is None:
            close = difflib.get_close_matches(name, TABLE, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise SettingsError(f"unknown environment variable {name}.{hint} Valid ones:\n{_describe_table()}")
        if text == "":
            continue
        try:
            values[name] = variable.parse(text)
        except ValueError:
            raise SettingsError(f"{name}={text!r} is not valid: it takes {variable.values}.") from None

    def op_settings(op: OpOptions) -> OpSettings:
        name = f"{PREFIX}_{op.name.upper()}"
        return OpSettings(values.get(name), values.get(f"{name}_ROUTE"), values.get(f"{name}_BACKEND", "auto"))

    return Settings(
        enabled=values.get(PREFIX, True),
        strict=values.get(f"{PREFIX}_STRICT", False),
        cache_dir=values.get(f"{PREFIX}_CACHE_DIR") or _default_cache_dir(),
        log=values.get(f"{PREFIX}_LOG", "info"),
        ops={name: op_settings(op) for name, op in OPS.items()},
    )


_current: Settings | None = None


def current() -> Settings:
    """The settings in force: those that the last `accelerate()` read, or the environment's where none was called."""
    global _current
    found = _current
    if found is None:
        found = _current = read()
    return found


def installed() -> Settings | None:
    """The settings in force, where any were read."""
    return _current


def install(settings: Settings | None) -> None:
    """Puts `settings` in force; None forgets them, so that the next reader reads the environment again."""
    global _current
    _current = settings


@contextlib.contextmanager
def in_force(found: Settings) -> Iterator[Settings]:
    """With `found` in force; afterwards what was in force before is."""
    before = installed()
    install(found)
    try:
        yield found
    finally:
        install(before)
