"""Kernels that are compiled side by side, each in a process: what is there afterwards, and what costs time alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch

from fusepatch import settings
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
    """One that can't be compiled, for its dtype here, takes nothing with it but what its process had still to do."""
    wrong = dataclasses.replace(FORWARD, dtype="float64")
    compile_ahead.compile_ahead((*THREE, wrong, THREE[0]), launching.build, ARCH)
    assert len(list(folder.glob("*.so"))) == 3
    for each in THREE:
        compiling.compiled(each, forbidden, ARCH)
    with pytest.raises(AssertionError, match="float64"):
        compiling.compiled(wrong, forbidden, ARCH)


@pytest.fixture
def started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands of the processes that would have been started."""
    commands: list[Any] = []

    def popen(command: list[str], **_: object) -> Any:
        commands.append(command)
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", popen)
    return commands


def test_processes_that_can_not_start_are_no_error(started: list[Any]) -> None:
    compile_ahead.compile_ahead(THREE, launching.build, ARCH)
    assert len(started) == 2


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


def test_a_process_that_hangs_is_ended(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_build.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
        "def build(configuration, options): ...\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    module = type(launching)("slow_build")
    exec("def build(configuration, options): ...", module.__dict__)
    monkeypatch.setitem(__import__("sys").modules, "slow_build", module)
    monkeypatch.setattr(compile_ahead, "LIMIT_S", 10.0)
    began = time.monotonic()
    compile_ahead.compile_ahead(THREE, module.build, ARCH)
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


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
