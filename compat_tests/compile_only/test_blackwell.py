"""The kernels of the Blackwell backend, compiled without a GPU: what they say, and what they do in a model of the
hardware. What their host side would launch is in test_blackwell_launches.py. Legend as in blackwell_forward.py.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import blackwell_resources
import machine_code
import ptx_machine
import pytest
import torch
from blackwell_kernels import (
    ARCHS,
    EVERY,
    OFTEN,
    Build,
    Configuration,
    Launch,
    builder,
    kinds,
    launcher,
    named,
    needs_a_compiler,
)

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

pytestmark = [machine_code.needs_the_dsl]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return builder(tmp_path_factory)


@pytest.fixture(scope="module")
def launch(compiled: Build) -> Launch:
    return launcher(compiled)


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


COMPILED = [
    pytest.param(*kind.values, arch, marks=kind.marks, id=f"{kind.id}-{arch}")
    for arch, often in zip(ARCHS, (6, 2), strict=True)
    for kind in kinds(often)
]


@machine_code.needs_the_tools
@pytest.mark.parametrize(("configuration", "arch"), COMPILED)
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


@needs_a_compiler
@machine_code.needs_the_tools
@pytest.mark.parametrize(("configuration", "arch"), COMPILED)
def test_resources(compiled: Build, configuration: Configuration, arch: str) -> None:
    """As in the table: registers, no spills, shared memory, tensor memory and the tensor cores' instruction."""
    made_with, rows = blackwell_resources.kept()
    kernel, folder = compiled(configuration, arch)
    found = blackwell_resources.measured(configuration, arch, kernel, folder)
    right = rows[named(configuration), arch]
    assert right["stack_bytes"] == "0"
    if made_with != blackwell_resources.compiler(kernel):  # another ptxas deals registers otherwise
        found["registers"] = right["registers"]
    assert found == right, f"where that is meant, make the table anew: {blackwell_resources.COMMAND}"


def test_the_table_of_resources_is_whole() -> None:
    _, rows = blackwell_resources.kept()
    assert set(rows) == {(named(configuration), arch) for configuration in EVERY for arch in ARCHS}


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
