"""`fusepatch doctor` on a GPU: what torch has loaded, each kernel's check run anew, and no memory taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusepatch import arch, selfcheck
from fusepatch.kernels.gated_mlp import choose

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """What it writes to stderr is this process's."""
    command = [sys.executable, "-m", "fusepatch", "doctor", "--json", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return done.returncode, json.loads(done.stdout)


def outcomes(found: dict[str, Any]) -> dict[str, set[str | None]]:
    """Of the gated MLP, by backend; of another op, which a name brought in, by op and backend."""
    by_name: dict[str, set[str | None]] = {}
    for row in found["kernels"]:
        name = row["backend"] if row["op"] == "gated_mlp" else f"{row['op']}/{row['backend']}"
        if row["checks"]:
            by_name.setdefault(name, set()).update(check["outcome"] for check in row["checks"])
    return by_name


def remembered() -> dict[str, set[str | None]]:
    """The same, as another process finds it on disk."""
    device = torch.device("cuda", 0)
    found: dict[str, set[str | None]] = {}
    for row in choose.survey(device):
        if row.reason is None and row.checks:
            verdicts = [selfcheck.on_disk(check, device) for check in row.checks]
            found[row.backend] = {None if verdict is None else verdict.outcome.value for verdict in verdicts}
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [(), ("triton", "cudnn")], ids=["all", "by_name"])
def test_checks_run_and_are_remembered(names: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    before = remembered()
    assert set().union(*before.values()) == {None}
    expected = {name: {"passed"} if name in (names or before) else {None} for name in before}
    if {"passed"} not in expected.values():
        pytest.skip("none of them can run here")
    with capfd.disabled():  # so that its progress is seen, also where somebody cuts it off
        code, found = run("--selfcheck", *names)
    others = {name: each for name, each in outcomes(found).items() if "/" in name}
    assert all(each == {"passed"} for each in others.values()), others
    assert outcomes(found) == {**expected, **others}
    assert code == 0, found["findings"]
    assert all(
        (check["seconds"] is None) is (check["outcome"] is None) for row in found["kernels"] for check in row["checks"]
    )
    assert remembered() == expected
    serves = {row["serves"] for row in found["kernels"] if row["backend"] == "triton"}
    assert serves == {"yes"}


def test_the_gpus_and_what_is_loaded() -> None:
    _, found = run()
    assert set().union(*outcomes(found).values()) == {None}
    assert {row["serves"] for row in found["kernels"] if row["backend"] == "triton"} == {"unchecked"}
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
