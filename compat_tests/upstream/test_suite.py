"""How the outcomes of another project's tests are read and compared, and the command for FLA's, on small folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from upstream import fla_suite, suite

LIBRARY = """
import torch
from torch import nn

class TinyMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down_proj, self.act_fn = nn.Linear(16, 8, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
"""
HEAD = """
import pytest
import torch
from transformers.models.tiny.modeling_tiny import TinyMLP
is_patched = hasattr(TinyMLP.forward, "__fusepatch__")
"""
SAME = """
import random, unittest

def test_call(): TinyMLP()(torch.ones(2, 8))
def test_fails(): assert False
def test_skipped(): pytest.skip("as it should")
def test_random(): assert torch.randn(1).item() < 9 and random.random() == pytest.approx(0.844, abs=1e-3)

class TestParts(unittest.TestCase):
    def test_parts(self):
        for part in range(4):
            with self.subTest(part=part):
                if part == 1: self.skipTest("this part")
                assert part != 2

@pytest.fixture
def unclean():
    yield
    raise OSError("at the end")

def test_unclean(unclean): pass
"""
DIFFERENT = """
def test_notices(): assert not is_patched
def test_skips_itself():
    if is_patched: pytest.skip("patched")

if is_patched:
    def test_of_its_own(): pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests laid out as FLA's are, over a library that is found as transformers is."""
    package = tmp_path / "library" / "transformers" / "models" / "tiny"
    package.mkdir(parents=True)
    for parent in (package, *package.parents[:2]):
        (parent / "__init__.py").touch()
    (package / "modeling_tiny.py").write_text(LIBRARY)
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(tmp_path / "library"), prepend=os.pathsep)
    models = tmp_path / "tests" / "models"
    models.mkdir(parents=True)
    (models / "__init__.py").touch()
    (models / "test_same.py").write_text(HEAD + SAME)
    (models / "test_different.py").write_text(HEAD + DIFFERENT)
    (models / "test_broken.py").write_text("import a_module_that_is_not_there\n")
    # Not for these tests: it would fail them all.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    return tmp_path


def show(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, str]:
    """The command's exit status and output; a word stands for a test file of the folder."""
    given = [f"tests/models/test_{name}.py" if name.isalpha() else name for name in arguments]
    code = fla_suite.main([str(folder), *given])
    return code, capsys.readouterr().out


@pytest.mark.usefixtures("reference_backend")
def test_equal_outcomes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = show(capsys, folder, "same", "broken", "--require-native")
    assert code == 0, out
    assert "unpatched: 2 passed, 4 failed, 1 skipped, 0 native calls" in out
    assert any(line.startswith("patched: 2 passed, 4 failed, 1 skipped, 1 native calls") for line in out.splitlines())
    assert "fusepatch: 1 native calls; fused 1" in out
    assert "FAILED tests/models/test_same.py::test_fails" in out
    assert "ERROR tests/models/test_broken.py" in out
    assert out.endswith("every test ends the same\n")


@pytest.mark.usefixtures("reference_backend")
def test_different_outcomes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = show(capsys, folder, "different")
    assert code == 1
    assert out.splitlines()[-4:] == [
        "3 tests end differently",
        "  tests.models.test_different::test_notices: unpatched passed; patched failure",
        "  tests.models.test_different::test_skips_itself: unpatched passed; patched skipped",
        "  tests.models.test_different::test_of_its_own: unpatched not run; patched passed",
    ]


def test_no_native_call(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine for which there is no kernel: an error only where native calls are required."""
    said = "fusepatch: 0 native calls; original 1; declined: cpu 1"
    monkeypatch.setattr(suite, "run", lambda *_: suite.Run({"a": "passed"}, 0, 0, said))
    code, out = show(capsys, folder, "same")
    assert code == 0
    assert said in out
    code, out = show(capsys, folder, "same", "--require-native")
    assert code == 1
    assert out.endswith("every test ends the same\nno call ran natively\n")


def test_nothing_compared(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [suite.Run({}, 0, 139, "the crash"), suite.Run({"a": "skipped"}, 0, 0, "")]
    monkeypatch.setattr(suite, "run", lambda *_: runs.pop(0))
    code, out = show(capsys, folder, "same")
    assert code == 1
    assert "the crash" in out
    assert "did not come to its end, or ran nothing (unpatched)" in out
    runs[:] = [suite.Run({"a": "skipped"}, 0, 0, "")] * 2
    code, out = show(capsys, folder, "same")
    assert code == 1
    assert out.endswith("no test passes unpatched, so nothing was compared\n")


def test_no_such_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fla_suite.main([str(folder), "tests/no.py"])
    assert "holds none of these files" in capsys.readouterr().err


REPORT = """<testsuites><testsuite>
<testcase classname="t" name="good" /><testcase classname="t" name="gone"><skipped /></testcase>
<testcase classname="t" name="parts"><skipped /><failure /><skipped /></testcase>
<testcase classname="t" name="twice"><failure /></testcase><testcase classname="t" name="twice"><error /></testcase>
</testsuite></testsuites>"""


def test_each_outcome_is_read() -> None:
    found = suite.read(REPORT)
    expected = {
        "t::good": "passed",
        "t::gone": "skipped",
        "t::parts": "failure, skipped, skipped",
        "t::twice": "error, failure",
    }
    assert found == expected
    run = suite.Run(found, 0, 1, "")
    assert run.failed() == ["t::parts", "t::twice"]
    assert run.count() == "1 passed, 2 failed, 1 skipped"
