"""The sources of cuDNN's frontend: where they are looked for, and what is said where others are installed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusepatch.kernels import vendor_sources


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `cudnn` with two files."""
    (tmp_path / "part").mkdir()
    for name in ("a", "b"):
        (tmp_path / "part" / name).write_text(name)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    )
    return tmp_path


def found(*names: str, read: bytes = b"ab") -> tuple[str, ...]:
    files = [vendor_sources.path_of("part", name) for name in names]
    return vendor_sources.why_not_as_read("part", files, hashlib.sha256(read).hexdigest())


def test_sources_as_they_were_read(package: Path) -> None:
    assert vendor_sources.path_of("part", "a") == package / "part" / "a"
    assert found("a", "b") == ()


@pytest.mark.parametrize("change", ["another text", "another order", "one more file"])
def test_other_sources(change: str, package: Path) -> None:
    if change == "another text":
        (package / "part" / "b").write_text("b ")
    names = {"another order": ("b", "a"), "one more file": ("a", "b", "a")}.get(change, ("a", "b"))
    assert found(*names) == ("part of nvidia-cudnn-frontend is not that of 1.32.0, whose limits are known",)


def test_a_file_that_is_not_there(package: Path) -> None:
    (package / "part" / "b").unlink()
    (package / "part" / "b").mkdir()
    assert found("a", "b") == ("nvidia-cudnn-frontend has no such part as 1.32.0 brings",)


@pytest.mark.parametrize("spec", [None, SimpleNamespace(submodule_search_locations=None)], ids=["none", "one file"])
def test_no_package(spec: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert "has no such part" in found("a", "b")[0]


@pytest.mark.parametrize(
    ("version", "numbers"), [("1.32.0", (1, 32)), ("3.7.1+cu13", (3, 7)), ("4", (4,)), ("2.0rc1", (2,)), ("odd", ())]
)
def test_versions(version: str, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert vendor_sources.leading_numbers(version) == numbers
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert vendor_sources.version_of("anything") == version


def test_a_distribution_that_is_not_installed() -> None:
    assert vendor_sources.version_of("fusepatch-has-no-such-distribution") is None


def test_nothing_of_the_package_is_imported() -> None:
    pytest.importorskip("cudnn")
    code = (
        "import sys; from fusepatch.kernels.linear_attention import cudnn_hopper as a; "
        "from fusepatch.kernels.engram_gate import cudnn_engram as b; "
        "from fusepatch.kernels.gated_mlp import cudnn as c; "
        "assert a.drift() == c.drift() == () and all('triton is' in each for each in b.drift()); "  # which may be older
        "assert 'cudnn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
