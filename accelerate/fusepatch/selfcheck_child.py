"""The child process of a self-check: `python -m fusepatch.selfcheck_child MODULE CASE DEVICE`.

Prints one marked line before each case, and one with the outcome; selfcheck.judge() reads them.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

import torch

from .selfcheck import MARK, Outcome


class Steps:
    """What a check tells of its progress."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def reference(self) -> None:
        """Plain PyTorch is about to do a case's work."""
        self.started = time.monotonic()

    def kernel(self, case: str) -> None:
        """Plain PyTorch has done it; the kernel is about to."""
        say(kernel=case, seconds=round(time.monotonic() - self.started, 3))


def say(**fields: object) -> None:
    """Prints one marked line."""
    print(MARK + json.dumps(fields), flush=True)


def main(module: str, case: str, device_name: str) -> int:
    """Runs the check; exceptions out of the kernel are a failed check, memory is not."""
    device = torch.device(device_name)
    steps = Steps()
    # Outputs are poisoned: what a kernel leaves unwritten is NaN, and fails.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        differences = importlib.import_module(module).run(case, device, steps)
    except torch.OutOfMemoryError as error:
        say(outcome=Outcome.INCONCLUSIVE.value, what=f"out of memory: {error}")
        return 0
    outcome = Outcome.FAILED if differences else Outcome.PASSED
    say(outcome=outcome.value, what="; ".join(differences))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
