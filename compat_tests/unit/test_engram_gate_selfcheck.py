"""The self-check of the Engram gate's kernels finds faults put into them (run by Triton's interpreter)."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from fusepatch import selfcheck, settings
from fusepatch.selfcheck import Check, Outcome, Verdict

pytest.importorskip("triton")
from fusepatch.kernels.engram_gate import triton_kernels

CPU = torch.device("cpu")
# The interpreter truncates to bf16 where the hardware rounds, which the check notices: fp32 it is.
CASE = "triton float32"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FUSEPATCH_CACHE_DIR", str(tmp_path / "cache"))
    settings.install(None)
    selfcheck.forget()
    yield
    selfcheck.forget()


def faulty_check(folder: Path, old: str, new: str) -> str:
    """A check module whose kernels are ours with one piece of text replaced; small shapes, for the interpreter."""
    text = Path(triton_kernels.__file__).read_text()
    assert old in text
    (folder / "faulty_kernels.py").write_text(text.replace(old, new))
    (folder / "faulty_check.py").write_text(
        textwrap.dedent("""
        import dataclasses
        from fusepatch.kernels.engram_gate import check, choose

        def run(case, device, steps):
            choose.BACKENDS = tuple(
                dataclasses.replace(found, module="faulty_kernels") if found.name == "triton" else found
                for found in choose.BACKENDS
            )
            check._SHAPES = (
                check.Shape(7, 2, 88, True, "copysign", True, 1e-20),
                check.Shape(5, 5, 24, False, "sign", False, 1e-6),
                check.Shape(3, 2, 40, False, "sign", False, 1e-6, True),
            )
            return check.run(case, device, steps)
        """)
    )
    return "faulty_check"


FAULTS = {  # more of them are tried in numerics/interpreted_engram_gate.py
    "a mask that zeroes": (
        "out_head += x_head",
        "out_head += tl.where(on[:, None], x_head, 0.0) if MASKED else x_head",
        "a masked token",
    ),
    "an exception": (
        "    tokens, streams, width = x_MSD.shape\n",
        "    raise RuntimeError('illegal access')\n",
        "illegal",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_fail(fault: str, tmp_path: Path) -> None:
    old, new, what = FAULTS[fault]
    found = selfcheck.run(Check(faulty_check(tmp_path, old, new), CASE), CPU)
    assert found.outcome is Outcome.FAILED
    assert what in found.what


def test_small_shapes_find_nothing_in_what_is_right(tmp_path: Path) -> None:
    module = faulty_check(tmp_path, "* 0.5 / root", "* 0.5 / root")
    assert selfcheck.run(Check(module, CASE), CPU) == Verdict(Outcome.PASSED)
