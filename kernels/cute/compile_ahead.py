"""Compiles several kernels side by side, each in a process, into the folder of artefacts.py: for a first self-check.

`python -m fusepatch.kernels.cute.compile_ahead` is such a process: it reads what to compile from its standard input,
which the process that started it wrote.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import settings
from . import artefacts, compiling

FEWEST = 3
"""Kernels that are missing: for fewer, importing the DSL again costs as much as it saves."""
MOST_PROCESSES = 8
LIMIT_S = 120.0


def compile_ahead(configurations: Sequence[Any], build: Callable[[Any, str], Any], arch: str) -> None:
    """Has those that are neither in this process nor on disk compiled, and waits until they lie on disk.

    Whatever goes wrong costs time alone: what is not there when it is asked for is compiled then.
    """
    missing = [each for each in dict.fromkeys(configurations) if not _is_there(each, arch)]
    processes = min(_processors(), MOST_PROCESSES, len(missing))
    if len(missing) < FEWEST or processes < 2 or artefacts.place("") is None:
        return
    shares = [missing[number::processes] for number in range(processes)]
    root = Path(__file__).parents[3]  # where `fusepatch` is
    environment = {**os.environ, f"{settings.PREFIX}_CACHE_DIR": str(settings.current().cache_dir)}
    children = []
    for share in shares:
        with contextlib.suppress(OSError):
            child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            children.append((child, pickle.dumps((share, build, arch))))
    for child, work in children:
        with contextlib.suppress(OSError, ValueError):
            assert child.stdin is not None
            child.stdin.write(work)
            child.stdin.close()
    deadline = time.monotonic() + LIMIT_S
    for child, _ in children:
        _wait(child, deadline)


def _wait(child: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        child.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _is_there(configuration: Any, arch: str) -> bool:
    if compiling.is_compiled(configuration, arch):
        return True
    path = artefacts.place(artefacts.key_of(configuration, compiling.options_for(arch)))
    return path is not None and path.exists()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> int:
    """Compiles what standard input says."""
    configurations, build, arch = pickle.loads(sys.stdin.buffer.read())
    for configuration in configurations:
        compiling.compiled(configuration, build, arch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
