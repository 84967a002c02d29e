"""The fused route's Triton kernels, compiled for SM90, SM100 and SM103 without a GPU, and what their code says.

What is compiled is what the launching code asks for: its launches on CPU tensors are recorded, and not run.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from fusepatch.kernels.gated_mlp import check, choose, dual_gemm  # noqa: E402

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
TARGETS = {90: ".target sm_90a", 100: ".target sm_100a", 103: ".target sm_103a"}
MOST_SHARED = 232448  # bytes per block, SM90 and SM100
MOST_TENSOR_MEMORY = 512  # columns
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SIZES = {"small": (7, 72, 136), "large": (2048, 64, 2048)}


class Launch(NamedTuple):
    """One launch: which kernel, on what, and with which constants and options."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class _Recorder:
    def __init__(self, kernel: Any, made: list[Launch]) -> None:
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.made.append(Launch(self.kernel, arguments, options))


@functools.cache
def launches(size: str, dtype: torch.dtype, activation: str) -> dict[str, Launch]:
    """Every launch that a call of this kind and its gradients may make, by what it writes."""
    tokens, hidden, inner = SIZES[size]
    x = torch.empty(tokens, hidden, dtype=dtype)
    weight, down, bias = (torch.empty(*shape, dtype=dtype) for shape in ((inner, hidden), (hidden, inner), (inner,)))
    made: list[Launch] = []
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_forward_kernel", "_backward_kernel"):
            patch.setattr(dual_gemm, name, _Recorder(getattr(dual_gemm, name), made))
        patch.setattr(dual_gemm, "_compiled", set())
        patch.setattr(dual_gemm, "_compile_the_rest", lambda *arguments: None)
        for want in (False, True):
            for biases in ((None, None), (bias, bias)):
                *_, gate_up = dual_gemm.dual_gemm_act(x, weight, weight, *biases, activation, want_gate_up=want)
                found[f"h{' and gate_up' if want else ''}{', biased' if biases[0] is not None else ''}"] = made[-1]
            gate_up = torch.empty(tokens, 2 * inner, dtype=dtype)
            dual_gemm.gemm_dact(x, down, gate_up, activation, want_h=want)
            found[f"d_gate_up{' and h' if want else ''}"] = made[-1]
    assert len(made) == len(found) == 6
    return found


def compiled(launch: Launch, capability: int) -> Any:
    kernel, arguments, options = launch
    options = dict(options)
    built_with = {name: options.pop(name) for name in ("num_warps", "num_stages", "maxnreg")}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    for index, name in enumerate(kernel.arg_names):
        value = given[name]
        if name in options or value is None:
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}{list(value.block_shape)}>"
        else:
            signature[name] = f"*{NAMES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"
    source = ASTSource(kernel, signature, constants, {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=built_with)


def machine_code(built: Any, folder: Path) -> list[str] | None:
    """Every instruction, without its predicate; None where this Triton's disassembler is older than its assembler."""
    path = folder / "kernel.cubin"
    path.write_bytes(built.asm["cubin"])
    done = subprocess.run([NVDISASM, "-c", path], capture_output=True, text=True)
    if done.returncode:
        return None
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.+?);", done.stdout, re.MULTILINE)


def loop(built: Any) -> str:
    """The loop over K, as Triton has it before it is lowered."""
    (found,) = re.findall(r"scf\.for .*?scf\.yield", built.asm["ttgir"], re.DOTALL)
    return str(found)


ALL = [
    (dtype, activation, size, capability, what)
    for dtype in NAMES
    for activation in choose.ACTIVATIONS
    for size in SIZES
    for capability in TARGETS
    for what in ("h", "h and gate_up", "h and gate_up, biased", "d_gate_up", "d_gate_up and h")
]
USUAL = {
    *itertools.product([torch.bfloat16], ["silu"], SIZES, [90, 100], ["h and gate_up, biased", "d_gate_up and h"]),
    *itertools.product([torch.float16], ["gelu"], ["large"], [90, 100], ["h", "d_gate_up and h"]),
    (torch.bfloat16, "silu", "large", 103, "h and gate_up"),
}
"""Each takes a second or two. The others are slow tests."""


@pytest.mark.parametrize(
    ("dtype", "activation", "size", "capability", "what"),
    [
        pytest.param(
            *case,
            marks=[] if case in USUAL else [pytest.mark.slow],
            id="-".join([NAMES[case[0]], *map(str, case[1:])]),
        )
        for case in ALL
    ],
)
def test_code(tmp_path: Path, dtype: torch.dtype, activation: str, size: str, capability: int, what: str) -> None:
    launch = launches(size, dtype, activation)[what]
    try:
        built = compiled(launch, capability)
    except Exception as error:
        if capability == 103 and "sm_103a" in str(error):
            pytest.skip("this Triton does not know SM103")
        raise
    ptx = built.asm["ptx"]
    assert TARGETS[capability] in ptx
    assert built.metadata.shared <= MOST_SHARED
    forward = not what.startswith("d_gate_up")

    # The tensor cores of the architecture: one product per accumulator and iteration.
    product = "wgmma.mma_async" if capability == 90 else "tcgen05.mma"
    assert product in ptx
    accumulators = _accumulators(loop(built), capability)
    assert len(accumulators) == len(set(accumulators)) == (2 if forward else 1), accumulators
    if capability != 90:
        assert "tcgen05.ld" in ptx
        assert 0 < built.metadata.tmem_size <= MOST_TENSOR_MEMORY

    # TMA for all that is loaded and stored; so addresses are 64-bit, and edges the hardware's affair.
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::(cluster|cta)\.global", ptx)
    assert "cp.async.bulk.tensor.2d.global.shared::cta" in ptx
    assert not re.search(r"\b(ld|st)\.global", ptx)

    code = machine_code(built, tmp_path) if NVDISASM.exists() else None
    if code is None:
        pytest.skip("no nvdisasm for this target: PTX alone was looked at")
    names = Counter(line.split()[0].split(".")[0] for line in code)
    assert names["HGMMA" if capability == 90 else "UTCHMMA"]
    assert names["UTMALDG"]
    assert names["UTMASTG"] >= {"h": 1, "d_gate_up": 2}.get(what, 3)
    assert not names.keys() & {"LDL", "STL", "LDG", "STG", "LDGSTS"}, names


def _accumulators(body: str, capability: int) -> list[str]:
    """What each product in the loop adds to."""
    if capability == 90:
        return re.findall(r"ttng\.warp_group_dot %\S+, %\S+, (%\S+)", body)
    return re.findall(r"ttng\.tc_gen5_mma %\S+, %\S+, (%\w+)", body)


def test_feeding_an_accumulator_twice_would_be_seen() -> None:
    """Liger's issue 1435: two products into one accumulator in an iteration came out wrong on SM100."""
    twice = "ttng.tc_gen5_mma %x, %w, %gate, %true\nttng.tc_gen5_mma %x, %v, %gate, %true"
    assert _accumulators(twice, 100) == ["%gate", "%gate"]
    assert _accumulators("%a = ttng.warp_group_dot %x, %w, %arg34 {", 90) == ["%arg34"]


def test_the_self_check_has_a_shape_for_each_tile() -> None:
    tiles = {dual_gemm.tile_of(tokens, inner) for tokens, _, inner in check._FUSED_SHAPES}
    assert tiles == {dual_gemm.SMALL, dual_gemm.LARGE}


def test_every_launch_of_a_call_is_known_to_capture() -> None:
    """As many kinds as there are launches, each with a bias or without."""
    kinds = {kind for biased in (False, True) for kind in dual_gemm._kinds(biased)}
    assert len(kinds) == len(launches("small", torch.bfloat16, "silu")) == 6
