"""The kernels of the Blackwell backend, compiled without a GPU: what they say, what they do in a model of the hardware,
and what their host side would launch. Legend as in blackwell_forward.py.
"""

from __future__ import annotations

import functools
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

from fusepatch.kernels.cute.tile import SHARED_LIMIT, WIDTH_K, Tile
from fusepatch.kernels.gated_mlp import blackwell_configuration
from fusepatch.kernels.gated_mlp.blackwell_configuration import NARROW, WIDE, Forward, forward_configuration
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
_OFTEN = [
    (torch.bfloat16, "silu", True, WIDE),
    (torch.bfloat16, "silu", False, NARROW),
    (torch.float16, "gelu", True, NARROW),
    (torch.float16, "gelu", False, WIDE),
]


def kinds(often: int) -> list[Any]:
    """Two dtypes, three activations, two tiles, with and without gate_up; all but a few are slow."""
    return [
        pytest.param(
            forward_configuration(dtype, activation, keep, tile),
            marks=[] if (dtype, activation, keep, tile) in _OFTEN[:often] else [pytest.mark.slow],
            id=f"{str(dtype).removeprefix('torch.')}-{activation}-{'h and gate_up' if keep else 'h'}-{name}",
        )
        for dtype in (torch.bfloat16, torch.float16)
        for activation in ACTIVATIONS
        for name, tile in TILES.items()
        for keep in (False, True)
    ]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """A kernel, once for all tests, and the folder with its machine code."""

    @functools.cache
    def build(configuration: Forward, arch: str = ARCHS[0]) -> tuple[Any, Path]:
        from fusepatch.kernels.gated_mlp import blackwell_forward

        folder = tmp_path_factory.mktemp("kernel")
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir={folder} warnings{{nvvm}}"
        return blackwell_forward.build(configuration, options), folder

    return build


# ------------------------------------------------------------------------------------------- L0: what must hold at all


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_tiles_fit(tile: Tile) -> None:
    configuration = forward_configuration(torch.bfloat16, "silu", True, tile)
    assert configuration.shared_bytes <= SHARED_LIMIT
    assert configuration.tensor_columns in (32, 64, 128, 256, 512)


@pytest.mark.parametrize(
    "changes", [{"stages": 5}, {"rows": 64}, {"columns": 512}, {"columns": 192}, {"cluster": 2}], ids=str
)
def test_a_tile_that_does_not_fit(changes: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        forward_configuration(torch.bfloat16, "silu", True, replace(WIDE, **changes))


# ---------------------------------------------------------------------------------- L1 and L2: what was compiled


@machine_code.needs_the_tools
@pytest.mark.parametrize(
    ("configuration", "arch"),
    [
        pytest.param(*kind.values, arch, marks=kind.marks, id=f"{kind.id}-{arch}")
        for arch, often in zip(ARCHS, (4, 1), strict=True)
        for kind in kinds(often)
    ],
)
def test_machine_code(
    compiled: Callable[..., tuple[Any, Path]], capfd: pytest.CaptureFixture[str], configuration: Forward, arch: str
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
    kinds = {int(value) for value in re.findall(r"mov\.b32\s+%r\d+, (\d{9});", ptx)}
    type_ = 1 if configuration.dtype == "bfloat16" else 0
    assert kinds == {128 // 16 << 24 | configuration.tile.columns // 8 << 17 | type_ << 10 | type_ << 7 | 1 << 4}
    assert operations["UTCBAR"] == 2  # behind a stage, and behind a tile

    # Tensor memory: read 32 columns at a time, h from gate and up.
    results = configuration.results
    assert operations["LDTM"] == configuration.chunks * sum(2 if role == "h" else 1 for role in results)
    assert re.findall(r"mov\.b32\s+(%r\d+), (\d+);\s+tcgen05\.alloc\S+\s+\[%r\d+\], \1;", ptx) == [
        (re.search(r"tcgen05\.alloc\S+\s+\[%r\d+\], (%r\d+);", ptx)[1], str(configuration.tensor_columns))  # type: ignore[index]
    ]

    # TMA for all that is loaded and stored, and nothing besides: so no address is computed in 32 bits.
    assert operations["UTMALDG"] == 3
    assert operations["UTMASTG"] == configuration.chunks * len(results)
    assert not operations.keys() & {"LDG", "STG", "LD", "ST", "LDGSTS", "ATOMG", "RED"}, operations
    (announced,) = re.findall(r"mov\.b32\s+(%r\d+), (\d+);\s+mbarrier\.arrive\.expect_tx\S+ \S+ \[%r\d+\], \1;", ptx)
    assert int(announced[1]) == configuration.tile.stage_bytes

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


@dataclass(frozen=True)
class Call:
    """One launch of the exported kernel, and its operands."""

    configuration: Forward
    program: ptx_machine.Program
    launched: fake_cuda.Launched
    memory: dict[int, Any]
    tensors: dict[str, Tensor]

    def run(self, seed: int, program: ptx_machine.Program | None = None) -> None:
        """Every CTA, one after the other."""
        for name in ("h", "gate_up"):
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
        """Of each result, against fp64 with the roundings of reference.py."""
        x_MH, w_gate_IH, w_up_IH = (self.tensors[name].double() for name in ("x", "w_gate", "w_up"))
        dtype = self.tensors["x"].dtype
        gate_MI, up_MI = ((x_MH @ weight.T).to(dtype) for weight in (w_gate_IH, w_up_IH))
        h_MI = (ACTIVATIONS[self.configuration.activation](gate_MI.double()) * up_MI.double()).to(dtype)
        found = {"h": relative_error(self.tensors["h"], h_MI)}
        if self.configuration.keep_gate_up:
            gate_up_M2I = torch.cat([gate_MI, up_MI], dim=1)
            found["gate_up"] = relative_error(self.tensors["gate_up"], gate_up_M2I)
        return found


Launch = Callable[..., Call]


@pytest.fixture(scope="module")
def launch(compiled: Callable[..., tuple[Any, Path]]) -> Launch:
    @functools.cache
    def loaded(configuration: Forward) -> tuple[Any, Any, ptx_machine.Program]:
        kernel, folder = compiled(configuration)
        return *fake_cuda.load(kernel, folder), ptx_machine.parse(kernel.artifacts.PTX)

    def run(configuration: Forward, tokens: int, hidden: int, inner: int, ctas: int) -> Call:
        start, launched, program = loaded(configuration)
        generator = torch.Generator().manual_seed(tokens * hidden + inner)
        dtype = getattr(torch, configuration.dtype)

        def normal(rows: int, columns: int, scale: float) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)

        tensors = {
            "x": normal(tokens, hidden, 1.0),
            "w_gate": normal(inner, hidden, hidden**-0.5),
            "w_up": normal(inner, hidden, hidden**-0.5),
            "h": torch.empty(tokens, inner, dtype=dtype),
            "gate_up": torch.empty(tokens, 2 * inner, dtype=dtype),
        }
        at = {name: 0x7F1000000000 + index * 0x10000000 for index, name in enumerate(tensors)}
        given = [
            fake_cuda.tensor(at[name], tuple(tensor.shape), configuration.dtype) for name, tensor in tensors.items()
        ]
        start(*given[:4], given[4] if configuration.keep_gate_up else None, ctas)
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
@pytest.mark.parametrize("configuration", kinds(4))
def test_the_kernel_computes_what_it_should(
    launch: Launch, configuration: Forward, tokens: int, hidden: int, inner: int, ctas: int
) -> None:
    call = launch(configuration, tokens, hidden, inner, ctas)
    call.run(seed=1)
    # Sums in another order round one value in thousands the other way: half a unit in the last place of it.
    assert all(error < 5e-4 for error in call.errors().values()), call.errors()


@needs_a_compiler
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize(
    "seeds", [range(2, 6), pytest.param(range(6, 60), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_in_any_order(launch: Launch, tile: Tile, seeds: range) -> None:
    """Warps, TMA and the tensor cores take turns as the seed has it; five tiles, in one CTA, through every stage."""
    call = launch(forward_configuration(torch.bfloat16, "silu", True, tile), 520, 200, 56, 1)
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
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(compiled: Callable[..., tuple[Any, Path]], launch: Launch, name: str) -> None:
    """Of faults in the order of things, none but the model would: each must show on one of a few seeds."""
    configuration = forward_configuration(torch.bfloat16, "silu", True, NARROW)
    kernel, _ = compiled(configuration)
    call = launch(configuration, 520, 456, 56, 1)
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


@needs_a_compiler
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("keep", [False, True], ids=["h", "h and gate_up"])
def test_an_export_launches_the_kernel(compiled: Callable[..., tuple[Any, Path]], tile: Tile, keep: bool) -> None:
    """Grid and shared memory; and each operand is read through a descriptor of its own."""
    configuration = forward_configuration(torch.bfloat16, "silu", keep, tile)
    start, launched = fake_cuda.load(*compiled(configuration))
    at = [0x7F1000000000 + index * 0x10000000 for index in range(5 if keep else 4)]

    def run(addresses: list[int], rows: int, hidden: int, inner: int, ctas: int) -> fake_cuda.Launched:
        shapes = [(rows, hidden), (inner, hidden), (inner, hidden), (rows, inner), (rows, 2 * inner)]
        tensors = [fake_cuda.tensor(address, shape) for address, shape in zip(addresses, shapes, strict=False)]
        start(*tensors, *([] if keep else [None]), ctas)
        return launched()

    for rows, hidden, inner, ctas in [(300, 64, 960, 3), (1, 8, 8, 148), (8192, 4096, 14336, 148), (128, 72, 136, 160)]:
        seen = run(at, rows, hidden, inner, ctas)
        tiles = -(-rows // 128) * -(-inner // configuration.half)
        assert seen.grid == (min(tiles, ctas), 1, 1)
        assert seen.block == (192, 1, 1)
        assert seen.cluster == (0, 0, 0)
        assert 0 < seen.shared_bytes <= configuration.shared_bytes <= SHARED_LIMIT
        found = [ptx_machine.Descriptor.read(each) for each in seen.arguments if len(each) == 128]
        results = [(at[3], inner, inner)]
        if keep:
            results = [(at[4], 2 * inner, inner), (at[4] + 2 * inner, 2 * inner, inner), *results]
        half, chunk = configuration.half, blackwell_configuration.CHUNK
        assert found == [
            ptx_machine.Descriptor(at[0], 2 * hidden, (rows, hidden), (128, 64)),
            ptx_machine.Descriptor(at[1], 2 * hidden, (inner, hidden), (half, 64)),
            ptx_machine.Descriptor(at[2], 2 * hidden, (inner, hidden), (half, 64)),
            *(ptx_machine.Descriptor(place, 2 * wide, (rows, inner), (128, chunk)) for place, wide, _ in results),
        ]

    # The layout of a descriptor is known by differences alone: moving one pointer changes its own, and no other.
    first = run(at, 300, 64, 960, 3)
    descriptors = [index for index, each in enumerate(first.arguments) if len(each) == 128]

    def changes(addresses: list[int], rows: int) -> tuple[int, ...]:
        now = run(addresses, rows, 64, 960, 3).arguments
        # The second half of a descriptor is whatever was there before.
        return tuple(index for index in descriptors if now[index][:64] != first.arguments[index][:64])

    moved = [changes([each + 0x1000 * (each == address) for each in at], 300) for address in at]
    assert [len(each) for each in moved] == [1, 1, 1, 1, 2][: len(at)]  # gate_up is stored as two halves
    assert sorted(sum(moved, ())) == descriptors
    assert changes(at, 300) == ()
    # Another number of rows is in the descriptors of x, h and gate_up, and not in the weights'.
    assert changes(at, 301) == tuple(sorted(sum((moved[index] for index in (0, 3, 4)[: len(at) - 2]), ())))


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
def test_what_a_launch_refuses(
    compiled: Callable[..., tuple[Any, Path]], shapes: list[tuple[int, int]], message: str
) -> None:
    start, launched = fake_cuda.load(*compiled(forward_configuration(torch.bfloat16, "silu", False, NARROW)))
    before = launched().count
    with pytest.raises(ValueError, match=message):
        start(*(fake_cuda.tensor(0x7F1000000000, shape) for shape in shapes), None, 1)
    assert launched().count == before
