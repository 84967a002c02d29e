"""Tries an arm in a process of its own: it may compile for minutes, tune, hang or crash there.

What it compiles and tunes stays in the caches on disk (Triton's, Inductor's, QuACK's), from which the timed process
then loads it. Several such processes run at once; arms that keep what they measured of their candidates run alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import check, data
from .arms import ARMS, Arm, why_unavailable
from .cases import DTYPES, Case, Shape

Reasons = dict[tuple[str, Case], str]
"""(name of the arm, case): why it is not to be tried in the process that times."""


@dataclass(frozen=True, eq=False)
class _Trial:
    arm: Arm
    process: subprocess.Popen[bytes]
    answers: Path
    log: Path
    start: float


def prepare(
    arms: Sequence[Arm], cases: Sequence[Case], seconds: float, say: Callable[[str], None], folder: Path | None = None
) -> Reasons:
    """Tries those arms that compile for long, each for that many seconds over all cases together."""
    reasons: Reasons = {}
    wanted = {arm: [case for case in cases if why_unavailable(arm, case) is None] for arm in arms if arm.compiles}
    together = [arm for arm, fit in wanted.items() if fit and not arm.tunes]
    alone = [[arm] for arm, fit in wanted.items() if fit and arm.tunes]
    with tempfile.TemporaryDirectory() as made:
        for group in ([together] if together else []) + alone:
            names = ", ".join(arm.name for arm in group)
            say(f"trying {names} in {'processes of their own' if len(group) > 1 else 'a process of its own'}")
            trials = [_start(arm, wanted[arm], seconds, folder or Path(made)) for arm in group]
            try:
                for trial in trials:
                    reasons.update(_finish(trial, wanted[trial.arm], seconds, say))
            finally:
                for trial in trials:
                    _kill(trial.process)
    return reasons


def _start(arm: Arm, cases: Sequence[Case], seconds: float, folder: Path) -> _Trial:
    answers, log = folder / f"{arm.name}.jsonl", folder / f"{arm.name}.log"
    answers.touch()
    command = [sys.executable, "-m", "benchmarks.prepare", arm.name, str(answers), str(seconds), *map(_spell, cases)]
    # More than its default of 8 shortens QuACK's autotuning where there are the cores.
    workers = str(max(1, (os.cpu_count() or 2) - 2))
    environment = {"QUACK_COMPILE_WORKERS": workers, **os.environ}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            cwd=Path(__file__).parent.parent,
        )  # fmt: skip
    return _Trial(arm, process, answers, log, time.monotonic())


def _finish(trial: _Trial, cases: Sequence[Case], seconds: float, say: Callable[[str], None]) -> Reasons:
    """Waits for a trial to end, and ends it where it takes too long."""
    name = trial.arm.name
    try:
        trial.process.wait(max(0.0, trial.start + seconds - time.monotonic()))
        end = f"its trial ended with status {trial.process.returncode}: {_last_line(trial.log)}"
    except subprocess.TimeoutExpired:
        end = f"not ready within {seconds:g} s (--prepare-seconds)"
    _kill(trial.process)
    whole_lines = trial.answers.read_text().splitlines(keepends=True)
    answers = dict(json.loads(line) for line in whole_lines if line.endswith("\n"))
    reasons: Reasons = {}
    for case in cases:
        reason = answers.get(_spell(case), end)
        if reason:
            reasons[name, case] = reason
    ready = len(cases) - len(reasons)
    say(f"{name}: ready for {ready} of {len(cases)} cases after {time.monotonic() - trial.start:.0f} s")
    return reasons


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and those that it started: it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"


def _spell(case: Case) -> str:
    (dtype,) = (name for name, found in DTYPES.items() if found is case.dtype)
    shape = case.shape
    return f"{shape.tokens},{shape.hidden},{shape.inner},{dtype},{case.activation},{case.layout},{case.device}"


def _read(text: str) -> Case:
    tokens, hidden, inner, dtype, activation, layout, device = text.split(",")
    return Case(Shape(int(tokens), int(hidden), int(inner)), DTYPES[dtype], activation, layout, device)


# ------------------------------------------------------------------------------------------------ in the new process


def _try(arm: Arm, case: Case) -> str:
    """Builds the arm and runs what will be timed; returns what is wrong, or nothing."""
    try:
        found = data.make(case, seed=0)
        expected = check.reference(case, found)
        (eager,) = (other for other in ARMS if other.name == "eager")
        baseline = check.errors(check.results(eager.build(case, found), found), expected)
        with arm.context(case):
            built = arm.build(case, found)
            errors = check.errors(check.results(built, found), expected)
            with torch.no_grad():
                built.forward(found.x)
        if case.device == "cuda":
            torch.cuda.synchronize()
        over = check.judge(errors, baseline).over
    except Exception as error:
        return check.first_line(error)
    return f"wrong: {over[0]}" if over else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm")
    parser.add_argument("answers", type=Path, help="gets one JSON line for each case: [case, what is wrong]")
    parser.add_argument("seconds", type=float, help="ends itself after so long, should whoever started it be gone")
    parser.add_argument("cases", nargs="+", type=_read)
    arguments = parser.parse_args()
    signal.alarm(int(arguments.seconds) + 10)
    (arm,) = (arm for arm in ARMS if arm.name == arguments.arm)
    for case in arguments.cases:
        torch.compiler.reset()
        answer = _try(arm, case)
        with arguments.answers.open("a") as file:
            file.write(json.dumps([_spell(case), answer]) + "\n")
    # Not by way of the interpreter's end: pools of compiling processes may hold it up.
    os._exit(0)


if __name__ == "__main__":
    main()
