"""Times several ways of doing one thing against each other, as a program would meet them: calls in a row, in turns.

A batch is timed from its first call to the end of its last, so that what the host takes counts wherever the GPU waits
for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP = 3
"""Calls before anything is measured: allocations, and what is compiled or planned once."""
BATCH_MS = 5.0
MOST_CALLS = 50
LEAST_ROUNDS, MOST_ROUNDS = 7, 60


@dataclass(frozen=True)
class Times:
    """Milliseconds per call."""

    p20: float
    p50: float
    p80: float


def compare(arms: Mapping[str, Callable[[], object]], seconds: float, device: torch.device) -> dict[str, Times]:
    """The times of each arm, of which a batch of each runs in every round, in an order that rotates and reverses."""
    batch = _gpu_batch if device.type == "cuda" else _cpu_batch
    calls = {}
    for name, call in arms.items():
        for _ in range(WARM_UP):
            call()
        calls[name] = max(1, min(MOST_CALLS, round(BATCH_MS / max(batch(call, 1), 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in arms}
    start = time.perf_counter()
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            break
        turn = (number // 2) % len(arms)
        order = [*arms][turn:] + [*arms][:turn]
        for name in order if number % 2 == 0 else reversed(order):
            samples[name].append(batch(arms[name], calls[name]))
    return {name: _quantiles(found) for name, found in samples.items()}


def settle(device: torch.device) -> None:
    """Waits for the device; raises what went wrong on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _quantiles(samples: list[float]) -> Times:
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Times(fifths[0], statistics.median(samples), fifths[3])


def _gpu_batch(call: Callable[[], object], calls: int) -> float:
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / calls


def _cpu_batch(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e3 / calls
