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
                check.Shape(11, 4, 264, True, "copysign", True, 1e-20),
                check.Shape(5, 6, 40, False, "sign", False, 1e-6),
            )
            return check.run(case, device, steps)
        """)
    )
    return "faulty_check"


def test_right_kernels_pass() -> None:
    assert selfcheck.run(Check("fusepatch.kernels.engram_gate.check", CASE), CPU) == Verdict(Outcome.PASSED)


FAULTS = {
    "a mask that zeroes": ("raw_head if RESIDUAL else", "out_head * 0 if RESIDUAL else", "a masked token"),
    "no mean": ("square_x / WIDTH", "square_x", "out of"),
    "a tail left out": ("tail < WIDTH\n", "tail < WIDTH - 8\n", "nan"),
    "a gradient without the residual": ("grad_x_head += grad_out_head", "pass", "grad_x of"),
    "a slope of the other sign": ("* 0.5 / root", "* -0.5 / root", "grad_kv of"),
    "one stream's sum in another": ("tl.store(slot + WIDTH + head, sum_1_head)", "pass", "nan"),
    "sums that forget": ("so_far = step >= STREAMS", "so_far = step < 0", "grad_weight of"),
    "a token twice": ("(program + 1) * tokens // programs", "tokens", "grad_weight of"),
    "the value of one stream": ("tl.where(is_first, 0.0, grad_value_head)", "0.0", "grad_kv of"),
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
