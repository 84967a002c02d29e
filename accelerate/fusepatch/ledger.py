"""Counts every call of a patched class by route and reason, and remembers errors.

One `Record` per patched class. Counting takes a lock, since `d[k] += 1` is not atomic and models run in threads
(DataParallel, serving); a forked child gets a fresh one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .decline import Decision, Reason, Route

log = logging.getLogger("fusepatch")

_lock = threading.Lock()


def _fresh_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_lock)


@dataclass(eq=False)
class Record:
    """What happened to the calls of one patched class. Mutable, and only through the functions of this module."""

    op: str
    library: str
    class_name: str
    calls: dict[Decision, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    traces: dict[Reason | Route, int] = field(default_factory=dict)
    """Times that a compiler traced through, by route of ours, or by the reason why it got the library's code: calls of
    compiled code run no Python and are not counted."""

    captured: dict[Decision, int] = field(default_factory=dict)
    """Calls while a CUDA graph was being captured: each is a site in a graph, whose replays run no Python."""

    notes: set[str] = field(default_factory=set)
    """What else there is to say of the kernels that served."""

    def native_calls(self) -> int:
        """Calls that one of our routes served, and the traces and CUDA graphs that it is part of."""
        return self.traces.get(Route.FUSED, 0) + sum(
            count
            for counts in (self.calls, self.captured)
            for made, count in list(counts.items())
            if made.route is not Route.ORIGINAL
        )


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream. Where CUDA was not used yet, that is not asked."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def count(record: Record, made: Decision, module: object) -> None:
    """Counts one call of `module`, before it runs: what runs may leave by an exception that is no error."""
    calls = record.captured if is_capturing() else record.calls
    with _lock:
        first = made not in calls
        calls[made] = 1 if first else calls[made] + 1
    if first and made.reason is not None and log.isEnabledFor(logging.DEBUG):
        log.debug("%s: %s, because %s: %s", record.class_name, made.route.value, made.reason.value, made.reason.meaning)
    step = _first_step  # another thread may end it
    if step is not None:
        step.seen(module)


def count_trace(record: Record, what: Reason | Route) -> None:
    """Counts one time that a compiler traced through a patched class."""
    with _lock:
        record.traces[what] = record.traces.get(what, 0) + 1


def note(record: Record, what: str) -> None:
    """Remembers what there is to say of the kernels that serve a call."""
    record.notes.add(what)


def count_error(record: Record, error: BaseException) -> None:
    """Remembers an exception that left one of our routes. The caller re-raises it."""
    name = type(error).__name__
    if name == "_StopRecomputationError":  # how non-reentrant checkpointing ends a recomputation early
        return
    with _lock:
        record.errors[name] = record.errors.get(name, 0) + 1
    log.warning("%s: %s in a fusepatch route (recorded and raised): %s", record.class_name, name, error)


def clear(record: Record) -> None:
    """Starts the counts of a record anew."""
    with _lock:
        record.calls.clear()
        record.captured.clear()
        record.errors.clear()
        record.traces.clear()
        record.notes.clear()


# ---------------------------------------------------------------------------------------------- the first step's end


class _FirstStep:
    """Calls `report` once: when the first module that was counted is called again, every module has been."""

    def __init__(self, report: Callable[[], None]) -> None:
        self.report = report
        self.first: int | None = None

    def seen(self, module: object) -> None:
        if self.first is None:
            self.first = id(module)
        elif self.first == id(module):
            end_first_step()


_first_step: _FirstStep | None = None


def watch_first_step(report: Callable[[], None] | None) -> None:
    """Arranges for `report()` to be called once, after the first step; None cancels."""
    global _first_step
    _first_step = None if report is None else _FirstStep(report)


def end_first_step() -> None:
    """Reports now, if the first step has begun and was not reported yet."""
    global _first_step
    with _lock:
        step, _first_step = _first_step, None
    if step is not None and step.first is not None:
        step.report()


def is_rank_zero() -> bool:
    """Whether this process is the one that prints: rank 0, or not distributed at all."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"
