"""Runs any project's own tests accelerated: `pytest -p fusepatch.pytest_plugin --fusepatch`.

Without `--fusepatch` it does nothing, and imports nothing but pytest. The classes are patched before any test module
is imported, and given back when pytest ends. What ran is one line in the summary, added up over the workers of
pytest-xdist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

_OPTIONS = ("--fusepatch-ops", "--fusepatch-require-native")
_KEY = "fusepatch"


@dataclass(frozen=True)
class Counts:
    """What the patched classes counted in one process, or in several."""

    calls: Mapping[str, int] = field(default_factory=dict)
    """By route, with the sites in CUDA graphs."""
    declines: Mapping[str, int] = field(default_factory=dict)
    """By reason, of those that took a slower route than the fastest."""
    traces: Mapping[str, int] = field(default_factory=dict)
    """Times a compiler traced, by the route of ours in its code, or by the reason why there is none."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Exceptions that left a route of ours, by type."""

    def native(self) -> int:
        """Calls that a route of ours served, and times that a compiler put one into its code."""
        from .decline import native_of

        return native_of(self.calls) + native_of(self.traces)

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        mine, theirs = asdict(self), asdict(other)
        return Counts(**{name: _add(mine[name], theirs[name]) for name in mine})


def _add(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in dict.fromkeys((*one, *other))}


@dataclass
class _Session:
    """What one process of pytest keeps while it runs with `--fusepatch`."""

    stack: contextlib.ExitStack
    require_native: bool
    counts: Counts = field(default_factory=Counts)
    lost_workers: int = 0
    """Workers of xdist that died without reporting."""
    off: str = ""
    """Why nothing is patched, where nothing is."""


_SESSION = pytest.StashKey[_Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The three options."""
    group = parser.getgroup("fusepatch", "run the models under test on fused GPU kernels")
    group.addoption("--fusepatch", action="store_true", help="call fusepatch.accelerate() before collecting tests")
    group.addoption(
        "--fusepatch-ops", metavar="OPS", help="the ops to turn on, separated by commas (default: those on by default)"
    )
    group.addoption(
        "--fusepatch-require-native",
        action="store_true",
        help="fail (exit status 1) where no call ran natively in the whole session",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Accelerates. Under xdist the controller too: what the options say wrongly is then said once, and by it."""
    if not config.getoption("--fusepatch"):
        given = [option for option in _OPTIONS if config.getoption(option)]
        if given:
            raise pytest.UsageError(f"{', '.join(given)}: only together with --fusepatch")
        return
    from . import entry, ledger, settings

    was_on = entry.is_on()
    ops = config.getoption("--fusepatch-ops")
    names = None if ops is None else [name.strip() for name in ops.split(",")]
    session = _Session(contextlib.ExitStack(), config.getoption("--fusepatch-require-native"))
    try:
        session.stack.enter_context(entry.accelerated(names))
    except (ValueError, ImportError) as error:  # an unknown op or variable; a library that is not installed
        raise pytest.UsageError(f"--fusepatch: {error}") from None
    if not was_on:
        ledger.watch_first_step(None)  # the closing line of the summary says what a line after the first step would
    # Strict mode raises where an op that was named never ran; here it is the whole session that is judged, not one
    # of its processes.
    session.require_native = session.require_native or (names is not None and settings.current().strict)
    session.off = _why_off()
    config.stash[_SESSION] = session


def _why_off() -> str:
    from . import entry

    targets = entry.status().targets
    if any(target.state in ("patched", "pending") for target in targets):
        return ""
    return ", ".join(f"{target.name} is off ({target.reason})" for target in targets if target.reason is not None)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Takes back what was patched."""
    session = config.stash.get(_SESSION, None)
    if session is None:
        return
    del config.stash[_SESSION]
    from .decline import DeclinedError

    with contextlib.suppress(DeclinedError):  # strict mode: judged in pytest_sessionfinish
        session.stack.close()


# ---------------------------------------------------------------------------------------------------------- counting


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Reads the counts: a worker sends them to the controller, everybody else judges them."""
    ours = session.config.stash.get(_SESSION, None)
    if ours is None:
        return
    ours.counts = ours.counts.plus(_read_counts())
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_KEY] = asdict(ours.counts)
    elif _is_short(ours, session.config) and session.exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Adds what a worker of xdist reported."""
    ours = node.config.stash.get(_SESSION, None)
    if ours is None:
        return
    reported = getattr(node, "workeroutput", {}).get(_KEY)
    if reported is None:
        ours.lost_workers += 1
    else:
        ours.counts = ours.counts.plus(Counts(**reported))


def _read_counts() -> Counts:
    from . import entry

    counts = Counts()
    for target in entry.status().targets:
        counts = counts.plus(Counts(**{name: target.total(name) for name in asdict(counts)}))
        counts = counts.plus(Counts(calls=target.total("captured")))
    return counts


def _is_short(ours: _Session, config: pytest.Config) -> bool:
    """Whether native calls are required and there was none."""
    return ours.require_native and not ours.counts.native() and not config.getoption("collectonly")


# ---------------------------------------------------------------------------------------------------------- reporting


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The closing line."""
    ours = config.stash.get(_SESSION, None)
    if ours is None:
        return
    short = _is_short(ours, config)
    if short:
        terminalreporter.write_line("fusepatch: FAILED, no call ran natively", red=True, bold=True)
    terminalreporter.write_line(_summary(ours))


def _summary(ours: _Session) -> str:
    from .report import in_order, most_first

    counts = ours.counts
    routes = ", ".join(f"{route} {counts.calls[route]}" for route in in_order(counts.calls))
    parts = [f"fusepatch: {counts.native()} native calls", routes or ours.off or "no call of a patched class"]
    for what, found in (("declined", counts.declines), ("traced", counts.traces), ("raised", counts.errors)):
        if found:
            parts.append(f"{what}: " + ", ".join(f"{reason} {count}" for reason, count in most_first(found)))
    if ours.lost_workers:
        parts.append(f"not counted: {ours.lost_workers} crashed workers")
    return "; ".join(parts)
