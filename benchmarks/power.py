"""The clock and the power of the GPU while one arm runs on and on: whether the power limit bounds a step.

From `nvidia-smi`, which comes with the driver.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass

import torch

from .timing import Step

SECONDS = 1.5
"""Of one arm; the first half, in which clock and power settle, does not count."""
_QUERY = "clocks.sm,power.draw.instant"
_EVERY_MS = 50
_CALLS = 4
"""Queued between two waits for the device, which has these to run meanwhile."""


@dataclass(frozen=True)
class Drawn:
    """One reading per sample: megahertz of the multiprocessors, and watts."""

    clock: tuple[float, ...]
    power: tuple[float, ...]


def measure(step: Step, seconds: float = SECONDS) -> Drawn:
    """Runs `step` for that long. Raises RuntimeError where nvidia-smi tells nothing of this GPU."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    command = ["nvidia-smi", "-i", f"GPU-{device.uuid}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        smi = subprocess.Popen([*command, f"--loop-ms={_EVERY_MS}"], stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise RuntimeError(f"nvidia-smi does not run: {error.strerror}") from None
    try:
        with step.context():
            _run_on(step, seconds)
    finally:
        smi.terminate()
        try:
            printed, _ = smi.communicate(timeout=5.0)
        except subprocess.TimeoutExpired:
            smi.kill()
            printed, _ = smi.communicate()
    return read(printed)


def read(printed: str) -> Drawn:
    """What nvidia-smi printed, without the first half. Raises RuntimeError where too little is left."""
    readings = []
    for line in printed.splitlines():
        try:
            clock, power = map(float, line.split(","))
        except ValueError:  # cut off at the end, or `[N/A]`
            continue
        readings.append((clock, power))
    settled = readings[len(readings) // 2 :]
    if len(settled) < 3:
        raise RuntimeError(f"nvidia-smi told clock and power {len(readings)} times: {printed[:200]!r}")
    return Drawn(*(tuple(each) for each in zip(*settled, strict=True)))


def _run_on(step: Step, seconds: float) -> None:
    end, number = time.monotonic() + seconds, 0
    before: torch.cuda.Event | None = None
    while time.monotonic() < end:
        for _ in range(_CALLS):
            step.timed(step.before(number))
            step.after()
            number += 1
        queued = torch.cuda.Event()
        queued.record()
        if before is not None:
            before.synchronize()
        before = queued
    torch.cuda.synchronize()
