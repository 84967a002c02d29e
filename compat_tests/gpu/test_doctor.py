"""`fusepatch doctor` on a GPU: what torch has loaded, each kernel's check run anew, and no memory taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusepatch import arch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "fusepatch", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    return done.returncode, json.loads(done.stdout)


def outcomes(found: dict[str, Any]) -> set[str | None]:
    return {check["outcome"] for row in found["kernels"] for check in row["checks"]}


@pytest.mark.timeout(1200)
def test_checks_run_and_are_remembered() -> None:
    _, found = run()
    assert outcomes(found) == {None}
    assert {row["serves"] for row in found["kernels"] if row["backend"] == "triton"} == {"unchecked"}
    code, found = run("--selfcheck")
    assert outcomes(found) == {"passed"}
    assert code == 0, found["findings"]
    _, found = run()
    assert outcomes(found) == {"passed"}
    assert {row["serves"] for row in found["kernels"] if row["backend"] == "triton"} == {"yes"}


def test_the_gpus_and_what_is_loaded() -> None:
    _, found = run()
    assert len(found["gpus"]) == torch.cuda.device_count()
    family = arch.ARCHITECTURES.get(torch.cuda.get_device_capability(0))
    assert found["gpus"][0]["family"] == (None if family is None else family.name)
    runtimes = [row for row in found["libraries"] if row["name"] == "libcudart" and row["loaded_by"] == "torch"]
    assert [row["reported"].partition(".")[0] for row in runtimes] == [torch.version.cuda.partition(".")[0]]
    versions = {row["name"]: row["version"] for row in found["versions"]}
    assert versions["CUDA driver"]
    assert versions["cuDNN"]


def test_nothing_is_allocated_in_the_parent() -> None:
    code = (
        "import torch; from fusepatch import doctor\n"
        "assert doctor.examine().gpus\n"
        "assert torch.cuda.memory_reserved() == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
