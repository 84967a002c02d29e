"""Before a native kernel is first used on a kind of GPU it is compared with the reference there, in a child process.

A leaf, besides settings, reasons and disk.py: kernels ask for a verdict here. A child, because a hang or an illegal
access must not take training down; started with `python -m`, because multiprocessing would run the user's script again.
What it finds is remembered on disk per kind of GPU, driver, versions and kernel sources, so it runs once per node
however many ranks start: the others wait for the first.

    passed         the kernel may serve
    failed         it is off, warned about once, and remembered
    inconclusive   out of memory, a busy or exclusive GPU, a killed child: off for this process, and not remembered
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from . import disk, settings
from .decline import Reason, Route

log = logging.getLogger("fusepatch")

CHILD_LIMIT_S = 120.0
"""With the wait below it stays under half of NCCL's 600 s time-out."""
WAIT_LIMIT_S = CHILD_LIMIT_S + 60.0
KILLED_LIMIT_S = 10.0
"""For a child that was killed to be gone: one that waits for the driver may never be."""
BUSY_S = 5.0
"""Plain PyTorch on a few thousand elements takes milliseconds: where it took longer than this, the GPU was busy."""
MARK = "fusepatch-selfcheck "


class Outcome(Enum):
    """What a self-check found."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Verdict:
    """The outcome, and in words what differed or went wrong."""

    outcome: Outcome
    what: str = ""
    seconds: float | None = field(default=None, compare=False)
    """How long `renew` took to find it; None where it was remembered."""

    @property
    def reason(self) -> Reason | None:
        """Why the kernel must not serve, if it must not."""
        return {
            Outcome.PASSED: None,
            Outcome.FAILED: Reason.SELFCHECK_FAILED,
            Outcome.INCONCLUSIVE: Reason.SELFCHECK_INCONCLUSIVE,
        }[self.outcome]


@dataclass(frozen=True)
class Check:
    """One thing to verify: `module` has `run(case, device, step)`, and `case` says which kernels, dtype, activation."""

    module: str
    case: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('fusepatch.kernels.')} {self.case}"


@dataclass(frozen=True)
class Standing:
    """What a table of backends says of one of them, on one route and one device, before any call: for `doctor`."""

    backend: str
    native: bool
    route: Route
    reason: Reason | None
    """Why it can serve no call there; None where only its checks are left to ask. Settings are not looked at."""
    missing: tuple[str, ...]
    """The packages it needs and does not find."""
    checks: tuple[Check, ...]
    drift: tuple[str, ...] = ()
    """Where an installed package is not what the backend was written against."""


_verdicts: dict[tuple[Check, str], Verdict] = {}
_running: dict[subprocess.Popen[str], threading.Event | None] = {}
"""The children of this process, in any of its threads, and what stops each besides its limit."""
_lock = threading.Lock()


def _fresh_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_lock)  # another thread may have been waiting for a check


def verdict(check: Check, device: torch.device) -> Verdict:
    """The verdict for this kind of device: from this process, from disk, or from a check that runs now."""
    kind = device_kind(device)
    found = _verdicts.get((check, kind))
    if found is None:
        with _lock:
            found = _verdicts.get((check, kind)) or _remembered_or_run(check, device, kind)
            _verdicts[check, kind] = found
    return found


def forget() -> None:
    """Drops what this process knows; the disk is asked again."""
    _verdicts.clear()


def on_disk(check: Check, device: torch.device) -> Verdict | None:
    """The verdict that is remembered on disk for this kind of device; nothing is run."""
    return _read(_place(identity(check, device_kind(device))))


def renew(check: Check, devices: Sequence[torch.device], stop: threading.Event | None = None) -> tuple[Verdict, ...]:
    """Runs the check now on each of `devices`, all of one kind, and puts the worst verdict on disk.

    This process keeps the verdicts it has: what serves a call must not change while a model runs. With `stop`, another
    thread can end it: see `end_checks`.
    """
    key = identity(check, device_kind(devices[0]))
    path = _place(key)
    with disk.one_process(path.with_suffix(".lock"), WAIT_LIMIT_S):
        found = tuple(_timed(check, device, stop) for device in devices)
        by_weight = (Outcome.FAILED, Outcome.INCONCLUSIVE, Outcome.PASSED)
        worst = min(found, key=lambda each: by_weight.index(each.outcome))
        if worst.outcome is not Outcome.INCONCLUSIVE:
            _write(path, worst, key)
    return found


def _timed(check: Check, device: torch.device, stop: threading.Event | None) -> Verdict:
    start = time.monotonic()
    found = run(check, device, stop=stop)
    return replace(found, seconds=round(time.monotonic() - start, 1))


# ------------------------------------------------------------------------------------------------ what it is keyed by


@functools.lru_cache(maxsize=64)
def device_kind(device: torch.device) -> str:
    """Name and capability of a GPU; the same for two of one kind."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} ({major}, {minor})"


def identity(check: Check, kind: str) -> dict[str, str]:
    """All that a remembered verdict holds for."""
    return {"check": str(check), **versions(kind)}


def versions(kind: str) -> dict[str, str]:
    """All that what was seen of our kernels on a kind of device depends on."""
    return {
        "device": kind,
        "driver": driver(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": version("triton"),
        "cutlass": version("nvidia-cutlass-dsl"),
        "cudnn": version("nvidia-cudnn-frontend"),
        "sources": sources_hash(),
    }


def driver() -> str:
    """The version of the NVIDIA driver, or `unknown`."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def version(distribution: str) -> str:
    """The version of an installed distribution, or `-`."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "-"


@functools.cache
def sources_hash() -> str:
    """Of every kernel's source, and of this machinery: whatever changes there is checked again."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*(here / "kernels").rglob("*.py"), here / "selfcheck.py", here / "selfcheck_child.py"]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# -------------------------------------------------------------------------------------------------------- memory


def _place(key: dict[str, str]) -> Path:
    return settings.current().cache_dir / "selfcheck" / f"{disk.name_of(key)}.json"


def _remembered_or_run(check: Check, device: torch.device, kind: str) -> Verdict:
    key = identity(check, kind)
    path = _place(key)
    found = _read(path)
    if found is None:
        with disk.one_process(path.with_suffix(".lock"), WAIT_LIMIT_S) as first:
            found = _read(path)  # another rank may have written it while we waited
            if found is None and not first:
                found = Verdict(
                    Outcome.INCONCLUSIVE, f"another process did not finish the check in {WAIT_LIMIT_S:.0f} s"
                )
            if found is None:
                log.info("checking %s on %s once", check, kind)
                found = run(check, device)
                if found.outcome is not Outcome.INCONCLUSIVE:
                    _write(path, found, key)
    if found.outcome is not Outcome.PASSED:
        log.warning(
            "self-check %s on %s %s: %s. What it checks is off here.",
            check,
            kind,
            found.outcome.value,
            found.what,
        )
    return found


def _read(path: Path) -> Verdict | None:
    try:
        stored = json.loads(path.read_text())
        return Verdict(Outcome(stored["outcome"]), str(stored["what"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or damaged: checked again


def _write(path: Path, found: Verdict, key: dict[str, str]) -> None:
    disk.write_whole(path, json.dumps({"outcome": found.outcome.value, "what": found.what, **key}, indent=1).encode())


# ------------------------------------------------------------------------------------------------------ the child


def run(
    check: Check, device: torch.device, *, limit_s: float = CHILD_LIMIT_S, stop: threading.Event | None = None
) -> Verdict:
    """Runs the check in a child process now, and judges what it left behind."""
    if stop is not None and stop.is_set():
        return Verdict(Outcome.INCONCLUSIVE, "stopped before it began")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("FUSEPATCH")}
    # What the child compiles is then here for this process.
    environment[f"{settings.PREFIX}_CACHE_DIR"] = str(settings.current().cache_dir)
    command = [sys.executable, "-m", "fusepatch.selfcheck_child", check.module, check.case, str(device)]
    # -m puts the working folder first on sys.path: with ours as that, the child finds this very fusepatch, and no
    # module of the user's hides one of torch's.
    try:
        child = subprocess.Popen(
            command,
            cwd=Path(__file__).parent.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (OSError, TypeError) as error:  # an embedded Python has no executable; or no more processes may start
        return Verdict(Outcome.INCONCLUSIVE, f"no child process could be started: {error}")
    code, output, complaints = _end_of(child, limit_s, stop)
    return judge(code, output, complaints, limit_s)


def _end_of(child: subprocess.Popen[str], limit_s: float, stop: threading.Event | None) -> tuple[int | None, str, str]:
    """The child's exit code, None where it ran past the limit and was killed, and what it wrote."""
    _running[child] = stop
    if stop is not None and stop.is_set():  # since it was started
        kill_session(child)
    try:
        output, complaints = child.communicate(timeout=limit_s)
        return child.returncode, output, complaints
    except subprocess.TimeoutExpired:
        kill_session(child)
    except BaseException:  # Ctrl-C, which a session of its own does not hear
        kill_session(child)
        raise
    finally:
        del _running[child]
    try:
        output, complaints = child.communicate(timeout=KILLED_LIMIT_S)
        return None, output, complaints
    except subprocess.TimeoutExpired as error:  # with bytes, whatever the pipes are opened as
        return None, (error.stdout or b"").decode(errors="replace"), ""


def end_checks(stop: threading.Event) -> None:
    """Sets `stop`: those checks that run with it end now, inconclusive, and no other begins."""
    stop.set()
    for child, its in tuple(_running.items()):
        if its is stop:
            kill_session(child)


def kill_session(child: subprocess.Popen[Any]) -> None:
    """Kills a child that has a session of its own, and all of that session; nothing where none is left."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)


def judge(code: int | None, output: str, complaints: str, limit_s: float) -> Verdict:
    """What a child's exit code (None: it ran past the limit) and output mean.

    The child says before each case that plain PyTorch has done the same work and how long that took; so a child that
    ended or hung after that line did so inside the kernel, and one before it did not.
    """
    marks = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    last = marks[-1] if marks else {}
    if code == 0 and "outcome" in last:
        return Verdict(Outcome(last["outcome"]), last["what"])
    where = f"in {last['kernel']}" if "kernel" in last else "before any kernel ran"
    tail = complaints.strip().splitlines()[-1:] or ["no message"]
    if code is None:
        how = f"no answer within {limit_s:.0f} s, {where}"
    elif code < 0:
        how = f"killed by signal {-code} {where}: {tail[0]}"
    else:
        how = f"exit code {code} {where}: {tail[0]}"
    was_busy = any(mark.get("seconds", 0.0) > BUSY_S for mark in marks)
    blames_kernel = "kernel" in last and code != -signal.SIGKILL and not was_busy
    return Verdict(Outcome.FAILED if blames_kernel else Outcome.INCONCLUSIVE, how)
