"""`fusepatch doctor --report`: what is run for what `doctor` found, and the file that comes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fusepatch import cli, doctor
from fusepatch.doctor import CheckResult, Diagnosis, Finding, Gpu, Kernel, Version, report_file
from fusepatch.doctor.report_file import Done, Step


def kernel(backend: str, serves: str, route: str = "fused", reason: str | None = None, op: str = "gated_mlp") -> Kernel:
    checks = tuple(CheckResult(f"{backend} {n}", "cuda:0", "passed", "a|b", 8.0 + n) for n in range(2))
    return Kernel(op, backend, route, ("cuda:0",), serves, reason, None, () if serves == "no" else checks)


B200 = Diagnosis(
    package="/somewhere",
    versions=(Version("torch", "2.11.0", ""), Version("triton", None, "not installed")),
    gpus=(Gpu("cuda:0", "NVIDIA B200", "10.0", "Blackwell data-centre", True),),
    kernels=(
        kernel("triton", "yes", "pointwise"),
        kernel("hopper", "no", reason="architecture"),
        kernel("cudnn", "if named"),
        kernel("triton_gemm", "if named"),
        kernel("reference", "if named"),
        kernel("triton", "yes", op="engram_gate"),
    ),
    libraries=(),
    settings=(),
    cache=doctor.Cache("/cache", True, ""),
    selfcheck="6 self-checks ran",
    findings=(Finding("warning", "two copies of libcudnn", "drop one"),),
)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """A machine with a B200, on which each step ends with a code; returns the steps that were run."""
    monkeypatch.chdir(Path(__file__).parent.parent.parent)

    def put(codes: dict[str, int | None] = {}, output: str = "all is well") -> list[str]:  # noqa: B006
        ran: list[str] = []

        def run(step: Step, tell: Callable[[str], None]) -> Done:
            tell("of the step")
            ran.append(str(step))
            return Done(step, codes.get(step.backend, 0), 1.0, output)

        def examine(selfcheck: bool, tell: Callable[[str], None]) -> Diagnosis:
            assert selfcheck
            return B200

        monkeypatch.setattr(report_file, "examine", examine)
        monkeypatch.setattr(report_file, "run", run)
        return ran

    return put


def test_every_backend_that_can_serve_is_run_by_its_name(here: Callable[..., list[str]], tmp_path: Path) -> None:
    ran = here()
    report = report_file.write(tmp_path / "report.md", lambda line: None)
    parity = [step for step in ran if "fusepatch parity" in step]
    assert [step.split()[0] for step in parity] == [
        f"FUSEPATCH_GATED_MLP_BACKEND={name}" for name in ("triton", "cudnn", "triton_gemm")
    ]
    assert [step.split()[1] for step in parity] == [
        f"FUSEPATCH_GATED_MLP_ROUTE={route}" for route in ("pointwise", "fused", "fused")
    ]
    assert all("--warmup" in step for step in parity)
    (benchmark,) = (step for step in ran if step not in parity)
    arms = "gemm_floor,eager,fusepatch_pointwise_triton,fusepatch_fused_cudnn,fusepatch_fused_triton_gemm"
    assert benchmark.startswith(f"python -m benchmarks gated_mlp --arms {arms} ")
    assert report.left_out == ("hopper, fused: architecture",)
    assert report.exit_code == 0


def test_the_file(here: Callable[..., list[str]], tmp_path: Path) -> None:
    here({"cudnn": None}, output="fine\n~~~~~~\nnot the end")
    path = tmp_path / "report.md"
    report = report_file.write(path, lambda line: None)
    text = path.read_text()
    assert text.startswith("# fusepatch on NVIDIA B200 (10.0), torch 2.11.0, 20")
    seen_there = text.partition("## What was seen\n")[2].partition("\n## ")[0]
    rows = [line for line in seen_there.splitlines() if line.startswith("| ")]
    assert len({row.count("|") for row in rows}) == 1
    assert rows[0] == "| op | backend | where | what was seen | command | date |"
    for seen in (
        "| triton_gemm | NVIDIA B200 (10.0), torch 2.11.0 | self-checks: 2 passed (8 to 9 s each) |",
        "| gated_mlp, fused route | triton_gemm | NVIDIA B200 (10.0), torch 2.11.0 | parity: passed, 1 s |",
        "| gated_mlp, fused route | cudnn | NVIDIA B200 (10.0), torch 2.11.0 | parity: no end within 600 s, 1 s |",
        "| gated_mlp | triton, cudnn, triton_gemm | NVIDIA B200 (10.0), torch 2.11.0 | benchmark: ran, 1 s |",
    ):
        assert seen in text
    assert "`fusepatch doctor --selfcheck triton_gemm`" in text
    table = text.partition("## Self-checks\n")[2].partition("\n## ")[0].splitlines()
    rows = [line for line in table if line.startswith("| gated_mlp | triton_gemm ")]
    assert rows == [f"| gated_mlp | triton_gemm {n} | cuda:0 | passed | {n + 8}.0 | a/b |" for n in range(2)]
    assert "- hopper, fused: architecture" in text
    assert "- warning: two copies of libcudnn. Fix: drop one." in text
    blocks = text.split("\n~~~~~~")
    assert len(blocks) == 1 + 2 * (len(report.done) + 1), "what a step printed ended its block"
    everything = json.loads(text.partition("~~~~~~json\n")[2].rpartition("\n~~~~~~")[0].replace("~~~~~ ", "~~~~~~"))
    assert everything["diagnosis"]["gpus"][0]["name"] == "NVIDIA B200"
    assert [each["outcome"] for each in everything["done"]] == ["passed", "no end within 600 s", "passed", "ran"]


@pytest.mark.parametrize(
    ("code", "outcome", "exit_code"), [(1, "failed", 1), (3, "nothing ran natively", 0), (-11, "exit code -11", 1)]
)
def test_outcomes(here: Callable[..., list[str]], tmp_path: Path, code: int, outcome: str, exit_code: int) -> None:
    here({"cudnn": code})
    report = report_file.write(tmp_path / "report.md", lambda line: None)
    assert outcome in (tmp_path / "report.md").read_text()
    assert report.exit_code == exit_code


def test_what_was_seen_is_not_lost(
    here: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here()
    path = tmp_path / "report.md"
    run = report_file.run

    def dies(step: Step, tell: Callable[[str], None]) -> Done:
        if step.backend == "triton_gemm":
            raise KeyboardInterrupt
        return run(step, tell)

    monkeypatch.setattr(report_file, "run", dies)
    with pytest.raises(KeyboardInterrupt):
        report_file.write(path, lambda line: None)
    assert (
        "| gated_mlp, fused route | cudnn | NVIDIA B200 (10.0), torch 2.11.0 | parity: passed, 1 s |"
        in path.read_text()
    )


def test_outside_of_the_repository_the_benchmark_is_left_out(
    here: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = here()
    monkeypatch.chdir(tmp_path)
    report = report_file.write(tmp_path / "report.md", lambda line: None)
    assert not any("benchmarks" in step for step in ran)
    assert "run this in its root folder" in report.left_out[-1]


def test_a_child_has_the_variables_of_its_step_and_no_other_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH_STRICT", "1")
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", "/cache")
    code = "import os; print(sorted(f'{k}={v}' for k, v in os.environ.items() if k.startswith('FUSEPATCH')))"
    step = Step("parity", "x", ("-c", code), {"FUSEPATCH_GATED_MLP": "1"}, 60.0)
    done = report_file.run(step, lambda line: None)
    assert (done.code, done.output) == (0, "['FUSEPATCH_CACHE_DIR=/cache', 'FUSEPATCH_GATED_MLP=1']\n")


def test_it_says_what_runs_and_how_it_ended(here: Callable[..., list[str]], tmp_path: Path) -> None:
    ran = here({"cudnn": 1})
    told: list[str] = []
    report_file.write(tmp_path / "report.md", told.append)
    assert told[3:6] == [
        f"2 of 4, at most 10 minutes: {ran[1]}",
        "of the step",
        "2 of 4: parity of cudnn: failed, 1 s",
    ]
    assert told[-3].startswith("4 of 4, at most 30 minutes: python -m benchmarks")


def test_what_a_step_writes_is_told_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = "import sys; print('first'); print('second', file=sys.stderr); sys.stdin.read(); print('third')"
    when: dict[str, float] = {}
    step = Step("benchmark", "x", ("-c", code + "; import time; time.sleep(60)"), {}, 3.0)
    done = report_file.run(step, lambda line: when.setdefault(line, time.monotonic()))
    assert list(when) == ["  first", "  second", "  third"]
    assert time.monotonic() - when["  third"] > 1, "it was told at the end alone"
    assert (done.code, done.output) == (None, "first\nsecond\nthird\n")


def test_what_a_step_started_ends_with_it() -> None:
    """It holds the step's output open, and would be in the way of the next step on the GPU."""
    code = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])"
    step = Step("benchmark", "x", ("-c", code + "; print(child.pid); child.wait()"), {}, 2.0)
    done = report_file.run(step, lambda line: None)
    assert done.seconds < 50
    assert not is_alive(int(done.output))


def test_a_limit_is_one_whoever_holds_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process does that is in a session of its own, or hangs in the driver."""
    monkeypatch.setattr(report_file, "KILLED_LIMIT_S", 0.5)
    code = "import subprocess, sys; print('first', flush=True); subprocess.Popen([sys.executable, '-c', 'import time; "
    code += "time.sleep(20)'], start_new_session=True).wait()"
    done = report_file.run(Step("benchmark", "x", ("-c", code), {}, 2.0), lambda line: None)
    assert (done.code, done.output) == (None, "first\n")
    assert done.seconds < 10


def is_alive(process: int) -> bool:
    for _ in range(100):  # until whoever adopts it has taken note of its end
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.02)
    return True


def test_the_command(here: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here()
    assert cli.main(["doctor", "--report", str(tmp_path / "report.md")]) == 0
    assert "written" in capsys.readouterr().err
    assert cli.main(["doctor", "--report", str(tmp_path / "no" / "report.md")]) == cli.USAGE_ERROR
    assert "can't write" in capsys.readouterr().err
