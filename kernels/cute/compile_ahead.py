"""Compiles several kernels side by side, each in a process, into the folder of artefacts.py: for a first self-check.

`python -m fusepatch.kernels.cute.compile_ahead` is such a process: it reads what to compile from its standard input,
which the process that started it wrote.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import settings
from . import artefacts, compiling

FEWEST = 3
"""Kernels that are missing. Each process imports PyTorch and the DSL first, which takes longer than one kernel does."""
MOST_PROCESSES = 4
"""Each imports PyTorch, and so takes memory of the host beside the training job that waits for it."""
LIMIT_S = 45.0
"""Well within that of the self-check which waits for it."""

log = logging.getLogger("fusepatch")


def compile_ahead(configurations: Sequence[Any], build: Callable[[Any, str], Any], arch: str) -> None:
    """Has those that are neither in this process nor on disk compiled, and waits until they lie on disk.

    Whatever goes wrong costs time alone: what is not there when it is asked for is compiled then.
    """
    missing = [each for each in dict.fromkeys(configurations) if not _is_there(each, arch)]
    processes = min(_processors(), MOST_PROCESSES, len(missing))
    if len(missing) < FEWEST or processes < 2 or not _can_be_kept() or not sys.executable:
        return
    work = [pickle.dumps((missing[number::processes], build, arch)) for number in range(processes)]
    children: list[subprocess.Popen[bytes]] = []
    try:
        with contextlib.suppress(OSError):
            children.extend(map(_started, work))
        deadline = time.monotonic() + LIMIT_S
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(0.0, deadline - time.monotonic()))
    finally:
        for child in children:
            child.kill()
            child.wait()
    if any(child.returncode for child in children):
        log.info("compiling ahead ended with %s", [child.returncode for child in children])


def _started(work: bytes) -> subprocess.Popen[bytes]:
    """In the session of this process, so that what ends this one ends it too."""
    child = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[3],  # where `fusepatch` is
        env={**os.environ, f"{settings.PREFIX}_CACHE_DIR": str(settings.current().cache_dir)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended at once
        child.stdin.write(work)
        child.stdin.close()
    return child


def _can_be_kept() -> bool:
    return artefacts.place("") is not None and artefacts.linker() is not None


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
    return sum(not _compiles(each, build, arch) for each in configurations)


def _compiles(configuration: Any, build: Callable[[Any, str], Any], arch: str) -> bool:
    try:
        compiling.compiled(configuration, build, arch)
    except Exception:  # whoever asks for that one will see what is wrong with it
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
