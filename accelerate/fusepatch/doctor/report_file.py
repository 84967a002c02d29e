"""`fusepatch doctor --report FILE`: what whoever has a GPU that we have not can tell us, in one file.

Every backend of the gated MLP that can serve here, by name: its self-checks, the parity of a small model, and the
benchmark. Each runs in a process of its own with a time limit, so that one that hangs or dies is a line of the report.
The file is Markdown: rows for docs/evidence.md, what was wrong, and everything else behind them as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from .. import settings
from ..selfcheck import KILLED_LIMIT_S, kill_session
from .diagnosis import Diagnosis, Kernel
from .examination import examine
from .text import checks_in_words

OP = "gated_mlp"
PARITY_LIMIT_S, BENCHMARK_LIMIT_S = 600.0, 1800.0
MOST_CHARACTERS = 20_000
"""Of one process's output: its end is kept."""


@dataclass(frozen=True)
class Step:
    """One command to run, and with which backend."""

    what: str
    backend: str
    arguments: tuple[str, ...]
    """Of this Python."""
    environment: Mapping[str, str]
    limit_s: float

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        module = " ".join(self.arguments).removeprefix("-m fusepatch ")
        command = f"fusepatch {module}" if self.arguments[:2] == ("-m", "fusepatch") else f"python {module}"
        return " ".join([*variables, command])


@dataclass(frozen=True)
class Done:
    """How a step went."""

    step: Step
    code: int | None
    """The exit code; None where it ran past its limit."""
    seconds: float
    output: str

    @property
    def outcome(self) -> str:
        """In a few words."""
        if self.code is None:
            return f"no end within {self.step.limit_s:.0f} s"
        words = {0: "passed", 1: "failed", 3: "nothing ran natively"} if self.step.what == "parity" else {0: "ran"}
        return words.get(self.code, f"exit code {self.code}")


@dataclass(frozen=True)
class Report:
    """What there is to say of this machine."""

    day: str
    diagnosis: Diagnosis
    done: tuple[Done, ...]
    left_out: tuple[str, ...]
    """What could not be run here, and why."""

    @property
    def exit_code(self) -> int:
        """1 where `doctor` found a problem, or a parity check failed, died or had no end."""
        failed = any(done.step.what == "parity" and done.code not in (0, 3) for done in self.done)
        return 1 if failed else self.diagnosis.exit_code

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, fit for JSON."""
        done = [{**asdict(each), "command": str(each.step), "outcome": each.outcome} for each in self.done]
        return {"day": self.day, "diagnosis": self.diagnosis.to_dict(), "done": done, "left_out": self.left_out}

    def __str__(self) -> str:
        return "\n\n".join(_sections(self)) + "\n"


def write(path: Path, tell: Callable[[str], None]) -> Report:
    """Runs it all, and writes the file after each step: what was seen is not lost.

    After the self-checks it takes at most 10 minutes for each backend on each of its routes, and 30 for the benchmark.
    Raises OSError where the file can't be written, before anything is run.
    """
    path.write_text("not finished: the self-checks are running\n")
    diagnosis = examine(selfcheck=True, tell=tell)
    steps, left_out = plan(diagnosis)
    report = Report(date.today().isoformat(), diagnosis, (), left_out)
    path.write_text(str(report))
    for number, step in enumerate(steps, 1):
        where = f"{number} of {len(steps)}"
        tell(f"{where}, at most {step.limit_s / 60:.0f} minutes: {step}")
        done = run(step, tell)
        tell(f"{where}: {step.what} of {step.backend}: {done.outcome}, {done.seconds:.0f} s")
        report = Report(report.day, diagnosis, (*report.done, done), left_out)
        path.write_text(str(report))
    return report


# ----------------------------------------------------------------------------------------------------- what is run


def plan(diagnosis: Diagnosis) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """What to run for what `doctor` found, and what can't be run. Without a GPU it is a rehearsal on small sizes."""
    on_gpu = bool(diagnosis.gpus)
    kernels = [each for each in diagnosis.kernels if each.op == OP and (each.backend == "reference") is not on_gpu]
    can = [each for each in kernels if each.serves != "no"]
    left_out = [f"{each.backend}, {each.route}: {each.reason}" for each in kernels if each.serves == "no"]
    steps = [_parity(each, on_gpu) for each in can]
    if not Path("benchmarks/gated_mlp.py").exists():  # `python -m` looks in the working folder
        left_out.append("the benchmark: it is in the repository; run this in its root folder")
    elif can:
        arms = ("gemm_floor", "eager", *(f"fusepatch_{each.route}_{each.backend}" for each in can))
        sizes = ("--shapes", "bench") if on_gpu else ("--device", "cpu", "--shapes", "tiny", "--repeats", "3")
        arguments = ("-m", "benchmarks", OP, "--arms", ",".join(arms), "--modes", "forward,train", *sizes)
        steps.append(
            Step("benchmark", ", ".join(dict.fromkeys(each.backend for each in can)), arguments, {}, BENCHMARK_LIMIT_S)
        )
    return tuple(steps), tuple(left_out)


def _parity(kernel: Kernel, on_gpu: bool) -> Step:
    name = f"{settings.PREFIX}_{OP.upper()}"
    sizes = ("--tokens", "2048", "--layers", "4") if on_gpu else ("--tokens", "32", "--layers", "1")
    # The warm-up is for backends that serve only what was warmed up.
    arguments = ("-m", "fusepatch", "parity", "--config", "llama", *sizes, "--warmup")
    environment = {f"{name}_BACKEND": kernel.backend, f"{name}_ROUTE": kernel.route}
    return Step("parity", kernel.backend, arguments, environment, PARITY_LIMIT_S)


def run(step: Step, tell: Callable[[str], None]) -> Done:
    """Runs a step in a child process; `tell` gets each line that it writes."""
    others = {name: text for name, text in os.environ.items() if not name.startswith(settings.PREFIX)}
    cache = {name: text for name, text in os.environ.items() if name == f"{settings.PREFIX}_CACHE_DIR"}
    start = time.monotonic()
    lines: list[str] = []
    child = subprocess.Popen(
        [sys.executable, *step.arguments],
        env={**others, **cache, **step.environment, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # what it starts must end with it: the next step is timed on the same GPU
    )

    def read() -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                lines.append(line)
                tell(f"  {line.rstrip()}")

    # In a thread, so that nobody who holds the pipe, or hangs in the driver, makes this wait past the limit.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    code: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(step.limit_s)
    finally:
        kill_session(child)
    reader.join(KILLED_LIMIT_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(KILLED_LIMIT_S)
    return Done(step, code, round(time.monotonic() - start, 1), "".join(tuple(lines))[-MOST_CHARACTERS:])


# ------------------------------------------------------------------------------------------------------- the file


def _sections(report: Report) -> Iterator[str]:
    found = report.diagnosis
    yield f"# fusepatch on {_where(found)}, {report.day}"
    yield "\n".join(f"- {each.name} {each.version or 'not there'}" for each in found.versions)
    rows = ["| op | backend | where | what was seen | command | date |", "| --- | --- | --- | --- | --- | --- |"]
    rows += [_row(report, *each) for each in _seen(report)]
    yield "## What was seen\n\nRows for docs/evidence.md.\n\n" + "\n".join(rows)
    if report.left_out:
        yield "## What was not run\n\n" + "\n".join(f"- {each}" for each in report.left_out)
    if found.findings:
        yield "## What is wrong\n\n" + "\n".join(f"- {each}" for each in found.findings)
    checks = [(kernel, check) for kernel in found.kernels for check in kernel.checks if check.seconds is not None]
    if checks:
        rows = ["| op | case | on | outcome | s | what |", "| --- | --- | --- | --- | --- | --- |"]
        rows += [
            f"| {kernel.op} | {each.case} | {each.device} | {each.outcome} | {each.seconds} | {_cell(each.what)} |"
            for kernel, each in checks
        ]
        yield "## Self-checks\n\nSeveral ran side by side.\n\n" + "\n".join(rows)
    for done in report.done:
        yield f"## {done.step.what} of {done.step.backend}: {done.outcome}\n\n`{done.step}`\n\n{_fenced(done.output)}"
    yield "## Everything\n\n" + _fenced(json.dumps(report.to_dict(), indent=1), "json")


def _seen(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """(op and route, backend, what was seen, the command) of each check that ran."""
    for kernel in report.diagnosis.kernels:
        checks = [check for check in kernel.checks if check.outcome is not None]
        if checks:
            yield (
                f"{kernel.op}, {kernel.route} route",
                kernel.backend,
                f"self-checks: {checks_in_words(checks)}",
                f"fusepatch doctor --selfcheck {kernel.backend}",
            )
    for done in report.done:
        route = next((text for name, text in done.step.environment.items() if name.endswith("_ROUTE")), "")
        op = f"{OP}, {route} route" if route else OP
        yield op, done.step.backend, f"{done.step.what}: {done.outcome}, {done.seconds:.0f} s", str(done.step)


def _row(report: Report, op: str, backend: str, seen: str, command: str) -> str:
    return f"| {op} | {backend} | {_where(report.diagnosis)} | {seen} | `{command}` | {report.day} |"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ") or "-"


def _where(found: Diagnosis) -> str:
    versions = {each.name: each.version for each in found.versions}
    gpus = dict.fromkeys(f"{gpu.name} ({gpu.capability})" for gpu in found.gpus)
    return f"{', '.join(gpus) or 'a CPU'}, torch {versions.get('torch')}"


def _fenced(text: str, language: str = "") -> str:
    """As a block of code; what is in it can't end it."""
    return f"~~~~~~{language}\n{text.replace('~~~~~~', '~~~~~ ').rstrip()}\n~~~~~~"
