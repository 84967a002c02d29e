"""The maps of the Blackwell kernels: which element goes where, for every element, and which tile is whose.

They are those of the compiled programs, compared with what is said here in plain terms. Legend as in
blackwell_forward.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import machine_code
import numpy as np
import provenance
import ptx_machine
import pytest
import torch
from blackwell_kernels import (
    EVERY,
    OFTEN,
    Build,
    Call,
    Configuration,
    Launch,
    builder,
    edited,
    kinds,
    launcher,
    named,
    needs_a_compiler,
    results_of,
)
from provenance import Alone, Followed, Plan, Product

from fusepatch.kernels.cute.tile import WIDTH_K
from fusepatch.kernels.gated_mlp.blackwell_configuration import CHUNK, ROWS, Forward

pytestmark = [machine_code.needs_the_dsl]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return builder(tmp_path_factory)


@pytest.fixture(scope="module")
def launch(compiled: Build) -> Launch:
    return launcher(compiled)


# ------------------------------------------------------------------------------------------------ what the maps must be


def plan_of(configuration: Configuration) -> Plan:
    """`gate = x Wg^T`, `up = x Wu^T`, `dh = dout Wd`; and what each element of a result is made from."""
    h = {"h": ("gate", "up")}
    if isinstance(configuration, Forward):
        products = Product("gate", "x", "w_gate", b_is_kn=False), Product("up", "x", "w_up", b_is_kn=False)
        reads = 2 if configuration.keep_gate_up else 1  # once to store it, once for h
        return Plan(products, {**h, "gate": ("gate",), "up": ("up",)}, reads)
    results = {**h, "d_gate": ("dh", "gate", "up"), "d_up": ("dh", "gate")}
    return Plan((Product("dh", "dout", "w_down", b_is_kn=True),), results, reads=1)


def names_of(call: Call) -> dict[int, str]:
    """What lies at the address of each descriptor: gate and up are halves of one tensor."""
    at = dict(zip(call.tensors, call.memory, strict=True))
    found = {}
    for name, address in at.items():
        if name.endswith("gate_up"):
            inner = call.tensors[name].shape[1] // 2
            found[address], found[address + 2 * inner] = name.removesuffix("_up"), name.replace("gate_up", "up")
        else:
            found[address] = name
    return found


def tiles_of(configuration: Configuration, tokens: int, inner: int) -> list[tuple[int, int]]:
    """(m, n) in the order in which they are numbered: eight rows of tiles, column by column, then the next eight."""
    m_tiles, n_tiles = -(-tokens // ROWS), -(-inner // columns_of(configuration))
    return list(in_groups(m_tiles, n_tiles, configuration.tile.group))


def in_groups(m_tiles: int, n_tiles: int, group: int) -> Iterator[tuple[int, int]]:
    for first in range(0, m_tiles, group):
        for n in range(n_tiles):
            for m in range(first, min(first + group, m_tiles)):
                yield m, n


def columns_of(configuration: Configuration) -> int:
    """Of h, or of dh, in a tile."""
    return configuration.half if isinstance(configuration, Forward) else configuration.tile.columns


# -------------------------------------------------------------------------------------------------------- every element


def follow(call: Call, program: ptx_machine.Program | None = None, seed: int = 1) -> list[Followed]:
    """Runs every CTA; complains where an element is made from others than it should be, or not written just once."""
    blocks, names = call.launched.grid[0], names_of(call)
    depth = next(iter(call.tensors.values())).shape[1]
    (inner,) = {call.tensors[name].shape[axis] for name, axis in (("w_gate", 0), ("w_down", 1)) if name in call.tensors}
    counts = {name: np.zeros((next(iter(call.tensors.values())).shape[0], inner), int) for name in _results(call)}
    machines = []
    for block in range(blocks):
        machine = Followed(
            program or call.program,
            call.launched.arguments,
            call.memory,
            block,
            blocks,
            call.configuration.dtype,
            seed,
            call.launched.shared_bytes,
            names=names,
            plan=plan_of(call.configuration),
            depth=depth,
        )
        machine.run()
        machine.finish()
        for name, boxes in machine.written.items():
            for descriptor, row, column in boxes:
                counts[name][ptx_machine._inside(descriptor, row, column)] += 1
        machines.append(machine)
    for name, count in counts.items():
        if (count != 1).any():
            raise ptx_machine.Fault(f"elements of {name} that are not written just once")
    return machines


def _results(call: Call) -> list[str]:
    """As the plan calls them."""
    halves = {"gate_up": ("gate", "up"), "d_gate_up": ("d_gate", "d_up")}
    written = [name for name in results_of(call.configuration) if name in call.tensors]
    return [half for name in written for half in halves.get(name, (name,))]


SHAPES = [
    pytest.param(1, 8, 8, 4, id="one row"),
    pytest.param(129, 520, 136, 1, id="ragged, and more stages than the ring has"),
    pytest.param(200, 72, 264, 2, id="two blocks", marks=pytest.mark.slow),
    pytest.param(128, 64, 256, 1, id="nothing cut off", marks=pytest.mark.slow),
]


@needs_a_compiler
@pytest.mark.parametrize(("tokens", "hidden", "inner", "ctas"), SHAPES)
@pytest.mark.parametrize("configuration", kinds(3))
def test_every_element_goes_where_it_should(
    launch: Launch, configuration: Configuration, tokens: int, hidden: int, inner: int, ctas: int
) -> None:
    machines = follow(launch(configuration, tokens, hidden, inner, ctas))
    for machine in machines:
        assert_slots_are_apart(configuration, machine)


def assert_slots_are_apart(configuration: Configuration, machine: Followed) -> None:
    """The buffers that TMA fills and reads, the mbarriers, and the place of tensor memory's address."""
    boxes = {(base, size) for *_, base, size in machine.loaded} | machine.stored
    assert all(base % 1024 == 0 for base, _ in boxes)
    spans = sorted({*boxes, *((at, 8) for at in machine.barriers), (machine.address_slot, 4)})
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(spans)), spans
    at, size = spans[-1]
    assert at + size <= len(machine.shared)
    steps = len({column for name, _, column, *_ in machine.loaded if name in ("x", "dout")})
    if steps >= configuration.tile.stages:
        operands = {base for name, _, _, base, _ in machine.loaded if name in ("x", "w_gate", "w_up", "dout", "w_down")}
        per_stage = 3 if isinstance(configuration, Forward) else 1 + configuration.tile.columns // 64
        assert len(operands) == configuration.tile.stages * per_stage


_LOADS = rf"{re.escape(provenance.TMA_LOAD)} (\[[^\]]*\]), \[(%rd\d+), \{{(%r\d+), (%r\d+)\}}\]"
_STORES = rf"{re.escape(provenance.TMA_STORE)} \[(%rd\d+), \{{(%r\d+), (%r\d+)\}}\]"


def _exchange(pattern: str, which: tuple[int, int], group: int) -> Callable[[str], str]:
    """What the first group of two instructions holds changes places; or two groups of one instruction."""

    def change(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))
        one, other = (found[index].span(group) for index in which)
        return ptx[: one[0]] + ptx[slice(*other)] + ptx[one[1] : other[0]] + ptx[slice(*one)] + ptx[other[1] :]

    return change


def _turn(pattern: str, first: int) -> Callable[[str], str]:
    """Two neighbouring groups of the first such instruction change places."""

    def change(ptx: str) -> str:
        match = re.search(pattern, ptx)
        assert match is not None
        one, other = match.span(first), match.span(first + 1)
        return ptx[: one[0]] + ptx[slice(*other)] + ptx[one[1] : other[0]] + ptx[slice(*one)] + ptx[other[1] :]

    return change


def _exchange_results(ptx: str) -> str:
    """The first two stores, where the addresses of their descriptors are made."""
    one, other = (
        re.search(rf"cvta\.param\.u64\s+{match[1]}, (%rd\d+);", ptx) for match in list(re.finditer(_STORES, ptx))[:2]
    )
    assert one is not None and other is not None
    return (
        edited(ptx, re.escape(one[0]), one[0].replace(one[1], "there"))
        .replace(other[0], other[0].replace(other[1], one[1]))
        .replace("there", other[1])
    )


def _edit(pattern: str, replacement: str, count: int = 0) -> Callable[[str], str]:
    return lambda ptx: edited(ptx, pattern, replacement, count)


FAULTS: dict[str, Callable[[str], str]] = {
    "TMA takes rows for columns": _turn(_LOADS, 3),
    "two boxes of B change places": _exchange(_LOADS, (1, 2), 1),
    "stages lie half upon each other": _edit(r"(shl\.b32\s+%r\d+, %r\d+), 14;", r"\1, 13;", 1),
    "the tensor cores take another stage of both operands": _edit(r"(shl\.b32\s+%r\d+, %r\d+), 10;", r"\1, 9;", 1),
    "the tensor cores take another half of both operands": _edit(r"add\.s32\s+(%r\d+), %r\d+, 4;", r"mov.b32 \1, 0;"),
    "the tensor cores make half of the columns": _edit(
        r"mov\.b32\s+(%r\d+), (1[34]\d{7});", lambda match: f"mov.b32 {match[1]}, {int(match[2]) - (8 << 17)};"
    ),
    "two tiles' accumulators overlap": _edit(
        r"(shl\.b32\s+%r\d+, %r\d+), 7;(?=\s+add\.s32\s+%r\d+, %r\d+, %r\d+;\s+@%p\d+ bra[^;]*;\s+mov)", r"\1, 5;", 1
    ),
    "a thread takes its neighbour's column": _turn(r"tcgen05\.ld\S+ \{(%r\d+), (%r\d+)", 1),
    "a warp takes its neighbour's lanes": _edit(r"(shl\.b32\s+%r\d+, %r\d+), 21;", r"\1, 20;"),
    "two values change places as they are rounded": _turn(r"cvt\.rn\.b?f16x2\.f32 %r\d+, (%r\d+), (%r\d+)", 1),
    "a thread writes two values in each other's place": _turn(r"st\.shared\.v4\.b32\s+\S+ \{(%r\d+), (%r\d+)", 1),
    "the epilogue does not swizzle": _edit(r"and\.b32\s+(%r\d+), (%r\d+), 112;", r"and.b32 \1, \2, 0;"),
    "TMA stores a box at its row's column": _turn(_STORES, 2),
    "two results change places": _exchange_results,
    "the last group is as high as the others": _edit(r"min\.s32\s+(%r\d+), (%r\d+), 8;", r"mov.b32 \1, 8;"),
    "one warp groups the tiles otherwise": _edit(r"min\.s32\s+(%r\d+), (%r\d+), 8;", r"min.s32 \1, \2, 1;", 1),
    "every second tile is left out": _edit(r"mov\.u32\s+(%r\d+), %nctaid\.x;", r"mov.b32 \1, 2;"),
}


@needs_a_compiler
@pytest.mark.parametrize(
    ("which", "fault"),
    [
        pytest.param(which, fault, marks=[pytest.mark.slow] if which == 4 else [], id=f"{named(OFTEN[which])}-{fault}")
        for which in (3, 4)
        for fault in FAULTS
    ],
)
def test_a_wrong_map_is_seen(launch: Launch, compiled: Build, which: int, fault: str) -> None:
    configuration = OFTEN[which]
    kernel, _ = compiled(configuration)
    call = launch(configuration, 129, 136, 136, 1)
    with pytest.raises(ptx_machine.Fault) as seen:
        follow(call, ptx_machine.parse(FAULTS[fault](kernel.artifacts.PTX)))
    assert not re.search("deadlock|before it is written", str(seen.value)), "another fault was put in"


@needs_a_compiler
def test_a_right_map_is_not_taken_for_a_wrong_one(launch: Launch) -> None:
    (machine,) = follow(launch(OFTEN[3], 129, 136, 136, 1))
    assert_slots_are_apart(OFTEN[3], machine)
    *_, base, size = machine.loaded[0]
    machine.stored.add((base + 1024, size))
    with pytest.raises(AssertionError):
        assert_slots_are_apart(OFTEN[3], machine)


# ----------------------------------------------------------------------------------------------------------- every tile


@pytest.mark.parametrize("group", sorted({configuration.tile.group for configuration in EVERY}))
def test_every_tile_has_one_number(group: int) -> None:
    """The function that the kernels call, compiled for the CPU; Hopper's call it too."""
    cute = pytest.importorskip("cutlass.cute")
    import cutlass
    from cutlass import Int32

    from fusepatch.kernels.cute import gemm

    @cute.jit
    def enumerate_all(out: Any, m_tiles: Any, n_tiles: Any) -> None:
        for number in cutlass.range(m_tiles * n_tiles):
            m, n = gemm.place_of(number, m_tiles, n_tiles, group)
            out[number, 0], out[number, 1] = m, n

    found = torch.empty((41 * 33, 2), dtype=torch.int32)
    given = cute.runtime.from_dlpack(found)
    run = cute.compile(enumerate_all, given, Int32(1), Int32(1))
    wrong = 0
    for m_tiles, n_tiles in itertools.product(range(42), range(34)):
        if m_tiles * n_tiles > len(found):
            continue
        found.fill_(-1)
        run(given, m_tiles, n_tiles)
        places = [tuple(each) for each in found.tolist()]
        assert places[: m_tiles * n_tiles] == list(in_groups(m_tiles, n_tiles, group))
        assert set(places[m_tiles * n_tiles :]) <= {(-1, -1)}
        wrong += places[: m_tiles * n_tiles] != list(in_groups(m_tiles, n_tiles, group - 1))
    assert wrong  # another group would be seen


def boxes_of(configuration: Configuration, warp: int, tiles: list[tuple[int, int]], k_tiles: int) -> list[Any]:
    """(name, row, column) of what the warp asks TMA for, in order."""
    columns, found = columns_of(configuration), []
    for m, n in tiles:
        row, column = m * ROWS, n * columns
        if warp == 5:
            for k in range(0, k_tiles * WIDTH_K, WIDTH_K):
                if isinstance(configuration, Forward):
                    found += [("x", row, k), ("w_gate", column, k), ("w_up", column, k)]
                else:
                    found += [("dout", row, k), *(("w_down", k, column + each) for each in range(0, columns, 64))]
        else:
            names = {0: getattr(configuration, "results", ()), 6: ("gate", "up"), 7: ("d_gate", "d_up", "h")}[warp]
            for chunk in range(0, columns, CHUNK):
                found += [(name, row, column + chunk) for name in names if name != "h" or _stores_h(configuration)]
    return found


def _stores_h(configuration: Configuration) -> bool:
    return isinstance(configuration, Forward) or configuration.want_h


def boxes(call: Call, block: int, warp: int, program: ptx_machine.Program | None = None) -> list[Any]:
    grid, names = call.launched.grid[0], names_of(call)
    machine = Alone(
        program or call.program,
        call.launched.arguments,
        call.memory,
        block,
        grid,
        call.configuration.dtype,
        1,
        call.launched.shared_bytes,
    )
    return [(names[address], row, column) for address, row, column in machine.boxes(warp)]


def grids(configuration: Configuration) -> list[tuple[int, int, int]]:
    """(M, I, CTAs at most): one tile, edges of tiles and of groups, fewer tiles than CTAs and many more."""
    columns = columns_of(configuration)
    return [
        (1, 8, 148),
        (128, columns, 1),
        (129, columns + 8, 3),
        (1024, 3 * columns, 5),
        (1025, 2 * columns - 8, 7),
        (2200, 5 * columns + 16, 148),
        (300, 4 * columns, 2),
    ]


@needs_a_compiler
@pytest.mark.parametrize("configuration", kinds(3))
def test_every_tile_is_some_blocks_and_every_warp_agrees(launch: Launch, configuration: Configuration) -> None:
    """Block z of G works on tiles z, z + G, ...; one that has none does nothing."""
    for tokens, inner, ctas in grids(configuration):
        call = launch(configuration, tokens, 72, inner, ctas)
        tiles, blocks = tiles_of(configuration, tokens, inner), call.launched.grid[0]
        assert blocks == min(len(tiles), ctas)
        assert sorted(itertools.chain(*(tiles[block::blocks] for block in range(blocks)))) == sorted(
            itertools.product(range(-(-tokens // ROWS)), range(-(-inner // columns_of(configuration))))
        )
        # All blocks where that is cheap: the epilogue's warp computes too.
        storing = 0 if isinstance(configuration, Forward) else 7
        for warp in (5, storing) if storing == 0 else (5, 6, 7):
            some = range(blocks) if warp or blocks < 3 else {0, blocks - 1}
            for block in some:
                right = boxes_of(configuration, warp, tiles[block::blocks], k_tiles=2)
                assert boxes(call, block, warp) == right, (tokens, inner, block, warp)


@needs_a_compiler
@pytest.mark.parametrize("which", range(2), ids=[named(configuration) for configuration in OFTEN[:2]])
def test_a_wrong_order_of_tiles_is_seen(launch: Launch, compiled: Build, which: int) -> None:
    configuration = OFTEN[which]
    kernel, _ = compiled(configuration)
    call = launch(configuration, 1025, 72, 2 * columns_of(configuration), 3)
    tiles = tiles_of(configuration, 1025, 2 * columns_of(configuration))
    for pattern, replacement in [
        (r"min\.s32\s+(%r\d+), (%r\d+), 8;", r"mov.b32 \1, 8;"),
        (r"mov\.u32\s+(%r\d+), %nctaid\.x;", r"mov.b32 \1, 1;"),
        (r"mov\.u32\s+(%r\d+), %ctaid\.x;", r"mov.b32 \1, 1;"),
    ]:
        program = ptx_machine.parse(edited(kernel.artifacts.PTX, pattern, replacement))
        right = [boxes_of(configuration, 5, tiles[block::3], k_tiles=2) for block in range(3)]
        assert [boxes(call, block, 5, program) for block in range(3)] != right
