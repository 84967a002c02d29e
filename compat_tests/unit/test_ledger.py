"""Counting: exact under threads and forks, errors remembered, and a summary printed once, where it should be."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers.models.llama.modeling_llama import LlamaMLP

import fusepatch
from fusepatch import entry, ledger
from fusepatch.decline import FUSED, Reason, original
from fusepatch.kernels.gated_mlp import reference
from fusepatch.ledger import Record
from support import tiny_llama_mlp

X = torch.linspace(-1, 1, 3 * 64).reshape(3, 64)


def totals(what: str) -> dict[str, int]:
    return {key: count for target in fusepatch.status().targets for key, count in target.total(what).items()}


def in_threads(number: int, work: Callable[[], object]) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(number)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)


# ---------------------------------------------------------------------------------------------------------- counts


def test_counts_are_exact_under_threads() -> None:
    record = Record("gated_mlp", "transformers", "Some")
    made = [FUSED, original(Reason.CPU)]

    def work() -> None:
        for step in range(1000):
            ledger.count(record, made[step % 2], None)
            ledger.count_trace(record, Reason.COMPILING)

    in_threads(8, work)
    assert record.calls == {FUSED: 4000, original(Reason.CPU): 4000}
    assert record.traces == {Reason.COMPILING: 8000}
    assert record.native_calls() == 4000


def test_calls_are_counted_exactly_under_threads(reference_backend: None) -> None:
    mlp = tiny_llama_mlp()
    fusepatch.accelerate()

    def work() -> None:
        for _ in range(25):
            mlp(X)

    in_threads(8, work)
    assert totals("calls") == {"fused": 200}


def test_a_forked_child_counts(reference_backend: None) -> None:
    """Though another thread of the parent holds the lock at that moment, and will never give it back in the child."""
    mlp = tiny_llama_mlp()
    fusepatch.accelerate()
    mlp(X)
    ledger._lock.acquire()
    child = os.fork()
    if child:
        ledger._lock.release()
    else:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            record = next(iter(entry._state.patches.values())).record
            ledger.count(record, FUSED, mlp)
            ledger.count(record, FUSED, mlp)
            os._exit(record.calls[FUSED])
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (2, 3)
    assert totals("calls") == {"fused": 1}


# Found: native_calls() iterates over the live dictionary.
def test_native_calls_while_another_thread_counts() -> None:
    record = Record("gated_mlp", "transformers", "Some", calls={FUSED: 1, original(Reason.CPU): 1})

    def interrupt(frame, event, argument):
        if frame.f_code.co_filename == ledger.__file__ and frame.f_code.co_name == "<genexpr>":
            record.calls[original(Reason.DTYPE)] = 1
        return interrupt

    tracer = sys.gettrace()
    sys.settrace(interrupt)
    try:
        found = record.native_calls()
    finally:
        sys.settrace(tracer)
    assert found == 1


# Found: the end of the first step, in another thread, came between two reads of it.
def test_the_first_step_ends_while_another_thread_counts() -> None:
    record = Record("gated_mlp", "transformers", "Some")
    stops: set[int] = set()

    def interrupt(frame, event, argument):
        if frame.f_code is ledger.count.__code__ and event == "line" and frame.f_lineno not in stops:
            stops.add(frame.f_lineno)
            ledger._first_step = None  # as another thread leaves it, which needs a lock that this one may hold
        return interrupt

    tracer = sys.gettrace()
    for _ in range(20):  # before another of its lines each time
        ledger.watch_first_step(lambda: None)
        sys.settrace(interrupt)
        try:
            ledger.count(record, FUSED, record)
        finally:
            sys.settrace(tracer)
            ledger.watch_first_step(None)
    assert len(stops) > 5


class _MeanwhileAnotherThread(dict):
    """Calls; while one is being counted, another thread calls `accelerate()`, for as long as it is let."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        if found:
            thread = threading.Thread(target=fusepatch.accelerate)
            thread.start()
            thread.join(0.2)
        return found


# Found: _forget_counts() clears without the lock, so that a call being counted in another thread raises KeyError.
def test_calls_under_capture_are_sites(reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what is counted while a CUDA graph is captured, and what is said of it."""
    mlp, x = tiny_llama_mlp(), torch.randn(2, 64)
    fusepatch.accelerate()
    mlp(x)
    monkeypatch.setattr(ledger, "is_capturing", lambda: True)
    for _ in range(3):
        mlp(x)
    monkeypatch.undo()
    found = fusepatch.status()
    assert (found.targets[0].total("calls"), found.targets[0].total("captured")) == ({"fused": 1}, {"fused": 3})
    assert found.native_calls() == 4
    assert "fused 1; captured, 3 sites" in found.summary()
    assert "fused 1; captured, 3 sites" in str(found)
    head, _, row, *_ = (re.split(r" {2,}", line.strip()) for line in str(found).splitlines()[1:])
    assert row[head.index("fused") :] == ["1", "0", "0", "3"]
    assert head[head.index("fused") :] == ["fused", "pointwise", "original", "captured"]
    assert found.to_dict()["targets"][0]["classes"][0]["captured"] == {"fused": 3}
    with fusepatch.disabled():
        monkeypatch.setattr(ledger, "is_capturing", lambda: True)
        mlp(x)
    assert "captured, fused 3, original 1 sites (declined: disabled 1)" in fusepatch.status().summary()
    monkeypatch.undo()
    fusepatch.restore()
    fusepatch.accelerate()
    assert fusepatch.status().targets[0].total("captured") == {}


def test_accelerate_while_a_call_is_counted(reference_backend: None) -> None:
    mlp, stock = tiny_llama_mlp(), LlamaMLP.forward
    fusepatch.accelerate(model=mlp)
    ours = LlamaMLP.forward
    LlamaMLP.forward = functools.wraps(ours)(lambda self, x: ours(self, x))
    try:
        fusepatch.restore()
        mlp(X)
        (found,) = entry._state.patches.values()
        found.record.calls = _MeanwhileAnotherThread(found.record.calls)
        mlp(X)
    finally:
        LlamaMLP.forward = stock


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, torch.OutOfMemoryError, NotImplementedError, TypeError])
@pytest.mark.parametrize(("route", "kernel"), [("fused", "dual_gemm_act"), ("pointwise", "act_mul")])
def test_error_of_a_kernel_is_recorded_and_raised(
    monkeypatch: pytest.MonkeyPatch, reference_backend: None, error: type[Exception], route: str, kernel: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error("from the kernel")

    monkeypatch.setenv("FUSEPATCH_GATED_MLP_ROUTE", route)
    mlp = tiny_llama_mlp()
    fusepatch.accelerate()
    for kernel_name in [name for name in vars(reference) if name.startswith(kernel)]:
        monkeypatch.setattr(reference, kernel_name, fail)
    for _ in range(2):
        with pytest.raises(error, match="from the kernel"):
            mlp(X)
    assert totals("errors") == {error.__name__: 2}
    assert totals("calls") == {route: 2}
    assert error.__name__ in str(fusepatch.status())


def test_error_of_the_library_is_not_ours() -> None:
    fusepatch.accelerate()
    with pytest.raises(RuntimeError):
        tiny_llama_mlp()(X[:, :5])
    assert totals("errors") == {}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("route", ["fused", "pointwise"])
def test_checkpointing_is_no_error(
    monkeypatch: pytest.MonkeyPatch, reference_backend: None, route: str, use_reentrant: bool, early_stop: bool
) -> None:
    monkeypatch.setenv("FUSEPATCH_GATED_MLP_ROUTE", route)
    mlp, x = tiny_llama_mlp(), X.clone().requires_grad_()
    fusepatch.accelerate()
    mlp(x).sum().backward()
    expected, x.grad = x.grad, None
    with set_checkpoint_early_stop(early_stop):
        checkpoint(mlp, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x.grad, expected)
    assert totals("errors") == {}
    assert totals("calls") == {route: 3}


# ------------------------------------------------------------------------------------------------- what is printed

# One interpreter, forked for each program: torch is imported once.
PROGRAMS = {
    "two steps": ({}, "accelerate(); model(x); model(x); model(x)"),
    "accelerate twice": ({}, "accelerate(); accelerate(); model(x); model(x); accelerate(); model(x)"),
    "two steps of two modules": ({}, "accelerate(); other(x); model(x); other(x); model(x); other(x)"),
    "one step": ({}, "accelerate(); model(x)"),
    "one step, then accelerate again": ({}, "accelerate(); model(x); accelerate()"),
    "no step": ({}, "accelerate()"),
    "no accelerate": ({}, "model(x)"),
    "warning": ({"FUSEPATCH_LOG": "warning"}, "accelerate(); model(x); model(x)"),
    "off": ({"FUSEPATCH_LOG": "off"}, "accelerate('gated_mlp'); model(x[:0])"),
    "rank 1": ({"RANK": "1"}, "accelerate(); model(x); model(x)"),
    "rank 1, one step": ({"RANK": "1"}, "accelerate(); model(x)"),
    "rank 0": ({"RANK": "0"}, "accelerate(); model(x); model(x)"),
    "one step, restored": ({}, "accelerate(); model(x); fusepatch.restore()"),
    "one step in a block": ({}, "with fusepatch.accelerated(model=both): model(x)"),
    "two steps in a block": ({}, "with fusepatch.accelerated(model=both): model(x); model(x)"),
    "never ran": ({"FUSEPATCH_LOG": "warning"}, "accelerate('gated_mlp'); model(x[:0])"),
    "never ran, rank 1": ({"FUSEPATCH_LOG": "warning", "RANK": "1"}, "accelerate('gated_mlp'); model(x[:0])"),
    "never ran, not named": ({"FUSEPATCH_LOG": "warning"}, "accelerate(); model(x[:0])"),
    "never ran, restored": ({"FUSEPATCH_LOG": "warning"}, "accelerate('gated_mlp'); fusepatch.restore()"),
    "ran": ({"FUSEPATCH_LOG": "warning"}, "accelerate('gated_mlp'); model(x)"),
    "debug": ({"FUSEPATCH_LOG": "debug", "RANK": "1"}, "accelerate(); model(x[:0]); model(x[:0])"),
    "program's own log": ({}, "logging.basicConfig(format='own %(message)s'); accelerate(); model(x)"),
    "program's own log later": ({}, "accelerate(); logging.basicConfig(format='own %(message)s'); model(x)"),
}

DRIVER = """
import atexit, json, logging, os, sys
import torch
from torch import nn
import fusepatch, fusepatch.entry, fusepatch.explanation, fusepatch.kernels.gated_mlp.reference

class FakeMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(8, 16, bias=False)
        self.up_proj = nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj

model, other, x = FakeMLP(), FakeMLP(), torch.ones(1, 8)
both = nn.ModuleList([model, other])

def accelerate(ops=None):
    fusepatch.accelerate(ops, model=both)

found = {}
for name, (environ, program) in json.loads(sys.stdin.read()).items():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(write, 2)
        os.environ.update(FUSEPATCH_GATED_MLP_BACKEND="reference", **environ)
        exec(program)
        atexit._run_exitfuncs()  # and not the rest of what an interpreter does at exit, which takes seconds
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found[name] = pipe.read()
    os.waitpid(child, 0)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """What each program wrote to stderr, exit included."""
    import json

    environ = {name: text for name, text in os.environ.items() if not name.startswith("FUSEPATCH") and name != "RANK"}
    programs = json.dumps(PROGRAMS)
    done = subprocess.run([sys.executable, "-c", DRIVER], input=programs, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: text.splitlines() for name, text in json.loads(done.stdout.splitlines()[-1]).items()}


SUMMARY = "fusepatch: gated_mlp/transformers: 1 class patched; {}"
NEVER_RAN = ["fusepatch: gated_mlp was asked for by name and never ran natively"]


# Found: after restore() and after a block, the summary is made when nothing is on any more: "nothing is patched".
# Found: accelerate() in the middle of the first step forgets that it had begun: nothing is printed at exit.
# Found: each accelerate() starts a new first step, so that calling it again prints the summary again.
@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("two steps", [SUMMARY.format("fused 2")]),
        ("accelerate twice", [SUMMARY.format("fused 2")]),
        ("two steps of two modules", [SUMMARY.format("fused 3")]),
        ("one step", [SUMMARY.format("fused 1")]),
        ("one step, then accelerate again", [SUMMARY.format("fused 1")]),
        ("no step", []),
        ("no accelerate", []),
        ("warning", []),
        ("off", []),
        ("rank 1", []),
        ("rank 1, one step", []),
        ("rank 0", [SUMMARY.format("fused 2")]),
        ("one step, restored", [SUMMARY.format("fused 1")]),
        ("one step in a block", [SUMMARY.format("fused 1")]),
        ("two steps in a block", [SUMMARY.format("fused 2")]),
        ("never ran", NEVER_RAN),
        ("never ran, rank 1", []),
        ("never ran, not named", []),
        ("never ran, restored", []),
        ("ran", []),
        ("debug", [f"fusepatch: __main__.FakeMLP: original, because zero-tokens: {Reason.ZERO_TOKENS.meaning}"]),
        ("program's own log", [SUMMARY.format("fused 1").replace("fusepatch:", "own")]),
        ("program's own log later", [SUMMARY.format("fused 1").replace("fusepatch:", "own")]),
    ],
)
def test_what_is_printed(printed: dict[str, list[str]], program: str, lines: list[str]) -> None:
    assert printed[program] == lines


def test_every_program_is_expected_to_print_something_or_nothing() -> None:
    (mark,) = (mark for mark in test_what_is_printed.pytestmark if mark.name == "parametrize")
    assert {program for program, _ in mark.args[1]} == set(PROGRAMS)


# Found: end_first_step() takes and clears the watch in two steps; two threads at once may both report.
def test_first_step_is_reported_once_by_many_threads() -> None:
    reports: list[int] = []
    other = threading.Thread(target=ledger.end_first_step)

    def interrupt(frame, event, argument):
        if frame.f_code is ledger.end_first_step.__code__:
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_locals.get("step") is not None and other.ident is None:
                other.start()
                other.join(0.2)
        return interrupt

    ledger.watch_first_step(lambda: reports.append(1))
    ledger._first_step.seen(reports)
    tracer = sys.gettrace()
    sys.settrace(interrupt)
    try:
        ledger.end_first_step()
    finally:
        sys.settrace(tracer)
    other.join(10)
    assert reports == [1]


@pytest.mark.parametrize(("rank", "expected"), [(None, True), ("0", True), ("1", False), ("7", False)])
def test_rank_zero(monkeypatch: pytest.MonkeyPatch, rank: str | None, expected: bool) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert ledger.is_rank_zero() is expected
