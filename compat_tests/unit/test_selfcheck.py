"""The self-check finds faults put into the real kernels (run by Triton's interpreter), and remembers what it found."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from fusepatch import selfcheck, settings
from fusepatch.kernels.gated_mlp import pointwise
from fusepatch.selfcheck import Check, Outcome, Verdict

pytest.importorskip("triton")

CPU = torch.device("cpu")
KERNELS = Path(pointwise.__file__)
# The interpreter truncates to bf16 where the hardware rounds, which the check notices: fp32 and fp16 it is.
SILU = "triton pointwise float32 silu"
GELU = "triton pointwise float16 gelu"
TANH = "triton pointwise float32 gelu_tanh"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path / "cache"))
    settings.install(None)
    selfcheck.forget()
    yield
    selfcheck.forget()


def faulty_check(folder: Path, old: str, new: str) -> str:
    """A check module whose kernels are ours with one piece of text replaced."""
    text = KERNELS.read_text()
    assert old in text
    (folder / "faulty_kernels.py").write_text(text.replace(old, new))
    (folder / "faulty_check.py").write_text(
        textwrap.dedent("""
        import dataclasses
        from fusepatch.kernels.gated_mlp import check, choose

        def run(case, device, steps):
            choose.BACKENDS = tuple(
                dataclasses.replace(found, module="faulty_kernels") if found.name == "triton" else found
                for found in choose.BACKENDS
            )
            return check.run(case, device, steps)
        """)
    )
    return "faulty_check"


@pytest.mark.parametrize("case", [SILU, GELU, TANH])
def test_right_kernels_pass(case: str) -> None:
    assert selfcheck.run(Check("fusepatch.kernels.gated_mlp.check", case), CPU) == Verdict(Outcome.PASSED)


def test_the_check_notices_rounding_that_truncates() -> None:
    found = selfcheck.run(Check("fusepatch.kernels.gated_mlp.check", "triton pointwise bfloat16 silu"), CPU)
    assert found.outcome is Outcome.FAILED


def test_the_child_keeps_what_it_compiles_where_this_process_looks(tmp_path: Path) -> None:
    (tmp_path / "saying_check.py").write_text(
        "import os\ndef run(case, device, steps):\n"
        "    return sorted(f'{name}={text}' for name, text in os.environ.items() if name.startswith('FUSEPATCH'))\n"
    )
    found = selfcheck.run(Check("saying_check", "any"), CPU)
    assert found.what == f"FUSEPATCH_CACHE_DIR={tmp_path / 'cache'}"  # and no other variable of ours


@pytest.mark.parametrize("executable", ["", None, "/no/such/python"])
def test_where_no_child_can_start_nothing_is_known(monkeypatch: pytest.MonkeyPatch, executable: str | None) -> None:
    """As in an embedded Python."""
    monkeypatch.setattr(sys, "executable", executable)
    found = selfcheck.run(Check("fusepatch.kernels.gated_mlp.check", SILU), CPU)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "could be started" in found.what


LAUNCH = "    (outer, rows, width), strides = geometry\n"
FAULTS = {
    "wrong constant": (GELU, "0.7071067811865476", "0.70", "h of"),
    "wrong constant in a derivative": (TANH, "0.134145", "0.13", "d_gate of"),
    "unwritten tile": (SILU, "inside = columns < width", "inside = (columns < width) & (columns >= 16)", "nan"),
    "swapped halves": (SILU, "(gate, up), (out,)", "(up, gate), (out,)", "h of"),
    "swapped gradients": (SILU, "(dh, gate, up), outputs", "(dh, gate, up), outputs[::-1]", "d_gate of"),
    "crash": (SILU, LAUNCH, LAUNCH + "    import os; os.abort()\n", "killed by signal 6 in triton"),
    "exception": (SILU, LAUNCH, LAUNCH + "    raise RuntimeError('illegal memory access')\n", "illegal memory access"),
    "hang": (SILU, LAUNCH, LAUNCH + "    while True: pass\n", "no answer within"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_fail(fault: str, tmp_path: Path) -> None:
    case, old, new, what = FAULTS[fault]
    module = faulty_check(tmp_path, old, new)
    found = selfcheck.run(Check(module, case), CPU, limit_s=12 if fault == "hang" else 120)
    assert found.outcome is Outcome.FAILED
    assert what in found.what


def test_out_of_memory_is_inconclusive(tmp_path: Path) -> None:
    module = faulty_check(tmp_path, LAUNCH, LAUNCH + "    raise torch.OutOfMemoryError('full')\n")
    found = selfcheck.run(Check(module, SILU), CPU)
    assert found == Verdict(Outcome.INCONCLUSIVE, "out of memory: full")


def _mark(**fields: object) -> str:
    return selfcheck.MARK + json.dumps(fields) + "\n"


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (None, "", Outcome.INCONCLUSIVE),
        (None, _mark(kernel="k", seconds=0.01), Outcome.FAILED),
        (None, _mark(kernel="k", seconds=60.0), Outcome.INCONCLUSIVE),
        (-9, _mark(kernel="k", seconds=0.01), Outcome.INCONCLUSIVE),
        (-11, _mark(kernel="k", seconds=0.01), Outcome.FAILED),
        (-11, "", Outcome.INCONCLUSIVE),
        (1, "CUDA error: all CUDA-capable devices are busy\n", Outcome.INCONCLUSIVE),
        (1, _mark(kernel="k", seconds=0.01), Outcome.FAILED),
        (0, "", Outcome.INCONCLUSIVE),
        (0, _mark(kernel="k", seconds=0.0) + _mark(outcome="passed", what=""), Outcome.PASSED),
    ],
)
def test_judgement(code: int | None, output: str, outcome: Outcome) -> None:
    assert selfcheck.judge(code, output, "", 1.0).outcome is outcome


# -------------------------------------------------------------------------------------------------------- memory

CHECK = Check("fusepatch.kernels.gated_mlp.check", SILU)


def _started(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the pipes that stay open
def test_a_child_that_can_not_be_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for the driver; here something that outlives it holds its output open."""
    monkeypatch.setattr(selfcheck, "KILLED_LIMIT_S", 0.2)
    lasts = "import subprocess, sys, time; print('a mark', flush=True); subprocess.Popen([sys.executable, '-c', "
    lasts += "'import time; time.sleep(20)'], start_new_session=True); time.sleep(100)"
    start = time.monotonic()
    assert selfcheck._end_of(_started(lasts), 2.0, None) == (None, "a mark\n", "")
    assert time.monotonic() - start < 15
    assert not selfcheck._running


def test_checks_that_are_ended_leave_no_verdict_behind() -> None:
    stop, another = threading.Event(), threading.Event()
    found: list[tuple[int | None, str, str]] = []
    child = _started("import time; time.sleep(100)")
    waiting = threading.Thread(target=lambda: found.append(selfcheck._end_of(child, 100.0, stop)))
    waiting.start()
    while not selfcheck._running:
        time.sleep(0.01)
    selfcheck.end_checks(another)
    assert child.poll() is None, "it was somebody else's"
    selfcheck.end_checks(stop)
    waiting.join(timeout=50)
    ((code, *texts),) = found
    assert code == -9
    assert selfcheck.judge(code, *texts, 100.0).outcome is Outcome.INCONCLUSIVE
    assert not selfcheck._running


def test_a_check_that_was_ended_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    child = _started("import time; time.sleep(100)")  # it is set between the start and the waiting
    stop.set()
    assert selfcheck._end_of(child, 100.0, stop)[0] == -9
    monkeypatch.setattr(subprocess, "Popen", None)
    found = selfcheck.run(Check("module", "case"), torch.device("cpu"), stop=stop)
    assert found.outcome is Outcome.INCONCLUSIVE


def test_an_interrupt_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    child = _started("import time; time.sleep(100)")

    def interrupted(timeout: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        selfcheck._end_of(child, 100.0, None)
    assert child.wait(timeout=20) == -9
    assert not selfcheck._running


def _count_runs(monkeypatch: pytest.MonkeyPatch, found: Verdict) -> list[Check]:
    runs: list[Check] = []
    monkeypatch.setattr(selfcheck, "run", lambda check, device, **options: runs.append(check) or found)
    return runs


@pytest.mark.parametrize("outcome", list(Outcome))
def test_remembered_on_disk_unless_inconclusive(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    runs = _count_runs(monkeypatch, Verdict(outcome, "why"))
    for _ in range(2):
        assert selfcheck.verdict(CHECK, CPU) == Verdict(outcome, "why")
    assert len(runs) == 1
    selfcheck.forget()
    assert selfcheck.verdict(CHECK, CPU).outcome is outcome
    assert len(runs) == (2 if outcome is Outcome.INCONCLUSIVE else 1)


@pytest.mark.parametrize(
    "what", ["device", "driver", "torch", "cuda", "triton", "cutlass", "cudnn", "sources", "check"]
)
def test_every_part_of_the_identity_counts(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    runs = _count_runs(monkeypatch, Verdict(Outcome.PASSED))
    selfcheck.verdict(CHECK, CPU)
    selfcheck.forget()
    plain = selfcheck.identity
    monkeypatch.setattr(selfcheck, "identity", lambda check, kind: {**plain(check, kind), what: "another"})
    selfcheck.verdict(CHECK, CPU)
    assert len(runs) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"outcome": "maybe", "what": ""}', "\x00\xff"])
def test_a_damaged_memory_is_checked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str) -> None:
    runs = _count_runs(monkeypatch, Verdict(Outcome.PASSED))
    selfcheck.verdict(CHECK, CPU)
    (stored,) = (tmp_path / "cache" / "selfcheck").glob("*.json")
    stored.write_text(damage)
    selfcheck.forget()
    assert selfcheck.verdict(CHECK, CPU).outcome is Outcome.PASSED
    assert len(runs) == 2
    assert json.loads(stored.read_text())["outcome"] == "passed"


def test_a_folder_that_cannot_be_made_costs_a_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    runs = _count_runs(monkeypatch, Verdict(Outcome.PASSED))
    for _ in range(2):
        selfcheck.forget()
        assert selfcheck.verdict(CHECK, CPU).outcome is Outcome.PASSED
    assert len(runs) == 2


def test_a_failure_is_warned_about_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _count_runs(monkeypatch, Verdict(Outcome.FAILED, "h is wrong"))
    for _ in range(3):
        assert selfcheck.verdict(CHECK, CPU).reason is selfcheck.Reason.SELFCHECK_FAILED
    warnings = [record for record in caplog.records if "h is wrong" in record.getMessage()]
    assert [record.levelname for record in warnings] == ["WARNING"]


def test_once_per_node_however_many_processes_start(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import time, torch
        from fusepatch import selfcheck
        def run(check, device):
            with open({str(tmp_path / "runs")!r}, "a") as file: file.write("run\\n")
            time.sleep(2)
            return selfcheck.Verdict(selfcheck.Outcome.PASSED)
        selfcheck.run = run
        found = selfcheck.verdict(selfcheck.Check("m", "c"), torch.device("cpu"))
        assert found.outcome is selfcheck.Outcome.PASSED
    """)
    children = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(4)]
    assert [child.wait(timeout=120) for child in children] == [0] * 4
    assert (tmp_path / "runs").read_text() == "run\n"


def test_waiting_for_another_process_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fcntl

    monkeypatch.setattr(selfcheck, "WAIT_LIMIT_S", 0.5)
    runs = _count_runs(monkeypatch, Verdict(Outcome.PASSED))
    selfcheck.verdict(CHECK, CPU)
    (lock,) = (tmp_path / "cache" / "selfcheck").glob("*.lock")
    for stored in lock.parent.glob("*.json"):
        stored.unlink()
    selfcheck.forget()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert selfcheck.verdict(CHECK, CPU).outcome is Outcome.INCONCLUSIVE
    assert len(runs) == 1


def test_the_child_runs_neither_the_users_script_nor_his_modules(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from fusepatch import selfcheck\n"
        "print('script runs')\n"
        f"check = selfcheck.Check('fusepatch.kernels.gated_mlp.check', {SILU!r})\n"
        "print(selfcheck.run(check, torch.device('cpu')).outcome.value)\n"
    )
    (folder / "json.py").write_text("raise SystemExit('the wrong json')\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=folder)
    assert done.stdout.split() == ["script", "runs", "passed"], done.stderr


@pytest.mark.parametrize("module", ["fusepatch.selfcheck", "fusepatch.kernels.cute.compiling"])
def test_a_child_that_is_forked_while_a_lock_is_held_is_not_stuck(module: str) -> None:
    """As while another thread of the parent waits for a check, or compiles."""
    held = importlib.import_module(module)
    with held._lock:
        child = os.fork()
        if not child:
            os._exit(0 if held._lock.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
