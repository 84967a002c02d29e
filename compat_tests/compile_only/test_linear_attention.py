"""The Triton kernels around KDA and the gated delta rule, compiled without a GPU for SM90: their machine code."""

from __future__ import annotations

import functools
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fusepatch.kernels.linear_attention import prepare, prepare_per_head  # noqa: E402
from fusepatch.kernels.linear_attention.problem import GATES  # noqa: E402

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
pytestmark = pytest.mark.skipif(not NVDISASM.exists(), reason="this Triton brings no nvdisasm")

_FP32 = {"rate_ptr", "bias_ptr", "g_out_ptr", "beta_out_ptr", "norm_ptr", "grad_g_ptr", "grad_beta_ptr"}
_FP32 |= {"rate_sum_ptr", "bias_sum_ptr"}


@functools.cache
def compiled(kernel: Any, gate: str, groups: int) -> Any:
    """A kernel for bf16 tensors and fp32 parameters, aligned as PyTorch aligns them, 16 heads of 128."""
    has_parameters = gate != "given"
    return built(kernel, {
        "HEADS": 16, "VALUE_HEADS": 16 * groups, "WIDTH": 128, "ROWS": prepare._ROWS, "GATE": GATES.index(gate),
        "HAS_RATE": has_parameters, "HAS_BIAS": has_parameters,
    }, prepare._WARPS)  # fmt: skip


def built(kernel: Any, named: dict[str, Any], warps: int, unaligned: tuple[str, ...] = ()) -> Any:
    signature, constant, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in named:
            signature[name], constant[(index,)] = "constexpr", named[name]
            continue
        pointer = "*fp32" if name in _FP32 else "*bf16"
        signature[name] = (
            pointer if name.endswith("_ptr") else "fp32" if name in ("lower_bound", "beta_scale") else "i32"
        )
        if name.endswith(("_ptr", "_token", "_head")) and name not in ("beta_head", *unaligned):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constant, attributes)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


def machine_code(built: Any, folder: Path) -> list[str]:
    """Every instruction, without its predicate."""
    path = folder / "kernel.cubin"
    path.write_bytes(built.asm["cubin"])
    text = subprocess.run([NVDISASM, "-c", path], check=True, capture_output=True, text=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.+?);", text, re.MULTILINE)


def names(code: list[str]) -> Counter[str]:
    return Counter(line.split()[0].split(".")[0] for line in code)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kernel", ["_forward_kernel", "_backward_kernel"])
def test_kernel(tmp_path: Path, kernel: str, gate: str, groups: int) -> None:
    """Its target, no spills, no atomics, rows that move 16 bytes at a time, and 64-bit addresses."""
    check(compiled(getattr(prepare, kernel), gate, groups), tmp_path)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("kernel", ["_forward_kernel", "_backward_kernel"])
def test_kernel_with_a_gate_per_head(tmp_path: Path, kernel: str, groups: int) -> None:
    """The same."""
    named = {
        "HEADS": 16, "GROUP": groups, "MEMBERS": triton.next_power_of_2(groups), "WIDTH": 128,
        "ROWS": prepare_per_head._ROWS, "HAS_BIAS": True,
    }  # fmt: skip
    check(built(getattr(prepare_per_head, kernel), named, prepare_per_head._WARPS, ("g_head",)), tmp_path)


def check(built: Any, folder: Path) -> None:
    assert ".target sm_90a" in built.asm["ptx"]
    code = machine_code(built, folder)
    found = names(code)
    assert not found.keys() & {"LDL", "STL"}, found
    assert not found.keys() & {"ATOM", "ATOMG", "ATOMS", "RED", "REDG"}, found
    assert any(re.match(r"LDG\.E\S*\.128", line) for line in code)
    assert any(re.match(r"STG\.E\S*\.128", line) for line in code)
    addresses = [line for line in code if re.match(r"(LDG|STG)\b", line)]
    assert all(re.search(r"\[U?R\d+\.64", line) or ".U32+UR" in line for line in addresses), addresses
