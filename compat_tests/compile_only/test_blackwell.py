"""The kernels of the Blackwell backend, compiled without a GPU: what they say, what they do in a model of the hardware,
and what their host side would launch. Legend as in blackwell_forward.py.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fake_cuda
import machine_code
import numpy as np
import ptx_machine
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusepatch.kernels.cute.tile import SHARED_LIMIT, WIDTH_K
from fusepatch.kernels.gated_mlp.blackwell_configuration import (
    CHUNK_BYTES,
    NARROW,
    SQUARE,
    WIDE,
    Backward,
    Forward,
    backward_configuration,
    forward_configuration,
)
from support import relative_error

pytestmark = [machine_code.needs_the_dsl]
needs_a_compiler = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="no C compiler")

ARCHS = ["sm_100a", "sm_103a"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
TILES = {"wide": WIDE, "narrow": NARROW}
Configuration = Forward | Backward
Build = Callable[..., tuple[Any, Path]]
EVERY = [
    configuration
    for dtype in (torch.bfloat16, torch.float16)
    for activation in ACTIVATIONS
    for second in (False, True)
    for configuration in (
        forward_configuration(dtype, activation, second, WIDE),
        forward_configuration(dtype, activation, second, NARROW),
        backward_configuration(dtype, activation, second, SQUARE),
    )
]
OFTEN = [
    forward_configuration(torch.bfloat16, "silu", True, WIDE),
    backward_configuration(torch.bfloat16, "silu", True, SQUARE),
    forward_configuration(torch.bfloat16, "silu", False, NARROW),
    forward_configuration(torch.float16, "gelu", True, NARROW),
    backward_configuration(torch.float16, "gelu", False, SQUARE),
    forward_configuration(torch.float16, "gelu", False, WIDE),
]


def named(configuration: Configuration) -> str:
    if isinstance(configuration, Forward):
        results = "h and gate_up" if configuration.keep_gate_up else "h"
    else:
        results = "d_gate_up and h" if configuration.want_h else "d_gate_up"
    return f"{configuration.dtype}-{configuration.activation}-{results}-{configuration.tile.columns}"


def kinds(often: int) -> list[Any]:
    """Two dtypes, three activations, three tiles, with and without the second result; all but a few are slow."""
    return [
        pytest.param(each, marks=[] if each in OFTEN[:often] else [pytest.mark.slow], id=named(each)) for each in EVERY
    ]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A kernel, once for all tests, and the folder with its machine code."""

    @functools.cache
    def build(configuration: Configuration, arch: str = ARCHS[0]) -> tuple[Any, Path]:
        kernel = "blackwell_forward" if isinstance(configuration, Forward) else "blackwell_backward"
        module = importlib.import_module(f"fusepatch.kernels.gated_mlp.{kernel}")
        folder = tmp_path_factory.mktemp("kernel")
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir={folder} warnings{{nvvm}}"
        return module.build(configuration, options), folder

    return build


# ------------------------------------------------------------------------------------------- L0: what must hold at all


@pytest.mark.parametrize("configuration", EVERY, ids=named)
def test_tiles_fit(configuration: Configuration) -> None:
    assert configuration.shared_bytes <= SHARED_LIMIT
    assert configuration.tensor_columns in (32, 64, 128, 256, 512)


@pytest.mark.parametrize(
    "changes", [{"stages": 5}, {"rows": 64}, {"columns": 512}, {"columns": 192}, {"cluster": 2}], ids=str
)
def test_a_tile_that_does_not_fit(changes: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        forward_configuration(torch.bfloat16, "silu", True, replace(WIDE, **changes))
    with pytest.raises(AssertionError):
        backward_configuration(torch.bfloat16, "silu", True, replace(SQUARE, **changes))


# ---------------------------------------------------------------------------------- L1 and L2: what was compiled


@machine_code.needs_the_tools
@pytest.mark.parametrize(
    ("configuration", "arch"),
    [
        pytest.param(*kind.values, arch, marks=kind.marks, id=f"{kind.id}-{arch}")
        for arch, often in zip(ARCHS, (6, 2), strict=True)
        for kind in kinds(often)
    ],
)
def test_machine_code(
    compiled: Build,
    capfd: pytest.CaptureFixture[str],
    configuration: Configuration,
    arch: str,
) -> None:
    kernel, folder = compiled(configuration, arch)
    assert "warning" not in capfd.readouterr().err  # of the DSL's checker of synchronisation
    text, ptx = machine_code.disassembled(folder), kernel.artifacts.PTX
    assert f".target {arch}" in ptx
    lines = machine_code.instructions(text)
    operations = Counter(line.split()[0].split(".")[0] for line in lines)

    # The tensor cores: all of a stage's instructions once, each of 128 x columns x 16, by one CTA, fp32 results.
    assert operations["UTCHMMA"] == WIDTH_K // 16, operations
    assert not any("2CTA" in line or "MULTICAST" in line for line in lines)
    type_ = 1 if configuration.dtype == "bfloat16" else 0
    b_major = 0 if isinstance(configuration, Forward) else 1 << 16
    shape = 128 // 16 << 24 | configuration.tile.columns // 8 << 17
    instruction = shape | b_major | type_ << 10 | type_ << 7 | 1 << 4
    assert {int(value) for value in re.findall(r"mov\.b32\s+%r\d+, (\d{9});", ptx)} == {instruction}
    assert operations["UTCBAR"] == 2  # behind a stage, and behind a tile

    # Tensor memory: read 32 columns at a time, in loops over pieces; h from gate and up.
    (allocated,) = re.findall(r"mov\.b32\s+(%r\d+), (\d+);\s+tcgen05\.alloc\S+\s+\[%r\d+\], \1;", ptx)
    assert int(allocated[1]) == configuration.tensor_columns
    assert all(line.split()[0] == "LDTM.x32" for line in lines if line.startswith("LDTM"))
    counted = operations["LDTM"], operations["UTMALDG"], operations["UTMASTG"]
    if isinstance(configuration, Forward):
        results, chunks = configuration.results, configuration.chunks
        assert counted == (chunks * sum(2 if role == "h" else 1 for role in results), 3, chunks * len(results))
    else:
        assert counted == (1, 1 + configuration.tile.columns // 64 + 2, 3 if configuration.want_h else 2)

    # TMA for all that is loaded and stored, and nothing besides: so no address is computed in 32 bits.
    assert not operations.keys() & {"LDG", "STG", "LD", "ST", "LDGSTS", "ATOMG", "RED"}, operations
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    announced = re.findall(r"mbarrier\.arrive\.expect_tx\S+\s+\S+ \[\S+\], (%r\d+);", ptx)
    chunk_bytes = [] if isinstance(configuration, Forward) else [2 * CHUNK_BYTES]
    assert [int(constants[each]) for each in announced] == [configuration.tile.stage_bytes, *chunk_bytes]

    # Registers: nothing spilled, and rounding takes two values at a time.
    assert not operations.keys() & {"LDL", "STL", "F2F"}, operations
    used = machine_code.resources(folder)
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] <= 168, used  # far from 255: ptxas has room


def test_the_compilers_checker_sees_what_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """That it warns at all."""
    import cutlass.cute as cute

    from fusepatch.kernels.gated_mlp import blackwell_forward

    monkeypatch.setattr(cute.arch, "fence_view_async_tmem_load", lambda: None)
    configuration = forward_configuration(torch.bfloat16, "silu", False, NARROW)
    blackwell_forward.build(configuration, "--enable-tvm-ffi --gpu-arch sm_100a warnings{nvvm}")
    assert "warning" in capfd.readouterr().err


# ------------------------------------------------------------------- L3 to L6: what the PTX does in a model of the GPU


def shapes_of(configuration: Configuration, tokens: int, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Of every operand, in the order of the kernel's arguments; the last one may be absent."""
    if isinstance(configuration, Forward):
        weights = {"w_gate": (inner, hidden), "w_up": (inner, hidden)}
        shapes = {"x": (tokens, hidden), **weights, "h": (tokens, inner), "gate_up": (tokens, 2 * inner)}
        return {name: shape for name, shape in shapes.items() if configuration.keep_gate_up or name != "gate_up"}
    both = dict.fromkeys(("gate_up", "d_gate_up"), (tokens, 2 * inner))
    shapes = {"dout": (tokens, hidden), "w_down": (hidden, inner), **both, "h": (tokens, inner)}
    return {name: shape for name, shape in shapes.items() if configuration.want_h or name != "h"}


def results_of(configuration: Configuration) -> tuple[str, ...]:
    return ("h", "gate_up") if isinstance(configuration, Forward) else ("d_gate_up", "h")


def expected(configuration: Configuration, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In fp64, with the roundings of reference.py and of the kernels."""
    act = ACTIVATIONS[configuration.activation]
    dtype = getattr(torch, configuration.dtype)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    if isinstance(configuration, Forward):
        gate_MI, up_MI = ((exact["x"] @ exact[name].T).to(dtype) for name in ("w_gate", "w_up"))
        h_MI = (act(gate_MI.double()) * up_MI.double()).to(dtype)
        return {"h": h_MI, "gate_up": torch.cat([gate_MI, up_MI], dim=1)}
    gate_MI, up_MI = (half.requires_grad_() for half in exact["gate_up"].chunk(2, dim=1))
    h_MI = act(gate_MI) * up_MI
    d_gate_MI, d_up_MI = torch.autograd.grad(h_MI, [gate_MI, up_MI], exact["dout"] @ exact["w_down"])
    return {"h": h_MI.detach().to(dtype), "d_gate_up": torch.cat([d_gate_MI, d_up_MI], dim=1).to(dtype)}


@dataclass(frozen=True)
class Call:
    """One launch of the exported kernel, and its operands."""

    configuration: Configuration
    program: ptx_machine.Program
    launched: fake_cuda.Launched
    memory: dict[int, Any]
    tensors: dict[str, Tensor]

    def run(self, seed: int, program: ptx_machine.Program | None = None) -> None:
        """Every CTA, one after the other."""
        for name in results_of(self.configuration):
            if name in self.tensors:
                self.tensors[name].fill_(float("nan"))
        blocks = self.launched.grid[0]
        for block in range(blocks):
            ptx_machine.Machine(
                program or self.program,
                self.launched.arguments,
                self.memory,
                block,
                blocks,
                self.configuration.dtype,
                seed * 1000 + block,
                self.launched.shared_bytes,
            ).run()

    def errors(self) -> dict[str, float]:
        """Of each result."""
        right = expected(self.configuration, self.tensors)
        return {name: relative_error(self.tensors[name], right[name]) for name in right if name in self.tensors}


Launch = Callable[..., Call]


@pytest.fixture(scope="module")
def launch(compiled: Build) -> Launch:
    @functools.cache
    def loaded(configuration: Configuration) -> tuple[Any, Any, ptx_machine.Program]:
        kernel, folder = compiled(configuration)
        return *fake_cuda.load(kernel, folder), ptx_machine.parse(kernel.artifacts.PTX)

    def run(configuration: Configuration, tokens: int, hidden: int, inner: int, ctas: int) -> Call:
        start, launched, program = loaded(configuration)
        generator = torch.Generator().manual_seed(tokens * hidden + inner)
        dtype = getattr(torch, configuration.dtype)
        scales = {"w_gate": hidden**-0.5, "w_up": hidden**-0.5, "w_down": hidden**-0.5}
        shapes = shapes_of(configuration, tokens, hidden, inner)
        tensors = {
            name: (torch.randn(shape, generator=generator) * scales.get(name, 1.0)).to(dtype)
            for name, shape in shapes.items()
        }
        at = {name: 0x7F1000000000 + index * 0x10000000 for index, name in enumerate(tensors)}
        given = [fake_cuda.tensor(at[name], shape, configuration.dtype) for name, shape in shapes.items()]
        start(*given, *[None] * (5 - len(given)), ctas)
        memory = {at[name]: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in tensors.items()}
        return Call(configuration, program, launched(), memory, tensors)

    return run


SHAPES = [
    pytest.param(1, 8, 8, 4, id="one row"),
    pytest.param(129, 264, 136, 1, id="ragged, in one CTA"),
    pytest.param(300, 584, 72, 2, id="more stages than the ring has", marks=pytest.mark.slow),
    pytest.param(1100, 72, 264, 5, id="more tiles than a group has", marks=pytest.mark.slow),
]


@needs_a_compiler
@pytest.mark.parametrize(("tokens", "hidden", "inner", "ctas"), SHAPES)
@pytest.mark.parametrize("configuration", kinds(6))
def test_the_kernel_computes_what_it_should(
    launch: Launch, configuration: Configuration, tokens: int, hidden: int, inner: int, ctas: int
) -> None:
    call = launch(configuration, tokens, hidden, inner, ctas)
    call.run(seed=1)
    # Sums in another order round one value in thousands the other way: half a unit in the last place of it.
    assert all(error < 5e-4 for error in call.errors().values()), call.errors()


@needs_a_compiler
@pytest.mark.parametrize(
    "seeds", [range(2, 5), pytest.param(range(6, 60), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("configuration", [*OFTEN[:2], replace(OFTEN[2], keep_gate_up=True)], ids=named)
def test_in_any_order(launch: Launch, configuration: Configuration, seeds: range) -> None:
    """Warps, TMA and the tensor cores take turns as the seed has it; five tiles, in one CTA, through every stage."""
    call = launch(configuration, 520, 200, 56, 1)
    found = set()
    for seed in seeds:
        call.run(seed)
        found.add(tuple(call.errors().values()))
    assert len(found) == 1  # bit for bit the same
    assert max(found.pop()) < 5e-4


_MOVE = r"mov\.b32\s+(%r\d+), (\d+);"
_SHIFT = r"shl\.b32\s+(%r\d+), (%r\d+), WIDTH;(?=\s+add\.s32)"
_PREDICATE = r"(?=(?:\s+mov\.b32[^;]*;)+\s+tcgen05\.mma)"
# Each is a fault that someone could write, as an edit of the PTX: pattern, replacement, how many places (0: all).
MUTANTS = {
    "the load from tensor memory is not waited for": (r"tcgen05\.wait::ld\.sync\.aligned;", "", 0),
    "no fence behind a wait": (r"tcgen05\.fence::after_thread_sync;", "", 0),
    "no fence before a release": (r"tcgen05\.fence::before_thread_sync;", "", 0),
    "no fence before a TMA store": (r"fence\.proxy\.async\.shared::cta;", "", 0),
    "no barrier before a TMA store": (r"(fence\.proxy\.async(?:(?!bar\.sync).)*?)bar\.sync\s+1, 128;", r"\1", 0),
    "a buffer is written again before it is read": (r"cp\.async\.bulk\.wait_group\.read\s+0;", "", 0),
    "a stage is released before it is read": ("", "first", 1),
    "accumulators are never released": (r"mbarrier\.arrive\.shared\.b64[^;]*;", "", 0),
    "accumulators are free after two warps": (r"mov\.b32\s+(%r\d+), (4);(?=\s+mbarrier\.init)", "halve", 1),
    "accumulators are free after eight warps": (r"mov\.b32\s+(%r\d+), (4);(?=\s+mbarrier\.init)", "double", 1),
    "too few bytes are announced": (_MOVE + r"(?=\s+mbarrier\.arrive\.expect_tx)", "halve", 1),
    "too many bytes are announced": (_MOVE + r"(?=\s+mbarrier\.arrive\.expect_tx)", "double", 1),
    "half of the columns are allocated": (_MOVE + r"(?=\s+tcgen05\.alloc)", "halve", 1),
    "tensor memory is not freed": (r"tcgen05\.dealloc[^;]*;", "", 1),
    "the first instruction of a tile adds": (
        rf"setp\.ne\.b32\s+(%p\d+), %r\d+, 0;{_PREDICATE}",
        r"mov.pred \1, -1;",
        1,
    ),
    "every instruction overwrites": (rf"mov\.pred\s+(%p\d+), -1;{_PREDICATE}", r"mov.pred \1, 0;", 0),
    "half of the columns are multiplied": (r"mov\.b32\s+(%r\d+), (\d{9});", "narrower", 0),
    "an instruction reads the wrong columns of K": (r"add\.s32\s+(%r\d+), (%r\d+), 4;", r"add.s32 \1, \2, 2;", 0),
    "the epilogue does not swizzle": (r"and\.b32\s+(%r\d+), (%r\d+), 112;", r"and.b32 \1, \2, 0;", 0),
    "the second accumulators overlap the first": (_SHIFT, r"shl.b32 \1, \2, 5;", 1),
    "phases never turn": (r"xor\.b32\s+(%r\d+), \1, (%r\d+);", "", 0),
    "gate and up change places": ("", "swap", 1),
}


def _mutated(ptx: str, name: str, columns: int) -> str:
    pattern, replacement, count = MUTANTS[name]
    scaled = {"halve": 0.5, "double": 2.0}
    if replacement == "first":  # the stage's commit, put in front of its first instruction
        commit = re.findall(r"tcgen05\.commit[^;]*;", ptx)[0]
        return re.sub(r"(?=tcgen05\.mma)", commit + "\n", ptx.replace(commit, "", 1), count=1)
    if replacement == "swap":
        first, second = re.findall(r"(?<=cache_hint )\[%r\d+\+\d+\]", ptx)[1:3]
        return ptx.replace(first, "there").replace(second, first).replace("there", second)

    def change(match: re.Match[str]) -> str:
        if replacement in scaled:
            return f"mov.b32 {match[1]}, {int(int(match[2]) * scaled[replacement])};"
        if replacement == "narrower":
            return f"mov.b32 {match[1]}, {int(match[2]) - (columns // 16 << 17)};"
        return match.expand(replacement)

    pattern = pattern.replace("WIDTH", f"{columns.bit_length() - 1}")
    mutant, places = re.subn(pattern, change, ptx, count=count, flags=re.DOTALL)
    assert places, f"nothing to change: {pattern}"
    return mutant


@needs_a_compiler
@pytest.mark.parametrize(
    ("configuration", "name"),
    [
        pytest.param(
            each,
            name,
            marks=[pytest.mark.slow] if isinstance(each, Backward) else [],
            id=f"{type(each).__name__.lower()}-{name}",
        )
        for each in (replace(OFTEN[2], keep_gate_up=True), OFTEN[1])
        for name in MUTANTS
        if (type(each), name) != (Backward, "no barrier before a TMA store")  # it has none: another warp stores
    ],
)
def test_a_fault_is_seen(compiled: Build, launch: Launch, configuration: Configuration, name: str) -> None:
    """A fault in the order of things need not show every time: each must on one of a few seeds."""
    kernel, _ = compiled(configuration)
    call = launch(configuration, 520, 456, 72, 1)
    program = ptx_machine.parse(_mutated(kernel.artifacts.PTX, name, configuration.tile.columns))
    for seed in range(12):
        try:
            call.run(seed, program)
        except ptx_machine.Fault:
            return
        if max(call.errors().values()) > 5e-4:
            return
    pytest.fail("it went unseen")


# ------------------------------------------------------------------------------------------ L8: what would be launched


def descriptors_of(configuration: Configuration, at: dict[str, int], M: int, H: int, I: int) -> list[Any]:  # noqa: E741
    """What TMA must be told, in the order of the kernel's parameters: gate and up are halves of one tensor."""
    box, wide = (128, 64), 2 * I

    def whole(name: str, rows: int, columns: int, box: tuple[int, int] = box) -> ptx_machine.Descriptor:
        return ptx_machine.Descriptor(at[name], 2 * columns, (rows, columns), box)

    def halves(name: str) -> list[ptx_machine.Descriptor]:
        return [ptx_machine.Descriptor(at[name] + offset, 2 * wide, (M, I), box) for offset in (0, 2 * I)]

    if isinstance(configuration, Forward):
        weights = [whole(name, I, H, (configuration.half, 64)) for name in ("w_gate", "w_up")]
        return [whole("x", M, H), *weights, *(halves("gate_up") if "gate_up" in at else []), whole("h", M, I)]
    operands = [whole("dout", M, H), whole("w_down", H, I, (64, 64))]
    return [*operands, *halves("gate_up"), *halves("d_gate_up"), *([whole("h", M, I)] if "h" in at else [])]


@needs_a_compiler
@pytest.mark.parametrize("configuration", kinds(6))
def test_an_export_launches_the_kernel(compiled: Build, configuration: Configuration) -> None:
    """Grid and shared memory; and each operand is read through a descriptor of its own."""
    start, launched = fake_cuda.load(*compiled(configuration))
    names = shapes_of(configuration, 1, 8, 8)
    at = {name: 0x7F1000000000 + index * 0x10000000 for index, name in enumerate(names)}

    def run(at: dict[str, int], tokens: int, hidden: int, inner: int, ctas: int) -> fake_cuda.Launched:
        shapes = shapes_of(configuration, tokens, hidden, inner)
        tensors = [fake_cuda.tensor(at[name], shape, configuration.dtype) for name, shape in shapes.items()]
        start(*tensors, *[None] * (5 - len(tensors)), ctas)
        return launched()

    columns = configuration.half if isinstance(configuration, Forward) else configuration.tile.columns
    for M, H, I, ctas in [(300, 64, 960, 3), (1, 8, 8, 148), (8192, 4096, 14336, 148), (128, 72, 136, 160)]:  # noqa: E741
        seen = run(at, M, H, I, ctas)
        tiles = -(-M // 128) * -(-I // columns)
        assert seen.grid == (min(tiles, ctas), 1, 1)
        assert seen.block == (192 if isinstance(configuration, Forward) else 256, 1, 1)
        assert seen.cluster == (0, 0, 0)
        assert 0 < seen.shared_bytes <= configuration.shared_bytes <= SHARED_LIMIT
        found = [ptx_machine.Descriptor.read(each) for each in seen.arguments if len(each) == 128]
        assert found == descriptors_of(configuration, at, M, H, I)

    # The layout of a descriptor is known by differences alone: moving one pointer changes its own, and no other.
    first = run(at, 300, 64, 960, 3)
    descriptors = [index for index, each in enumerate(first.arguments) if len(each) == 128]

    def changes(at: dict[str, int], tokens: int) -> set[int]:
        now = run(at, tokens, 64, 960, 3).arguments
        # The second half of a descriptor is whatever was there before.
        return {index for index in descriptors if now[index][:64] != first.arguments[index][:64]}

    moved = {name: changes({**at, name: at[name] + 0x1000}, 300) for name in at}
    assert {name: len(each) for name, each in moved.items()} == {name: 2 if "gate_up" in name else 1 for name in at}
    assert sorted(index for each in moved.values() for index in each) == descriptors
    assert changes(at, 300) == set()
    # Another number of rows is in the descriptors of all but the weights.
    assert changes(at, 301) == {index for name in at if not name.startswith("w_") for index in moved[name]}


@needs_a_compiler
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(8, 12), (16, 12), (16, 12), (8, 16)], "divisible by 8"),
        ([(8, 16), (16, 16), (24, 16), (8, 16)], "shape"),
        ([(8, 16), (16, 16), (16, 16), (9, 16)], "shape"),
    ],
    ids=["H not in eighths", "unlike weights", "another number of rows"],
)
def test_what_a_launch_refuses(compiled: Build, shapes: list[tuple[int, int]], message: str) -> None:
    start, launched = fake_cuda.load(*compiled(forward_configuration(torch.bfloat16, "silu", False, NARROW)))
    before = launched().count
    with pytest.raises(ValueError, match=message):
        start(*(fake_cuda.tensor(0x7F1000000000, shape) for shape in shapes), None, 1)
    assert launched().count == before
