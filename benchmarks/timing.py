"""Times the arms of a case against each other: batches in rotating order, so that drift meets all of them alike.

On a GPU a batch is timed with CUDA events. GEMMs that are the same before every batch are queued first of all, so the
GPU works while the host enters the arm's context and queues the batch: no gap of the host's shows as time of the
device's, and no arm finds a chip that has rested, which may then run faster than in training, where it never rests.
Calls that do not count stand before those that do, so that each arm is timed at the clock that its own kernels leave.
On a CPU it is a clock around each call.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .check import first_line

Samples = dict[str, list[float]]
Failed = Callable[[str, str], None]
"""Takes the name of an arm and what it raised."""


@dataclass(frozen=True, eq=False)
class Step:
    """One call of an arm in one mode: what is done before, what is timed, and what is done after."""

    before: Callable[[int], Any]
    """Takes the number of the call, by which the data rotates; returns what `timed` takes."""
    timed: Callable[[Any], None]
    after: Callable[[], None]
    context: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Limits:
    """How long a case may take, all arms together."""

    repeats: int
    """Batches of each arm."""
    seconds: float
    """Past this no further round is begun, once there were LEAST_ROUNDS."""


LEAST_ROUNDS = 5
WARM_UP = 2
"""Calls of each step before anything of it is measured."""

_BATCH_MS, _MOST_CALLS = 10.0, 20
"""How long the calls of a batch that count should be, those that do not being as many, and the most of either: the
driver holds about a thousand launches that have not started."""
_MOST_FILLER_MS = 100.0


def measure(steps: Mapping[str, Step], limits: Limits, on_gpu: bool, failed: Failed) -> Samples:
    """Milliseconds per call, one sample per batch. A step that raises is reported to `failed` and left out."""
    if not on_gpu:
        calls = dict.fromkeys(_warm(steps, _cpu_batch, failed), 1)
        return _rounds(steps, calls, limits, failed, _cpu_batch)
    calls, host_ms = {}, [0.0]
    for name in _warm(steps, _gpu_batch, failed):
        with _reported(name, failed):
            once = _gpu_batch(steps[name], 1, 0, _with_margin(_host_ms(steps[name], 1)))
            count = max(1, min(_MOST_CALLS, round(_BATCH_MS / once)))
            host_ms.append(_host_ms(steps[name], count))
            calls[name] = count
    filler_ms = _with_margin(max(host_ms))
    return _rounds(steps, calls, limits, failed, lambda step, count, number: _gpu_batch(step, count, number, filler_ms))


def measure_host(steps: Mapping[str, Step], limits: Limits, on_gpu: bool, failed: Failed) -> Samples:
    """Milliseconds from a call to its return, with nothing queued before it and no wait for the device."""
    settle = torch.cuda.synchronize if on_gpu else _nothing

    def batch(step: Step, calls: int, number: int) -> float:
        return _cpu_batch(step, calls, number, settle, warm=_HOST_WARM)

    return _rounds(steps, dict.fromkeys(_warm(steps, batch, failed), _HOST_CALLS), limits, failed, batch)


_HOST_CALLS, _HOST_WARM = 20, 50
"""How many count, after how many that do not. Entering a context of ours patches classes, whereupon Python forgets what
it had specialised, and learns it again over some tens of calls. A model is patched once."""


_Batch = Callable[[Step, int, int], float]
"""Takes a step, how many calls of it, and the number of the batch; returns milliseconds per call."""


def _warm(steps: Mapping[str, Step], batch: _Batch, failed: Failed) -> list[str]:
    """Runs each step; returns the names of those that ran."""
    ran = []
    for name, step in steps.items():
        with _reported(name, failed):
            for number in range(WARM_UP):
                batch(step, 1, number)
            ran.append(name)
    return ran


def _rounds(
    steps: Mapping[str, Step], calls: Mapping[str, int], limits: Limits, failed: Failed, batch: _Batch
) -> Samples:
    samples: Samples = {name: [] for name in calls}
    with _no_garbage_collection():
        start = time.perf_counter()
        for number in range(limits.repeats):
            if number >= LEAST_ROUNDS and time.perf_counter() - start > limits.seconds:
                break
            for name in _order(list(samples), number):
                with _reported(name, failed, samples):
                    samples[name].append(batch(steps[name], calls[name], number))
    return samples


def _order(names: list[str], number: int) -> list[str]:
    """Rotated by one every other round, and reversed in between, so that no arm always follows the same one."""
    turn = (number // 2) % len(names) if names else 0
    names = names[turn:] + names[:turn]
    return names[::-1] if number % 2 else names


def _nothing() -> None:
    pass


# ----------------------------------------------------------------------------------------------------------- batches


def _gpu_batch(step: Step, calls: int, number: int, filler_ms: float = 0.0) -> float:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    _keep_busy(filler_ms)
    with step.context():
        _lead_in(step, calls, number)
        for call, (start, end) in enumerate(events):
            state = step.before(number * calls + call)
            start.record()
            step.timed(state)
            end.record()
            del state
            step.after()
    torch.cuda.synchronize()
    return float(sum(start.elapsed_time(end) for start, end in events)) / calls


def _cpu_batch(step: Step, calls: int, number: int, settle: Callable[[], None] = _nothing, warm: int = 0) -> float:
    """With `warm` calls before it that do not count."""
    total = 0.0
    with step.context():
        for call in range(-warm, calls):
            state = step.before(number * calls + call)
            settle()
            start = time.perf_counter()
            step.timed(state)
            if call >= 0:
                total += time.perf_counter() - start
            del state
            step.after()
    return total * 1e3 / calls


def _with_margin(host_ms: float) -> float:
    return min(_MOST_FILLER_MS, 1.5 * host_ms + 0.5)


def _host_ms(step: Step, calls: int) -> float:
    """What the host takes to queue a batch, from its entering the context on."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        with step.context():
            _lead_in(step, 2 * calls, 0)  # as many again stand for those that count
            found.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
    return min(found)


def _lead_in(step: Step, calls: int, number: int) -> None:
    """Calls that do not count. The first one in a context of ours decides anew, for longer than a kernel runs."""
    for call in range(calls):
        step.timed(step.before(number * calls + call))
        step.after()


def _keep_busy(milliseconds: float) -> None:
    """Queues GEMMs of about that length."""
    if milliseconds > 0:
        a, b, out, each_ms = _filler()
        for _ in range(math.ceil(milliseconds / each_ms)):
            torch.mm(a, b, out=out)


@lru_cache(maxsize=1)
def _filler() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    a, b = (torch.randn(size, 4096, device="cuda", dtype=torch.bfloat16) for size in (8192, 4096))
    out = torch.empty_like(a)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        torch.mm(a, b, out=out)
    start.record()
    for _ in range(10):
        torch.mm(a, b, out=out)
    end.record()
    torch.cuda.synchronize()
    return a, b, out, float(start.elapsed_time(end)) / 10


@contextmanager
def _reported(name: str, failed: Failed, samples: Samples | None = None) -> Iterator[None]:
    """Reports what is raised inside, and drops what was measured of that arm."""
    try:
        yield
    except Exception as error:
        if samples is not None:
            samples.pop(name, None)
        failed(name, first_line(error))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
