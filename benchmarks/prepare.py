"""Tries an arm in a process of its own: it may compile for minutes, tune, hang or crash there.

What it compiles stays in the caches on disk (Triton's, Inductor's, QuACK's), from which the timed process then loads
it. Several such processes run at once, so nothing is measured there: Triton's autotuners compile their candidates,
and the timed process measures them while it has the GPU to itself. Arms that keep on disk what they measured run alone.
More processes than cores only slow each other down, and the GPU is shared out among them in slices.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusepatch.selfcheck import kill_session

from . import check, data, tuning
from .arms import ARMS, Arm, why_unavailable
from .cases import DTYPES, Case, Shape

Reasons = dict[tuple[str, Case], str]
"""(name of the arm, case): why it is not to be tried in the process that times."""


@dataclass(frozen=True, eq=False)
class _Trial:
    arm: Arm
    cases: Sequence[Case]
    process: subprocess.Popen[bytes]
    answers: Path
    log: Path
    start: float


def prepare(
    arms: Sequence[Arm], cases: Sequence[Case], seconds: float, say: Callable[[str], None], folder: Path | None = None
) -> Reasons:
    """Tries those arms that compile for long, each for that many seconds over all cases together.

    `folder` keeps what they printed. Cases that share what they compile share the answer of the first of them.
    """
    reasons: Reasons = {}
    wanted = {arm: [case for case in cases if why_unavailable(arm, case) is None] for arm in arms if arm.compiles}
    together = [arm for arm, fit in wanted.items() if fit and not arm.tunes]
    alone = [[arm] for arm, fit in wanted.items() if fit and arm.tunes]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        for group in ([together] if together else []) + alone:
            say(f"trying {', '.join(arm.name for arm in group)} in processes of their own")
            trials = {arm: _start_all(arm, wanted[arm], seconds, folder or Path(made)) for arm in group}
            try:
                for arm, of_arm in trials.items():
                    answers = _finish_all(of_arm, seconds, say)
                    for case in wanted[arm]:
                        reason = answers[arm.shares(case)]
                        if reason:
                            reasons[arm.name, case] = reason
            finally:
                for trial in (trial for of_arm in trials.values() for trial in of_arm):
                    _kill(trial.process)
    return reasons


def _start_all(arm: Arm, cases: Sequence[Case], seconds: float, folder: Path) -> list[_Trial]:
    firsts: dict[Hashable, Case] = {}
    for case in cases:
        firsts.setdefault(arm.shares(case), case)
    parts = [[case] for case in firsts.values()] if arm.apart else [list(firsts.values())]
    return [_start(arm, part, seconds, folder) for part in parts]


def _start(arm: Arm, cases: Sequence[Case], seconds: float, folder: Path) -> _Trial:
    name = f"{arm.name}_{cases[0]}" if arm.apart else arm.name
    answers, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    answers.write_text("")
    command = [sys.executable, "-m", "benchmarks.prepare", arm.name, str(answers), str(seconds), *map(_spell, cases)]
    # More than its default of 8 shortens QuACK's autotuning where there are the cores.
    workers = str(max(1, (os.cpu_count() or 2) - 2))
    environment = {"QUACK_COMPILE_WORKERS": workers, **os.environ}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            cwd=Path(__file__).parent.parent,
        )  # fmt: skip
    return _Trial(arm, cases, process, answers, log, time.monotonic())


def _finish_all(trials: Sequence[_Trial], seconds: float, say: Callable[[str], None]) -> dict[Hashable, str]:
    """Waits for the trials of one arm; returns what is wrong, or nothing, by what the cases share."""
    answers: dict[Hashable, str] = {}
    for trial in trials:
        answers.update(_finish(trial, seconds))
    ready, took = list(answers.values()).count(""), time.monotonic() - trials[0].start
    say(f"{trials[0].arm.name}: ready for {ready} of {len(answers)} tried cases after {took:.0f} s")
    return answers


def _finish(trial: _Trial, seconds: float) -> dict[Hashable, str]:
    """Waits for a trial to end, and ends it where it takes too long."""
    try:
        trial.process.wait(max(0.0, trial.start + seconds - time.monotonic()))
        end = f"its trial ended with status {trial.process.returncode}: {_last_line(trial.log)}"
    except subprocess.TimeoutExpired:
        end = f"not ready within {seconds:g} s (--prepare-seconds)"
    _kill(trial.process)
    whole_lines = trial.answers.read_text().splitlines(keepends=True)
    answers = dict(json.loads(line) for line in whole_lines if line.endswith("\n"))
    return {trial.arm.shares(case): answers.get(_spell(case), end) for case in trial.cases}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and those that it started: it leads a session of its own."""
    kill_session(process)
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
    """Builds the arm and runs what will be timed; returns what was raised, or nothing. The timed process judges."""
    try:
        found = data.make(case, seed=0)
        with arm.context(case):
            built = arm.build(case, found)
            check.results(built, found)
            with torch.no_grad():
                built.forward(found.x)
        if case.device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        return check.first_line(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm")
    parser.add_argument("answers", type=Path, help="gets one JSON line for each case: [case, what is wrong]")
    parser.add_argument("seconds", type=float, help="ends itself after so long, should whoever started it be gone")
    parser.add_argument("cases", nargs="+", type=_read)
    arguments = parser.parse_args()
    signal.alarm(int(arguments.seconds) + 10)
    (arm,) = (arm for arm in ARMS if arm.name == arguments.arm)
    if not arm.tunes:
        tuning.compile_only()
    for case in arguments.cases:
        began = time.monotonic()
        torch.compiler.reset()
        answer = _try(arm, case)
        print(f"{case}: {answer or 'ran'} ({time.monotonic() - began:.1f} s)", flush=True)
        with arguments.answers.open("a") as file:
            file.write(json.dumps([_spell(case), answer]) + "\n")
    # Not by way of the interpreter's end: pools of compiling processes may hold it up.
    os._exit(0)


if __name__ == "__main__":
    main()
