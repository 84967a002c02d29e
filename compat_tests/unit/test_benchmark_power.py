"""The benchmark's readings of clock and power: what nvidia-smi prints, and what it may print instead."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import power
from benchmarks.timing import Step


def test_the_first_half_does_not_count() -> None:
    printed = "1980, 100.0\n1980, 400.5\n[N/A], [N/A]\n1500, 690.0\n1495, 699.9\n1490, 700.1\n14"
    assert power.read(printed) == power.Drawn((1500.0, 1495.0, 1490.0), (690.0, 699.9, 700.1))


@pytest.mark.parametrize("printed", ["", "No devices were found\n", "[N/A], [N/A]\n" * 9, "1500, 690.0\n" * 4])
def test_too_little_is_said(printed: str) -> None:
    with pytest.raises(RuntimeError, match=r"nvidia-smi told clock and power [04] times"):
        power.read(printed)


class _Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        time.sleep(0.01)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU of which `tmp_path/nvidia-smi` tells; nothing is there yet."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="11-22"))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "nvidia-smi"


def step(seen: list[int]) -> Step:
    return Step(lambda number: number, seen.append, lambda: None, contextlib.nullcontext)


def test_it_is_read_while_the_step_runs(played: Path) -> None:
    played.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {played.parent}/asked\nwhile true; do echo 1500, 700; sleep 0.02; done\n"
    )
    played.chmod(0o755)
    calls: list[int] = []
    found = power.measure(step(calls), seconds=0.5)
    assert set(found.clock) == {1500.0} and set(found.power) == {700.0}
    assert calls == list(range(len(calls))) and len(calls) >= 8
    assert (played.parent / "asked").read_text().splitlines()[:2] == ["-i", "GPU-11-22"]


def test_it_is_stopped_where_the_step_raises(played: Path) -> None:
    played.write_text(f"#!/bin/sh\necho $$ > {played.parent}/pid\nexec sleep 60\n")
    played.chmod(0o755)

    def fails(number: int) -> None:
        while not (played.parent / "pid").exists():
            time.sleep(0.01)
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        power.measure(Step(lambda number: number, fails, lambda: None, contextlib.nullcontext))
    pid = (played.parent / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists()


def test_no_nvidia_smi(played: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(played.parent))
    with pytest.raises(RuntimeError, match="nvidia-smi does not run"):
        power.measure(step([]))
