"""Kernels that are compiled side by side, each in a process: what is there afterwards, and what costs time alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch

from fusepatch import selfcheck, settings
from fusepatch.kernels.cute import artefacts, compile_ahead, compiling
from fusepatch.kernels.gated_mlp import blackwell, hopper, hopper_configuration, launching
from fusepatch.kernels.gated_mlp.hopper_configuration import ARCH, Size, configurations, forward_configuration

needs_the_dsl = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("cutlass", "tvm_ffi")) or fake_cuda.COMPILER is None,
    reason="needs nvidia-cutlass-dsl, apache-tvm-ffi and a C compiler",
)
FORWARD = forward_configuration(torch.bfloat16, "silu", False, Size.SMALL)
THREE = tuple(dataclasses.replace(FORWARD, activation=each) for each in ("silu", "gelu", "gelu_tanh"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path / "fusepatch"))
    monkeypatch.setenv("CUTE_DSL_ARCH", ARCH)
    monkeypatch.setattr(compiling, "_compiled", {})
    monkeypatch.setattr(compile_ahead, "_processors", lambda: 2)
    settings.install(settings.read())
    return tmp_path / "fusepatch" / "kernels"


def forbidden(configuration: object, options: str) -> Any:
    raise AssertionError(f"compiled in this process: {configuration}")


@needs_the_dsl
def test_what_was_compiled_ahead_is_loaded(folder: Path) -> None:
    """One that can't be compiled, for its dtype here, takes none of the others with it."""
    wrong = dataclasses.replace(FORWARD, dtype="float64")
    compile_ahead.compile_ahead((wrong, *THREE, THREE[0]), launching.build, ARCH)
    assert len(list(folder.glob("*.so"))) == 3
    for each in THREE:
        compiling.compiled(each, forbidden, ARCH)
    with pytest.raises(AssertionError, match="float64"):
        compiling.compiled(wrong, forbidden, ARCH)


class Child:
    """A process that takes its work and comes to its end."""

    returncode = 0

    def __init__(self) -> None:
        self.stdin = io.BytesIO()

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None: ...


@pytest.fixture
def started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands of the processes that would have been started."""
    commands: list[Any] = []

    def popen(command: list[str], *, cwd: Path, env: dict[str, str], **_: object) -> Any:
        assert (cwd / "fusepatch" / "__init__.py").is_file()
        assert env["FUSEPATCH_CACHE_DIR"] == str(folder.parent)
        commands.append(command)
        return Child()

    monkeypatch.setattr(artefacts, "linker", lambda: "cc")

    monkeypatch.setattr(subprocess, "Popen", popen)
    return commands


@pytest.mark.parametrize(("processors", "expected"), [(2, 2), (3, 3), (64, 4)])
def test_how_many_processes(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, processors: int, expected: int
) -> None:
    """As many as there are processors, and four at most: each needs memory."""
    monkeypatch.setattr(compile_ahead, "_processors", lambda: processors)
    many = [dataclasses.replace(each, dtype=dtype) for each in THREE for dtype in ("bfloat16", "float16")]
    compile_ahead.compile_ahead(many, launching.build, ARCH)
    assert len(started) == expected


def test_processes_that_can_not_start_are_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*_: object, **__: object) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(artefacts, "linker", lambda: "cc")
    monkeypatch.setattr(subprocess, "Popen", popen)
    compile_ahead.compile_ahead(THREE, launching.build, ARCH)


def test_a_process_that_ends_at_once_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefacts, "linker", lambda: "cc")
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    compile_ahead.compile_ahead(THREE, launching.build, ARCH)


@pytest.mark.parametrize("missing", ["a linker", "an executable"])
def test_what_could_not_be_kept_or_started_is_not_tried(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "a linker":
        monkeypatch.setattr(artefacts, "linker", lambda: None)
    else:
        monkeypatch.setattr(sys, "executable", "")
    compile_ahead.compile_ahead(THREE, launching.build, ARCH)
    assert started == []


def test_few_that_are_missing_start_nothing(started: list[Any], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    compile_ahead.compile_ahead(THREE[:2] * 2, launching.build, ARCH)
    monkeypatch.setattr(compiling, "_compiled", {(THREE[0], ARCH): print})
    compile_ahead.compile_ahead(THREE, launching.build, ARCH)
    monkeypatch.setattr(compiling, "_compiled", {})
    path = artefacts.place(artefacts.key_of(THREE[1], compiling.options_for(ARCH)))
    assert path is not None
    path.write_bytes(b"an entry")
    compile_ahead.compile_ahead(THREE, launching.build, ARCH)
    assert started == []


def test_one_processor_starts_nothing(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_processors", lambda: 1)
    compile_ahead.compile_ahead(THREE, launching.build, ARCH)
    assert started == []


def test_a_folder_that_others_may_write_starts_nothing(started: list[Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    compile_ahead.compile_ahead(THREE, launching.build, ARCH)
    assert started == []


def test_processes_that_hang_are_ended_together(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_build.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\ntime.sleep(600)\n"
        "def build(configuration, options): ...\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    module = types.ModuleType("slow_build")
    exec("def build(configuration, options): ...", module.__dict__)
    monkeypatch.setitem(sys.modules, "slow_build", module)
    monkeypatch.setattr(artefacts, "linker", lambda: "cc")
    monkeypatch.setattr(compile_ahead, "LIMIT_S", 12.0)
    began = time.monotonic()
    compile_ahead.compile_ahead(THREE, module.build, ARCH)
    assert time.monotonic() - began < 2 * compile_ahead.LIMIT_S
    assert compile_ahead.LIMIT_S < selfcheck.CHILD_LIMIT_S / 2
    hung = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert hung
    for number in hung:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.mark.parametrize("biased", [False, True])
def test_a_self_check_has_all_that_it_launches_compiled(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    """Every size's four kernels, and the products of Hopper."""
    asked: list[Any] = []
    monkeypatch.setattr(launching, "side_by_side", lambda found, build, arch: asked.append((set(found), arch)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 3))
    blackwell._arch.cache_clear()
    device = torch.device("cuda", 0)
    hopper.compile_ahead(device, torch.bfloat16, "silu", biased)
    blackwell.compile_ahead(device, torch.bfloat16, "silu", biased=False)
    blackwell._arch.cache_clear()
    (of_hopper, arch), (of_blackwell, other) = asked
    assert (arch, other) == ("sm_90a", "sm_103a")
    assert of_hopper == {
        *(each for size in Size for each in configurations(torch.bfloat16, "silu", size, biased=biased)),
        *hopper_configuration.every_product(torch.bfloat16),
    }
    assert len(hopper_configuration.every_product(torch.bfloat16)) == 4
    assert {each.kernel for each in of_blackwell} == {"blackwell_forward", "blackwell_backward"}
