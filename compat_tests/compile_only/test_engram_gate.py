"""The Triton kernels of the Engram gate, compiled without a GPU for SM90 and SM100: their machine code."""

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

from fusepatch.kernels.engram_gate import sizes  # noqa: E402
from fusepatch.kernels.engram_gate import triton_kernels as kernels  # noqa: E402

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
pytestmark = pytest.mark.skipif(not NVDISASM.exists(), reason="this Triton brings no nvdisasm")

CAPABILITIES = pytest.mark.parametrize("capability", [90, 100])
MOST_REGISTERS = 65536
MOST_SHARED, SHARED_OF_DRIVER = 227 * 1024, 1024  # per block, SM90 and SM100


@functools.cache
def compiled(
    kernel: Any,
    constants: tuple[tuple[str, Any], ...],
    warps: int,
    capability: int,
    most: int | None = None,
    dtype: str = "bf16",
) -> Any:
    """A kernel for tensors of a dtype, fp32 weights, aligned as PyTorch aligns them."""
    named = dict(constants)
    types = {
        "weight_ptr": "*fp32",
        "key_weight_ptr": "*fp32",
        "saved_ptr": "*fp32",
        "partial_ptr": "*fp32",
        "mask_ptr": "*u8",
    }
    types |= {"grad_weight_ptr": "*fp32", "eps": "fp32"}
    signature, constant, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in named:
            signature[name], constant[(index,)] = "constexpr", named[name]
            continue
        signature[name] = types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        if (name.endswith("_ptr") and name != "mask_ptr") or name == "size":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constant, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "maxnreg": most}
    )


def machine_code(built: Any, folder: Path) -> list[str]:
    """Every instruction, without its predicate."""
    path = folder / "kernel.cubin"
    path.write_bytes(built.asm["cubin"])
    text = subprocess.run([NVDISASM, "-c", path], check=True, capture_output=True, text=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.+?);", text, re.MULTILINE)


def names(code: list[str]) -> Counter[str]:
    return Counter(line.split()[0].split(".")[0] for line in code)


def registers(code: list[str]) -> int:
    return 1 + max(int(number) for line in code for number in re.findall(r"\bR(\d+)\b", line))


ITEM = {"bf16": 2, "fp32": 4}


def forward_of(streams: int, width: int, capability: int, dtype: str = "bf16", **changes: Any) -> tuple[Any, Any]:
    shape = sizes.shape_of(streams, width, ITEM[dtype], weights=2 if changes.get("ROUNDED") else 1)
    constants = {"STREAMS": streams, "WIDTH": width, "HEAD": shape.head, "TAIL": shape.tail, "MASKED": False}
    constants |= {"RESIDUAL": True, "COPYSIGN": True, "ROUNDED": False, "TOGETHER": shape.forward_together}
    constants |= {"ONE_STREAM": shape.forward_one_stream, "THREADS": shape.forward_threads}
    constants |= {"STAGES": shape.forward_stages, **changes}
    kernel, most = kernels._forward_kernel, shape.forward_registers
    return compiled(kernel, tuple(constants.items()), shape.forward_warps, capability, most, dtype), shape


def backward_of(streams: int, width: int, capability: int, dtype: str = "bf16", **changes: Any) -> tuple[Any, Any]:
    shape = sizes.shape_of(streams, width, ITEM[dtype])
    constants = {"STREAMS": streams, "WIDTH": width, "HEAD": shape.head, "TAIL": shape.tail, "MASKED": False}
    constants |= {"RESIDUAL": True, "WANT_WEIGHT": True, "HELD": shape.held, "STAGES": shape.backward_stages}
    constants |= {"COPY_WEIGHT": shape.backward_copies_weight, "THREADS": shape.backward_threads, **changes}
    kernel, warps = kernels._backward_kernel, shape.backward_warps
    return compiled(kernel, tuple(constants.items()), warps, capability, dtype=dtype), shape


def check(built: Any, warps: int, folder: Path, architecture: str, programs: int = 1) -> list[str]:
    """What holds of each kernel: its target, no spills, no atomics, 64-bit addresses, and that so many programs fit."""
    assert architecture in built.asm["ptx"]
    code = machine_code(built, folder)
    found = names(code)
    assert not found.keys() & {"LDL", "STL"}, found
    assert not found.keys() & {"ATOM", "ATOMG", "ATOMS", "RED", "REDG"}, found
    assert registers(code) * warps * 32 * programs <= MOST_REGISTERS
    assert (built.metadata.shared + SHARED_OF_DRIVER) * programs <= MOST_SHARED + SHARED_OF_DRIVER
    addresses = [line for line in code if re.match(r"(LDG|STG)\b", line)]
    assert addresses
    # An address is a pair of registers; a 32-bit offset may be added to one, within a row.
    assert all(re.search(r"\[U?R\d+\.64", line) or ".U32+UR" in line for line in addresses), addresses
    return code


TARGETS = {90: ".target sm_90a", 100: ".target sm_100a"}


FORWARD = {
    "": {},
    "masked": {"MASKED": True},
    "gated": {"RESIDUAL": False, "COPYSIGN": False},
    "rounded": {"RESIDUAL": False, "COPYSIGN": False, "ROUNDED": True},
}


@CAPABILITIES
@pytest.mark.parametrize("form", FORWARD)
@pytest.mark.parametrize("width", [5120, 2048])
def test_forward(tmp_path: Path, width: int, form: str, capability: int) -> None:
    built, shape = forward_of(4, width, capability, **FORWARD[form])
    code = check(built, shape.forward_warps, tmp_path, TARGETS[capability], shape.forward_programs)
    # The ring: rows are copied to shared memory ahead of their use, each once, and 16 bytes at a time.
    found = names(code)
    assert found["LDGSTS"]
    # What is loaded directly: the mask, and rows once more where a dot is next to 0, a few columns at a time.
    assert not any(re.match(r"LDG\b.*\.128", line) for line in code)
    assert bool(found["LDG"]) == (form != "rounded")
    assert found["BAR"] <= 8 or form == "rounded"  # three or four where threads' sums meet, the others next to 0
    assert any(line.startswith("STG.E.128") for line in code)


BACKWARD = {
    "": {},
    "masked": {"MASKED": True},
    "gated": {"RESIDUAL": False},
    "without the weight's gradient": {"WANT_WEIGHT": False},
}


@CAPABILITIES
@pytest.mark.parametrize("form", BACKWARD)
@pytest.mark.parametrize("width", [5120, 2048])
def test_backward(tmp_path: Path, width: int, form: str, capability: int) -> None:
    built, shape = backward_of(4, width, capability, **BACKWARD[form])
    code = check(built, shape.backward_warps, tmp_path, TARGETS[capability], shape.backward_programs)
    # Only the four saved numbers are loaded directly: those of the first step, and those of the next in the loop.
    assert names(code)["LDGSTS"]
    assert names(code)["LDG"] == 8


@CAPABILITIES
@pytest.mark.parametrize("want_weight", [True, False], ids=["", "without the weight's gradient"])
def test_float32(tmp_path: Path, want_weight: bool, capability: int) -> None:
    """Rows of twice the bytes, of which the ring holds one step more without the weight's gradient."""
    built, shape = backward_of(4, 5120, capability, "fp32", WANT_WEIGHT=want_weight)
    check(built, shape.backward_warps, tmp_path, TARGETS[capability], shape.backward_programs)
    built, shape = forward_of(4, 5120, capability, "fp32")
    check(built, shape.forward_warps, tmp_path, TARGETS[capability], shape.forward_programs)


@CAPABILITIES
def test_sums_in_memory_are_not_loaded_ahead(tmp_path: Path, capability: int) -> None:
    built, shape = backward_of(6, 1032, capability)
    code = check(built, shape.backward_warps, tmp_path, TARGETS[capability])
    assert not names(code)["LDGSTS"]


@CAPABILITIES
def test_the_sum_over_programs(tmp_path: Path, capability: int) -> None:
    shape = sizes.shape_of(4, 5120)
    constants = (("ROWS", shape.sum_rows), ("COLUMNS", shape.sum_columns))
    check(compiled(kernels._weight_kernel, constants, 4, capability), 4, tmp_path, TARGETS[capability])
